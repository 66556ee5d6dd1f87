"""How a product is cut into tiles on a TPU, and on a GPU."""

import dataclasses
import math

from pallas_kernels.low_bit_matmul.layout import Layout

# Rows of a plane, columns and rows of x that a tile aims at.
ROWS, COLUMNS, TOKENS = 256, 512, 256
# A register holds 8 sublanes of 128 lanes of float32.
SUBLANES, LANES = 8, 128
# Rows of bfloat16 that a register holds.
FEWEST_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Sizes of a tile on a TPU.

  Attributes:
    tokens: rows of x or of g.
    rows: rows of one plane of a weight.
    columns: outputs.
    scales: rows of scales that belong to the rows.
    byte_rows: rows of bytes that hold the rows.
  """

  tokens: int
  rows: int
  columns: int
  scales: int
  byte_rows: int


def choose(tokens: int, outputs: int, layout: Layout) -> Tiling:
  """Tiles near 256 tokens, 256 rows and 512 outputs that a TPU can address.

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
  if layout.bits == 3 and layout.blocks == 1 and rows < layout.rows:
    raise NotImplementedError(f'{layout.inputs} codes of 3 bits are one block, too long for a tile')
  scales = layout.blocks if rows == layout.rows else max(1, rows // m)
  columns = outputs if outputs <= COLUMNS else COLUMNS
  byte_rows = scales * layout.bytes_of_block if layout.bits == 3 else rows
  return Tiling(min(TOKENS, -(-tokens // FEWEST_TOKENS) * FEWEST_TOKENS), rows, columns, scales, byte_rows)


# Programs that keep every core of a large GPU busy.
PROGRAMS = 256
# Tensor cores take at least 16 rows, columns and terms.
LEAST = 16


@dataclasses.dataclass(frozen=True)
class GpuTiling:
  """Sizes of a tile on a GPU, powers of two, and how a program runs.

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


def choose_gpu(tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool) -> GpuTiling:
  """Tiles for activations of `itemsize` bytes that registers hold, and enough of them to fill a GPU.

  A product of float32 runs outside the tensor cores and keeps its operands in registers, so its tiles are
  smaller. Where few programs would run, as in decoding, the summed axis is split among more of them, in
  shares of four steps or more.
  """
  wide = itemsize == 4
  most = max(LEAST, 64 // layout.planes // (2 if wide else 1))
  m = layout.rows_of_block
  # A power of two that divides a block's rows, so that no tile is partly empty, if one of at least 16 does.
  even = min(most, m & -m)
  rows = even if even >= LEAST else max(LEAST, min(most, _power(m)))
  tiles = GpuTiling(max(LEAST, min(32 if wide else 64, _power(tokens))), rows, 32 if wide else 64)
  row_tiles, column_tiles = tiles.row_tiles(layout), -(-outputs // tiles.columns)
  owned, summed = (row_tiles, column_tiles) if transposed else (column_tiles, row_tiles)
  programs = -(-tokens // tiles.tokens) * owned
  return dataclasses.replace(tiles, splits=max(1, min(PROGRAMS // programs, summed // 4)))
