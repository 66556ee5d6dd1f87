"""The answer: decode the whole weight, then multiply."""

import jax
import jax.numpy as jnp

from pallas_kernels.low_bit_matmul.layout import Layout, Scales, codes_of, level_of, read_scales


def dequantize(codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout) -> jax.Array:
  """The weight float32 [K, N] of bytes [byte rows, N], scales, and float32 offsets [blocks, N or 1]."""
  scale = read_scales(scale)
  parts, tail = [], layout.tail
  for block in range(layout.blocks + (tail is not None)):
    own = layout if block < layout.blocks or tail is None else tail
    packed = codes[block * layout.bytes_of_block :][: own.bytes_of_block]
    levels = [level_of(codes_of(packed, plane, own), own) for plane in range(own.planes)]
    w = jnp.concatenate(levels)[: own.span] * scale[block]
    parts.append(w if offset is None else w + offset[block])
  return jnp.concatenate(parts)


def matmul(
  x: jax.Array, codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N]; W is rounded to the dtype of x, products add up in float32."""
  w = dequantize(codes, scale, offset, layout).astype(x.dtype)
  return jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def matmul_transposed(
  g: jax.Array, codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], the gradient of the input."""
  w = dequantize(codes, scale, offset, layout).astype(g.dtype)
  return jax.lax.dot_general(
    g, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
