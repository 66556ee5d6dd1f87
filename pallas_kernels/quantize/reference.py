"""The answer: weights and activations in few bits, and rounding at random, in plain JAX.

Bits for rounding at random are given as uint32; their use is part of the answer, where they come from is not.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.low_bit_matmul.layout import Layout

# The largest code of an activation, and the least range: the inverse of a smaller one might not be finite.
LARGEST, TINY = 127, 1e-30

Nearest = Callable[[jax.Array], jax.Array]


def largest_code(layout: Layout) -> float:
  """What a block's largest magnitude is divided by to be its scale."""
  return 1.0 if layout.levels is not None else 2.0 ** (layout.bits - 1) - 1


def code_of(shares: jax.Array, layout: Layout, nearest: Nearest = jnp.round) -> jax.Array:
  """int32 codes as they are packed of float32 weights divided by their scale.

  The level nearest to each, the lower one of two that are equally near; integers half to even, plus the bias.
  `nearest` is what rounds to integers.
  """
  if layout.levels is None:
    largest = largest_code(layout)
    return jnp.clip(nearest(shares), -largest, largest).astype(jnp.int32) + layout.bias
  table = np.asarray(layout.levels, np.float32)
  code = jnp.zeros(shares.shape, jnp.int32)
  for midpoint in (table[1:] + table[:-1]) / 2:
    code = code + (shares > midpoint).astype(jnp.int32)
  return code


def packed(codes: jax.Array, layout: Layout) -> jax.Array:
  """Codes int32 [blocks, span, N] of whole blocks as bytes [blocks · m, N]; a filled place holds code 0."""
  blocks, span, outputs = codes.shape
  m = layout.rows_of_block
  if layout.bits == 8:
    return codes.reshape(blocks * span, outputs).astype(layout.dtype)
  if span < layout.planes * m:
    fill = jnp.zeros((blocks, layout.planes * m - span, outputs), jnp.int32)
    codes = jnp.concatenate([codes, fill], axis=1)
  packed = codes[:, :m]
  for plane in range(1, layout.planes):
    packed = packed | (codes[:, plane * m : (plane + 1) * m] << (plane * layout.bits))
  return packed.reshape(blocks * m, outputs).astype(layout.dtype)


def blocks_of(w: jax.Array, divisor: jax.Array | None, layout: Layout) -> tuple[jax.Array, jax.Array]:
  """Bytes [blocks · m, N] and scales [blocks, N] of whole blocks w float32 [blocks · span, N].

  A block of zeros has scale zero and codes of zero. `divisor` is `largest_code` as an array, None for 1: XLA
  would multiply by the inverse of a constant, and round otherwise.
  """
  blocks = w.reshape(-1, layout.span, w.shape[-1])
  largest = jnp.max(jnp.abs(blocks), axis=1)
  scale = largest if divisor is None else largest / divisor
  # Zeros are divided by one. That is decided weight by weight, for a division by a scale that is only
  # repeated becomes a product with its inverse in XLA, which rounds otherwise.
  divisors = jnp.where(blocks == 0, jnp.ones_like(blocks), scale[:, None, :])
  return packed(code_of(blocks / divisors, layout), layout), scale


def divisor_of(layout: Layout) -> jax.Array | None:
  """`largest_code` as float32 [1], or None where it is 1."""
  largest = largest_code(layout)
  return None if largest == 1 else jax.lax.optimization_barrier(jnp.full((1,), largest, jnp.float32))


def check(layout: Layout) -> None:
  """Refuses codes that are not packed here.

  Raises:
    NotImplementedError: saying why.
  """
  if layout.bits not in (8, 4, 2):
    raise NotImplementedError(f'codes of {layout.bits} bits are not packed by a kernel; 8, 4 and 2 are')
  bias = 0 if layout.bits == 8 else 2 ** (layout.bits - 1)
  if layout.has_offsets or (layout.levels is None and layout.bias != bias):
    raise NotImplementedError('integers with an offset are not quantized by a kernel; symmetric ones are')


def weight(w: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
  """A weight [K, N] at rest: bytes [rows, N] and float32 scales [blocks, N], as `layout` describes them.

  Args:
    w: float32, bfloat16 or float16; values must be finite.
    layout: symmetric integers or a table, of 8, 4 or 2 bits.

  Raises:
    NotImplementedError: other codes.
  """
  check(layout)
  w, divisor, tail = w.astype(jnp.float32), divisor_of(layout), layout.tail
  whole = layout.blocks * layout.span
  codes, scale = blocks_of(w[:whole], divisor, layout)
  if tail is None:
    return codes, scale
  last, last_scale = blocks_of(w[whole:], divisor, tail)
  return jnp.concatenate([codes, last]), jnp.concatenate([scale, last_scale])


def uniform(bits: jax.Array) -> jax.Array:
  """float32 in [0, 1) of the upper 23 of uint32 bits, as `jax.random.uniform` makes them."""
  mantissa = (bits >> np.uint32(9)) | np.uint32(0x3F800000)
  return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)


def tokens(
  x: jax.Array, bits: jax.Array | None = None, nearest: Nearest = jnp.round
) -> tuple[jax.Array, jax.Array]:
  """Codes int8 [M, K] in -127…127 and a float32 scale [M, 1] for each row.

  code = round(x · (127 / high)), half to even, or with bits ⌊x · (127 / high) + u⌋, whose mean is right, and
  scale = high · (1 / 127), where high is the row's largest magnitude, at least 1e-30. A row that holds a NaN
  or an infinity has scale NaN.

  Args:
    x: of any floating dtype.
    bits: uint32 [M, K], or None.
    nearest: what rounds half to even.
  """
  wide = x.astype(jnp.float32)
  high = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True), np.float32(TINY))
  share = wide * (LARGEST / high)
  rounded = nearest(share) if bits is None else jnp.floor(share + uniform(bits))
  codes = jnp.clip(rounded, -LARGEST, LARGEST).astype(jnp.int32).astype(jnp.int8)
  # A comparison, for not every compiler has a test for what is finite: it is false for a NaN, too.
  is_finite = high <= np.finfo(np.float32).max
  return codes, jnp.where(is_finite, high * np.float32(1 / LARGEST), np.float32(np.nan))


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
  """float32 x in bfloat16, up or down with the probability that makes the mean exact.

  The lower 16 of the given uint32 bits are added to those that are cut off. Infinities and NaN pass, and what
  is finite stays finite.
  """
  special = np.uint32(0x7F800000)
  pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
  rounded = (pattern + (bits & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)
  rounded = jnp.where((rounded & special) == special, pattern & np.uint32(0xFFFF0000), rounded)
  rounded = jnp.where((pattern & special) == special, pattern, rounded)
  return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)
