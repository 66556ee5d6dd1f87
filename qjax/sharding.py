"""Where every array lives: the mesh, the rules from parameter path to axes, and activation constraints.

The mesh has three axes. 'data' holds copies of everything, 'fsdp' splits weights, moments and batch,
'tensor' splits inside a layer. Rules name axes for the weight [in, out] itself; the codes, scales, adapter
factors and moments that belong to a weight follow it. Weights are split over fsdp along their outputs, so
that blocks of quantized inputs stay whole.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from qjax import trees
from qjax.errors import UserError

Tree = Any
AXES = ('data', 'fsdp', 'tensor')

# Where an array waits for its turn: JAX's kinds of memory by the names that rules use. None is the default.
MEMORY = {'device': None, 'host': 'pinned_host'}
BATCH_AXES = ('data', 'fsdp')

# First match wins; specs are for the trailing axes of the weight, a stack of layers is never split.
RULES: tuple[tuple[str, tuple[Any, ...]], ...] = (
  (r'(.*/)?(q|k|v|gate|up)/kernel(/.*)?', (None, ('tensor', 'fsdp'))),
  (r'(.*/)?(o|down)/kernel(/.*)?', ('tensor', 'fsdp')),
  (r'(.*/)?(q|k|v)/bias', (('tensor', 'fsdp'),)),
  (r'(.*/)?embed/embedding(/.*)?', ('tensor', 'fsdp')),
  (r'(.*/)?head/kernel(/.*)?', (None, ('tensor', 'fsdp'))),
  (r'.*', ()),
)


@dataclasses.dataclass(frozen=True)
class MeshSpec:
  """Sizes of the mesh axes; -1 once means "all devices that are left"."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self) -> None:
    sizes = (self.data, self.fsdp, self.tensor)
    if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
      raise UserError(
        f'mesh {dict(zip(AXES, sizes, strict=True))}: sizes are at least 1, and one of them may be -1'
      )


