"""The products of `tpu`, for NVIDIA GPUs: Pallas lowered to Triton, for compute capability 8.0 and later.

A program of the grid owns a tile of the result and walks along the summed axis. What it reads it addresses
itself, element by element and masked, so any shape serves, and x is read where it lies. A tile of weights
never leaves its block, or the shorter last one: its scales are one row, and its inputs are one run a plane.

A table of levels is read through the first-level cache, code by code. Selecting a level by comparisons, as on
a TPU, takes four times as many instructions and, for 16 levels, more registers than there are.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul import tiling
from pallas_kernels.low_bit_matmul.layout import DoubleQuantized, Layout, Scales
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.low_bit_matmul.tiling import GpuTiling
from pallas_kernels.tile import covered, dot, load, mask_of


class _Weight:
  """The arrays of a weight in memory, and how a tile of it is read.

  Attributes:
    layout: what the bytes mean.
    tiles: their sizes.
    outputs: N.
  """

  def __init__(self, refs: Any, layout: Layout, tiles: GpuTiling, outputs: int) -> None:
    self.layout, self.tiles, self.outputs = layout, tiles, outputs
    self._codes, self._scale, *rest = refs
    # Of scales in 8 bits: a step for each group, and an offset.
    self._groups = (rest.pop(0), rest.pop(0)) if layout.double_quantized else None
    self._levels = rest.pop(0) if layout.levels is not None else None
    self._offset = rest.pop(0) if rest else None

  def of_block(self, block: Any, whole: int, last: int) -> Any:
    """A number that differs for the shorter last block."""
    if self.layout.tail is None:
      return whole
    # Not `where`, which Triton's lowering gives the type of the condition if both numbers are literals.
    return last + (whole - last) * (block < self.layout.blocks).astype(jnp.int32)

  def place(self, tile: Any) -> tuple[Any, Any]:
    """The block of a tile, and the rows [rows of a tile] of a plane of that block which the tile holds."""
    each = self.tiles.tiles_of_block(self.layout)
    block = jax.lax.div(tile, each)
    return block, jax.lax.rem(tile, each) * self.tiles.rows + jnp.arange(self.tiles.rows, dtype=jnp.int32)

  def inputs(self, plane: int, block: Any, row: Any) -> tuple[Any, Any]:
    """The inputs k [rows] of one plane of a tile, and which of them exist (None: all)."""
    layout, tail = self.layout, self.layout.tail
    m = self.of_block(block, layout.rows_of_block, tail.rows_of_block if tail else 0)
    span = self.of_block(block, layout.span, tail.span if tail else 0)
    within = plane * m + row
    k = block * layout.span + within
    is_exact = tail is None and self.tiles.is_exact(layout)
    return k, None if is_exact else (row < m) & (within < span)

  def decode(self, block: Any, row: Any, n: Any, dtype: Any) -> list[jax.Array]:
    """The planes of a tile, each [rows, columns] in `dtype`; what lies beyond the weight is finite."""
    layout, tail = self.layout, self.layout.tail
    m = self.of_block(block, layout.rows_of_block, tail.rows_of_block if tail else 0)
    start = block * layout.byte_rows_of_block
    fits = None if self.outputs % self.tiles.columns == 0 else n < self.outputs
    mask = mask_of(None if tail is None and self.tiles.is_exact(layout) else row < m, fits)
    low = self._bytes(start + row, n, mask)
    scale, offset = self._per_block(self._scale, block, n, fits), None
    if self._groups is not None:
      step, scale_offset = self._groups
      step = load(step, (block, jax.lax.div(n, jnp.full_like(n, layouts.GROUP))), fits)[None, :]
      scale = scale.astype(jnp.float32) * step + scale_offset[0, 0]
    if self._offset is not None:
      offset = self._per_block(self._offset, block, n, fits)
    planes = []
    for plane in range(layout.planes):
      code = low if layout.bits == 8 else (low >> (plane * layout.low_bits)) & (2**layout.low_bits - 1)
      if layout.bits == 3:
        h = self.of_block(block, layout.high_rows_of_block, tail.high_rows_of_block if tail else 0)
        within = plane * m + row
        high = self._bytes(start + m + jax.lax.rem(within, jnp.full_like(within, h)), n, mask)
        bit = jax.lax.div(within, jnp.full_like(within, h))
        code = code | (((high >> bit[:, None]) & 1) << 2)
      w = self._level(code) * scale
      planes.append((w if offset is None else w + offset).astype(dtype))
    return planes

  def _bytes(self, row: Any, n: Any, mask: Any) -> jax.Array:
    return load(self._codes, (row[:, None], n[None, :]), mask).astype(jnp.int32)

  def _per_block(self, ref: Any, block: Any, n: Any, fits: Any) -> jax.Array:
    """The row of scales or offsets of a block, [1, columns]; one for all outputs is not repeated."""
    if ref.shape[1] == 1:
      return ref[block, 0]
    return load(ref, (block, n), fits)[None, :]

  def _level(self, code: jax.Array) -> jax.Array:
    if self._levels is not None:
      return self._levels[code]
    return (code - self.layout.bias).astype(jnp.float32)


def _share(count: int, splits: int) -> tuple[Any, Any]:
  """First step and end of the share of `count` steps along the summed axis that a program takes."""
  if splits == 1:
    return 0, count
  each = pl.cdiv(count, splits)
  start = pl.program_id(1) * each
  return start, jnp.minimum(start + each, count)


def _low_rank(
  refs: tuple[Any, ...], scale: float, index: tuple[Any, Any], masks: tuple[Any, Any], start: Any
) -> jax.Array:
  """The tile scale · low · B, zero but in the share of a sum that has its first step.

  It is what the sum begins with, so that no second tile is held beside it.
  """
  (low, b), (rows, n), (is_token, fits) = refs, index, masks
  rank = b.shape[0]
  size = tiling.rank_tile(rank)

  def add(step: Any, total: jax.Array) -> jax.Array:
    r, exists = covered(step, size, rank)
    left = load(low, (rows[:, None], r[None, :]), mask_of(is_token, exists))
    return total + dot(left, load(b, (r[:, None], n[None, :]), mask_of(exists, fits)))

  steps: Any = pl.cdiv(rank, size)
  if not isinstance(start, int):
    steps *= (start == 0).astype(jnp.int32)
  return scale * jax.lax.fori_loop(0, steps, add, jnp.zeros((rows.size, n.size), jnp.float32))


def _forward_kernel(x_ref: Any, *refs: Any, layout: Layout, tiles: GpuTiling, scale: float | None) -> None:
  factors, (*weight_refs, y_ref) = (refs[:0], refs) if scale is None else (refs[:2], refs[2:])
  tokens, outputs = y_ref.shape[1:]
  weight = _Weight(weight_refs, layout, tiles, outputs)
  token_tile, column_tile = tiles.place(pl.program_id(0), tokens, outputs, layout, transposed=False)
  rows, is_token = covered(token_tile, tiles.tokens, tokens)
  n, fits = covered(column_tile, tiles.columns, outputs)

  def add(tile: Any, total: jax.Array) -> jax.Array:
    block, row = weight.place(tile)
    for plane, w in enumerate(weight.decode(block, row, n, x_ref.dtype)):
      k, exists = weight.inputs(plane, block, row)
      total += dot(load(x_ref, (rows[:, None], k[None, :]), mask_of(is_token, exists)), w)
    return total

  start, end = _share(tiles.row_tiles(layout), tiles.splits)
  total = jnp.zeros((tiles.tokens, tiles.columns), jnp.float32)
  if scale is not None:
    total = _low_rank(factors, scale, (rows, n), (is_token, fits), start)
  total = jax.lax.fori_loop(start, end, add, total)
  _store(y_ref, (rows[:, None], n[None, :]), total, mask_of(is_token, fits))


def _backward_kernel(g_ref: Any, *refs: Any, layout: Layout, tiles: GpuTiling) -> None:
  *weight_refs, dx_ref = refs
  tokens, outputs = g_ref.shape
  weight = _Weight(weight_refs, layout, tiles, outputs)
  token_tile, stack = tiles.place(pl.program_id(0), tokens, outputs, layout, transposed=True)
  rows, is_token = covered(token_tile, tiles.tokens, tokens)
  places = [weight.place(stack * tiles.stack + index) for index in range(tiles.stack)]

  def add(step: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    n, fits = covered(step, tiles.columns, outputs)
    g = load(g_ref, (rows[:, None], n[None, :]), mask_of(is_token, fits))
    planes = (w for block, row in places for w in weight.decode(block, row, n, g.dtype))
    return tuple(total + dot(g, w.T) for total, w in zip(totals, planes, strict=True))

  start, end = _share(pl.cdiv(outputs, tiles.columns), tiles.splits)
  zero = jnp.zeros((tiles.tokens, tiles.rows), jnp.float32)
  totals = jax.lax.fori_loop(start, end, add, (zero,) * layout.planes * tiles.stack)
  for index, total in enumerate(totals):
    k, exists = weight.inputs(index % layout.planes, *places[index // layout.planes])
    # Beyond the end where there is no such input, so that no other's result is written twice.
    k = k if exists is None else jnp.where(exists, k, layout.inputs)
    _store(dx_ref, (rows[:, None], k[None, :]), total, mask_of(is_token, exists))


def _store(ref: Any, index: tuple[Any, Any], value: jax.Array, mask: Any) -> None:
  """Writes the share of a program, [splits, M, …]; `combine` adds up the shares."""
  split = pl.program_id(1) if ref.shape[0] > 1 else 0
  plt.store(ref.at[(split, *index)], value, mask=mask)


def obstacle(layout: Layout) -> str | None:
  """Why no tile serves a layout; None, for masks serve all."""
  del layout
  return None


def _call(
  kernel: Any, x: jax.Array, weight: list[jax.Array], width: int, layout: Layout, tiles: GpuTiling,
  interpret: bool, name: str, factors: tuple[jax.Array, ...] = (),
) -> jax.Array:  # fmt: skip
  """The sum over splits of what the programs write, float32 [M, width]; `factors` are x·A and B."""
  tokens, outputs, rank = x.shape[0], weight[0].shape[1], factors[1].shape[0] if factors else 0
  read = (x, *factors, *weight)
  moved = sum(each.size * each.dtype.itemsize for each in read) + 4 * tokens * width
  shares = pl.pallas_call(
    functools.partial(kernel, layout=layout, tiles=tiles),
    grid=(math.prod(tiles.grid(tokens, outputs, layout, name == tiling.NAMES[1])), tiles.splits),
    out_shape=jax.ShapeDtypeStruct((tiles.splits, tokens, width), jnp.float32),
    compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
    cost_estimate=pl.CostEstimate(
      flops=2 * tokens * (layout.inputs + rank) * outputs, bytes_accessed=moved, transcendentals=0
    ),
    interpret=interpret,
    name=name,
  )(*read)
  return jnp.sum(shares, axis=0)


def _arrays(codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout) -> list[jax.Array]:
  """What a kernel reads of a weight, in the order of `_Weight`."""
  scales = list(scale) if isinstance(scale, DoubleQuantized) else [scale]
  table = [] if layout.levels is None else [jnp.asarray(layouts.table_of(layout), jnp.float32)]
  return [codes, *scales, *table, *([] if offset is None else [offset])]


@functools.partial(jax.jit, static_argnames=('layout', 'interpret', 'tiles'))
def matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: Scales,
  offset: jax.Array | None,
  layout: Layout,
  interpret: bool = False,
  tiles: GpuTiling | None = None,
  adapter: LowRank | None = None,
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N], as `reference.matmul` defines it.

  x·A is read, never computed here: each program would read all of A for it, as many bytes as of its weights.

  Args:
    x: bfloat16, float16 or float32.
    codes: bytes [byte rows, N], int8 for signed codes of 8 bits, else uint8.
    scale: float32 [blocks, N or 1], or in 8 bits.
    offset: float32 [blocks, N or 1], or None.
    layout: what the bytes mean.
    interpret: run on a CPU.
    tiles: how it is cut; None is `tiling.choose_gpu`.
    adapter: what is added to the product.

  Raises:
    ValueError: operands that do not belong together.
  """
  layouts.check(x, codes, scale, offset, layout, transposed=False)
  outputs = codes.shape[1]
  if not x.shape[0]:
    return jnp.zeros((0, outputs), jnp.float32)
  tiles = tiles or tiling.choose_gpu(x.shape[0], outputs, layout, x.dtype.itemsize, transposed=False)
  weight = _arrays(codes, scale, offset, layout)
  factors = () if adapter is None else (adapter.low, adapter.b)
  kernel = functools.partial(_forward_kernel, scale=None if adapter is None else adapter.scale)
  return _call(kernel, x, weight, outputs, layout, tiles, interpret, tiling.NAMES[0], factors)


@functools.partial(jax.jit, static_argnames=('layout', 'interpret', 'tiles'))
def matmul_transposed(
  g: jax.Array,
  codes: jax.Array,
  scale: Scales,
  offset: jax.Array | None,
  layout: Layout,
  interpret: bool = False,
  tiles: GpuTiling | None = None,
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], as `reference.matmul_transposed` defines it; else as `matmul`."""
  layouts.check(g, codes, scale, offset, layout, transposed=True)
  if not g.shape[0]:
    return jnp.zeros((0, layout.inputs), jnp.float32)
  tiles = tiles or tiling.choose_gpu(g.shape[0], codes.shape[1], layout, g.dtype.itemsize, transposed=True)
  weight = _arrays(codes, scale, offset, layout)
  return _call(_backward_kernel, g, weight, layout.inputs, layout, tiles, interpret, tiling.NAMES[1])
