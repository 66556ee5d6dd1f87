"""Quantization on a TPU in one pass: what is read once is ranged, rounded and packed in vector memory.

Random bits come from the chip's own generator, seeded for each tile, unless they are given.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hardware import LANES, VMEM_LIMIT, sublanes
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.quantize import reference

# Elements of a tile: 2 MiB of float32.
TILE = 2**19


def _tile_rows(rows: int, width: int) -> int:
  """Rows of a tile over whole rows: a multiple of what registers hold, or all."""
  step = sublanes(1)  # codes are bytes
  fit = max(1, TILE // width // step) * step
  return rows if rows <= fit else fit


def _weight_tile(outputs: int, layout: Layout) -> tuple[int, int]:
  """Blocks and outputs of a tile of a weight.

  Raises:
    NotImplementedError: no tile serves.
  """
  reference.check(layout)
  step = 8 * layout.planes
  if layout.blocks > 1 and layout.span % step:
    raise NotImplementedError(f'blocks of {layout.span} inputs are no multiples of {step}')
  # Scales of a tile are rows of registers of float32, 8 of them, or all that there are.
  blocks = layout.blocks if layout.blocks < 8 else 8
  columns = TILE // (blocks * layout.span) // LANES * LANES
  if columns == 0:
    if blocks * layout.span * LANES > 8 * TILE:
      raise NotImplementedError(f'{blocks} blocks of {layout.span} inputs are too many for a tile')
    columns = LANES
  return blocks, min(outputs, columns)


def obstacle(layout: Layout) -> str | None:
  """Why no tile serves a weight, None if one does."""
  try:
    _weight_tile(LANES, layout)
  except NotImplementedError as error:
    return str(error)
  return None


def _weight_kernel(w_ref: Any, *refs: Any, layout: Layout) -> None:
  *divisor_ref, codes_ref, scale_ref = refs
  divisor = divisor_ref[0][0] if divisor_ref else None
  codes_ref[...], scale_ref[...] = reference.blocks_of(w_ref[...].astype(jnp.float32), divisor, layout)


@functools.partial(jax.jit, static_argnames=('layout', 'interpret'))
def weight(w: jax.Array, layout: Layout, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
  """As `reference.weight`; a shorter last block is quantized by XLA.

  Raises:
    NotImplementedError: no tile serves.
  """
  outputs = w.shape[1]
  blocks, columns = _weight_tile(outputs, layout)
  divisor, tail, m = reference.divisor_of(layout), layout.tail, layout.rows_of_block
  whole = layout.blocks * layout.span
  codes, scale = pl.pallas_call(
    functools.partial(_weight_kernel, layout=layout),
    grid=(pl.cdiv(layout.blocks, blocks), pl.cdiv(outputs, columns)),
    in_specs=[
      pl.BlockSpec((blocks * layout.span, columns), lambda i, j: (i, j)),
      *([] if divisor is None else [pl.BlockSpec(memory_space=pltpu.SMEM)]),
    ],
    out_specs=[
      pl.BlockSpec((blocks * m, columns), lambda i, j: (i, j)),
      pl.BlockSpec((blocks, columns), lambda i, j: (i, j)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((layout.rows, outputs), layout.dtype),
      jax.ShapeDtypeStruct((layout.blocks, outputs), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * whole * outputs,
      bytes_accessed=whole * outputs * w.dtype.itemsize + (layout.rows + 4 * layout.blocks) * outputs,
      transcendentals=0,
    ),
    interpret=interpret,
    name='quantize_weight',
  )(w[:whole], *([] if divisor is None else [divisor]))
  if tail is None:
    return codes, scale
  last, last_scale = reference.weight(w[whole:], tail)
  return jnp.concatenate([codes, last]), jnp.concatenate([scale, last_scale])


def _drawn(refs: list[Any], shape: tuple[int, ...], is_seeded: bool) -> jax.Array | None:
  """Bits for a tile: of the generator, which takes the seed and the number of the tile, or those given."""
  if not refs:
    return None
  if not is_seeded:
    return refs[0][...]
  pltpu.prng_seed(refs[0][0], pl.program_id(0))
  return jax.lax.bitcast_convert_type(pltpu.prng_random_bits(shape), jnp.uint32)


def _noise(
  seed: jax.Array | None, bits: jax.Array | None, tile: tuple[int, int]
) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
  """The operand that random bits come from, and where it lies."""
  if seed is not None and bits is not None:
    raise ValueError('give a seed or bits, not both')
  if seed is not None:
    return [seed.reshape(1)], [pl.BlockSpec(memory_space=pltpu.SMEM)]
  return ([], []) if bits is None else ([bits], [pl.BlockSpec(tile, lambda i: (i, 0))])


def tokens_obstacle(width: int) -> str | None:
  """Why rows of that many inputs can't be quantized here, None if they can."""
  return f'rows of {width} inputs are too long for a tile' if width > 2**17 else None


