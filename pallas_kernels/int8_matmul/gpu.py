"""A product of int8 codes with scales on NVIDIA GPUs: Pallas lowered to Triton, for capability 8.0 and later.

A program of the grid owns a tile of the result and a share of the sum, which is in int32, exactly. What lies
beyond an edge is masked, so any shape serves. Shares of one sum are added up and scaled afterwards, by XLA.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.int8_matmul import reference, tiling
from pallas_kernels.int8_matmul.reference import FORMS
from pallas_kernels.int8_matmul.tiling import GpuTiling
from pallas_kernels.tile import covered, dot, load, mask_of


def _kernel(
  a_ref: Any, b_ref: Any, *rest: Any, form: str, tiles: GpuTiling, size: tuple[int, int, int],
  has_row: bool, has_column: bool,
) -> None:  # fmt: skip
  *scale_refs, y_ref = rest
  rows, columns, depth = size
  first, second = FORMS[form]
  down, across = tiles.place(pl.program_id(0), rows, columns)
  _, is_row = covered(down, tiles.rows, rows)
  _, is_column = covered(across, tiles.columns, columns)
  share = tiles.steps(depth) * tiles.depth
  step = tiles.depth
  start = pl.program_id(1) * share

  def add(index: Any, sums: jax.Array) -> jax.Array:
    terms = pl.ds(index * step, step)
    # Shares may end beyond the sum, and the last of them begin there.
    is_term = None
    if tiles.splits * share != depth:
      is_term = start + index * step + jnp.arange(step, dtype=jnp.int32) < depth
    if first == 1:
      a = load(a_ref, (slice(None), terms), mask_of(is_row, is_term))
    else:
      a = load(a_ref, (terms, slice(None)), mask_of(is_term, is_row))
    if second == 0:
      b = load(b_ref, (terms, slice(None)), mask_of(is_term, is_column))
    else:
      b = load(b_ref, (slice(None), terms), mask_of(is_column, is_term))
    return sums + dot(a, b, (first, second))

  sums = jax.lax.fori_loop(
    0, tiles.steps(depth), add, jnp.zeros((tiles.rows, tiles.columns), jnp.int32)
  )
  scales = list(scale_refs)
  row = column = None
  if has_row:
    ref = scales.pop(0)
    row = load(ref, (slice(None), slice(None)), mask_of(is_row if ref.shape[0] > 1 else None, None))
  if has_column:
    ref = scales.pop(0)
    column = load(ref, (slice(None), slice(None)), mask_of(None, is_column if ref.shape[1] > 1 else None))
  mask = mask_of(is_row, is_column)
  plt.store(y_ref.at[:, :], reference.scaled(sums, row, column, y_ref.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=('form', 'dtype', 'interpret', 'tiles'))
def matmul(
  a: jax.Array,
  b: jax.Array,
  row_scale: jax.Array | None = None,
  column_scale: jax.Array | None = None,
  form: str = 'nn',
  dtype: jnp.dtype = jnp.dtype('float32'),
  interpret: bool = False,
  tiles: GpuTiling | None = None,
) -> jax.Array:
  """As `reference.matmul`, bit for bit; arguments and errors are those of `tpu.matmul`, but for its tiles."""
  rows, columns, depth = size = reference.sizes(a, b, row_scale, column_scale, form, dtype)
  if not rows * columns:
    return jnp.zeros((rows, columns), dtype)
  first, second = FORMS[form]
  tiles = tiles or tiling.choose_gpu(form, rows, columns, depth, jnp.dtype(dtype).itemsize)
  share = tiles.steps(depth) * tiles.depth
  is_whole = tiles.splits == 1

  def spec(block: tuple[int | None, ...], of: Callable[[Any, Any, Any], tuple[Any, ...]]) -> pl.BlockSpec:
    """Of what a program reads or writes, by its row and column of tiles and its share."""
    return pl.BlockSpec(block, lambda p, s: of(*tiles.place(p, rows, columns), s))

  a_spec = (
    spec((tiles.rows, share), lambda i, j, s: (i, s)) if first == 1
    else spec((share, tiles.rows), lambda i, j, s: (s, i))
  )  # fmt: skip
  b_spec = (
    spec((share, tiles.columns), lambda i, j, s: (s, j)) if second == 0
    else spec((tiles.columns, share), lambda i, j, s: (j, s))
  )  # fmt: skip
  operands, specs = [a, b], [a_spec, b_spec]
  if is_whole and row_scale is not None:
    is_one = row_scale.shape[0] == 1
    operands.append(row_scale)
    specs.append(spec((1 if is_one else tiles.rows, 1), lambda i, j, s: (0 if is_one else i, 0)))
  if is_whole and column_scale is not None:
    is_single = column_scale.shape[1] == 1
    operands.append(column_scale)
    specs.append(spec((1, 1 if is_single else tiles.columns), lambda i, j, s: (0, 0 if is_single else j)))
  y = pl.pallas_call(
    functools.partial(
      _kernel, form=form, tiles=tiles, size=size,
      has_row=is_whole and row_scale is not None, has_column=is_whole and column_scale is not None,
    ),
    grid=(math.prod(tiles.grid(rows, columns)), tiles.splits),
    in_specs=specs,
    out_specs=spec((None, tiles.rows, tiles.columns), lambda i, j, s: (s, i, j)),
    out_shape=jax.ShapeDtypeStruct((tiles.splits, rows, columns), dtype if is_whole else jnp.int32),
    compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
    cost_estimate=pl.CostEstimate(
      flops=2 * rows * columns * depth,
      bytes_accessed=a.size + b.size + rows * columns * jnp.dtype(dtype).itemsize,
      transcendentals=0,
    ),
    interpret=interpret,
    name='int8_matmul',
  )(*operands)  # fmt: skip
  if is_whole:
    return y[0]
  return reference.scaled(jnp.sum(y, axis=0), row_scale, column_scale, jnp.dtype(dtype))
