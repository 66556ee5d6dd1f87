"""Several adapters in one batch on a TPU (v5e, v5p, v6e): a tile of rows meets only adapters that it needs.

The tile of x and that of y stay in vector memory while the adapters of its rows come by one after another,
by a table that is there before the first (scalar prefetch). So x and y are read once, and x·A is never
written to memory. A row that is another adapter's adds zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import hardware
from pallas_kernels.grouped_adapter import reference, tiling
from pallas_kernels.grouped_adapter.tiling import Sizes, Tiling
from pallas_kernels.tile import dot


def _kernel(
  groups_ref: Any, counts_ref: Any, scale_ref: Any, of_row_ref: Any, x_ref: Any, a_ref: Any, b_ref: Any,
  y_ref: Any, out_ref: Any, *, slots: int,
) -> None:  # fmt: skip
  tile, slot = pl.program_id(0), pl.program_id(1)

  @pl.when(slot == 0)
  def _() -> None:
    out_ref[...] = y_ref[...]

  @pl.when(slot < counts_ref[tile])
  def _() -> None:
    group = groups_ref[tile * slots + slot]
    low = dot(x_ref[...], a_ref[...], (1, 1))
    low = jnp.where(of_row_ref[...] == group, low, 0).astype(x_ref.dtype)
    out_ref[...] += scale_ref[group] * dot(low, b_ref[...])


def obstacle(sizes: Sizes) -> str | None:
  """Why no tile serves adapters of these sizes, None if one does."""
  try:
    tiling.candidates(1, sizes, 4)
  except NotImplementedError as error:
    return str(error)
  return None


@functools.partial(jax.jit, static_argnames=('interpret', 'tiles'))
def add(
  y: jax.Array,
  x: jax.Array,
  a: jax.Array,
  b: jax.Array,
  scale: jax.Array,
  of_row: jax.Array,
  interpret: Any = False,
  tiles: Tiling | None = None,
) -> jax.Array:
  """As `reference.add`, for x in bfloat16 or float32.

  Args:
    y, x, a, b, scale, of_row: those of `reference.add`.
    interpret: run on a CPU, True or `pltpu.InterpretParams`.
    tiles: how it is cut; None is `tiling.choose`.

  Raises:
    ValueError: as `reference.add`.
    NotImplementedError: no tile serves.
  """
  given, inputs, outputs, groups, rank = reference.sizes(y.shape, x.shape, a.shape, b.shape, of_row.shape)
  tiles = tiles or tiling.choose(given, Sizes(groups, rank, inputs, outputs), x.dtype.itemsize)
  more_rank = (0, max(0, hardware.FEWEST_RANK - rank))
  a, b = (jnp.pad(each, ((0, 0), more_rank, (0, 0))) for each in (a, b))
  rank += more_rank[1]
  itemsize = x.dtype.itemsize
  tall = tiles.rows
  rows = max(given, tall)
  more = (0, rows - given)
  x, y = jnp.pad(x, (more, (0, 0))), jnp.pad(y, (more, (0, 0)))
  of_row = jnp.pad(of_row, more, constant_values=-1)
  table, counts = tiling.meetings(of_row, tall, groups)
  down, slots = table.shape

  def of_tile(tile: Any, slot: Any, *_: Any) -> tuple[Any, Any]:
    return tile, 0

  def of_group(tile: Any, slot: Any, groups_ref: Any, *_: Any) -> tuple[Any, Any, Any]:
    return groups_ref[tile * slots + slot], 0, 0

  out = pl.pallas_call(
    functools.partial(_kernel, slots=slots),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(down, slots),
      in_specs=[
        pl.BlockSpec((tall, 1), of_tile),
        pl.BlockSpec((tall, inputs), of_tile),
        pl.BlockSpec((None, rank, inputs), of_group),
        pl.BlockSpec((None, rank, outputs), of_group),
        pl.BlockSpec((tall, outputs), of_tile),
      ],
      out_specs=pl.BlockSpec((tall, outputs), of_tile),
    ),
    out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=hardware.VMEM_LIMIT
    ),
    # As if each tile met one adapter; how many it meets is known when it runs.
    cost_estimate=pl.CostEstimate(
      flops=2 * rows * rank * (inputs + outputs),
      bytes_accessed=itemsize * (rows * inputs + down * rank * (inputs + outputs)) + 8 * rows * outputs,
      transcendentals=0,
    ),
    interpret=interpret,
    name='grouped_adapter',
  )(table.reshape(-1), counts, scale, of_row[:, None], x, a, b, y)  # fmt: skip
  return out[:given]
