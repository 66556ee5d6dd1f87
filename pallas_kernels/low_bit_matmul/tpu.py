"""A weight in few bits times an input, and times a gradient, on a TPU: bytes are decoded tile by tile.

Both products read the same bytes and write no decoded weight to memory. A tile of the weight is decoded into
vector memory, its inputs in the order of x, and all rows of x that the tile meets are multiplied with that.
Where a tile comes again at the next step of the grid it is not decoded again. The sum runs over the last axis
of the grid, in float32, in the tile of the result.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import hardware
from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul import reference, tiling
from pallas_kernels.low_bit_matmul.layout import DoubleQuantized, Layout, Scales, read_scales
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.low_bit_matmul.tiling import Tiling
from pallas_kernels.tile import dot


def _levels(code: jax.Array, layout: Layout) -> jax.Array:
  """As `layouts.level_of`. A table is looked up eight levels at a time, one in each sublane of a register.

  That is two instructions and a selection for 16 levels, where a tree of selections takes 23; it takes codes
  that fill registers.
  """
  rows, columns = code.shape
  if layout.levels is None or rows % tiling.SUBLANES or columns % tiling.LANES:
    return layouts.level_of(code, layout)
  shape = tiling.SUBLANES, tiling.LANES
  place = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  table, eights = layouts.table_of(layout), []
  for start in range(0, len(table), tiling.SUBLANES):
    eight = jnp.zeros(shape, jnp.float32)
    for sublane, level in enumerate(table[start : start + tiling.SUBLANES]):
      eight = jnp.where(place == sublane, np.float32(level), eight)
    eights.append(eight)

  def look(codes: jax.Array) -> jax.Array:
    within = codes & (tiling.SUBLANES - 1) if len(eights) > 1 else codes
    found = [jnp.take_along_axis(eight, within, axis=0, mode='promise_in_bounds') for eight in eights]
    return found[0] if len(found) == 1 else jnp.where(codes < tiling.SUBLANES, found[0], found[1])

  tall, wide = range(0, rows, tiling.SUBLANES), range(0, columns, tiling.LANES)
  pieces = [
    [look(code[i : i + tiling.SUBLANES, j : j + tiling.LANES]) for j in wide] for i in tall
  ]
  return jnp.concatenate([jnp.concatenate(row, axis=1) for row in pieces])


def _values(
  codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout
) -> list[jax.Array]:
  """Runs of consecutive inputs, float32 [inputs, columns], of bytes and of scales [their blocks, columns]."""
  planes = []
  for plane in range(layout.planes):
    levels = _levels(layouts.codes_of(codes, plane, layout), layout)
    rows, columns = levels.shape

    def spread(each: jax.Array, rows: int = rows, columns: int = columns) -> jax.Array:
      if each.shape[0] == 1:
        return each
      tall = jnp.broadcast_to(each[:, None, :], (each.shape[0], rows // each.shape[0], columns))
      return tall.reshape(rows, columns)

    w = levels * spread(scale)
    planes.append(w if offset is None else w + spread(offset))
  if layout.blocks == 1 or layout.planes == 1:
    return planes
  m = layout.rows_of_block
  blocks = range(planes[0].shape[0] // m)
  return [jnp.concatenate([plane[b * m : (b + 1) * m] for b in blocks for plane in planes])]


def _ended(x: jax.Array, axis: int, first: Any, end: int) -> jax.Array:
  """x with zeros from `end` on along an axis that begins at `first`: memory there may hold anything."""
  place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + first
  return jnp.where(place < end, x, jnp.zeros((), x.dtype))


class _Weight:
  """The arrays of a tile of a weight, and where it is decoded.

  Attributes:
    layout: what the bytes mean.
    tiles: their sizes.
    end: (axis, where) inputs (0) or outputs (1) end within a tile that is summed along them; else None.
  """

  def __init__(
    self, refs: list[Any], scratch: list[Any], layout: Layout, tiles: Tiling, end: tuple[int, int] | None
  ) -> None:
    self.layout, self.tiles, self.end = layout, tiles, end
    self._codes, *rest = refs
    if layout.double_quantized:
      self._scale_codes, self._step, self._scale_offset, *rest = rest
      self.decoded, self._scale = scratch
    else:
      self._scale, *rest = rest
      (self.decoded,) = scratch
    self._offset = rest[0] if rest else None

  def decode(self, first: tuple[Any, Any]) -> None:
    """Fills `decoded` [runs, inputs of a run, columns], which begins at `first`, an input and an output."""
    layout, tiles = self.layout, self.tiles
    if layout.double_quantized:
      self._decode_scales(first[1])
    blocks = tiles.blocks(layout)
    if layout.blocks > 1:
      step, count, whole = tiling.STEP_BLOCKS, blocks // tiling.STEP_BLOCKS, blocks
      rows_of, inputs_of = layout.byte_rows_of_block, layout.span
    else:
      step = tiles.rows if layout.bits == 3 else tiling.STEP_ROWS
      count, whole, rows_of, inputs_of = tiles.rows // step, tiles.rows, 1, 1
    width = tiling.STEP_COLUMNS if tiles.columns % tiling.STEP_COLUMNS == 0 else tiles.columns
    width = tiling.LANES if width > 2 * tiling.STEP_COLUMNS else width
    if tiles.columns % width:
      raise ValueError(f'{tiles}: more than {2 * tiling.STEP_COLUMNS} columns must be a multiple of {width}')
    strips = tiles.columns // width

    def part(start: Any, size: int, strip: Any) -> None:
      left = pl.multiple_of(strip * width, width) if strips > 1 else 0
      across = pl.ds(left, width) if strips > 1 else slice(None)
      if layout.bits == 3 and layout.blocks == 1:
        codes = self._codes[:, across]
      else:
        codes = self._codes[pl.ds(start * rows_of, size * rows_of), across]
      own = pl.ds(start, size) if layout.blocks > 1 else slice(None)
      scale = self._scale[own, across]
      offset = None if self._offset is None else self._offset[own, across]
      for run, w in enumerate(_values(codes, scale, offset, layout)):
        if self.end is not None:
          axis = self.end[0]
          w = _ended(w, axis, first[axis] + (left if axis else start * inputs_of), self.end[1])
        into = pl.ds(start * inputs_of, size * inputs_of)
        self.decoded[run, into, across] = w.astype(self.decoded.dtype)

    def walk(index: Any, _: Any) -> None:
      start = jax.lax.div(index, strips)
      part(pl.multiple_of(start * step, step), step, index - start * strips)

    if count:
      jax.lax.fori_loop(0, count * strips, walk, None)
    if rest := whole - count * step:
      jax.lax.fori_loop(0, strips, lambda strip, _: part(count * step, rest, strip), None)

  def _decode_scales(self, column: Any) -> None:
    """Scales of the tile; the step of each column is picked by a product whose sums have one term."""
    step = self._step[...]
    shape = step.shape[1], self._scale.shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + column
    group = jax.lax.div(place, jnp.full_like(place, layouts.GROUP))
    is_own = group == jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    wide = dot(step, is_own.astype(jnp.float32))
    self._scale[...] = self._scale_codes[...].astype(jnp.float32) * wide + self._scale_offset[...]


def _walk_rows(tokens: int, work: Any) -> None:
  """`work(rows)` for strips of the rows of a tile, so that the program does not grow with it."""
  step = tiling.STEP_TOKENS
  if tokens <= step or tokens % step:
    work(slice(None))
    return
  jax.lax.fori_loop(
    0, tokens // step, lambda index, _: work(pl.ds(pl.multiple_of(index * step, step), step)), None
  )


def _is_first(cuts: int) -> Any:
  """Whether the first of several parts of a sum is met, None of one; not to be asked within a loop."""
  return None if cuts == 1 else pl.program_id(2) == 0


def _add(ref: Any, index: Any, total: jax.Array, is_first: Any) -> None:
  """Adds a term of the sum to the tile of a result, whose first term sets it."""
  if is_first is None:
    ref[index] = total
    return

  @pl.when(is_first)
  def _() -> None:
    ref[index] = total

  @pl.when(jnp.logical_not(is_first))
  def _() -> None:
    ref[index] += total


def _decode_if_new(weight: _Weight, grid: tuple[int, int, int], first: tuple[Any, Any]) -> None:
  if weight.tiles.weight_stays and grid[2] == 1:
    pl.when(pl.program_id(1) == 0)(lambda: weight.decode(first))
  else:
    weight.decode(first)


class _Adapter:
  """What an adapter adds to a tile of the result: references to x·A or to runs of A, and to B.

  Attributes:
    scale: s.
    total: float32 [tokens, r], where x·A adds up; None if it is there.
  """

  def __init__(self, refs: list[Any], scale: float, total: Any) -> None:
    *self._given, self._b = refs
    self.scale, self.total = scale, total

  def meet(self, rows: Any, x: list[jax.Array], end: tuple[Any, int] | None, is_first: Any) -> None:
    """Adds the terms of x·A that runs of x give, whose inputs begin and end at `end`."""
    if self.total is None:
      return
    terms = []
    for each, ref in zip(x, self._given, strict=True):
      terms.append(dot(each, ref[...] if end is None else _ended(ref[...], 1, *end), (1, 1)))
    _add(self.total, (rows, slice(None)), sum(terms[1:], terms[0]), is_first)

  def add(self, y_ref: Any, rows: Any) -> None:
    """Adds scale · (x·A) · B to rows that met all inputs; x·A is rounded to the dtype of x first."""
    low = (self._given[0] if self.total is None else self.total)[rows, :]
    y_ref[rows, :] += self.scale * dot(low.astype(self._b.dtype), self._b[...])


def _forward_kernel(
  *refs: Any, layout: Layout, tiles: Tiling, grid: tuple[int, int, int], s: float | None, lowers: bool
) -> None:
  runs = tiles.runs(layout)[0]
  count = 0 if s is None else 1 + (runs if lowers else 1)
  refs, total_low = (refs[:-1], refs[-1]) if lowers else (refs, None)
  read, (*weight_refs, y_ref), scratch = _taken_apart(refs, runs + count, layout)
  x_refs = read[:runs]
  adapter = None if s is None else _Adapter(read[runs:], s, total_low)
  inputs = layout.blocks * layout.span
  is_ragged = layout.rows % tiles.rows != 0
  weight = _Weight(weight_refs, scratch, layout, tiles, (0, inputs) if is_ragged else None)
  first, is_first = pl.program_id(2) * tiles.runs(layout)[1], _is_first(grid[2])
  _decode_if_new(weight, grid, (first, _across(tiles) * tiles.columns))

  def work(rows: Any) -> None:
    x = [ref[rows, :] for ref in x_refs]
    x[0] = _ended(x[0], 1, first, inputs) if is_ragged else x[0]
    total = dot(x[0], weight.decoded[0])
    for run in range(1, runs):
      total += dot(x[run], weight.decoded[run])
    _add(y_ref, (rows, slice(None)), total, is_first)
    if adapter is not None:
      adapter.meet(rows, x, (first, inputs) if is_ragged else None, is_first)

  _walk_rows(tiles.tokens, work)
  if adapter is not None:
    finish = functools.partial(adapter.add, y_ref)
    pl.when(pl.program_id(2) == grid[2] - 1)(lambda: _walk_rows(tiles.tokens, finish))


def _backward_kernel(
  *refs: Any, layout: Layout, tiles: Tiling, grid: tuple[int, int, int], outputs: int
) -> None:
  (g_ref,), (*weight_refs, dx_ref), scratch = _taken_apart(refs, 1, layout)
  is_ragged = outputs % tiles.columns != 0
  column, is_first = pl.program_id(2) * tiles.columns, _is_first(grid[2])
  weight = _Weight(weight_refs, scratch, layout, tiles, (1, outputs) if is_ragged else None)
  _decode_if_new(weight, grid, (0, column))

  def work(rows: Any) -> None:
    g = _ended(g_ref[rows, :], 1, column, outputs) if is_ragged else g_ref[rows, :]
    for run in range(tiles.runs(layout)[0]):
      _add(dx_ref, (run, rows, slice(None)), dot(g, weight.decoded[run], (1, 1)), is_first)

  _walk_rows(tiles.tokens, work)


def _taken_apart(refs: Any, of_x: int, layout: Layout) -> tuple[list[Any], list[Any], list[Any]]:
  """References to x or g, to the weight and the result, and to scratch."""
  scratch = 2 if layout.double_quantized else 1
  return list(refs[:of_x]), list(refs[of_x:-scratch]), list(refs[-scratch:])


def _across(tiles: Tiling) -> Any:
  """Which tile across the result a step of the grid is about."""
  return pl.program_id(0 if tiles.weight_stays else 1)


def _call(
  kernel: Any, x: list[jax.Array], x_specs: list[Any], weight: tuple[jax.Array, Scales, jax.Array | None],
  result: Any, layout: Layout, tiles: Tiling, transposed: bool, interpret: Any,
  adapter: tuple[list[jax.Array], list[Any], list[Any]] = ([], [], []),
) -> jax.Array:  # fmt: skip
  """The product of operands x with a weight, in a grid that runs as `tiles` says.

  Args:
    kernel: which takes the static arguments `layout`, `tiles` and `grid`.
    x: arrays [M, …].
    x_specs: for each the shape of a block and its place for tiles (of x, across, of the sum).
    weight: codes, scales and offsets of whole blocks.
    result: the same for the result, with its shape.
    layout: of the weight.
    tiles: their sizes.
    transposed: whether the product is with the transposed weight.
    interpret: run on a CPU.
    adapter: arrays that it is read from, B the last, their blocks, places and copies, and scratch.
  """
  codes, scale, offset = weight
  factors, factor_specs, total_low = adapter
  tokens, outputs, rank = x[0].shape[0], codes.shape[1], factors[-1].shape[0] if factors else 0
  grid = tiles.grid(tokens, outputs, layout, transposed)
  of_x, of_w, of_y = tiles.copies(grid)

  def spec(shape: tuple[int, ...], where: Any, copies: int = 2) -> pl.BlockSpec:
    swapped = (lambda j, i, k: where(i, j, k)) if tiles.weight_stays else where
    return pl.BlockSpec(shape, swapped, pipeline_mode=pl.Buffered(1) if copies == 1 else None)

  def part(i: Any, j: Any, k: Any) -> tuple[Any, Any]:
    """Tile of rows and of columns of the weight."""
    return (j, k) if transposed else (k, j)

  def of_blocks(i: Any, j: Any, k: Any) -> tuple[Any, Any]:
    """One row of scales serves all tiles of rows."""
    row, column = part(i, j, k)
    return (0 if layout.blocks == 1 else row), column

  per_block = (tiles.blocks(layout), tiles.columns)
  wide = lambda each: jnp.broadcast_to(each[: layout.blocks], (layout.blocks, outputs))
  operands, specs = [codes[: layout.byte_rows]], [spec((tiles.byte_rows(layout), tiles.columns), part, of_w)]
  scratch = [pltpu.VMEM((*tiles.runs(layout), tiles.columns), x[0].dtype)]
  if isinstance(scale, DoubleQuantized):
    groups = scale.step.shape[1]
    operands += [scale.codes[: layout.blocks], scale.step[: layout.blocks], scale.offset]
    specs += [
      spec(per_block, of_blocks, of_w),
      spec((tiles.blocks(layout), groups), lambda i, j, k: (of_blocks(i, j, k)[0], 0)),
      spec((1, 1), lambda i, j, k: (0, 0)),
    ]
    scratch.append(pltpu.VMEM(per_block, jnp.float32))
  else:
    operands.append(wide(scale))
    specs.append(spec(per_block, of_blocks, of_w))
  if offset is not None:
    operands.append(wide(offset))
    specs.append(spec(per_block, of_blocks, of_w))
  shape, block, where = result
  down, across, cuts = grid
  return pl.pallas_call(
    functools.partial(kernel, layout=layout, tiles=tiles, grid=grid),
    grid=(across, down, cuts) if tiles.weight_stays else grid,
    in_specs=[
      *(spec(block, where, of_x) for block, where in x_specs),
      *(spec(*each) for each in factor_specs),
      *specs,
    ],
    out_specs=spec(block, where, of_y),
    out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
    scratch_shapes=[*scratch, *total_low],
    compiler_params=pltpu.CompilerParams(
      # A tile that is decoded once is met by the steps of one core.
      dimension_semantics=('parallel', 'arbitrary' if tiles.weight_stays else 'parallel', 'arbitrary'),
      vmem_limit_bytes=tiling.VMEM_LIMIT,
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * tokens * (layout.blocks * layout.span + rank) * outputs,
      bytes_accessed=tiles.moved(tokens, outputs, layout, x[0].dtype.itemsize, transposed, rank),
      transcendentals=0,
    ),
    interpret=interpret,
    name=tiling.NAMES[transposed],
  )(*x, *factors, *operands)


def obstacle(layout: Layout, device_kind: str = '') -> str | None:
  """Why no tile serves a layout on that kind of TPU, None if one serves products small and large."""
  if hardware.is_before_v5(device_kind):
    return f'{device_kind} has 16 MiB of vector memory and looks nothing up across sublanes'
  layout = dataclasses.replace(layout, double_quantized=False)  # scales may be read back first
  try:
    for tokens, outputs in ((tiling.FEWEST_TOKENS, tiling.LANES), (4096, 16512)):
      for transposed in (False, True):
        tiling.candidates(tokens, outputs, layout, 4, transposed)
  except NotImplementedError as error:
    return str(error)
  return None


def _tail(
  codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Codes, scales and offsets of the shorter last block, which XLA multiplies."""
  left = None if offset is None else offset[layout.blocks :]
  if isinstance(scale, DoubleQuantized):
    return codes[layout.byte_rows :], read_scales(scale.of_blocks(layout.blocks)), left
  return codes[layout.byte_rows :], scale[layout.blocks :], left


