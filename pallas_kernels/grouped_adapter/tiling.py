"""How rows are cut into tiles, and which adapters each tile meets."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.hardware import LANES, PROGRAMS, VMEM_BYTES, power_of_two, sublanes
from pallas_kernels.tuned import Product

# Rows of bfloat16 that a register of a TPU holds.
SUBLANES = sublanes(2)
# Rows of a tile, at most: more adapters meet in a taller one, and each multiplies the whole of it.
ROWS = 128


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is static about a stack of adapters.

  Attributes:
    groups: G, adapters.
    rank: r.
    inputs: K.
    outputs: N.
  """

  groups: int
  rank: int
  inputs: int
  outputs: int

  def held(self, rows: int, itemsize: int) -> int:
    """Bytes of a TPU's vector memory with tiles of so many rows."""
    inputs, outputs = (-(-size // LANES) * LANES for size in (self.inputs, self.outputs))
    factors = -(-self.rank // SUBLANES) * SUBLANES * (inputs + outputs)
    # Two of each, one being fetched or written; the products before they are added; which row is whose.
    return 2 * itemsize * (rows * inputs + factors) + 4 * rows * (5 * outputs + 3 * LANES)


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How x and y are cut on a TPU.

  Attributes:
    rows: of a tile.
  """

  rows: int


def candidates(rows: int, sizes: Sizes, itemsize: int) -> tuple[Tiling, ...]:
  """Tiles for a TPU: the tallest of up to `ROWS` rows that fits, then shorter ones, then a taller one.

  Raises:
    NotImplementedError: the shortest takes more memory than there is.
  """
  whole = -(-rows // SUBLANES) * SUBLANES
  cuts = [min(ROWS, whole)]
  while cuts[-1] > SUBLANES:
    cuts.append(max(SUBLANES, cuts[-1] // 2 // SUBLANES * SUBLANES))
  tiles = tuple(
    Tiling(cut) for cut in (*cuts, min(2 * ROWS, whole)) if sizes.held(cut, itemsize) <= VMEM_BYTES
  )
  if not tiles:
    raise NotImplementedError(
      f'{SUBLANES} rows of {sizes.inputs} inputs and {sizes.outputs} outputs do not fit vector memory'
    )
  return tuple(dict.fromkeys(tiles))


def product(rows: int, sizes: Sizes, itemsize: int) -> Product:
  """What is added, as the table of measured tiles has it."""
  form = f'{sizes.groups} adapters of rank {sizes.rank}'
  return Product('grouped_adapter', form, (rows, sizes.inputs, sizes.outputs), itemsize)


def choose(rows: int, sizes: Sizes, itemsize: int) -> Tiling:
  """The tiles for a TPU that were measured to be fastest, else the first of `candidates`."""
  args = (rows, sizes, itemsize)
  whole = -(-rows // SUBLANES) * SUBLANES
  return tuned.choose(candidates(*args), product(*args), lambda found: Tiling(min(found.rows, whole)))


@dataclasses.dataclass(frozen=True)
class GpuTiling:
  """Sizes of tiles, powers of two.

  Attributes:
    rows: of x and y.
    rank: filled up to what one product takes.
    depth: inputs that are multiplied at once.
    columns: of y.
    splits: shares of the sum over the inputs, each the work of another program.
  """

  rows: int
  rank: int
  depth: int
  columns: int
  splits: int


# The highest rank of a GPU's tile: with 64 rows and 128 columns, as much as shared memory holds twice.
GPU_RANK = 128


def choose_gpu(rows: int, sizes: Sizes, itemsize: int) -> GpuTiling:
  """The tiles for a GPU that were measured to be fastest, else the first of `candidates_gpu`."""
  args = (rows, sizes, itemsize)
  return tuned.choose(candidates_gpu(*args), product(*args))


def candidates_gpu(rows: int, sizes: Sizes, itemsize: int) -> tuple[GpuTiling, ...]:
  """Tiles that a tuner may try on a GPU; the first is what is taken where nothing was measured.

  Each of the others has one size or number of shares twice or half as large.
  """
  first = _heuristic(rows, sizes, itemsize)
  bounds = {'rows': (16, 128), 'depth': (16, 128), 'columns': (16, 128)}
  return tuned.neighbours(first, {**bounds, 'splits': (1, -(-sizes.inputs // first.depth))})


def _heuristic(rows: int, sizes: Sizes, itemsize: int) -> GpuTiling:
  """Tiles of up to 64 rows, 32 of float32; few rows are shared out among more programs."""
  tall = power_of_two(rows, 16, 64 if itemsize < 4 else 32)
  rank = power_of_two(sizes.rank, 16, GPU_RANK)
  short = 64 if rank > 64 or itemsize == 4 else 128
  deep, wide = power_of_two(sizes.inputs, 16, short), power_of_two(sizes.outputs, 16, short)
  programs = -(-rows // tall) * min(sizes.groups, tall)
  splits = max(1, min(PROGRAMS // programs, -(-sizes.inputs // deep) // 4, 8))
  return GpuTiling(tall, rank, deep, wide, splits)


def meetings(of_row: jax.Array, rows: int, groups: int) -> tuple[jax.Array, jax.Array]:
  """Which adapters each tile of rows meets: int32 [tiles, slots] in rising order, and how many [tiles].

  Slots beyond those name the last one again, so that a TPU fetches nothing for them.

  Args:
    of_row: int32 [M] in -1…G-1.
    rows: of a tile.
    groups: G.
  """
  tiles, slots = -(-of_row.shape[0] // rows), min(groups, rows)
  filled = jnp.pad(of_row, (0, tiles * rows - of_row.shape[0]), constant_values=-1).reshape(tiles, rows, 1)
  is_met = jnp.any(filled == jnp.arange(groups, dtype=jnp.int32), axis=1)
  order = jnp.argsort(~is_met, axis=1, stable=True).astype(jnp.int32)
  counts = jnp.sum(is_met, axis=1, dtype=jnp.int32)
  slot = jnp.minimum(jnp.arange(slots, dtype=jnp.int32), jnp.maximum(counts[:, None] - 1, 0))
  return jnp.take_along_axis(order, slot, axis=1), counts
