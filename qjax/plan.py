"""What a step of training needs on a chip that is not here: memory, what takes it, and the least time.

Arithmetic: the step is traced with shapes for weights, and `liveness` says what it holds at its fullest
moment. What rests (weights, adapters, moments) is counted from the method's own trees, so nothing here knows
a method.

Compiler: XLA for the chip, which needs no chip, compiles the same step and says what it would reserve
(`compile_for`, to be called in a process that `chips.call` started).

Time is a bound from below (Williams et al. 2009, "Roofline"): the products at the chip's peak rate, or what
must pass through its memory at full bandwidth, whichever takes longer.
"""

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from qjax import chips, kernels, liveness, operations, sharding, train, trees
from qjax.adapters import is_adapter
from qjax.chips import GIB, Chip
from qjax.errors import UserError
from qjax.liveness import Liveness
from qjax.operations import Value

Tree = Any

# What takes the room, in the order of tables and pictures.
PARTS = ('weights', 'adapters', 'moments', 'gradients', 'activations', 'logits', 'temporaries')
# Labels of `liveness` under other names here.
_PART_OF = {'layer': 'temporaries', '': 'temporaries'}
# Remat policies under which the backward pass multiplies by v's weights once more.
_MULTIPLIES_AGAIN = ('full', 'attention')
# XLA's scheduling for this effort takes a tenth of the time and moves large programs by about one percent.
QUICK = -1.0
_PLATFORM = {'gpu': 'cuda', 'tpu': 'tpu', 'cpu': 'cpu'}


# Label of arguments that wait in host memory.
HOST = 'host'


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one step needs on one chip.

  Attributes:
    chip: its name.
    source: 'arithmetic' or 'compiler'.
    peak_bytes: of device memory, at the fullest moment.
    host_bytes: of host memory that the step keeps arrays in.
    capacity_bytes: what the chip has; of a CPU, this machine's memory.
    breakdown: bytes by `PARTS`; they add up to `peak_bytes`.
    step_seconds: the least time of a step, None where the chip's rates are not known.
    tokens: of a step.
    kernels: implementations of 'matmul' and 'attention' that the numbers are for.
    host_traffic_bytes: that a step copies from host memory.
    hiding_tokens: at a time, from which the products take longer than these copies; None without copies.
    kernel_calls: how often the compiled program calls each Pallas kernel, a loop's body once.
  """

  chip: str
  source: str
  peak_bytes: int
  host_bytes: int
  capacity_bytes: int
  breakdown: Mapping[str, int]
  step_seconds: float | None
  tokens: int
  kernels: Mapping[str, str]
  host_traffic_bytes: int = 0
  hiding_tokens: float | None = None
  kernel_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def fits(self) -> bool:
    return self.peak_bytes <= self.capacity_bytes

  @property
  def tokens_per_second(self) -> float | None:
    """No more than this."""
    return self.tokens / self.step_seconds if self.step_seconds else None

  def record(self) -> dict[str, Any]:
    """Plain values, for JSON, tables and pictures."""
    return {
      'chip': self.chip,
      'source': self.source,
      'fits': self.fits,
      'peak_gib': self.peak_bytes / GIB,
      'host_gib': self.host_bytes / GIB,
      'capacity_gib': self.capacity_bytes / GIB,
      'breakdown': {name: size / GIB for name, size in self.breakdown.items()},
      'step_seconds_bound': self.step_seconds,
      'tokens_per_second_bound': self.tokens_per_second,
      'kernels': dict(self.kernels),
      'host_traffic_gib': self.host_traffic_bytes / GIB,
      'hiding_tokens': self.hiding_tokens,
      'kernel_calls': dict(self.kernel_calls),
    }


# ---- the step, without weights and data -------------------------------------------------------------------


def arguments(program: train.Program) -> tuple[train.State, Tree, dict[str, Any], Any]:
  """What the step takes, as `ShapeDtypeStruct`s placed on the program's mesh: state, frozen, batch, key."""
  mesh = program.mesh
  trainable, frozen = program.method.abstract(program.shapes)
  state = jax.eval_shape(partial(train.init_state, program, set_aside=None), trainable)

  def place(tree: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

  count = program.loop.accumulate
  shape = (count, program.data.batch_size // count, program.data.seq_len)
  rows = sharding.batch_sharding(mesh, len(shape), batch_axis=1)
  dtypes = {'weights': jnp.float32} | dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), jnp.int32)
  batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in dtypes.items()}
  everywhere = NamedSharding(mesh, PartitionSpec())
  key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=everywhere)
  placed = place(state, train.state_shardings(program, state))
  return placed, place(frozen, sharding.shardings(frozen, mesh, program.method.memory_of)), batch, key