def _settled(
  scale: Scales, layout: Layout, tokens: int, outputs: int, itemsize: int, transposed: bool, rank: int = 0
) -> tuple[Scales, Layout]:
  """Scales as the kernel shall read them, and the layout that says so."""
  given = tiling.multiplied(tokens, outputs, layout, itemsize, transposed, rank)
  return scale if given.double_quantized else read_scales(scale), given


def _filled(x: jax.Array, rows: int = tiling.FEWEST_TOKENS, columns: int = 0) -> jax.Array:
  """x [M, …] with at least so many rows, those of a register of bfloat16, and columns; zeros at the end."""
  return jnp.pad(x, ((0, max(0, rows - x.shape[0])), (0, max(0, columns - x.shape[1]))))


def _runs_of(x: jax.Array, layout: Layout, tiles: Tiling) -> tuple[list[jax.Array], list[Any]]:
  """x [M, K] as operands, one for each run of a tile, with their blocks."""
  runs, length = tiles.runs(layout)
  block = (tiles.tokens, length)
  k = layout.blocks * layout.span
  x = x[:, :k] if x.shape[1] > k else x
  if runs == 1:
    return [x], [(block, lambda i, j, k: (i, k))]
  m = layout.rows_of_block
  x = jnp.pad(x, ((0, 0), (0, runs * m - k)))
  if m % tiling.LANES:
    return [x[:, run * m : (run + 1) * m] for run in range(runs)], [(block, lambda i, j, k: (i, k))] * runs
  # The same array; each operand begins where its plane does.
  each = m // tiles.rows
  return [x] * runs, [(block, lambda i, j, k, run=run: (i, run * each + k)) for run in range(runs)]