def make_mesh(spec: MeshSpec, devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh of a spec over the first devices it needs.

  Raises:
    UserError: there are too few devices, or -1 does not come out even.
  """
  devices = jax.devices() if devices is None else devices
  sizes = [spec.data, spec.fsdp, spec.tensor]
  if -1 in sizes:
    fixed = math.prod(size for size in sizes if size != -1)
    if len(devices) % fixed:
      raise UserError(f'mesh {dataclasses.asdict(spec)}: {len(devices)} devices do not divide by {fixed}')
    sizes[sizes.index(-1)] = len(devices) // fixed
  count = math.prod(sizes)
  if count > len(devices):
    raise UserError(
      f'mesh {dict(zip(AXES, sizes, strict=True))} needs {count} devices; {len(devices)} are visible'
    )
  grid = np.asarray(devices[:count]).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
  """How many parts `axes` make."""
  names = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(mesh.shape[name] for name in names)


def fit(axes: Any, size: int, mesh: Mesh | AbstractMesh) -> Any:
  """The longest tail of `axes` that divides `size` evenly, None if none does."""
  names = (axes,) if isinstance(axes, str) else tuple(axes or ())
  for start in range(len(names)):
    kept = names[start:]
    if size % axis_size(mesh, kept) == 0:
      return kept if len(kept) > 1 else kept[0]
  return None


def spec_for(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Axes of one array, from the path of the array and its shape.

  An axis that does not divide evenly (a scale row of nine blocks over two devices) is not split; what is
  left over of the rule still is.
  """
  spec = next(spec for pattern, spec in RULES if trees.is_match(pattern, path))
  last = re.sub(r'(/(mu|nu)/.*)/(codes|scale)$', r'\1', path).rsplit('/', 1)[-1]  # moments in 8 bits
  if last == 'a':  # adapter factors are [r, in] and [r, out]: the rank is never split
    spec = (None, spec[0]) if spec else ()
  elif last == 'b':
    spec = (None, spec[1]) if spec else ()
  elif last == 'offset' and len(shape) < 2:
    spec = ()
  spec = spec[-len(shape) :] if len(shape) else ()
  if trees.is_stacked(path):
    spec = spec[-(len(shape) - 1) :] if len(shape) > 1 else ()
  lead = (None,) * (len(shape) - len(spec))
  return PartitionSpec(
    *lead, *(fit(axes, size, mesh) for axes, size in zip(spec, shape[len(lead) :], strict=True))
  )


def axes_inside(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Axes that split the inputs and the outputs of the weight at `path` within a layer.

  The batch axes are not among them: what they split is gathered before it is multiplied.
  """
  spec = next(spec for pattern, spec in RULES if trees.is_match(pattern, path))
  both = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec or (None, None)]
  inputs, outputs = (tuple(name for name in axes if name not in BATCH_AXES) for axes in both)
  return inputs, outputs


def sharding_of(path: str, leaf: Any, mesh: Mesh, memory: str = 'device') -> NamedSharding | Format:
  """Where one array (or a shape with a dtype) lives: its axes over the mesh, in a memory of `MEMORY`.

  In the host memory of a TPU it is laid out in tiles of eight rows. XLA's own choice for bytes is 32, which
  it cannot slice there: it would copy the whole stack to the device and back, for every layer.
  """
  where = NamedSharding(mesh, spec_for(path, leaf.shape, mesh), memory_kind=MEMORY[memory])
  itemsize = leaf.dtype.itemsize
  if memory == 'device' or mesh.devices.flat[0].platform != 'tpu' or itemsize >= 4:
    return where
  order = tuple(range(len(leaf.shape)))
  return Format(Layout(order, tiling=((8, 128), (4 // itemsize, 1))), where)


def resident(nbytes: Mapping[str, int], budget: int) -> list[str]:
  """Which of a few stacks stay on the device: those that fill most of a budget of bytes, and no more.

  Whole stacks, not whole layers: every layer then has the same share to copy, so that copies can hide behind
  each layer's products alike, and a stack stays one array that one loop reads.
  """
  found: dict[int, list[str]] = {0: []}
  for name, size in nbytes.items():
    found |= {total + size: [*kept, name] for total, kept in found.items() if total + size <= budget}
  return found[max(found)]


def shardings(tree: Tree, mesh: Mesh, memory: Callable[[str], str] = lambda path: 'device') -> Tree:
  """A sharding for every array of a tree of parameters, adapters or optimizer state.

  `memory` says by path which of `MEMORY` an array waits in.
  """
  return trees.map_with_path(lambda path, leaf: sharding_of(path, leaf, mesh, memory(path)), tree)


def fetch(tree: Tree) -> Tree:
  """The tree with what waits in host memory copied to the device; without such arrays nothing happens.

  Called on one layer's slice inside the scan over layers, and inside what remat computes again, so that the
  device holds the layer at work (and the one on its way), not the stack.
  """

  def one(x: jax.Array) -> jax.Array:
    waits = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if waits else x

  return jax.tree.map(one, tree)


def put_back(x: jax.Array, beside: jax.Array) -> jax.Array:
  """x in the memory that `beside` is in: what was fetched returns to its stack."""
  waits = jax.typeof(beside).memory_space == jax.memory.Space.Host
  return jax.device_put(x, jax.memory.Space.Host) if waits else x


def batch_sharding(mesh: Mesh, ndim: int, batch_axis: int = 0) -> NamedSharding:
  """Rows split over data × fsdp."""
  spec: list[Any] = [None] * ndim
  spec[batch_axis] = BATCH_AXES
  return NamedSharding(mesh, PartitionSpec(*spec))


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
  """x, with its axes laid out over the ambient mesh; unchanged where there is no mesh.

  Without these constraints the compiler is free to gather whole activations.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  fitted = (fit(a, size, mesh) for a, size in zip(axes, x.shape, strict=True))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*fitted))


def unsplit(tree: Tree, mesh: Mesh, least_bytes: int = 1 << 20) -> list[str]:
  """Paths of arrays of at least `least_bytes` that a mesh of several shards leaves whole."""
  if mesh.shape['fsdp'] * mesh.shape['tensor'] == 1:
    return []
  return [
    path
    for path, leaf in trees.flatten(tree).items()
    if leaf.size * leaf.dtype.itemsize >= least_bytes and not any(spec_for(path, leaf.shape, mesh))
  ]
