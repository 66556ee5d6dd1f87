"""Quantization on NVIDIA GPUs in one pass: Pallas lowered to Triton.

Rounding at random is not here: XLA fuses the drawing of bits with what rounds by them, moving as few bytes.
Division in Triton may err in the last bit, so that a weight halfway between two codes may get the other one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.hardware import power_of_two
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.quantize import reference
from pallas_kernels.tile import load, mask_of

# Elements of x that a program holds.
MOST = 2**15
# Outputs and rows of a plane that a program handles at once.
COLUMNS, ROWS = 64, 32


def _half_to_even(x: jax.Array) -> jax.Array:
  """`jnp.round`, which Triton lacks."""
  below = jnp.floor(x)
  past = x - below
  is_odd = below != 2 * jnp.floor(below * 0.5)
  return jnp.where((past > 0.5) | ((past == 0.5) & is_odd), below + 1, below)


def obstacle(layout: Layout) -> str | None:
  """Why a weight can't be quantized here, None if it can."""
  try:
    reference.check(layout)
  except NotImplementedError as error:
    return str(error)
  return None


def _weight_kernel(w_ref: Any, *refs: Any, layout: Layout, outputs: int) -> None:
  *divisor_ref, codes_ref, scale_ref = refs
  m = layout.rows_of_block
  rows = power_of_two(m, most=ROWS)
  steps = -(-m // rows)
  block = pl.program_id(0)
  n = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
  fits = n < outputs

  def read(step: Any, plane: int) -> tuple[jax.Array, jax.Array]:
    """A tile of one plane in float32, zeros beyond its end, and its rows within the plane."""
    row = step * rows + jnp.arange(rows, dtype=jnp.int32)
    exists = (row < m) & (plane * m + row < layout.span)
    index = (block * layout.span + plane * m + row)[:, None], n[None, :]
    return load(w_ref, index, mask_of(exists, fits)).astype(jnp.float32), row

  def larger(step: Any, largest: jax.Array) -> jax.Array:
    for plane in range(layout.planes):
      largest = jnp.maximum(largest, jnp.max(jnp.abs(read(step, plane)[0]), axis=0))
    return largest

  scale = jax.lax.fori_loop(0, steps, larger, jnp.zeros((COLUMNS,), jnp.float32))
  if divisor_ref:
    scale = scale / divisor_ref[0][0]
  plt.store(scale_ref.at[(block, n)], scale, mask=fits)

  def write(step: Any, _: None) -> None:
    packed = jnp.zeros((rows, COLUMNS), jnp.int32)
    for plane in range(layout.planes):
      w, row = read(step, plane)
      shares = w / jnp.where(w == 0, jnp.ones_like(w), scale[None, :])
      code = reference.code_of(shares, layout, _half_to_even)
      # A place beyond an odd block is filled with code 0, not with the code of zero.
      if layout.span < layout.planes * m:
        code = jnp.where((plane * m + row < layout.span)[:, None], code, 0)
      packed = packed | (code << (plane * layout.bits))
    index = (block * m + row)[:, None], n[None, :]
    plt.store(codes_ref.at[index], packed.astype(codes_ref.dtype), mask=mask_of(row < m, fits))

  jax.lax.fori_loop(0, steps, write, None)


@functools.partial(jax.jit, static_argnames=('layout', 'interpret'))
def weight(w: jax.Array, layout: Layout, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """As `reference.weight`; a shorter last block is quantized by XLA.

  Raises:
    NotImplementedError: other codes than symmetric integers or a table of 8, 4 or 2 bits.
  """
  reference.check(layout)
  outputs, whole = w.shape[1], layout.blocks * layout.span
  divisor, tail = reference.divisor_of(layout), layout.tail
  codes, scale = pl.pallas_call(
    functools.partial(_weight_kernel, layout=layout, outputs=outputs),
    grid=(layout.blocks, pl.cdiv(outputs, COLUMNS)),
    out_shape=[
      jax.ShapeDtypeStruct((layout.rows, outputs), layout.dtype),
      jax.ShapeDtypeStruct((layout.blocks, outputs), jnp.float32),
    ],
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    cost_estimate=pl.CostEstimate(
      flops=4 * whole * outputs,
      bytes_accessed=whole * outputs * w.dtype.itemsize + (layout.rows + 4 * layout.blocks) * outputs,
      transcendentals=0,
    ),
    interpret=interpret,
    name='quantize_weight',
  )(w, *([] if divisor is None else [divisor]))
  if tail is None:
    return codes, scale
  last, last_scale = reference.weight(w[whole:], tail)
  return jnp.concatenate([codes, last]), jnp.concatenate([scale, last_scale])


def tokens_obstacle(width: int) -> str | None:
  """Why training leaves tokens of that many inputs to XLA; never None, for it needs the same codes.

  The range that a row is divided by may err in the last bit, which moves an input halfway between two codes.
  """
  if width > MOST:
    return f'rows of {width} inputs are too long for a program'
  return 'a division in Triton may err in the last bit, and the codes of inputs must be those of XLA'


def _tokens_kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *, width: int) -> None:
  k = jnp.arange(power_of_two(width), dtype=jnp.int32)
  row, exists = pl.program_id(0), k < width
  x = load(x_ref, (row, k), exists)
  codes, scale = reference.tokens(x[None, :], nearest=_half_to_even)
  plt.store(codes_ref.at[(row, k)], codes[0], mask=exists)
  plt.store(scale_ref.at[(row, jnp.arange(1, dtype=jnp.int32))], scale[0])


@functools.partial(jax.jit, static_argnames=('interpret',))
def tokens(x: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """As `reference.tokens`, to nearest.

  Raises:
    NotImplementedError: rows of more than 2^15 inputs.
  """
  count, width = x.shape
  if width > MOST:
    raise NotImplementedError(f'rows of {width} inputs are too long for a program; XLA quantizes them')
  return pl.pallas_call(
    functools.partial(_tokens_kernel, width=width),
    grid=(count,),
    out_shape=[
      jax.ShapeDtypeStruct((count, width), jnp.int8), jax.ShapeDtypeStruct((count, 1), jnp.float32)
    ],
    compiler_params=plt.CompilerParams(num_warps=4 if width <= 8192 else 8, num_stages=1),
    cost_estimate=pl.CostEstimate(
      flops=6 * count * width, bytes_accessed=count * (width * (x.dtype.itemsize + 1) + 4), transcendentals=0
    ),
    interpret=interpret,
    name='quantize_tokens',
  )(x)  # fmt: skip
