"""How a product is cut into tiles on a TPU."""

import dataclasses
import math

from pallas_kernels.low_bit_matmul.layout import Layout

# Rows of bytes, columns and rows of x that a tile aims at.
ROWS, COLUMNS, TOKENS = 256, 512, 256
# A register holds 8 sublanes of 128 lanes of float32.
SUBLANES, LANES = 8, 128
# Rows of bfloat16 that a register holds.
FEWEST_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Sizes of a tile.

  Attributes:
    tokens: rows of x or of g.
    rows: rows of bytes.
    columns: outputs.
    scales: rows of scales that belong to the rows of bytes.
  """

  tokens: int
  rows: int
  columns: int
  scales: int


def choose(tokens: int, outputs: int, layout: Layout) -> Tiling:
  """Tiles near 256 tokens, 256 rows of bytes and 512 outputs that a TPU can address.

  Along each axis a tile is a multiple of what registers hold, or the whole axis.

  Raises:
    NotImplementedError: blocks are so long that no such tile fits.
  """
  m = layout.rows_of_block
  step = LANES if layout.blocks == 1 else math.lcm(LANES, SUBLANES * m)
  rows = step * max(1, ROWS // step)
  if layout.rows <= max(rows, 2 * ROWS):
    rows = layout.rows
  if rows > 4 * ROWS:
    raise NotImplementedError(f'blocks of {layout.block} inputs make tiles of {rows} rows of bytes')
  scales = layout.blocks if rows == layout.rows else max(1, rows // m)
  columns = outputs if outputs <= COLUMNS else COLUMNS
  return Tiling(min(TOKENS, -(-tokens // FEWEST_TOKENS) * FEWEST_TOKENS), rows, columns, scales)


# Programs that keep every core of a large GPU busy.
PROGRAMS = 256
# Tensor cores take at least 16 rows, columns and terms.
LEAST = 16


@dataclasses.dataclass(frozen=True)
class GpuTiling:
  """Sizes of a tile, powers of two, and how a program runs.

  Attributes:
    tokens: rows of x or of g.
    rows: rows of one plane of a weight, within a block.
    columns: outputs.
    splits: shares of the summed axis, each the work of another program.
    warps: of 32 threads, a program.
    stages: steps of the loop that are in flight.
  """

  tokens: int
  rows: int
  columns: int
  splits: int = 1
  warps: int = 4
  stages: int = 2

  def tiles_of_block(self, layout: Layout) -> int:
    return -(-layout.rows_of_block // self.rows)

  def row_tiles(self, layout: Layout) -> int:
    """Tiles along the inputs, those of the shorter last block included."""
    last = 0 if layout.tail is None else self.tiles_of_block(layout.tail)
    return layout.blocks * self.tiles_of_block(layout) + last

  def is_exact(self, layout: Layout) -> bool:
    """Whether no tile of a whole block reaches beyond the block's inputs."""
    return layout.rows_of_block % self.rows == 0 and layout.span % layout.planes == 0


def _power(size: int) -> int:
  """The least power of two that is not smaller."""
  return 1 << (size - 1).bit_length()


def _rows_on_gpu(layout: Layout, most: int) -> int:
  """Rows of a tile: a power of two up to `most` that divides a block's if one of at least 16 does."""
  m = layout.rows_of_block
  even = min(most, m & -m)
  return even if even >= LEAST else max(LEAST, min(most, _power(m)))


def _splits(programs: int, steps: int) -> int:
  """Shares of the summed axis that fill a GPU, each of four steps or more."""
  return max(1, min(PROGRAMS // programs, steps // 4))


def choose_gpu(tokens: int, outputs: int, layout: Layout, itemsize: int) -> GpuTiling:
  """Tiles of the forward product for activations of `itemsize` bytes."""
  rows = _rows_on_gpu(layout, 64 if layout.planes == 1 else 32 if layout.planes == 2 else 16)
  size = max(LEAST, min(64, _power(tokens)))
  tiles = GpuTiling(size, rows, 64)
  programs = -(-tokens // tiles.tokens) * -(-outputs // tiles.columns)
  return dataclasses.replace(tiles, splits=_splits(programs, tiles.row_tiles(layout)))


def choose_gpu_transposed(tokens: int, outputs: int, layout: Layout, itemsize: int) -> GpuTiling:
  """Tiles of the gradient's product for gradients of `itemsize` bytes."""
  rows = _rows_on_gpu(layout, 64 if layout.planes == 1 else 32 if layout.planes == 2 else 16)
  size = max(LEAST, min(64, _power(tokens)))
  tiles = GpuTiling(size, rows, 64)
  programs = -(-tokens // tiles.tokens) * tiles.row_tiles(layout)
  return dataclasses.replace(tiles, splits=_splits(programs, -(-outputs // tiles.columns)))
