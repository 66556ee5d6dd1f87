"""Grouped-query attention over packed documents: who sees whom, which kernel runs, and its gradient.

Shape legend: B rows, T tokens, H query heads, K key/value heads, G = H / K, C head width.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from qjax import ops
from qjax.remat import ATTENTION_IN, ATTENTION_OUT, named


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
    mask: bool [B, 1, T, T], True where the query (third axis) sees the key (fourth); causal.
    implementation: 'xla' is the one below; 'cudnn' that of `jax.nn.dot_product_attention`.
  """
  if implementation == 'cudnn':
    q, k, v = (named(x, ATTENTION_IN) for x in (q, k, v))
    return named(jax.nn.dot_product_attention(q, k, v, mask=mask, implementation='cudnn'), ATTENTION_OUT)
  b, t, h, c = q.shape
  heads = k.shape[2]
  # Queries that share a key head become further rows of one matrix, so that every product is a plain one.
  rows = q.reshape(b, t, heads, h // heads, c).transpose(0, 2, 3, 1, 4).reshape(b * heads, h // heads, t, c)
  keys, values = (x.transpose(0, 2, 1, 3).reshape(b * heads, t, c) for x in (k, v))
  out = _attend(rows, keys, values, mask)
  return out.reshape(b, heads, h // heads, t, c).transpose(0, 3, 1, 2, 4).reshape(b, t, h, c)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention of q [B·K, G, T, C] over k, v [B·K, T, C]; mask [B, 1, T, T]."""
  return _forward(q, k, v, mask)[0]


# Queries up to this many see a prefix of the keys together: what lies behind the prefix is masked for all.
_QUERIES = 64


def _parts(t: int) -> list[tuple[int, int]]:
  """Consecutive ranges of queries, at most four."""
  size = max(_QUERIES, -(-t // 4))
  return [(start, min(start + size, t)) for start in range(0, t, size)]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Output [B·K, G, T, C] and, per query, log Σ exp(score) as float32 [B·K, G, T]."""
  # Not jax.nn's attention, which does not run in float16 on CPU.
  outs, totals = [], []
  for start, stop in _parts(q.shape[2]):
    scores, values = _scores(q, k, mask, start, stop), v[:, :stop]
    largest = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1, keepdims=True)
    out = ops.contract((p / total).astype(q.dtype), values, ((2,), (1,)), jnp.float32, batch=(0,))
    outs.append(out.astype(q.dtype).reshape(*q.shape[:2], stop - start, -1))
    totals.append((largest + jnp.log(total)).reshape(*q.shape[:2], stop - start))
  return jnp.concatenate(outs, axis=2), jnp.concatenate(totals, axis=2)


def _rows(x: jax.Array, start: int, stop: int) -> jax.Array:
  """Queries of all G heads as rows: [B·K, G, T, …] to [B·K, G·(stop − start), …]."""
  part = x[:, :, start:stop]
  return part.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array, start: int, stop: int) -> jax.Array:
  """Masked scores of some queries with the keys up to the last of them, float32 [B·K, G·queries, stop]."""
  scores = ops.contract(_rows(q, start, stop), k[:, :stop], ((2,), (2,)), jnp.float32, batch=(0,))
  b = mask.shape[0]
  shape = (b, q.shape[0] // b, q.shape[1], stop - start, stop)
  seen = jnp.broadcast_to(mask[:, :, None, start:stop, :stop], shape).reshape(scores.shape)
  return jnp.where(seen, scores / math.sqrt(q.shape[-1]), jnp.finfo(jnp.float32).min)


def _attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
  q, k, v = (named(x, ATTENTION_IN) for x in (q, k, v))
  out, log_total = _forward(q, k, v, mask)
  out, log_total = named(out, ATTENTION_OUT), named(log_total, ATTENTION_OUT)
  return out, (q, k, v, mask, out, log_total)


def _attend_bwd(residual: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  """Recomputes the probabilities from the scores, so that no [T, T] array outlives its layer.

  With P = exp(S − log Σ exp S) and dP = dO·vᵀ:  dS = P ∘ (dP − rowsum(dO ∘ O)),  dq = dS·k/√C,
  dk = dSᵀ·q/√C,  dv = Pᵀ·dO (Dao et al. 2022, "FlashAttention", appendix B). Sums are float32.
  """
  q, k, v, mask, out, log_total = residual
  wide, narrow = jnp.float32, q.dtype
  d_out = d_out.astype(narrow)
  pulled = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
  dq = []
  dk_t = dv_t = jnp.zeros((k.shape[0], k.shape[2], k.shape[1]), wide)
  for start, stop in _parts(q.shape[2]):
    rows, d_rows, keys, values = _rows(q, start, stop), _rows(d_out, start, stop), k[:, :stop], v[:, :stop]
    p = jnp.exp(_scores(q, k, mask, start, stop) - _rows(log_total, start, stop)[..., None])
    d_p = ops.contract(d_rows, values, ((2,), (2,)), wide, batch=(0,))
    d_s = (p * (d_p - _rows(pulled, start, stop)[..., None]) / math.sqrt(q.shape[-1])).astype(narrow)
    part = ops.contract(d_s, keys, ((2,), (1,)), wide, batch=(0,)).astype(narrow)
    dq.append(part.reshape(*q.shape[:2], stop - start, -1))
    # C is the narrow side: dkᵀ and dvᵀ are formed, and turned by a product that XLA cannot fold away.
    behind = [(0, 0), (0, 0), (0, k.shape[1] - stop)]
    dk_t = dk_t + jnp.pad(ops.rows_product(rows, d_s, wide), behind)
    dv_t = dv_t + jnp.pad(ops.rows_product(d_rows, p.astype(narrow), wide), behind)
  dk, dv = (ops.transpose(x.astype(narrow)) for x in (dk_t, dv_t))
  return jnp.concatenate(dq, axis=2), dk, dv, None


_attend.defvjp(_attend_fwd, _attend_bwd)
