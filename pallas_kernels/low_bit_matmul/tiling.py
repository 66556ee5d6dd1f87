"""How a product is cut into tiles: on a TPU by the bytes that each cut moves, and on a GPU by its shape."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from pallas_kernels import grid_order, tuned
from pallas_kernels.hardware import LANES, PROGRAMS, STEP_BYTES, power_of_two, sublanes
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.tuned import Product

# Of the product and of that with the transposed weight.
NAMES = ('low_bit_matmul', 'low_bit_matmul_transposed')

# Rows of float32, of bytes and of bfloat16 that a register of a TPU holds.
SUBLANES, BYTE_SUBLANES, FEWEST_TOKENS = sublanes(4), sublanes(1), sublanes(2)
# Bytes of a TPU's vector memory that tiles may take here, what decoding takes included, and those that a
# kernel may then use; of the 64 MiB or more that there are.
VMEM_BYTES, VMEM_LIMIT = 47 * 2**20, 60 * 2**20
# As `STEP_BYTES`, of decoding a code: a v5e's compiler packs 1,024 values of a table of 16 into 2.4 cycles.
DECODE_BYTES = 1.25
# Rows of x that one product of registers takes; a larger tile is walked through in a loop.
STEP_TOKENS = 256
# Blocks, rows of one long block and columns that are decoded at once, likewise.
STEP_BLOCKS, STEP_ROWS, STEP_COLUMNS = 8, 256, 256
# What a tile may hold of an axis.
MOST = 16384


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Sizes of a tile on a TPU, and in which order tiles are walked.

  Attributes:
    tokens: rows of x or of g.
    rows: rows of one plane of a weight, whole blocks or a part of the only one.
    columns: outputs.
    weight_stays: whether tiles of x follow each other below one tile of the weight, which then is decoded
      once if the summed axis is not cut; else tiles of the weight follow each other below one of x.
  """

  tokens: int
  rows: int
  columns: int
  weight_stays: bool = False

  def blocks(self, layout: Layout) -> int:
    """Blocks of a tile: rows of scales."""
    return 1 if layout.blocks == 1 else self.rows // layout.rows_of_block

  def byte_rows(self, layout: Layout) -> int:
    """Rows of bytes that hold the rows."""
    return self.blocks(layout) * layout.byte_rows_of_block if layout.bits == 3 else self.rows

  def runs(self, layout: Layout) -> tuple[int, int]:
    """Runs of consecutive inputs that a tile holds, and the length of each.

    The planes of whole blocks together are one run; of a part of one block each plane is a run.
    """
    if layout.blocks == 1:
      return layout.planes, self.rows
    return 1, layout.planes * self.rows

  def grid(self, tokens: int, outputs: int, layout: Layout, transposed: bool) -> tuple[int, int, int]:
    """Tiles of x, of the result across, and of the summed axis."""
    down, along, across = -(-tokens // self.tokens), -(-layout.rows // self.rows), -(-outputs // self.columns)
    return (down, along, across) if transposed else (down, across, along)

  def copies(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tiles of x, of the weight and of the result that are held: one that never changes, else two.

    Of two one is being fetched, or written.
    """
    down, across, cuts = grid
    return 1 + (down > 1 or cuts > 1), 1 + (across > 1 or cuts > 1), 1 + (down > 1 or across > 1)

  def factor_copies(self, grid: tuple[int, int, int]) -> tuple[int, int]:
    """The same of an adapter's x·A and B."""
    down, across, _ = grid
    return 1 + (down > 1), 1 + (across > 1)

  def held(
    self, grid: tuple[int, int, int], layout: Layout, itemsize: int, transposed: bool, rank: int = 0
  ) -> int:
    """Bytes of vector memory; of an adapter those of B, and of x·A or what it is had from."""
    runs, length = self.runs(layout)
    inputs, (of_x, of_w, of_y) = runs * length, self.copies(grid)
    summed, kept = (self.columns, inputs) if transposed else (inputs, self.columns)
    scales = -(-self.blocks(layout) // SUBLANES) * SUBLANES * self.columns * 4
    weight = self.byte_rows(layout) * self.columns + 2 * scales
    decoding = 6 * 4 * max(STEP_BLOCKS * layout.span if layout.blocks > 1 else 0, STEP_ROWS) * STEP_COLUMNS
    decoded = inputs * self.columns * itemsize
    wide, tall = -(-rank // LANES) * LANES, -(-rank // FEWEST_TOKENS) * FEWEST_TOKENS
    of_low, of_b = self.factor_copies(grid)
    factors = of_b * tall * self.columns * itemsize
    if self.lowers(grid, layout):
      factors += 2 * tall * inputs * itemsize + 4 * self.tokens * wide
    else:
      factors += of_low * self.tokens * wide * itemsize
    rows = self.tokens * (of_x * summed * itemsize + of_y * kept * 4)
    return rows + of_w * weight + decoded + decoding + factors

  def moved(
    self, tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
  ) -> int:
    """Bytes between a TPU's memories: tiles that come again in a row stay where they are."""
    down, across, cuts = self.grid(tokens, outputs, layout, transposed)
    k = layout.blocks * layout.span
    summed, kept = (outputs, k) if transposed else (k, outputs)
    reads_x = across if across > 1 and (cuts > 1 or self.weight_stays) else 1
    reads_w = down if down > 1 and (cuts > 1 or not self.weight_stays) else 1
    weight = layout.nbytes(outputs)
    # x·A comes again with each tile across where those of x follow each other, else B with each tile of x.
    reads_low = across if self.weight_stays and down > 1 else 1
    reads_b = down if not self.weight_stays and across > 1 else 1
    factors = (reads_low * tokens + reads_b * outputs) * rank * itemsize
    return reads_x * tokens * summed * itemsize + reads_w * weight + 4 * tokens * kept + factors

  def lowers(self, grid: tuple[int, int, int], layout: Layout) -> bool:
    """Whether x·A may be had in the pass over x: one tile holds the whole result, so that x passes once.

    Of more tiles across, those on another core would each need all of x·A. Rows are few, those of decoding,
    for the columns of A fill little of a product of registers; and no input is multiplied elsewhere.
    """
    return grid[:2] == (1, 1) and self.tokens <= STEP_TOKENS and layout.tail is None

  def decodes(self, grid: tuple[int, int, int]) -> int:
    """How often a code is decoded."""
    down, _, cuts = grid
    return 1 if self.weight_stays and cuts == 1 else down

  def cost(
    self, tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
  ) -> float:
    """Bytes moved, and in bytes that could be moved meanwhile: steps, codes decoded, and the first tiles."""
    grid = self.grid(tokens, outputs, layout, transposed)
    inputs = math.prod(self.runs(layout))
    first = self.byte_rows(layout) * self.columns
    first += self.tokens * (itemsize * (self.columns if transposed else inputs))
    codes = layout.blocks * layout.span * outputs
    moved = self.moved(tokens, outputs, layout, itemsize, transposed, rank)
    return moved + first + STEP_BYTES * math.prod(grid) + DECODE_BYTES * self.decodes(grid) * codes


def _row_cuts(layout: Layout) -> Iterator[int]:
  """Rows of a plane that a tile may hold; of one block they divide all, for its planes lie side by side."""
  m, whole = layout.rows_of_block, layout.rows
  if layout.planes * whole <= MOST and not (layout.blocks == 1 and layout.bits == 3 and m > 1024):
    yield whole
  if layout.blocks == 1 and layout.bits == 3:
    return
  # Of one block any part that registers hold; of many, blocks whose inputs and scales registers hold.
  step = LANES if layout.blocks == 1 else m * (BYTE_SUBLANES if layout.double_quantized else STEP_BLOCKS)
  if layout.blocks > 1 and step * layout.planes % LANES:
    return
  for count in (1, 2, 4, 8, 16, 32):
    rows = count * step
    if rows < whole and (layout.blocks > 1 or whole % rows == 0) and layout.planes * rows <= MOST:
      yield rows


def _column_cuts(outputs: int, most: int) -> Iterator[int]:
  if outputs <= STEP_COLUMNS * 2 or (outputs <= most and outputs % LANES == 0):
    yield outputs
  for cut in (4096, 2048, 1024, 512, 256, 128):
    if cut < outputs and cut <= most:
      yield cut


@functools.cache
def candidates(
  tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
) -> tuple[Tiling, ...]:
  """Tiles for a TPU, what costs least first: bytes moved, steps, codes decoded, and first tiles, unhidden.

  Args:
    tokens: rows of x, at least `FEWEST_TOKENS`.
    outputs: N.
    layout: what the bytes mean.
    itemsize: bytes of an element of x.
    transposed: whether the product is that with the transposed weight.
    rank: of an adapter that is added, 0 for none.

  Raises:
    NotImplementedError: no tile that a TPU can address and hold serves.
  """
  m = layout.rows_of_block
  if layout.blocks > 1 and m % SUBLANES:
    raise NotImplementedError(
      f'blocks of {layout.block} inputs take {m} rows of bytes, no multiple of {SUBLANES}'
    )
  if layout.blocks > 1 and m * layout.planes != layout.span:
    raise NotImplementedError(f'blocks of {layout.block} inputs do not fill their bytes')

  def fits(tiles: Tiling) -> bool:
    grid = tiles.grid(tokens, outputs, layout, transposed)
    return tiles.held(grid, layout, itemsize, transposed, rank) <= VMEM_BYTES

  whole = [-(-tokens // FEWEST_TOKENS) * FEWEST_TOKENS] if tokens <= 2048 else []
  cuts = itertools.product(
    whole + [cut for cut in (2048, 1024, 512, 256) if cut < tokens],
    _row_cuts(layout), _column_cuts(outputs, MOST), (False, True),
  )  # fmt: skip
  tiles = [each for each in itertools.starmap(Tiling, cuts) if fits(each)]
  if not tiles:
    raise NotImplementedError(f'no tile of {layout.inputs} inputs in blocks of {layout.block} fits a TPU')
  return tuple(sorted(tiles, key=lambda each: each.cost(tokens, outputs, layout, itemsize, transposed, rank)))


def reads_scales_first(
  tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
) -> bool:
  """Whether scales in 8 bits had better be read back before the product; arguments are those of `candidates`.

  A tile has 32 rows of them or all, where eight of float32 will do. So a long sum can be cut more finely,
  which may save more than it costs to read them, to write floats and to read those.
  """
  if not layout.double_quantized:
    return False
  plain = dataclasses.replace(layout, double_quantized=False)

  def least(layout: Layout) -> float:
    args = (tokens, outputs, layout, itemsize, transposed, rank)
    try:
      return candidates(*args)[0].cost(*args)
    except NotImplementedError:
      return math.inf

  return least(plain) + 5 * layout.blocks * outputs < least(layout)


def multiplied(
  tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
) -> Layout:
  """The layout that a TPU's kernel is given: with scales as floats if those in 8 bits are read back first."""
  is_first = reads_scales_first(tokens, outputs, layout, itemsize, transposed, rank)
  return dataclasses.replace(layout, double_quantized=False) if is_first else layout


def product(tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool) -> Product:
  """The product as the table of measured tiles has it."""
  form = f'{layout.bits} bits, blocks of {layout.span}'
  form += ', table' if layout.levels is not None else ''
  form += ', scales in 8 bits' if layout.double_quantized else ''
  form += ', offsets' if layout.has_offsets else ''
  return Product(NAMES[transposed], form, (tokens, layout.inputs, outputs), itemsize)


def choose(
  tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool, rank: int = 0
) -> Tiling:
  """The tiles for a TPU that were measured to be fastest, else the first of `candidates`.

  An adapter was not measured; tiles that leave no room for it are not taken.
  """
  args = (tokens, outputs, layout, itemsize, transposed)
  whole = -(-tokens // FEWEST_TOKENS) * FEWEST_TOKENS

  def fitted(found: Tiling) -> Tiling:
    return dataclasses.replace(found, tokens=min(found.tokens, whole))

  return tuned.choose(candidates(*args, rank), product(*args), fitted)


# Programs that are enough for large tiles: most cores of a GPU have work.
FEWEST_LARGE = 96
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
    group: tiles of tokens of a group of programs, as `grid_order` numbers them.
    stack: tiles of the weight, one below the other, whose results a program of the transposed product owns;
      they divide `row_tiles`.
  """

  tokens: int
  rows: int
  columns: int
  splits: int = 1
  warps: int = 4
  stages: int = 2
  group: int = 1
  stack: int = 1

  def grid(self, tokens: int, outputs: int, layout: Layout, transposed: bool) -> tuple[int, int]:
    """Tiles of the result: of tokens, and of columns or of stacks of rows of the weight.

    Raises:
      ValueError: stacks do not divide the tiles of the weight.
    """
    stacks, left = divmod(self.row_tiles(layout), self.stack)
    if left and transposed:
      raise ValueError(f'stack = {self.stack} does not divide {self.row_tiles(layout)} tiles of rows; 1 does')
    return -(-tokens // self.tokens), stacks if transposed else -(-outputs // self.columns)

  def place(
    self, program: Any, tokens: int, outputs: int, layout: Layout, transposed: bool
  ) -> tuple[Any, Any]:
    """Which tile of tokens and which of `grid`'s others a program owns."""
    return grid_order.place(program, *self.grid(tokens, outputs, layout, transposed), self.group)

  def tiles_of_block(self, layout: Layout) -> int:
    return -(-layout.rows_of_block // self.rows)

  def row_tiles(self, layout: Layout) -> int:
    """Tiles along the inputs, those of the shorter last block included."""
    last = 0 if layout.tail is None else self.tiles_of_block(layout.tail)
    return layout.blocks * self.tiles_of_block(layout) + last

  def is_exact(self, layout: Layout) -> bool:
    """Whether no tile of a whole block reaches beyond the block's inputs."""
    return layout.rows_of_block % self.rows == 0 and layout.span % layout.planes == 0


def rank_tile(rank: int) -> int:
  """Terms of the sum over the rank of an adapter that one step of a GPU's program takes."""
  return power_of_two(rank, LEAST, 64)


def choose_gpu(tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool) -> GpuTiling:
  """The tiles for a GPU that were measured to be fastest, else the first of `candidates_gpu`."""
  args = (tokens, outputs, layout, itemsize, transposed)
  return tuned.choose(candidates_gpu(*args), product(*args))


def candidates_gpu(
  tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool
) -> tuple[GpuTiling, ...]:
  """Tiles that a tuner may try on a GPU; the first is what is taken where nothing was measured.

  Of the others each differs from it in one or two sizes, shares, warps, stages or the order of programs.
  """
  args = (tokens, outputs, layout, itemsize, transposed)
  first = _heuristic(*args)
  fitting = [t for t in (16, 32, 64, 128, 256) if t <= max(LEAST, 2 * tokens)]
  down, _ = first.grid(*args[:3], transposed)
  # Ends of each range first, for a tuner may try but some.
  sizes = [(t, first.columns) for t in (2 * first.tokens, first.tokens // 2) if t in fitting]
  others = [_ordered(dataclasses.replace(first, tokens=t, columns=c), *args) for t, c in sizes]
  others += [dataclasses.replace(first, group=group) for group in sorted({1, max(1, down // 2), down})]
  sizes = [(first.tokens, first.columns), *((t, c) for t in fitting for c in (32, 64, 128))]
  others += [
    _ordered(dataclasses.replace(
      first, tokens=t, columns=c, splits=max(1, splits), warps=warps, stages=stages
    ), *args)
    for t, c in sizes for splits in (first.splits, first.splits // 2, 2 * first.splits)
    for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3))
  ]  # fmt: skip
  return tuple(dict.fromkeys((first, *others)))


def _heuristic(tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool) -> GpuTiling:
  """Tiles for activations of `itemsize` bytes that registers hold, and enough of them to fill a GPU.

  A weight is decoded again for each tile of tokens, and the fewer tiles a result has, the fewer bytes waves
  of programs read. Registers of eight warps hold a result of 128 by 128 beside the codes that are decoded, of
  the transposed product those of 32 columns a step: with 64 they spill on capability 8.9, as with 256 tokens
  on 8.0. So it is taken where there are enough such results to fill a GPU; else a tile is 64 by 64. The order
  of programs is by bytes (`grid_order`).

  A product of float32 runs outside the tensor cores and keeps its operands in registers, so its tiles are
  smaller. Where few programs would run, as in decoding, the summed axis is split among more of them, in
  shares of four steps or more.
  """
  single = itemsize == 4
  size = 32 if single else 64
  kept = layout.inputs if transposed else outputs
  large = not single and -(-tokens // 128) * -(-kept // 128) >= FEWEST_LARGE
  wide = 128 if large else size
  # Of the transposed product's result a tile has all planes, in one stack or more; else they are steps.
  most = max(LEAST, (wide if transposed and large else size) // layout.planes)
  m = layout.rows_of_block
  # A power of two that divides a block's rows, so that no tile is partly empty, if one of at least 16 does.
  even = min(most, m & -m)
  rows = even if even >= LEAST else power_of_two(m, LEAST, most)
  columns = (32 if transposed else wide) if large else size
  tiles = GpuTiling(wide if large else power_of_two(tokens, LEAST, size), rows, columns)
  if large:
    tiles = dataclasses.replace(tiles, warps=8)
  if large and transposed:
    stacked = max(1, wide // (layout.planes * rows))
    tiles = dataclasses.replace(tiles, stack=math.gcd(stacked, tiles.row_tiles(layout)))
  row_tiles, column_tiles = tiles.row_tiles(layout), -(-outputs // tiles.columns)
  down, across = tiles.grid(tokens, outputs, layout, transposed)
  summed = column_tiles if transposed else row_tiles
  return _ordered(
    dataclasses.replace(tiles, splits=max(1, min(PROGRAMS // (down * across), summed // 4))),
    tokens, outputs, layout, itemsize, transposed,
  )  # fmt: skip


def _ordered(
  tiles: GpuTiling, tokens: int, outputs: int, layout: Layout, itemsize: int, transposed: bool
) -> GpuTiling:
  """The tiles in the order in which they read the fewest bytes."""
  down, across = tiles.grid(tokens, outputs, layout, transposed)
  summed = outputs if transposed else layout.inputs
  row_bytes = tiles.tokens * summed * itemsize
  return dataclasses.replace(
    tiles, group=grid_order.best_group(down, across, row_bytes, layout.nbytes(outputs) // across)
  )
