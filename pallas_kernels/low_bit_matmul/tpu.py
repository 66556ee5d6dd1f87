"""A weight in few bits times an input, and times a gradient, on a TPU: bytes are decoded tile by tile.

Both products read the same bytes and write no decoded weight to memory. The sum runs over the last axis of
the grid, in float32. What a tile holds beyond the end of a summed axis is set to zero, x and weight both, for
memory there may hold anything.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul import reference, tiling
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.low_bit_matmul.tiling import Tiling


def _plane(
  plane: int, codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """One plane of a tile of bytes, [rows, columns], decoded with its scales [blocks of the tile, columns]."""
  levels = layouts.level_of(layouts.codes_of(codes, plane, layout), layout)
  rows, columns = levels.shape

  def spread(each: jax.Array) -> jax.Array:
    if each.shape[0] == 1:
      return each
    tall = jnp.broadcast_to(each[:, None, :], (each.shape[0], rows // each.shape[0], columns))
    return tall.reshape(rows, columns)

  w = levels * spread(scale)
  return w if offset is None else w + spread(offset)


def _below(size: int, axis: int, shape: tuple[int, ...], start: Any) -> jax.Array:
  """Which entries of a tile lie before the end `size` of an axis whose tile begins at `start`."""
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + start < size


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  dims = (((axes[0],), (axes[1],)), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(
  x_ref: Any, codes_ref: Any, scale_ref: Any, *rest: Any, layout: Layout, tiles: Tiling
) -> None:
  *offset_ref, y_ref, total_ref = rest
  k, last = pl.program_id(2), pl.num_programs(2) - 1

  @pl.when(k == 0)
  def _() -> None:
    total_ref[...] = jnp.zeros_like(total_ref)

  codes, scale = codes_ref[...], scale_ref[...]
  offset = offset_ref[0][...] if offset_ref else None
  is_ragged = layout.rows % tiles.rows != 0
  total = total_ref[...]
  for plane in range(layout.planes):
    x, w = x_ref[plane], _plane(plane, codes, scale, offset, layout)
    if is_ragged:
      x = jnp.where(_below(layout.rows, 1, x.shape, k * tiles.rows), x, jnp.zeros((), x.dtype))
      w = jnp.where(_below(layout.rows, 0, w.shape, k * tiles.rows), w, 0.0)
    total += _dot(x, w.astype(x.dtype), (1, 0))
  total_ref[...] = total

  @pl.when(k == last)
  def _() -> None:
    y_ref[...] = total_ref[...].astype(y_ref.dtype)


def _backward_kernel(
  g_ref: Any, codes_ref: Any, scale_ref: Any, *rest: Any, layout: Layout, tiles: Tiling, outputs: int
) -> None:
  *offset_ref, dx_ref, total_ref = rest
  n, last = pl.program_id(2), pl.num_programs(2) - 1

  @pl.when(n == 0)
  def _() -> None:
    total_ref[...] = jnp.zeros_like(total_ref)

  g, codes, scale = g_ref[...], codes_ref[...], scale_ref[...]
  offset = offset_ref[0][...] if offset_ref else None
  is_ragged = outputs % tiles.columns != 0
  if is_ragged:
    g = jnp.where(_below(outputs, 1, g.shape, n * tiles.columns), g, jnp.zeros((), g.dtype))
  for plane in range(layout.planes):
    w = _plane(plane, codes, scale, offset, layout)
    if is_ragged:
      w = jnp.where(_below(outputs, 1, w.shape, n * tiles.columns), w, 0.0)
    total_ref[plane] += _dot(g, w.astype(g.dtype), (1, 1))

  @pl.when(n == last)
  def _() -> None:
    dx_ref[...] = total_ref[...].astype(dx_ref.dtype)


def _weight_specs(layout: Layout, tiles: Tiling, where: Any, has_offset: bool) -> list[pl.BlockSpec]:
  """Of codes, scales and offsets; `where` maps grid indices to (tile of rows, tile of columns).

  One row of scales serves all tiles of rows.
  """

  def where_scales(*indices: Any) -> tuple[Any, Any]:
    row, column = where(*indices)
    return (0 if layout.blocks == 1 else row), column

  codes = pl.BlockSpec((tiles.byte_rows, tiles.columns), where)
  scale = pl.BlockSpec((tiles.scales, tiles.columns), where_scales)
  return [codes, scale] + ([scale] if has_offset else [])


def _cost(tokens: int, outputs: int, layout: Layout, itemsize: int) -> pl.CostEstimate:
  k = layout.blocks * layout.span
  weight = (layout.byte_rows + 4 * layout.blocks) * outputs
  moved = tokens * k * itemsize + weight + 4 * tokens * outputs
  return pl.CostEstimate(flops=2 * tokens * k * outputs, bytes_accessed=moved, transcendentals=0)


def _wide(each: jax.Array | None, outputs: int, blocks: int) -> jax.Array | None:
  """Scales or offsets [blocks, N], where all outputs may share one."""
  return None if each is None else jnp.broadcast_to(each[:blocks], (blocks, outputs))


def obstacle(layout: Layout) -> str | None:
  """Why no tile serves a layout, None if one does."""
  try:
    tiling.choose(tiling.TOKENS, tiling.COLUMNS, layout)
  except NotImplementedError as error:
    return str(error)
  if layout.blocks > 1 and layout.rows_of_block % tiling.SUBLANES:
    return f'blocks of {layout.block} inputs take {layout.rows_of_block} rows of bytes, no multiple of 8'
  return None


def _tail(
  codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Codes, scales and offsets of the shorter last block, which XLA multiplies."""
  left = None if offset is None else offset[layout.blocks :]
  return codes[layout.byte_rows :], scale[layout.blocks :], left


