"""A method is a point on four axes: storage, numerics, trainable, update. Nothing else knows its name.

`full`, `lora` and `qlora` are constructors of one frozen `Method`; a fourth is another constructor, not a
branch anywhere.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import adapters, storage, trees
from qjax.adapters import LoraSpec
from qjax.errors import UserError
from qjax.ops import Numerics
from qjax.quant.formats import FORMATS

Tree = Any
Reader = Callable[[str, int | None], np.ndarray]
Place = Callable[[str, jax.Array], jax.Array]

# Storage of a leaf that is plain and in the policy's param dtype: what a trained leaf must have.
PARAM = 'param'


@dataclasses.dataclass(frozen=True)
class Trainable:
  """What moves: the leaves of {'params': …, 'lora': …} whose path matches, and adapters to add, if any."""

  pattern: str
  lora: LoraSpec | None = None


@dataclasses.dataclass(frozen=True)
class Update:
  """How it moves: AdamW with a warmed-up schedule. `optim.make` turns this into a transformation.

  Attributes:
    learning_rate: peak.
    schedule: 'constant', 'linear' or 'cosine' after the warm-up, down to zero.
    warmup_steps: updates of linear rise, the first of them already above zero.
    weight_decay: decoupled, on matrices and embeddings, never on norms and biases.
    beta1, beta2, eps: of Adam.
    clip_norm: largest global norm of the unscaled gradient over everything trained; 0 is no clipping.
    rounding: how an updated weight returns to a narrower param dtype: 'nearest' or 'stochastic'.
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


@dataclasses.dataclass(frozen=True)
class Method:
  """One point on the four axes.

  Attributes:
    name: for records and tables only.
    storage: rules from parameter path to 'param', a dtype, or a scheme.
    numerics: dtypes and kernels of matrix products.
    trainable: what moves.
    update: how it moves.
  """

  name: str
  storage: tuple[tuple[str, str], ...]
  numerics: Numerics
  trainable: Trainable
  update: Update

  def is_trainable(self, path: str) -> bool:
    """Whether a leaf of {'params': …, 'lora': …} moves."""
    return trees.is_match(self.trainable.pattern, path)

  def plan(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The storage of every parameter, after checking every rule against the paths.

    Raises:
      UserError: a rule that matches nothing or is never used, an uncovered leaf, a quantized leaf that is to
        be trained or is no projection, a target without a match.
    """
    paths = list(shapes)
    kinds = storage.plan(self.storage, paths, (PARAM,))
    for path, kind in kinds.items():
      if kind != PARAM and self.is_trainable(f'params/{path}'):
        raise UserError(f'{path} is trained and cannot rest as {kind!r}; store it as {PARAM!r}')
    if self.trainable.lora is not None:
      adapters.targets(self.trainable.lora, shapes)
    else:
      trees.select(self.trainable.pattern, [f'params/{path}' for path in paths], 'trainable')
    return kinds

  def prepare(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    read: Reader,
    key: jax.Array,
    place: Place = lambda path, leaf: leaf,
    progress: Callable[[str], None] = lambda path: None,
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

    Raises:
      UserError: as `plan`, and a NaN or an infinity in a weight, by path.
    """
    kinds = self.plan(shapes)
    flat: dict[str, Any] = {}
    for path in shapes:
      progress(path)
      leaf = self._stored(path, shapes[path], kinds[path], read)
      flat[f'params/{path}'] = _place(place, f'params/{path}', leaf)
    if self.trainable.lora is not None:
      fresh = adapters.init(self.trainable.lora, shapes, key, self.numerics.policy.param)
      for path, adapter in trees.flatten(fresh, adapters.is_adapter).items():
        flat[f'lora/{path}'] = _place(place, f'lora/{path}', adapter)
    moves = {path: leaf for path, leaf in flat.items() if self.is_trainable(path)}
    rests = {path: leaf for path, leaf in flat.items() if path not in moves}
    return trees.nest(moves), trees.nest(rests)

  def abstract(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tree, Tree]:
    """`prepare`'s trees as `ShapeDtypeStruct`s, for compiling without weights."""

    def make(key: jax.Array) -> tuple[Tree, Tree]:
      return self.prepare(shapes, _Zeros(shapes), key)

    return jax.eval_shape(make, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))

  def _stored(self, path: str, shape: tuple[int, ...], kind: str, read: Reader) -> Any:
    if kind == PARAM:
      dtype = self.numerics.policy.param
      return _stack(path, shape, lambda w: storage.checked(w, path, dtype), read)
    return _stack(path, shape, lambda w: storage.rest(w, kind, path), read)


class _Zeros:
  """Reads zeros: what `Method.abstract` traces through."""

  def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
    self.shapes = shapes

  def __call__(self, path: str, layer: int | None) -> Any:
    shape = self.shapes[path]
    return jnp.zeros(shape if layer is None else shape[1:], jnp.float32)


def _stack(path: str, shape: tuple[int, ...], store: Callable[[Any], Any], read: Reader) -> Any:
  if not path.startswith('layers/'):
    return store(read(path, None))
  layers = [store(read(path, layer)) for layer in range(shape[0])]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def _place(place: Place, path: str, leaf: Any) -> Any:
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