def _tokens_kernel(x_ref: Any, *refs: Any, is_seeded: bool) -> None:
  *noise_refs, codes_ref, scale_ref = refs
  bits = _drawn(noise_refs, x_ref.shape, is_seeded)
  codes_ref[...], scale_ref[...] = reference.tokens(x_ref[...], bits)


@functools.partial(jax.jit, static_argnames=('interpret',))
def tokens(
  x: jax.Array, seed: jax.Array | None = None, bits: jax.Array | None = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
  """As `reference.tokens`, rounding at random if there is a seed (int32 []) or bits.

  Raises:
    NotImplementedError: rows of more than 2^17 inputs.
    ValueError: both a seed and bits.
  """
  count, width = x.shape
  if (reason := tokens_obstacle(width)) is not None:
    raise NotImplementedError(f'{reason}; XLA quantizes them')
  tile = (_tile_rows(count, width), width)
  noise, noise_specs = _noise(seed, bits, tile)
  return pl.pallas_call(
    functools.partial(_tokens_kernel, is_seeded=seed is not None),
    grid=(pl.cdiv(count, tile[0]),),
    in_specs=[pl.BlockSpec(tile, lambda i: (i, 0)), *noise_specs],
    out_specs=[pl.BlockSpec(tile, lambda i: (i, 0)), pl.BlockSpec((tile[0], 1), lambda i: (i, 0))],
    out_shape=[
      jax.ShapeDtypeStruct((count, width), jnp.int8), jax.ShapeDtypeStruct((count, 1), jnp.float32)
    ],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_LIMIT),
    cost_estimate=pl.CostEstimate(
      flops=6 * count * width, bytes_accessed=count * (width * (x.dtype.itemsize + 1) + 4), transcendentals=0
    ),
    interpret=interpret,
    name='quantize_tokens',
  )(x, *noise)  # fmt: skip


def _round_kernel(x_ref: Any, noise_ref: Any, y_ref: Any, *, is_seeded: bool) -> None:
  bits = _drawn([noise_ref], x_ref.shape, is_seeded)
  assert bits is not None
  y_ref[...] = reference.stochastic_round(x_ref[...], bits)


@functools.partial(jax.jit, static_argnames=('interpret',))
def stochastic_round(
  x: jax.Array, seed: jax.Array | None = None, bits: jax.Array | None = None, interpret: Any = False
) -> jax.Array:
  """As `reference.stochastic_round` for x float32 [R, C], with a seed (int32 []) or uint32 bits [R, C].

  Raises:
    ValueError: neither a seed nor bits, or both.
  """
  if seed is None and bits is None:
    raise ValueError('give a seed or bits')
  count, width = x.shape
  tile = (_tile_rows(count, width), width)
  noise, noise_specs = _noise(seed, bits, tile)
  return pl.pallas_call(
    functools.partial(_round_kernel, is_seeded=seed is not None),
    grid=(pl.cdiv(count, tile[0]),),
    in_specs=[pl.BlockSpec(tile, lambda i: (i, 0)), *noise_specs],
    out_specs=pl.BlockSpec(tile, lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((count, width), jnp.bfloat16),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_LIMIT),
    cost_estimate=pl.CostEstimate(
      flops=8 * count * width, bytes_accessed=6 * count * width, transcendentals=0
    ),
    interpret=interpret,
    name='stochastic_round',
  )(x, *noise)