def _labels(state: train.State, frozen: Tree, batch: Tree, memory_of: Callable[[str], str]) -> list[str]:
  """What each argument of the step is, in the order of `jax.tree.leaves`."""

  def named(tree: Tree, label: str) -> Tree:
    return jax.tree.map(lambda _: label, tree)

  trained = jax.tree.map(
    lambda leaf: named(leaf, 'adapters' if is_adapter(leaf) else 'weights'),
    state.trainable,
    is_leaf=is_adapter,
  )
  others: dict[str, Any] = {'step': '', 'loss_scale': named(state.loss_scale, '')}
  moments = jax.tree.map(lambda x: HOST if _is_on_host(x) else 'moments', state.optimizer)
  labelled = dataclasses.replace(state, trainable=trained, optimizer=moments, **others)
  rest = trees.map_with_path(lambda path, _: HOST if memory_of(path) == 'host' else 'weights', frozen)
  return jax.tree.leaves((labelled, rest, named(batch, ''), ''))


def _is_on_host(x: Any) -> bool:
  return getattr(x.sharding, 'sharding', x.sharding).memory_kind == sharding.MEMORY['host']


class Traced:
  """A step that was traced once and can be held against any chip.

  Raises:
    UserError: the program is for several devices.
  """

  def __init__(self, program: train.Program):
    if program.mesh.size > 1:
      shape = dict(program.mesh.shape)
      raise UserError(f'plans are for one device; the mesh is {shape}. Set data, fsdp and tensor to 1')
    self.program = program
    args = arguments(program)
    step = train.make_step(program.model, program.method, program.loop)
    with jax.set_mesh(program.mesh), kernels.noting() as notes:
      self._closed = jax.make_jaxpr(step)(*args)
    self._kernels = train.kernels_used(program, kernels.products(notes))
    self._labels = _labels(*args[:3], program.method.memory_of)
    self._weights = trees.combine(args[0].trainable, args[1])
    self._trained = [leaf.shape for leaf in jax.tree.leaves(args[0].trainable)]
    self._state_bytes = trees.nbytes(args[0])
    arrays = zip(jax.tree.leaves(args), self._labels, strict=True)
    self._waiting_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf, label in arrays if label == HOST)
    self._read: dict[str, operations.Program] = {}

  @property
  def tokens(self) -> int:
    return self.program.data.batch_size * self.program.data.seq_len

  def _for(self, kind: str) -> operations.Program:
    if kind not in self._read:
      found = operations.read(self._closed, self._labels, _PLATFORM[kind])
      liveness.annotate(found.operations, self.program.model.config.num_layers, self._trained)
      self._read[kind] = found
    return self._read[kind]

  def plan(self, chip: Chip) -> Plan:
    """The arithmetic for one chip."""
    read = self._for(chip.kind)
    size = _tiled if chip.kind == 'tpu' else lambda value: value.nbytes
    rules = Liveness(size, is_eager=chip.kind == 'gpu', recomputes=chip.kind != 'cpu')
    moments = rules.moments(read.operations, {*read.arguments, *read.results}, read.results)
    fullest = max(moments, key=lambda moment: moment.nbytes)
    held: Counter[str] = Counter()
    for argument in read.arguments:
      if argument.label != HOST:
        held[argument.label] += size(argument)
    held.update(fullest.held)
    if chip.kind == 'tpu':
      held[''] += self._turned_bytes()
    parts = dict.fromkeys(PARTS, 0)
    for label, count in held.items():
      parts[_PART_OF.get(label, label)] += count
    return Plan(
      chip.name, 'arithmetic', sum(parts.values()), self._waiting_bytes, capacity(chip), parts,
      self.step_seconds(chip), self.tokens, self._kernels, self.host_traffic_bytes,
      self.hiding_tokens(chip),
    )  # fmt: skip

  def _turned_bytes(self) -> int:
    """Of the second copy of v's weights, inputs last, that XLA makes for a TPU before the loop over layers.

    It does so where v is computed in the backward pass, too; seen in programs compiled for v5e and v6e.
    """
    if self.program.model.remat not in _MULTIPLIES_AGAIN:
      return 0
    leaves = jax.tree.leaves(self._weights['params']['layers']['attn']['v']['kernel'])
    return max(leaf.size * min(leaf.dtype.itemsize, 2) for leaf in leaves)  # float32 is cast on the way

  def step_seconds(self, chip: Chip) -> float | None:
    """The least time of a step: products at the peak rate, or memory traffic at full bandwidth."""
    if not chip.flops or not chip.bandwidth:
      return None
    moved = operations.traffic(self._for(chip.kind).operations) + 2 * self._state_bytes
    copies = self.host_traffic_bytes / chips.HOST_BANDWIDTH
    return max(self._product_seconds(chip), moved / chip.bandwidth, copies)

  def _product_seconds(self, chip: Chip) -> float:
    return sum(
      count / chip.flops.get(dtype, chip.flops['float32'])
      for dtype, count in operations.flops(self._for(chip.kind).operations).items()
    )

  @property
  def host_traffic_bytes(self) -> int:
    """What a step copies from host memory: all that waits there, twice for each micro-batch."""
    return 2 * self.program.loop.accumulate * self._waiting_bytes

  def hiding_tokens(self, chip: Chip) -> float | None:
    """Tokens at a time from which products at the peak rate take longer than the copies from host memory."""
    if not self._waiting_bytes or not chip.flops:
      return None
    seconds_a_token = self._product_seconds(chip) / self.tokens
    return 2 * self._waiting_bytes / chips.HOST_BANDWIDTH / seconds_a_token


