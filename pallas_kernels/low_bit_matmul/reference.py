"""The answer: decode the whole weight, then multiply."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.low_bit_matmul.layout import Layout, Scales, codes_of, level_of, read_scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
  """What an adapter adds to a product: scale · (x·A) · B.

  Attributes:
    low: x·A [M, r], in the dtype of x.
    b: B [r, N], in it.
    scale: static.
    a: Aᵀ [r, K] in it, for a kernel that has x·A in the same pass over x; then nothing reads `low`. None if
      `low` is no product of this x, or only a part of the sum is.
  """

  low: Any
  b: Any
  scale: float = dataclasses.field(metadata={'static': True})
  a: Any = None

  @property
  def rank(self) -> int:
    """r."""
    return self.b.shape[0]


def dequantize(codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout) -> jax.Array:
  """The weight float32 [K, N] of bytes [byte rows, N], scales, and float32 offsets [blocks, N or 1]."""
  scale = read_scales(scale)
  parts, tail = [], layout.tail
  for block in range(layout.blocks + (tail is not None)):
    own = layout if block < layout.blocks or tail is None else tail
    packed = codes[block * layout.byte_rows_of_block :][: own.byte_rows_of_block]
    levels = [level_of(codes_of(packed, plane, own), own) for plane in range(own.planes)]
    w = jnp.concatenate(levels)[: own.span] * scale[block]
    parts.append(w if offset is None else w + offset[block])
  return jnp.concatenate(parts)


def matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: Scales,
  offset: jax.Array | None,
  layout: Layout,
  adapter: LowRank | None = None,
) -> jax.Array:
  """x [M, K] · W [K, N] as float32 [M, N], with what an adapter adds.

  W is rounded to the dtype of x, products add up in float32.
  """
  y = _dot(x, dequantize(codes, scale, offset, layout).astype(x.dtype))
  return y if adapter is None else y + adapter.scale * _dot(adapter.low, adapter.b)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  return jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def matmul_transposed(
  g: jax.Array, codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout
) -> jax.Array:
  """g [M, N] · Wᵀ [N, K] as float32 [M, K], the gradient of the input."""
  w = dequantize(codes, scale, offset, layout).astype(g.dtype)
  return jax.lax.dot_general(
    g, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
