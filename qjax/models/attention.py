"""Grouped-query attention over packed documents: who sees whom, which kernel runs, and its gradient.

Shape legend: B rows, T tokens, H query heads, K key/value heads, G = H / K, C head width.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from qjax import ops


def attention_mask(segments: jax.Array, window: int | None) -> jax.Array:
  """Who may see whom, bool [B, 1, T, T].

  A token sees tokens of its own document (equal non-zero segment) at or before it, within `window` tokens
  including itself. A pad (segment 0) sees only itself, which keeps its softmax finite.
  """
  t = segments.shape[-1]
  query, key = jnp.arange(t)[:, None], jnp.arange(t)[None, :]
  causal = key <= query
  if window is not None:
    causal = causal & (query - key < window)
  same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
  return ((causal & same) | (query == key))[:, None]


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
  """Which implementation of attention runs.

  'auto' is cuDNN's flash attention on an NVIDIA GPU for half precision and head widths it serves, else XLA.
  A named one runs or raises.
  """

  name: str = 'auto'

  def resolve(self, dtype: jnp.dtype, head_dim: int) -> str:
    if self.name != 'auto':
      return self.name
    is_served = dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
    return 'cudnn' if jax.default_backend() == 'gpu' and is_served else 'xla'


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, implementation: str) -> jax.Array:
  """softmax(q·kᵀ/√C, where masked)·v as [B, T, H, C], softmax in float32.

  Args:
    q: [B, T, H, C].
    k, v: [B, T, K, C]; query head h reads key head h // G.
    mask: bool [B, 1, T, T], True where the query (third axis) sees the key (fourth).
    implementation: 'xla' is the one below; 'cudnn' that of `jax.nn.dot_product_attention`.
  """
  if implementation == 'cudnn':
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation='cudnn')
  b, t, h, c = q.shape
  heads = k.shape[2]
  # Queries that share a key head become further rows of one matrix, so that every product is a plain one.
  rows = q.reshape(b, t, heads, h // heads, c).transpose(0, 2, 3, 1, 4).reshape(b * heads, h // heads * t, c)
  keys, values = (x.transpose(0, 2, 1, 3).reshape(b * heads, t, c) for x in (k, v))
  out = _attend(rows, keys, values, mask)
  return out.reshape(b, heads, h // heads, t, c).transpose(0, 3, 1, 2, 4).reshape(b, t, h, c)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention of q [B·K, G·T, C] over k, v [B·K, T, C], one head each; mask [B, 1, T, T]."""
  # Not jax.nn's attention, which does not run in float16 on CPU.
  p = _probabilities(q, k, mask).astype(q.dtype)
  return ops.contract(p, v, ((2,), (1,)), jnp.float32, batch=(0,)).astype(q.dtype)


def _probabilities(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
  """float32 [B·K, G·T, T]."""
  scores = ops.contract(q, k, ((2,), (2,)), jnp.float32, batch=(0,)) / math.sqrt(q.shape[-1])
  return jax.nn.softmax(jnp.where(_rows_mask(mask, q, k), scores, jnp.finfo(jnp.float32).min), axis=-1)


def _rows_mask(mask: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
  """The mask of every folded row, bool [B·K, G·T, T]."""
  b, t = mask.shape[0], mask.shape[-1]
  shape = (b, q.shape[0] // b, q.shape[1] // t, t, t)
  return jnp.broadcast_to(mask[:, :, None], shape).reshape(q.shape[0], q.shape[1], k.shape[1])


def _attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
  return _attend(q, k, v, mask), (q, k, v, mask)


def _attend_bwd(residual: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  """Recomputes the probabilities, so that no [T, T] array outlives its layer; sums are float32.

  With P = softmax(S) and dP = dO·vᵀ:  dS = P ∘ (dP − rowsum(P ∘ dP)),  dq = dS·k/√C,  dk = dSᵀ·q/√C,
  dv = Pᵀ·dO.
  """
  q, k, v, mask = residual
  wide, narrow = jnp.float32, q.dtype
  scale = 1 / math.sqrt(q.shape[-1])
  d_out = d_out.astype(narrow)
  p = _probabilities(q, k, mask)
  d_p = ops.contract(d_out, v, ((2,), (2,)), wide, batch=(0,))
  d_s = (p * (d_p - jnp.sum(p * d_p, axis=-1, keepdims=True)) * scale).astype(narrow)
  dq = ops.contract(d_s, k, ((2,), (1,)), wide, batch=(0,))
  # C is the narrow side: dkᵀ and dvᵀ are formed, and turned by a product that XLA cannot fold away.
  dk_t = ops.rows_product(q, d_s, wide).astype(narrow)
  dv_t = ops.rows_product(d_out, p.astype(narrow), wide).astype(narrow)
  return dq.astype(narrow), ops.transpose(dk_t), ops.transpose(dv_t), None


_attend.defvjp(_attend_fwd, _attend_bwd)