def _filled(x: jax.Array) -> jax.Array:
  """x [M, …] with at least the rows of a register of bfloat16, zeros at the end."""
  return jnp.pad(x, ((0, max(0, tiling.FEWEST_TOKENS - x.shape[0])), (0, 0)))


@functools.partial(jax.jit, static_argnames=('layout', 'interpret'))
def matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: jax.Array,
  offset: jax.Array | None,
  layout: Layout,
  interpret: Any = False,
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N], as `reference.matmul` defines it.

  Args:
    x: bfloat16 or float32.
    codes: bytes [byte rows, N], int8 for signed codes of 8 bits, else uint8.
    scale: float32 [blocks, N or 1].
    offset: the same, or None.
    layout: what the bytes mean.
    interpret: run on a CPU, True or `pltpu.InterpretParams`.

  Raises:
    NotImplementedError: no tile serves.
  """
  given, outputs = x.shape[0], codes.shape[1]
  x = _filled(x)
  tokens = x.shape[0]
  tiles = tiling.choose(tokens, outputs, layout)
  grid = (
    pl.cdiv(tokens, tiles.tokens), pl.cdiv(outputs, tiles.columns), pl.cdiv(layout.rows, tiles.rows)
  )  # fmt: skip
  whole = [_wide(scale, outputs, layout.blocks), _wide(offset, outputs, layout.blocks)]
  y = pl.pallas_call(
    functools.partial(_forward_kernel, layout=layout, tiles=tiles),
    grid=grid,
    in_specs=[
      pl.BlockSpec((layout.planes, tiles.tokens, tiles.rows), lambda i, j, k: (0, i, k)),
      *_weight_specs(layout, tiles, lambda i, j, k: (k, j), offset is not None),
    ],
    out_specs=pl.BlockSpec((tiles.tokens, tiles.columns), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((tokens, outputs), jnp.float32),
    scratch_shapes=[pltpu.VMEM((tiles.tokens, tiles.columns), jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    cost_estimate=_cost(tokens, outputs, layout, x.dtype.itemsize),
    interpret=interpret,
    name='low_bit_matmul',
  )(layouts.split(x, layout), codes[: layout.byte_rows], *(each for each in whole if each is not None))
  if layout.tail is not None:
    end = x[:, layout.blocks * layout.span :]
    y = y + reference.matmul(end, *_tail(codes, scale, offset, layout), layout.tail)
  return y[:given]


@functools.partial(jax.jit, static_argnames=('layout', 'interpret'))
def matmul_transposed(
  g: jax.Array,
  codes: jax.Array,
  scale: jax.Array,
  offset: jax.Array | None,
  layout: Layout,
  interpret: Any = False,
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], as `reference.matmul_transposed` defines it; else as `matmul`."""
  given, outputs = g.shape
  g = _filled(g)
  tokens = g.shape[0]
  tiles = tiling.choose(tokens, outputs, layout)
  grid = (
    pl.cdiv(tokens, tiles.tokens), pl.cdiv(layout.rows, tiles.rows), pl.cdiv(outputs, tiles.columns)
  )  # fmt: skip
  whole = [_wide(scale, outputs, layout.blocks), _wide(offset, outputs, layout.blocks)]
  block = (layout.planes, tiles.tokens, tiles.rows)
  parts = pl.pallas_call(
    functools.partial(_backward_kernel, layout=layout, tiles=tiles, outputs=outputs),
    grid=grid,
    in_specs=[
      pl.BlockSpec((tiles.tokens, tiles.columns), lambda i, k, n: (i, n)),
      *_weight_specs(layout, tiles, lambda i, k, n: (k, n), offset is not None),
    ],
    out_specs=pl.BlockSpec(block, lambda i, k, n: (0, i, k)),
    out_shape=jax.ShapeDtypeStruct((layout.planes, tokens, layout.rows), jnp.float32),
    scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    cost_estimate=_cost(tokens, outputs, layout, g.dtype.itemsize),
    interpret=interpret,
    name='low_bit_matmul_transposed',
  )(g, codes[: layout.byte_rows], *(each for each in whole if each is not None))
  dx = layouts.join(parts, layout)
  if layout.tail is not None:
    end = reference.matmul_transposed(g, *_tail(codes, scale, offset, layout), layout.tail)
    dx = jnp.concatenate([dx, end], axis=1)
  return dx[:given]