def capacity(chip: Chip) -> int:
  """Bytes that a program may use on the chip."""
  return chip.memory_bytes or psutil.virtual_memory().total


def _tiled(value: Value) -> int:
  """Bytes on a TPU, where the last two axes are filled up to tiles of 128 and of 8, 16 or 32 for 4, 2 and 1
  bytes an element; the layout with the less filling is taken.
  """
  if not value.shape:
    return 512
  rows = 32 // min(value.dtype.itemsize, 4)

  def filled(shape: Sequence[int]) -> int:
    *lead, second, last = (1, *shape)
    second = 1 << (second - 1).bit_length() if second < rows else -(-second // rows) * rows
    return math.prod(lead) * second * -(-last // 128) * 128 * value.dtype.itemsize

  orders = [value.shape, (*value.shape[:-2], *value.shape[:-3:-1])]
  return min(map(filled, orders))


# ---- the compiler ------------------------------------------------------------------------------------------


def compile_for(program: train.Program) -> dict[str, Any]:
  """What the compiler reserves for the step on the devices of the program's mesh, in bytes, and its calls.

  A program that does not fit is an answer, too: 'needed_bytes' is then what the compiler says it needs, and
  the sizes are missing.
  """
  start = time.monotonic()
  # An attribute that only some versions have; without it compiling takes longer.
  if hasattr(jax.config, 'jax_exec_time_optimization_effort'):
    jax.config.update('jax_exec_time_optimization_effort', QUICK)
  args = arguments(program)  # not below, where the mesh's devices, which are not here, would make the key
  try:
    with jax.set_mesh(program.mesh), kernels.noting() as notes:
      compiled = train.compile_step(program, *args)
  except jax.errors.JaxRuntimeError as error:
    needed = _needed(str(error))
    if needed is None:
      raise
    return {'needed_bytes': needed, 'kernels': train.kernels_used(program, kernels.products(notes))}
  memory, text = compiled.memory, compiled.call.as_text()  # type: ignore[attr-defined]
  fields = {name: getattr(memory, f'{name}_size_in_bytes') for name in _SIZES}
  fields |= {'peak': memory.peak_memory_in_bytes, 'seconds': time.monotonic() - start}
  fields |= {'kernel_calls': kernels.calls(text)}
  return fields | {'kernels': train.kernels_used(program, kernels.products(notes))}


_SIZES = ('argument', 'output', 'alias', 'temp', 'host_argument', 'host_output', 'host_alias', 'host_temp')


def _needed(message: str) -> int | None:
  """Bytes from XLA's complaint that memory does not suffice, None if it complains of something else."""
  if 'RESOURCE_EXHAUSTED' not in message:
    return None
  found = re.search(r'(?:temporaries \(|Used )([\d.]+)([KMG])', message)
  return int(float(found[1]) * {'K': 2**10, 'M': 2**20, 'G': 2**30}[found[2]]) if found else None


def from_compiler(reserved: Mapping[str, Any], chip: Chip, arithmetic: Plan) -> Plan:
  """The plan that `compile_for`'s answer stands for.

  On a TPU the largest sum over time (`peak`) is what the compiler holds against the chip's memory; its
  temporaries count some buffers twice. `peak` mixes host memory in, so where arrays rest there, as on GPUs
  and CPUs, it is arguments + outputs - aliases + temporaries.

  What rests is split as in the arithmetic; the compiler does not say what its temporaries are for, so the
  other parts keep their shares.
  """
  if 'needed_bytes' in reserved:
    peak, host = reserved['needed_bytes'], 0
  else:
    host = sum(reserved[f'host_{name}'] for name in ('argument', 'output', 'temp')) - reserved['host_alias']
    peak = reserved['argument'] + reserved['output'] - reserved['alias'] + reserved['temp']
    if chip.kind == 'tpu' and not host:
      peak = reserved['peak']
    if not host:  # programs for GPUs and CPUs know no host memory: what waits there is among the arguments
      host = arithmetic.host_bytes
      peak -= host
  rests = {name: arithmetic.breakdown[name] for name in ('weights', 'adapters', 'moments')}
  passing = {name: size for name, size in arithmetic.breakdown.items() if name not in rests}
  scale = max(peak - sum(rests.values()), 0) / max(sum(passing.values()), 1)
  parts = rests | {name: round(size * scale) for name, size in passing.items()}
  return dataclasses.replace(
    arithmetic, source='compiler', peak_bytes=peak, host_bytes=host, breakdown=parts,
    kernels=reserved['kernels'], kernel_calls=reserved.get('kernel_calls', {}),
  )  # fmt: skip


# ---- searches ----------------------------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
  """The largest multiple of `least` up to `most` for which `fits`.

  `fits` must hold for everything below a number for which it holds. None if it does not hold for `least`.
  """
  if not fits(least):
    return None
  low, high = 1, 2
  while high * least <= most and fits(high * least):
    low, high = high, 2 * high
  high = min(high, most // least + 1)
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle * least) else (low, middle)
  return low * least
