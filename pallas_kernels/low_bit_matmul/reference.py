"""The answer: decode the whole weight, then multiply."""

import jax
import jax.numpy as jnp

from pallas_kernels.low_bit_matmul.layout import Layout, level_of


def dequantize(codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout) -> jax.Array:
  """The weight float32 [K, N] of bytes [rows, N] with float32 scales and offsets [blocks, N or 1]."""
  parts, tail = [], layout.tail
  for block in range(layout.blocks + (tail is not None)):
    own = layout if block < layout.blocks or tail is None else tail
    rows = codes[block * layout.rows_of_block :][: own.rows_of_block]
    levels = jnp.concatenate([level_of(rows, plane, own) for plane in range(own.planes)])[: own.span]
    w = levels * scale[block]
    parts.append(w if offset is None else w + offset[block])
  return jnp.concatenate(parts)


def matmul(
  x: jax.Array, codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N]; W is rounded to the dtype of x, products add up in float32."""
  w = dequantize(codes, scale, offset, layout).astype(x.dtype)
  return jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def matmul_transposed(
  g: jax.Array, codes: jax.Array, scale: jax.Array, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], the gradient of the input."""
  w = dequantize(codes, scale, offset, layout).astype(g.dtype)
  return jax.lax.dot_general(
    g, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