def _factors_of(
  adapter: LowRank, layout: Layout, tiles: Tiling, grid: tuple[int, int, int], lowers: bool
) -> tuple[list[jax.Array], list[Any], list[Any]]:
  """What a product reads of an adapter, as `_call` takes it; `lowers` is whether it has x·A by itself."""
  rank = max(adapter.rank, hardware.FEWEST_RANK)
  low_copies, b_copies = tiles.factor_copies(grid)
  b, of_b = _filled(adapter.b, rank), ((rank, tiles.columns), lambda i, j, k: (0, j), b_copies)
  if lowers:
    assert adapter.a is not None
    runs, specs = _runs_of(_filled(adapter.a, rank), layout, dataclasses.replace(tiles, tokens=rank))
    return [*runs, b], [*specs, of_b], [pltpu.VMEM((tiles.tokens, rank), jnp.float32)]
  of_low = (tiles.tokens, rank), lambda i, j, k: (i, 0), low_copies
  return [_filled(adapter.low, columns=rank), b], [of_low, of_b], []


@functools.partial(jax.jit, static_argnames=('layout', 'interpret', 'tiles'))
def matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: Scales,
  offset: jax.Array | None,
  layout: Layout,
  interpret: Any = False,
  tiles: Tiling | None = None,
  adapter: LowRank | None = None,
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N], as `reference.matmul` defines it.

  An adapter is added to each tile of the result at the last step of its sum. In decoding x·A adds up beside
  the product, from the tiles of x that the weight meets, if the adapter has `a`; see `Tiling.lowers`.

  Args:
    x: bfloat16 or float32.
    codes: bytes [byte rows, N], int8 for signed codes of 8 bits, else uint8.
    scale: float32 [blocks, N or 1], or in 8 bits.
    offset: float32 [blocks, N or 1], or None.
    layout: what the bytes mean.
    interpret: run on a CPU, True or `pltpu.InterpretParams`.
    tiles: how it is cut; None is `tiling.choose`.
    adapter: what is added to the product.

  Raises:
    NotImplementedError: no tile serves.
    ValueError: operands that do not belong together.
  """
  layouts.check(x, codes, scale, offset, layout, transposed=False)
  given, outputs = x.shape[0], codes.shape[1]
  x = _filled(x)
  rank = 0 if adapter is None else adapter.rank
  if tiles is None:
    tokens, itemsize = x.shape[0], x.dtype.itemsize
    scale, layout = _settled(scale, layout, tokens, outputs, itemsize, False, rank)
    tiles = tiling.choose(tokens, outputs, layout, itemsize, False, rank)
  factors: Any = ([], [], [])
  s, lowers = None, False
  if adapter is not None:
    grid = tiles.grid(x.shape[0], outputs, layout, False)
    s, lowers = adapter.scale, adapter.a is not None and tiles.lowers(grid, layout)
    factors = _factors_of(adapter, layout, tiles, grid, lowers)
  operands, specs = _runs_of(x, layout, tiles)
  result = (x.shape[0], outputs), (tiles.tokens, tiles.columns), lambda i, j, k: (i, j)
  kernel = functools.partial(_forward_kernel, s=s, lowers=lowers)
  y = _call(
    kernel, operands, specs, (codes, scale, offset), result, layout, tiles, False, interpret, factors
  )
  if layout.tail is not None:
    end = x[:, layout.blocks * layout.span :]
    y = y + reference.matmul(end, *_tail(codes, scale, offset, layout), layout.tail)
  return y[:given]


@functools.partial(jax.jit, static_argnames=('layout', 'interpret', 'tiles'))
def matmul_transposed(
  g: jax.Array,
  codes: jax.Array,
  scale: Scales,
  offset: jax.Array | None,
  layout: Layout,
  interpret: Any = False,
  tiles: Tiling | None = None,
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], as `reference.matmul_transposed` defines it; else as `matmul`."""
  layouts.check(g, codes, scale, offset, layout, transposed=True)
  given, outputs = g.shape
  g = _filled(g)
  if tiles is None:
    tokens, itemsize = g.shape[0], g.dtype.itemsize
    scale, layout = _settled(scale, layout, tokens, outputs, itemsize, True)
    tiles = tiling.choose(tokens, outputs, layout, itemsize, True)
  runs, length = tiles.runs(layout)
  specs = [((tiles.tokens, tiles.columns), lambda i, j, k: (i, k))]
  shape = (runs, g.shape[0], layout.planes * layout.rows // runs)
  result = shape, (runs, tiles.tokens, length), lambda i, j, k: (0, i, j)
  kernel = functools.partial(_backward_kernel, outputs=outputs)
  parts = _call(kernel, [g], specs, (codes, scale, offset), result, layout, tiles, True, interpret)
  dx = parts[0] if runs == 1 else layouts.join(parts, layout)
  if layout.tail is not None:
    end = reference.matmul_transposed(g, *_tail(codes, scale, offset, layout), layout.tail)
    dx = jnp.concatenate([dx, end], axis=1)
  return dx[:given]
