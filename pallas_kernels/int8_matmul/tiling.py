"""How a product of integers is cut into tiles: by bytes moved on a TPU, on a GPU by its shape."""

import dataclasses
import functools
import itertools
from typing import Any

from pallas_kernels import grid_order, tuned
from pallas_kernels.hardware import LANES, PROGRAMS, STEP_BYTES, VMEM_BYTES, power_of_two, sublanes
from pallas_kernels.tuned import Product

# Rows, columns and terms that one product of registers is made of; larger tiles are walked through in a loop.
STEP_ROWS, STEP_DEPTH = 256, 4096


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Sizes of a tile, and in which order they are walked.

  Attributes:
    rows: of the result.
    columns: of the result.
    depth: terms of the sum, which divide it evenly.
    columns_first: whether tiles of one column follow each other, so that an operand b that is not cut in
      depth stays where it is, rather than those of one row.
  """

  rows: int
  columns: int
  depth: int
  columns_first: bool = False

  def moved(self, rows: int, columns: int, depth: int, itemsize: int) -> int:
    """Bytes between a TPU's memories for a result of that size: tiles that come again in a row stay there."""
    across, down = -(-columns // self.columns), -(-rows // self.rows)
    is_cut = self.depth < depth
    reads_a = across if is_cut or self.columns_first else 1
    reads_b = down if is_cut or not self.columns_first else 1
    a = rows * depth * (1 if across == 1 else reads_a)
    b = depth * columns * (1 if down == 1 else reads_b)
    return a + b + rows * columns * itemsize

  def copies(self, rows: int, columns: int, depth: int) -> tuple[int, int]:
    """Tiles of a and of b that are held: one that never changes, else two, one being fetched."""
    is_cut = self.depth < depth
    return 1 + (is_cut or self.rows < rows), 1 + (is_cut or self.columns < columns)

  def held(self, rows: int, columns: int, depth: int, itemsize: int) -> int:
    """Bytes of vector memory."""
    copies_a, copies_b = self.copies(rows, columns, depth)
    operands = (copies_a * self.rows + copies_b * self.columns) * self.depth
    return operands + self.rows * self.columns * (2 * itemsize + 4)


def filled(rows: int, depth: int) -> tuple[int, int]:
  """Rows and terms of a sum once filled up with zeros: few rows, and long sums that can't be cut evenly."""
  is_even = depth <= STEP_DEPTH or depth % LANES == 0
  return max(rows, sublanes(1)), depth if is_even else -(-depth // 1024) * 1024


def _cuts(size: int, most: int) -> list[int]:
  """The whole axis, and multiples of what registers hold that halve down from `most`."""
  steps = [cut for cut in (2048, 1024, 512, 256, 128) if cut <= most and cut < size]
  return ([size] if size <= most else []) + steps


@functools.cache
def candidates(rows: int, columns: int, depth: int, itemsize: int) -> tuple[Tiling, ...]:
  """Tiles for a TPU, what costs least first: bytes moved, the first tiles, which nothing hides, and steps.

  Along each axis a tile is a multiple of what registers hold, or the whole axis.

  Args:
    rows: of the result; as `filled` says.
    columns: of the result.
    depth: terms of a sum; as `filled` says.
    itemsize: bytes of an element of the result.
  """
  rows, depth = filled(rows, depth)
  depths = [depth] if depth <= 4 * STEP_DEPTH else []
  depths += [cut for cut in range(LANES, STEP_DEPTH + 1, LANES) if depth % cut == 0 and cut < depth]

  def cost(tiles: Tiling) -> int:
    steps = -(-rows // tiles.rows) * -(-columns // tiles.columns) * (depth // tiles.depth)
    first = (tiles.rows + tiles.columns) * tiles.depth + tiles.rows * tiles.columns * itemsize
    return tiles.moved(rows, columns, depth, itemsize) + first + STEP_BYTES * steps

  cuts = itertools.product(_cuts(rows, 2048), _cuts(columns, 2048), depths, (False, True))
  tiles = (Tiling(*cut) for cut in cuts)
  return tuple(sorted((t for t in tiles if t.held(rows, columns, depth, itemsize) <= VMEM_BYTES), key=cost))


def product(form: str, rows: int, columns: int, depth: int, itemsize: int) -> Product:
  """The product of a form in `reference.FORMS` as the table of measured tiles has it, by tokens, K and N."""
  shape = {'nn': (rows, depth, columns), 'nt': (rows, columns, depth), 'tn': (depth, rows, columns)}[form]
  return Product('int8_matmul', form, shape, itemsize)


def choose(form: str, rows: int, columns: int, depth: int, itemsize: int) -> Tiling:
  """The tiles for a TPU that were measured to be fastest, else the first of `candidates`."""
  size = (rows, columns, depth)
  rows, depth = filled(rows, depth)

  def fitted(found: Tiling) -> Tiling:
    return dataclasses.replace(
      found, rows=min(found.rows, rows), columns=min(found.columns, columns), depth=min(found.depth, depth)
    )

  return tuned.choose(candidates(*size, itemsize), product(form, *size, itemsize), fitted)


@dataclasses.dataclass(frozen=True)
class GpuTiling:
  """Sizes of a tile, powers of two, and how a program runs.

  Attributes:
    rows: of the result.
    columns: of the result.
    depth: terms of the sum that are multiplied at once.
    splits: shares of the sum, each the work of another program.
    warps: of 32 threads, a program.
    stages: steps of the loop that are in flight.
    group: rows of tiles of a group of programs, as `grid_order` numbers them.
  """

  rows: int
  columns: int
  depth: int
  splits: int
  warps: int
  stages: int = 3
  group: int = 1

  def grid(self, rows: int, columns: int) -> tuple[int, int]:
    """Tiles of the result, down and across."""
    return -(-rows // self.rows), -(-columns // self.columns)

  def place(self, program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Which tile, down and across, a program owns."""
    return grid_order.place(program, *self.grid(rows, columns), self.group)

  def steps(self, depth: int) -> int:
    """Steps of the loop of one share."""
    return -(-depth // (self.splits * self.depth))


def choose_gpu(form: str, rows: int, columns: int, depth: int, itemsize: int) -> GpuTiling:
  """The tiles for a GPU that were measured to be fastest, else the first of `candidates_gpu`."""
  size = (rows, columns, depth)
  return tuned.choose(candidates_gpu(*size), product(form, *size, itemsize))


def candidates_gpu(rows: int, columns: int, depth: int) -> tuple[GpuTiling, ...]:
  """Tiles that a tuner may try on a GPU; the first is what is taken where nothing was measured.

  Each of the others has one size, number of shares, warps or stages twice or half as large.
  """
  first = _heuristic(rows, columns, depth)
  bounds = {'rows': (16, 256), 'columns': (16, 256), 'depth': (32, 256), 'splits': (1, first.steps(depth))}
  return tuned.neighbours(first, {**bounds, 'warps': (2, 8), 'stages': (2, 6)})


def _heuristic(rows: int, columns: int, depth: int) -> GpuTiling:
  """Tiles of up to 128 by 128 by 64; few rows take narrow tiles, so that many programs read the weight.

  Programs take them in the order in which they read the fewest bytes.
  """
  tall = power_of_two(rows, 16, 128)
  wide = power_of_two(columns, 16, 128 if tall > 32 else 64)
  deep = power_of_two(depth, 32, 64 if tall > 32 else 128)
  down, across = -(-rows // tall), -(-columns // wide)
  steps = -(-depth // deep)
  splits = max(1, min(PROGRAMS // (down * across), steps // 4))
  # No more than have steps to take.
  splits = -(-steps // -(-steps // splits))
  group = grid_order.best_group(down, across, tall * depth, wide * depth)
  return GpuTiling(tall, wide, deep, splits, 8 if tall * wide > 64 * 64 else 4, group=group)
