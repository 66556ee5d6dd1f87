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
