"""Several adapters in one batch on NVIDIA GPUs: Pallas lowered to Triton, for capability 8.0 and later.

Two kernels, as in Chen et al. 2023 ("Punica"). The first multiplies x by the A of each adapter that a tile of
rows meets, in a program for each and each share of the inputs; every row is written by its own adapter's
alone. The second owns a tile of y and goes through those adapters once more. Masks serve any shape.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.grouped_adapter import reference, tiling
from pallas_kernels.grouped_adapter.tiling import GpuTiling, Sizes
from pallas_kernels.tile import dot, load, mask_of


def _rows(tiles: GpuTiling, rows: int) -> tuple[Any, Any]:
  """Rows of a program, and which of them exist."""
  row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
  return row, row < rows


def _owners(of_row_ref: Any, row: Any, exists: Any) -> jax.Array:
  return plt.load(of_row_ref.at[row], mask=exists, other=jnp.full((), -1, jnp.int32))


def _lower_kernel(
  table_ref: Any, counts_ref: Any, of_row_ref: Any, x_ref: Any, a_ref: Any, low_ref: Any, *,
  tiles: GpuTiling, sizes: Sizes,
) -> None:  # fmt: skip
  tile, slot, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  row, exists = _rows(tiles, x_ref.shape[0])
  group, is_met = table_ref[tile, slot], slot < counts_ref[tile]
  own = (_owners(of_row_ref, row, exists) == group) & is_met
  place = jnp.arange(tiles.rank, dtype=jnp.int32)
  is_place = place < sizes.rank
  steps = pl.cdiv(pl.cdiv(sizes.inputs, tiles.depth), tiles.splits)

  def add(step: Any, total: jax.Array) -> jax.Array:
    k = (split * steps + step) * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
    is_input = k < sizes.inputs
    x = load(x_ref, (row[:, None], k[None, :]), mask_of(own, is_input))
    a = load(a_ref, (group, place[None, :], k[:, None]), is_place[None, :] & is_input[:, None])
    return total + dot(x, a)

  zero = jnp.zeros((tiles.rows, tiles.rank), jnp.float32)
  total = jax.lax.fori_loop(0, steps * is_met.astype(jnp.int32), add, zero)
  plt.store(low_ref.at[split, row[:, None], place[None, :]], total, mask=mask_of(own, is_place))


def _raise_kernel(
  table_ref: Any, counts_ref: Any, scale_ref: Any, of_row_ref: Any, low_ref: Any, b_ref: Any, y_ref: Any,
  out_ref: Any, *, tiles: GpuTiling, sizes: Sizes,
) -> None:  # fmt: skip
  tile = pl.program_id(0)
  row, exists = _rows(tiles, y_ref.shape[0])
  owner = _owners(of_row_ref, row, exists)
  n = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
  place = jnp.arange(tiles.rank, dtype=jnp.int32)
  is_output, is_place = n < sizes.outputs, place < sizes.rank
  # A row of no adapter was written by none.
  is_low = mask_of(exists & (owner >= 0), is_place)
  low = jnp.zeros((tiles.rows, tiles.rank), jnp.float32)
  for split in range(tiles.splits):
    low += load(low_ref, (split, row[:, None], place[None, :]), is_low)
  low = low.astype(b_ref.dtype)

  def add(slot: Any, total: jax.Array) -> jax.Array:
    group = table_ref[tile, slot]
    b = load(b_ref, (group, place[:, None], n[None, :]), mask_of(is_place, is_output))
    mine = jnp.where(owner[:, None] == group, low, jnp.zeros_like(low))
    return total + scale_ref[group] * dot(mine, b)

  where, mask = (row[:, None], n[None, :]), mask_of(exists, is_output)
  total = jax.lax.fori_loop(0, counts_ref[tile], add, load(y_ref, where, mask))
  plt.store(out_ref.at[where], total, mask=mask)


def obstacle(sizes: Sizes) -> str | None:
  """Why no tile serves adapters of these sizes, None if one does."""
  if sizes.rank > tiling.GPU_RANK:
    return f'a rank of {sizes.rank} does not fit a tile, which holds up to {tiling.GPU_RANK}'
  return None


@functools.partial(jax.jit, static_argnames=('interpret', 'tiles'))
def add(
  y: jax.Array,
  x: jax.Array,
  a: jax.Array,
  b: jax.Array,
  scale: jax.Array,
  of_row: jax.Array,
  interpret: bool = False,
  tiles: GpuTiling | None = None,
) -> jax.Array:
  """As `reference.add`, for x in bfloat16, float16 or float32.

  Args:
    y, x, a, b, scale, of_row: those of `reference.add`.
    interpret: run on a CPU.
    tiles: how it is cut; None is `tiling.choose_gpu`.

  Raises:
    ValueError: as `reference.add`.
  """
  rows, inputs, outputs, groups, rank = reference.sizes(y.shape, x.shape, a.shape, b.shape, of_row.shape)
  sizes = Sizes(groups, rank, inputs, outputs)
  tiles = tiles or tiling.choose_gpu(rows, sizes, x.dtype.itemsize)
  table, counts = tiling.meetings(of_row, tiles.rows, groups)
  down, slots = table.shape
  itemsize = x.dtype.itemsize
  # As if each tile met one adapter; how many it meets is known when it runs.
  low_cost, high_cost = (
    pl.CostEstimate(
      flops=2 * rows * rank * width,
      bytes_accessed=itemsize * down * rank * width + rest + 4 * tiles.splits * rows * rank,
      transcendentals=0,
    )
    for width, rest in ((inputs, itemsize * rows * inputs), (outputs, 8 * rows * outputs))
  )
  low = pl.pallas_call(
    functools.partial(_lower_kernel, tiles=tiles, sizes=sizes),
    grid=(down, slots, tiles.splits),
    out_shape=jax.ShapeDtypeStruct((tiles.splits, rows, rank), jnp.float32),
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
    cost_estimate=low_cost,
    interpret=interpret,
    name='grouped_adapter_lower',
  )(table, counts, of_row, x, a)
  return pl.pallas_call(
    functools.partial(_raise_kernel, tiles=tiles, sizes=sizes),
    grid=(down, pl.cdiv(outputs, tiles.columns)),
    out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    cost_estimate=high_cost,
    interpret=interpret,
    name='grouped_adapter_raise',
  )(table, counts, scale, of_row, low, b, y)
