"""A product of int8 codes with scales on a TPU (v5e, v5p, v6e), tile by tile.

The sum runs over the last axis of the grid, in int32, exactly. That axis is cut evenly, filled up with zeros
if need be, so that no tile reads beyond it; what the other tiles hold beyond an edge is never written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import hardware
from pallas_kernels.int8_matmul import reference, tiling
from pallas_kernels.int8_matmul.reference import FORMS
from pallas_kernels.int8_matmul.tiling import Tiling
from pallas_kernels.tile import dot


def _kernel(*refs: Any, form: str, tiles: Tiling, depth: int, has_row: bool, has_column: bool) -> None:
  a_ref, b_ref, *rest = refs
  row_ref = rest.pop(0) if has_row else None
  column_ref = rest.pop(0) if has_column else None
  y_ref, *sums_ref = rest
  first, _ = FORMS[form]
  step = tiling.STEP_ROWS if tiles.rows % tiling.STEP_ROWS == 0 else tiles.rows
  k, last = pl.program_id(2), pl.num_programs(2) - 1

  def rows_at(index: Any) -> None:
    """One strip of rows of the tile, so that the program does not grow with it."""
    strip = pl.ds(pl.multiple_of(index * step, step), step) if step < tiles.rows else slice(None)
    a = a_ref[strip, :] if first == 1 else a_ref[:, strip]
    sums = dot(a, b_ref[...], FORMS[form])

    def write(sums: jax.Array) -> None:
      row = None
      if row_ref is not None:
        row = row_ref[strip, :] if row_ref.shape[0] > 1 else row_ref[...]
      column = None if column_ref is None else column_ref[...]
      y_ref[strip, :] = reference.scaled(sums, row, column, y_ref.dtype)

    if tiles.depth == depth:
      write(sums)
      return
    held = sums_ref[0]

    @pl.when(k == 0)
    def _() -> None:
      held[strip, :] = sums

    @pl.when(k > 0)
    def _() -> None:
      held[strip, :] += sums

    @pl.when(k == last)
    def _() -> None:
      write(held[strip, :])

  if step == tiles.rows:
    rows_at(0)
  else:
    jax.lax.fori_loop(0, tiles.rows // step, lambda index, _: rows_at(index), None)


def _filled(x: jax.Array, axis: int, size: int) -> jax.Array:
  """x with zeros up to `size` along an axis."""
  widths = [(0, 0), (0, 0)]
  widths[axis] = (0, max(0, size - x.shape[axis]))
  return jnp.pad(x, widths)


def obstacle(device_kind: str) -> str | None:
  """Why the TPU of that `device_kind` can't run this, None if it can."""
  return f'{device_kind} multiplies no integers' if hardware.is_before_v5(device_kind) else None


@functools.partial(jax.jit, static_argnames=('form', 'dtype', 'interpret', 'tiles'))
def matmul(
  a: jax.Array,
  b: jax.Array,
  row_scale: jax.Array | None = None,
  column_scale: jax.Array | None = None,
  form: str = 'nn',
  dtype: jnp.dtype = jnp.dtype('float32'),
  interpret: Any = False,
  tiles: Tiling | None = None,
) -> jax.Array:
  """As `reference.matmul`, bit for bit.

  Args:
    a: int8.
    b: int8.
    row_scale: float32 [rows, 1] or [1, 1], or None.
    column_scale: float32 [1, columns] or [1, 1], or None.
    form: a name in `reference.FORMS`.
    dtype: float32 or bfloat16, or int32 without scales.
    interpret: run on a CPU, True or `pltpu.InterpretParams`.
    tiles: how it is cut; None is `tiling.choose`.

  Raises:
    ValueError: as `reference.matmul`.
  """
  given, columns, depth = reference.sizes(a, b, row_scale, column_scale, form, dtype)
  first, second = FORMS[form]
  itemsize = jnp.dtype(dtype).itemsize
  tiles = tiles or tiling.choose(form, given, columns, depth, itemsize)
  rows, depth = tiling.filled(given, depth)
  a, b = _filled(_filled(a, first, depth), 1 - first, rows), _filled(b, second, depth)
  across, down = pl.cdiv(columns, tiles.columns), pl.cdiv(rows, tiles.rows)

  def spec(shape: tuple[int, int], where: Any, copies: int = 2) -> pl.BlockSpec:
    """`where` maps tiles (row, column, depth) to a block; the grid may exchange the first two."""
    swapped = (lambda j, i, k: where(i, j, k)) if tiles.columns_first else where
    return pl.BlockSpec(shape, swapped, pipeline_mode=pl.Buffered(1) if copies == 1 else None)

  copies_a, copies_b = tiles.copies(rows, columns, depth)
  a_spec = (
    spec((tiles.rows, tiles.depth), lambda i, j, k: (i, k), copies_a) if first == 1
    else spec((tiles.depth, tiles.rows), lambda i, j, k: (k, i), copies_a)
  )  # fmt: skip
  b_spec = (
    spec((tiles.depth, tiles.columns), lambda i, j, k: (k, j), copies_b) if second == 0
    else spec((tiles.columns, tiles.depth), lambda i, j, k: (j, k), copies_b)
  )  # fmt: skip
  operands, specs = [a, b], [a_spec, b_spec]
  if row_scale is not None:
    is_one = row_scale.shape[0] == 1
    operands.append(row_scale if is_one else _filled(row_scale, 0, rows))
    specs.append(
      spec((1, 1), lambda i, j, k: (0, 0)) if is_one else spec((tiles.rows, 1), lambda i, j, k: (i, 0))
    )
  if column_scale is not None:
    operands.append(jnp.broadcast_to(column_scale, (1, columns)))
    specs.append(spec((1, tiles.columns), lambda i, j, k: (0, j)))
  y = pl.pallas_call(
    functools.partial(
      _kernel, form=form, tiles=tiles, depth=depth,
      has_row=row_scale is not None, has_column=column_scale is not None,
    ),
    grid=(across, down, depth // tiles.depth) if tiles.columns_first
    else (down, across, depth // tiles.depth),
    in_specs=specs,
    out_specs=spec((tiles.rows, tiles.columns), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
    scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), jnp.int32)] if tiles.depth < depth else [],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=hardware.VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * rows * columns * depth,
      bytes_accessed=tiles.moved(rows, columns, depth, itemsize),
      transcendentals=0,
    ),
    interpret=interpret,
    name='int8_matmul',
  )(*operands)  # fmt: skip
  return y[:given]
