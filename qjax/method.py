"""A method is a point on four axes: storage, numerics, trainable, update. Nothing else knows its name.

`full`, `lora`, `qlora`, `qat`, `qat_lora` and `targeted` are constructors of one frozen `Method`; another one
is another constructor, not a branch anywhere.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import adapters, integers, storage, trees
from qjax.adapters import Adapter, LoraSpec
from qjax.errors import UserError, nearest
from qjax.models.objective import Distillation
from qjax.ops import Numerics
from qjax.quant import fake, ptq
from qjax.quant.formats import FORMATS, Scheme
from qjax.quant.ptq.lowrank import LowRank
from qjax.quant.qtensor import QTensor
from qjax.sharding import MEMORY

Tree = Any
Reader = Callable[[str, int | None], np.ndarray]
Stored = Callable[[str, int | None], QTensor | None]
Place = Callable[[str, jax.Array], jax.Array]
SetAside = Callable[[str, jax.Array], jax.Array | np.ndarray]

# Storage of a leaf that is plain and in the policy's param dtype: what a trained leaf must have.
PARAM = 'param'

# The arrays that placement rules are for: projections, plain or their codes.
_PLACED = re.compile(f'params/({storage.PROJECTIONS})(/codes)?')


# What placement rules call the optimizer's state of all layers, where those move one at a time.
LAYERS_MOMENTS = 'optimizer/layers'


@dataclasses.dataclass(frozen=True)
class Trainable:
  """What moves: the leaves of {'params': …, 'lora': …} whose path matches, and what is added to move.

  Attributes:
    pattern: regular expression over whole paths, which begin with the collection: 'params' (weights), 'lora',
      'ranges' and 'act' (of weights and inputs), 'slices'.
    lora: adapters to add.
    slices: (path of a stack, layers) to train in the place of the stack's own. Adapters are then theirs
      alone, inside their quantizers.
  """

  pattern: str
  lora: LoraSpec | None = None
  slices: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Course:
  """How quantization in training changes with the steps.

  Attributes:
    start_step: before it, nothing that is trained is quantized.
    freeze_step: from it on, ranges stay as they are; None is never.
    momentum: of the moving average that static ranges of inputs follow; None leaves them as they are, or to
      their gradient.
  """

  start_step: int = 0
  freeze_step: int | None = None
  momentum: float | None = None

  def __post_init__(self) -> None:
    if self.start_step < 0:
      raise UserError(f'qat.start_step = {self.start_step} must be at least 0')
    if self.momentum is not None and not 0 <= self.momentum < 1:
      raise UserError(f'qat.momentum = {self.momentum} must be at least 0 and below 1')


@dataclasses.dataclass(frozen=True)
class Update:
  """How it moves: an optimizer with a warmed-up schedule. `optim.make` turns this into a transformation.

  Attributes:
    learning_rate: peak.
    schedule: 'constant', 'linear' or 'cosine' after the warm-up, down to zero.
    warmup_steps: updates of linear rise, the first of them already above zero.
    weight_decay: decoupled, on matrices and embeddings, never on norms and biases.
    beta1, beta2, eps: of 'adamw' and 'adamw8bit'. 'lion' reads the betas (0.9 and 0.99 are its authors'), and
      'adafactor' and 'sgd' read none.
    clip_norm: largest norm of the unscaled gradient, see `kind`; 0 is no clipping.
    rounding: how an updated weight returns to a narrower param dtype: 'nearest' or 'stochastic'.
    range_rate: of ranges of quantizers, the peak of the share of itself by which one moves a step; with
      'sgd', whose steps have the size of the gradient, what multiplies the gradient of its logarithm.
    name: 'adamw' (Loshchilov and Hutter 2019); 'adamw8bit', the same with moments in 8 bits (Dettmers et al.
      2022); 'adafactor', factored second moments and no first (Shazeer and Stern 2018); 'lion', the sign of a
      momentum (Chen et al. 2023); 'sgd', the gradient itself.
    kind: when it moves. 'separate': after the backward pass, clipped by the norm over everything trained.
      'fused': inside it, so that one layer's gradient exists at a time, each layer clipped by its own norm.
      'fused_global': the same after another backward pass that only finds the norm over everything.
  """

  learning_rate: float
  schedule: str = 'cosine'
  warmup_steps: int = 0
  weight_decay: float = 0.0
  beta1: float = 0.9
  beta2: float = 0.999
  eps: float = 1e-8
  clip_norm: float = 1.0
  rounding: str = 'nearest'
  range_rate: float = 0.01
  name: str = 'adamw'
  kind: str = 'separate'


@dataclasses.dataclass(frozen=True)
class Method:
  """One point on the four axes.

  Attributes:
    name: for records and tables only.
    storage: rules from parameter path to 'param', a dtype, or a scheme.
    numerics: dtypes and kernels of matrix products.
    trainable: what moves.
    update: how it moves.
    course: how quantization in training changes with the steps.
    distillation: what the model is to learn from itself as it was; None is nothing.
    placement: rules from the path of a projection to the memory that its stack rests in, 'device' or 'host';
      the device where none matches. 'optimizer/layers' are the layers' moments, for updates inside the
      backward pass. From the host a layer is copied when its turn comes; no number changes.
  """

  name: str
  storage: tuple[tuple[str, str], ...]
  numerics: Numerics
  trainable: Trainable
  update: Update
  course: Course = Course()
  distillation: Distillation | None = None
  placement: tuple[tuple[str, str], ...] = ()

  def is_trainable(self, path: str) -> bool:
    """Whether a leaf of {'params': …, 'lora': …} moves."""
    return trees.is_match(self.trainable.pattern, path)

  def memory_of(self, path: str) -> str:
    """Where an array of `prepare`'s trees, or of the state, rests: 'device' or 'host'.

    Of a quantized stack on the host the scales stay on the device: they are few, and XLA's TPU compiler fails
    on slices of host memory in some of their shapes.
    """
    owner = _PLACED.fullmatch(path)
    name = owner[1] if owner else LAYERS_MOMENTS if f'{path}/'.startswith(f'{LAYERS_MOMENTS}/') else None
    if name is None or (name == LAYERS_MOMENTS and self.update.kind == 'separate'):
      return 'device'
    return next((memory for pattern, memory in self.placement if trees.is_match(pattern, name)), 'device')

  def _check_placement(self, projections: list[str]) -> None:
    if self.distillation is not None and any(memory == 'host' for _, memory in self.placement):
      raise UserError('placement: the teacher of distill rests whole on the device; use one or the other')
    for pattern, memory in self.placement:
      if memory not in MEMORY:
        raise UserError(f'placement: {pattern!r} names the memory {memory!r}{nearest(memory, MEMORY)}')
      if self.update.kind == 'separate' and pattern.startswith('optimizer'):
        raise UserError(
          f"placement: {pattern!r} places moments, which wait on the host where a layer moves at a time; use "
          "optimizer.kind = 'fused'"
        )
    known = projections if self.update.kind == 'separate' else [*projections, LAYERS_MOMENTS]
    for path, memory in trees.match_rules(self.placement, known, 'placement', is_partial=True).items():
      if memory == 'host' and path != LAYERS_MOMENTS and self.is_trainable(f'params/{path}'):
        raise UserError(f'placement: {path} is trained and cannot rest on the host; place it on the device')

  def plan(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The storage of every parameter, after checking every rule against the paths.

    Raises:
      UserError: a rule that matches nothing or is never used, an uncovered leaf, a quantized leaf that is to
        be trained or is no projection, a target without a match, a kernel by name that no product is for.
    """
    paths = list(shapes)
    kinds = storage.plan(self.storage, paths, (PARAM,))
    for path, kind in kinds.items():
      if kind != PARAM and self.is_trainable(f'params/{path}'):
        raise UserError(f'{path} is trained and cannot rest as {kind!r}; store it as {PARAM!r}')
    projections = [path for path in paths if trees.is_match(storage.PROJECTIONS, path)]
    n = self.numerics
    self._check_placement(projections)
    trees.match_rules(n.weights, projections, 'qat.weights', is_partial=True)
    trees.match_rules(n.activations, projections, 'qat.activations', is_partial=True)
    targets: list[str] = []
    if self.trainable.lora is not None and not self.trainable.slices:
      targets = adapters.targets(self.trainable.lora, shapes)
    elif not self.trainable.slices:
      trees.select(self.trainable.pattern, [f'params/{path}' for path in paths], 'trainable')
    in_few_bits = False
    self._corrected(kinds, shapes)
    for path in projections:
      rests = _is_at_rest(kinds[path], path)
      scheme = n.trained_scheme_of(path, rests, path in targets)
      if path in dict(self.trainable.slices):
        scheme = storage.scheme_of(kinds[path], path)
      in_few_bits |= rests or (scheme is not None and not scheme.numbers.is_float)
      if scheme is not None:
        integers.check_backward(n.backward, n.scheme_of(path), path, scheme, shapes[path])
    if n.kernels not in ('auto', 'xla') and not in_few_bits:
      raise UserError(
        f'kernels = {n.kernels!r}, but no weight of this model is multiplied in few bits, as kernels'
        " do; use kernels = 'auto' or 'xla', or a method that quantizes, such as qlora or qat"
      )
    for path, layers in self.trainable.slices:
      if path not in projections or not all(0 <= layer < shapes[path][0] for layer in layers):
        raise UserError(f'targeted: {path} layers {layers} are no projections of this model')
      scheme = storage.scheme_of(kinds[path], path)
      if scheme is None or scheme.numbers.is_float:
        raise UserError(f'targeted: {path} rests in {kinds[path]}, which quantizes nothing')
      if scheme.asymmetric and n.weight_gradient in fake.LEARNED:
        raise UserError(f'targeted: {path} rests in {kinds[path]}, whose offsets cannot learn')
    if self.trainable.slices and self.trainable.lora is not None:
      adapted = self._adapted(shapes)
      left = adapted.keys() - set(adapters.targets(self.trainable.lora, adapted))
      if left:
        raise UserError(
          f'lora.targets = {self.trainable.lora.targets!r} leaves out {min(left)}, which is targeted; '
          "use '.*'"
        )
    return kinds

  def _corrected(
    self, kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
  ) -> dict[str, LowRank]:
    """What quantizes those weights whose adapters start from what rounding lost."""
    lora = self.trainable.lora
    if lora is None or lora.init == adapters.ZERO:
      return {}
    found = ptq.make(lora.init)
    start = found.quantizer
    if found.reparametrizations or not isinstance(start, LowRank) or start.weighted or 'rank' in lora.init:
      raise UserError(
        f'lora.init = {lora.init!r} is no start of adapters; use {adapters.ZERO!r} or loftq with rounds and '
        "clip, such as 'loftq:rounds=5,clip' (the rank is lora.rank, and there are no inputs to weigh by)"
      )
    if self.numerics.weights or self.trainable.slices:
      raise UserError(
        f'lora.init = {lora.init!r} corrects what lies beside it, but these adapters act inside a quantizer; '
        f'use {adapters.ZERO!r}'
      )
    targets = adapters.targets(lora, shapes)
    chosen = [path for path in targets if _is_at_rest(kinds[path], path)]
    if not chosen:
      raise UserError(
        f'lora.init = {lora.init!r} corrects what rounding lost, but no target rests in few bits; use '
        f'{adapters.ZERO!r}, or a scheme in storage.projections'
      )
    return dict.fromkeys(chosen, dataclasses.replace(start, rank=lora.rank))

  def _adapted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """The shapes of what may have adapters: all parameters, or the slices."""
    slices = self.trainable.slices
    return {path: (len(layers), *shapes[path][1:]) for path, layers in slices} if slices else shapes

  def static_inputs(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The projections whose inputs have a range from calibration."""
    projections = (path for path in shapes if trees.is_match(storage.PROJECTIONS, path))
    return [path for path in projections if self.numerics.scheme_of(path).is_static]

  def prepare(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    read: Reader,
    key: jax.Array,
    place: Place = lambda path, leaf: leaf,
    progress: Callable[[str], None] = lambda path: None,
    input_ranges: Mapping[str, Any] | None = None,
    stored: Stored = lambda path, layer: None,
    set_aside: SetAside = lambda path, layer: layer,
  ) -> tuple[Tree, Tree]:
    """What moves and what rests: two trees that `trees.combine` joins to {'params': …, 'lora': …}.

    Weights are read, checked and stored one layer at a time, so that a model much larger than memory in
    float32 can be prepared.

    Args:
      shapes: of every parameter, by path.
      read: `read(path, layer)` as float32; layer None for a leaf that belongs to no layer.
      key: draws the adapters.
      place: moves an array, named by its path in the returned trees, to where it shall live.
      progress: called with each parameter's path before it is read.
      input_ranges: float32 [L], the largest magnitude of the inputs of each of `static_inputs`.
      stored: `stored(path, layer)` as a `QTensor` where the model has it at rest; one that rests as it should
        is taken as it is.
      set_aside: `set_aside(path, layer)` moves one layer of a parameter to where it waits until the stack of
        all layers is built and placed.

    Raises:
      UserError: as `plan`, and a NaN or an infinity in a weight, by path.
    """
    kinds = self.plan(shapes)
    corrected, started = self._corrected(kinds, shapes), {}
    flat: dict[str, Any] = {}
    for path in shapes:
      progress(path)
      if path in corrected:
        make = partial(self._corrected_layer, path, kinds[path], corrected[path], read, stored, set_aside)
        leaf, started[path] = _stack(path, shapes[path], make)
      else:
        leaf = self._at_rest(path, shapes[path], kinds[path], read, stored, set_aside)
      flat[f'params/{path}'] = _place(place, f'params/{path}', leaf)
    if self.trainable.lora is not None:
      adapted = self._adapted(shapes)
      fresh = adapters.init(self.trainable.lora, adapted, key, self.numerics.policy.param)
      for path, adapter in trees.flatten(fresh, adapters.is_adapter).items():
        where = f'slices/{path}/correction' if self.trainable.slices else f'lora/{path}'
        flat[where] = _place(place, where, started.get(path, adapter))
    for path, leaf in self._quantizers(shapes, kinds, read, input_ranges or {}).items():
      flat[path] = _place(place, path, leaf)
    if self.distillation is not None:

      def teach(path: str, layer: int | None) -> Any:
        return storage.rest(read(path, layer), 'bfloat16', path)

      for path in shapes:
        teacher = _stack(path, shapes[path], partial(teach, path))
        flat[f'teacher/{path}'] = _place(place, f'teacher/{path}', teacher)
    moves = {path: leaf for path, leaf in flat.items() if self.is_trainable(path)}
    rests = {path: leaf for path, leaf in flat.items() if path not in moves}
    return trees.nest(moves), trees.nest(rests)

  def _quantizers(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    read: Reader,
    input_ranges: Mapping[str, Any],
  ) -> dict[str, Any]:
    """Ranges of inputs and weights, and the slices of stacks that move, by path."""
    found: dict[str, Any] = {}
    learns = self.numerics.weight_gradient in fake.LEARNED
    sliced = dict(self.trainable.slices)
    for path in self.static_inputs(shapes):
      found[f'act/{path}'] = jnp.asarray(input_ranges[path], jnp.float32)
    lora = self.trainable.lora
    targets = [] if lora is None or sliced else adapters.targets(lora, shapes)

    def first(path: str, scheme: Scheme, layer: int | None) -> Any:
      return fake.first_range(jnp.asarray(read(path, layer)), scheme)

    for path in shapes if learns else ():
      if path in sliced or not trees.is_match(storage.PROJECTIONS, path):
        continue
      scheme = self.numerics.trained_scheme_of(path, _is_at_rest(kinds[path], path), path in targets)
      if scheme is not None:
        found[f'ranges/{path}'] = _stack(path, shapes[path], partial(first, path, scheme))
    for path, layers in sliced.items():
      scheme = storage.scheme_of(kinds[path], path)
      assert scheme is not None
      param = self.numerics.policy.param
      w = jnp.stack([storage.checked(read(path, layer), path, param) for layer in layers])
      found[f'slices/{path}/w'] = w
      if learns:
        found[f'slices/{path}/high'] = fake.first_range(w, scheme)
      slots = np.full(shapes[path][0], -1, np.int32)
      slots[list(layers)] = np.arange(len(layers))
      found[f'slots/{path}'] = jnp.asarray(slots)
    return found

  def abstract(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tree, Tree]:
    """`prepare`'s trees as `ShapeDtypeStruct`s, for compiling without weights."""

    def make(key: jax.Array) -> tuple[Tree, Tree]:
      ranges = {path: jnp.zeros(shapes[path][0]) for path in self.static_inputs(shapes)}
      return self.prepare(shapes, _Zeros(shapes), key, input_ranges=ranges)

    return jax.eval_shape(make, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))

  def _at_rest(
    self, path: str, shape: tuple[int, ...], kind: str, read: Reader, stored: Stored, set_aside: SetAside
  ) -> Any:
    def make(layer: int | None) -> Any:
      if kind == PARAM:
        return storage.checked(read(path, layer), path, self.numerics.policy.param)
      found = stored(path, layer)
      if isinstance(found, QTensor) and found.scheme == storage.scheme_of(kind, path):
        return found
      return storage.rest(read(path, layer), kind, path)

    def waiting(layer: int | None) -> Any:
      return _place(set_aside, f'params/{path}', make(layer))

    return _stack(path, shape, waiting)

  def _corrected_layer(
    self,
    path: str,
    kind: str,
    correct: LowRank,
    read: Reader,
    stored: Stored,
    set_aside: SetAside,
    layer: int | None,
  ) -> tuple[Any, Adapter]:
    """One layer of a weight at rest, and the adapter that starts from what rounding lost of it."""
    scheme, spec = storage.scheme_of(kind, path), self.trainable.lora
    assert scheme is not None and spec is not None
    found = stored(path, layer)
    if isinstance(found, QTensor) and found.scheme == scheme:
      raise UserError(
        f'lora.init = {spec.init!r}: {path} comes in {scheme} already, and what rounding lost of it is not '
        f'known; use {adapters.ZERO!r}, or the model that it was made from'
      )
    w = storage.checked(read(path, layer), path, jnp.dtype('float32'))
    q, (a, b, _) = correct(w, scheme, None, None)
    adapter = adapters.starting_at(spec, a, b, self.numerics.policy.param)
    return _place(set_aside, f'params/{path}', q), adapter


class _Zeros:
  """Reads zeros: what `Method.abstract` traces through."""

  def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
    self.shapes = shapes

  def __call__(self, path: str, layer: int | None) -> Any:
    shape = self.shapes[path]
    return jnp.zeros(shape if layer is None else shape[1:], jnp.float32)


def _is_at_rest(kind: str, path: str) -> bool:
  """Whether a parameter of this kind rests in few bits."""
  scheme = None if kind == PARAM else storage.scheme_of(kind, path)
  return scheme is not None and not scheme.numbers.is_float


def _stack(path: str, shape: tuple[int, ...], make: Callable[[int | None], Any]) -> Any:
  """What `make` gives for each layer as one stack; for None where the path belongs to no layer."""
  if not path.startswith('layers/'):
    return make(None)

  def stacked(*layers: Any) -> Any:
    return np.stack(layers) if isinstance(layers[0], np.ndarray) else jnp.stack(layers)

  return jax.tree.map(stacked, *map(make, range(shape[0])))


def _place(place: Place | SetAside, path: str, leaf: Any) -> Any:
  return trees.map_with_path(lambda sub, x: place(f'{path}/{sub}' if sub else path, x), leaf)


def full(numerics: Numerics, update: Update) -> Method:
  """Everything moves."""
  return Method('full', (('.*', PARAM),), numerics, Trainable('params/.*'), update)


def lora(
  numerics: Numerics,
  update: Update,
  spec: LoraSpec,
  projections: str = 'bfloat16',
  embeddings: str = 'bfloat16',
  rules: tuple[tuple[str, str], ...] = (),
  name: str = 'lora',
) -> Method:
  """Low-rank adapters move; the base rests.

  Args:
    numerics: dtypes and kernels.
    update: how the adapters move.
    spec: what adapters there are.
    projections: storage of layers/…/kernel: a dtype or a scheme.
    embeddings: dtype of the embedding and the head.
    rules: storage rules that go first, for single layers' leaves.
    name: for records.
  """
  stored = storage.rules(projections, embeddings, rules)
  return Method(name, stored, numerics, Trainable('lora/.*', spec), update)


def qlora(
  numerics: Numerics,
  update: Update,
  spec: LoraSpec,
  projections: str = 'nf4:block=64,dq',
  embeddings: str = 'bfloat16',
  rules: tuple[tuple[str, str], ...] = (),
) -> Method:
  """`lora` over a quantized base (Dettmers et al. 2023).

  Raises:
    UserError: `projections` is a dtype: that would be LoRA under another name.
  """
  if projections in ('float32', PARAM) or (projections in FORMATS and FORMATS[projections].is_float):
    raise UserError(
      f'storage.projections = {projections!r} quantizes nothing; qlora wants a scheme such as nf4:block=64,dq'
    )
  return lora(numerics, update, spec, projections, embeddings, rules, name='qlora')


def _check_numerics(numerics: Numerics, course: Course, *, moves_weights: bool) -> None:
  """Refuses settings that would do nothing.

  Raises:
    UserError: naming them.
  """
  backward = numerics.backward
  if not moves_weights and 'int8' in (backward.dx, backward.dw):
    raise UserError("qat.backward wants integers, but no weight is quantized; set qat.weights")
  moves_ranges = numerics.activation_gradient in fake.LEARNED or course.momentum is not None
  if moves_ranges and not numerics.has_static_ranges:
    raise UserError(
      "qat.activation_gradient moves ranges of static schemes, but no activation has one; use 'ste', or "
      "qat.activations = (('.*', 'int8:axis=tensor,static'),)"
    )
  if course.freeze_step is not None and course.freeze_step <= course.start_step:
    raise UserError(
      f'qat.freeze_step = {course.freeze_step} is not after qat.start_step = {course.start_step}: '
      'no range would move'
    )


def _moving_ranges(numerics: Numerics, course: Course) -> str:
  """The pattern of the ranges that move, to be put behind another one."""
  weights = '|ranges/.*' if numerics.weight_gradient in fake.LEARNED else ''
  inputs = numerics.activation_gradient in fake.LEARNED or course.momentum is not None
  return weights + ('|act/.*' if inputs else '')


def qat(
  numerics: Numerics, update: Update, course: Course = Course(), distillation: Distillation | None = None
) -> Method:
  """Everything moves, through the quantizers that `numerics` names (quantization-aware training).

  Raises:
    UserError: nothing is quantized: that would be full fine-tuning under another name.
  """
  if not numerics.weights and not numerics.activations:
    raise UserError("qat quantizes nothing: give qat.weights or qat.activations, or use method = 'full'")
  _check_numerics(numerics, course, moves_weights=bool(numerics.weights))
  pattern = 'params/.*' + _moving_ranges(numerics, course)
  return Method('qat', (('.*', PARAM),), numerics, Trainable(pattern), update, course, distillation)


def qat_lora(
  numerics: Numerics,
  update: Update,
  spec: LoraSpec,
  projections: str = 'int8:axis=channel',
  embeddings: str = 'bfloat16',
  rules: tuple[tuple[str, str], ...] = (),
  course: Course = Course(),
  distillation: Distillation | None = None,
) -> Method:
  """Adapters move inside the quantizer: products see Q(W + s·A·B), and so does the merged model.

  Args:
    numerics: dtypes, and the schemes Q.
    update: how the adapters move.
    spec: what adapters there are.
    projections: how W rests: a dtype or a scheme; one that is finer than Q loses little.
    embeddings: dtype of the embedding and the head.
    rules: storage rules that go first.
    course: how quantization changes with the steps.
    distillation: what to learn from the model as it was.

  Raises:
    UserError: no weight is trained through a quantizer.
  """
  if not numerics.weights:
    raise UserError("qat_lora needs qat.weights, the schemes of the merged weights; or use method = 'lora'")
  _check_numerics(numerics, course, moves_weights=True)
  if spec.dropout > 0:
    raise UserError('lora.dropout: an adapter inside a quantizer has no inputs of its own; set it to 0')
  stored = storage.rules(projections, embeddings, rules)
  pattern = 'lora/.*' + _moving_ranges(numerics, course)
  return Method('qat_lora', stored, numerics, Trainable(pattern, spec), update, course, distillation)


# What may move of a targeted matrix, and which of its leaves that are.
TARGETED = {'weights': '(w|high)', 'adapters': '(correction|high)', 'ranges': 'high'}


def targeted(
  numerics: Numerics,
  update: Update,
  slices: tuple[tuple[str, tuple[int, ...]], ...],
  projections: str,
  embeddings: str = 'bfloat16',
  rules: tuple[tuple[str, str], ...] = (),
  train: str = 'weights',
  spec: LoraSpec | None = None,
  course: Course = Course(),
  distillation: Distillation | None = None,
) -> Method:
  """A quantized model of which only some matrices move, each through its quantizer.

  Args:
    numerics: dtypes, and how gradients pass the quantizers.
    update: how what moves moves.
    slices: (path of a stack, its layers that move).
    projections: the scheme of all projections.
    embeddings: dtype of the embedding and the head.
    rules: storage rules that go first.
    train: a name in `TARGETED`: whole weights, or adapters inside their quantizers, each with the ranges, if
      those learn; or ranges alone.
    spec: what adapters there are, for 'adapters'.
    course: how quantization changes with the steps.
    distillation: what to learn from the model as it was.

  Raises:
    UserError: an unknown `train`, or ranges that are to move but don't learn.
  """
  if train not in TARGETED:
    raise UserError(f'targeted.train = {train!r} is not known{nearest(train, TARGETED)}')
  if (spec is None) == (train == 'adapters'):
    raise UserError(f'targeted.train = {train!r} {"needs" if spec is None else "takes no"} section lora')
  if spec is not None and spec.dropout > 0:
    raise UserError('lora.dropout: an adapter inside a quantizer has no inputs of its own; set it to 0')
  if numerics.weights:
    raise UserError("targeted: schemes are those of storage; set qat.weights = 'none' and qat.rules = ()")
  _check_numerics(numerics, course, moves_weights=True)
  if numerics.weight_rounding != 'nearest' or course.start_step:
    raise UserError(
      "targeted rounds to nearest, from the first step: qat.weight_rounding = 'nearest', qat.start_step = 0"
    )
  learns = numerics.weight_gradient in fake.LEARNED
  if train == 'ranges' and not learns:
    raise UserError("targeted.train = 'ranges' needs ranges that learn; set qat.weight_gradient to 'lsq'")
  part = 'slices/.*/' + TARGETED[train]
  stored = storage.rules(projections, embeddings, rules)
  trainable = Trainable(part + _moving_ranges(numerics, course).replace('|ranges/.*', ''), spec, slices)
  return Method('targeted', stored, numerics, trainable, update, course, distillation)
