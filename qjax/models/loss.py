"""Cross-entropy in float32 over vocabulary chunks, so that a batch's full logits never exist.

Forward: one pass over the chunks keeps the target's logit, and of all other words the largest and a sum
(online log-sum-exp). The gradient of a hidden state is Σ p(v)·head[v] − head[target]. If the head is frozen
that sum runs along in the forward pass, rescaled as the maximum moves, as attention does with its values
(Dao et al. 2022, "FlashAttention"), and the backward pass multiplies nothing. If the head is trained, each
chunk's logits are computed again, turned into softmax − one-hot, and multiplied both ways. The whole
[tokens, vocab] matrix would be 402 MB in float32 for 2,048 tokens and 49,152 words; a chunk of
4,096 is 34 MB.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from qjax.ops import Weight, matmul, slice_of, take_rows
from qjax.precision import Policy
from qjax.quant.qtensor import QTensor


class TokenLosses(NamedTuple):
  """Per token, in the shape of the targets.

  Attributes:
    nll: float32, −log p(target), in nats.
    is_correct: float32, 1 where every other word has a smaller logit than the target; a tie is no success, or
      a collapsed model with equal logits would seem perfect.
  """

  nll: jax.Array
  is_correct: jax.Array


def chunks(vocab: int, chunk: int) -> tuple[int, int]:
  """Number of chunks and their size; the last one overlaps its neighbour if they don't divide evenly."""
  count = -(-vocab // min(chunk, vocab))
  return count, -(-vocab // count)


def chunk_logits(
  hidden: jax.Array, head: Weight, transposed: bool, policy: Policy, index: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, Weight]:
  """One chunk: logits float32 [tokens, size]; which words are new in it; start; the head's part."""
  axis = 0 if transposed else 1
  start = jnp.minimum(index * size, head.shape[axis] - size)
  part = slice_of(head, start, size, axis)
  logits = matmul(hidden, part, policy, transposed).astype(policy.output).astype(jnp.float32)
  return logits, start + jnp.arange(size) >= index * size, start, part


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _losses(
  hidden: jax.Array, head: Weight, targets: jax.Array, transposed: bool, policy: Policy, chunk: int
) -> TokenLosses:
  return _forward(hidden, head, targets, transposed, policy, chunk, False)[0]


class _Residual(NamedTuple):
  """Per token, float32: log Σ exp(logit); 1 − p(target); Σ p(v)·head[v] over v ≠ target, [tokens, D]."""

  log_total: jax.Array
  share: jax.Array
  pull: jax.Array | None


def _forward(
  hidden: jax.Array,
  head: Weight,
  targets: jax.Array,
  transposed: bool,
  policy: Policy,
  chunk: int,
  with_pull: bool,
) -> tuple[TokenLosses, _Residual]:
  count, size = chunks(head.shape[0 if transposed else 1], chunk)

  def body(carry: Any, index: jax.Array) -> tuple[Any, None]:
    rival, others, target, pull = carry
    logits, is_new, start, part = chunk_logits(hidden, head, transposed, policy, index, size)
    column = targets - start
    is_target = jnp.arange(size) == column[:, None]
    here = (column >= 0) & (column < size) & is_new[jnp.clip(column, 0, size - 1)]
    own = jnp.take_along_axis(logits, jnp.clip(column, 0, size - 1)[:, None], axis=1)[:, 0]
    target = jnp.where(here, own, target)
    # The target stays out: beside p(target) near 1 the rest would drown in rounding.
    logits = jnp.where(is_target | ~is_new, -jnp.inf, logits)
    new_rival = jnp.maximum(rival, jnp.max(logits, axis=-1))
    share = jnp.exp(logits - new_rival[:, None])
    shrink = jnp.exp(rival - new_rival)
    others = others * shrink + jnp.sum(share, axis=-1)
    if pull is not None:
      pull = pull * shrink[:, None] + matmul(share, part, policy, not transposed).astype(jnp.float32)
    return (new_rival, others, target, pull), None

  zeros = jnp.zeros(targets.shape, jnp.float32)
  # Not −inf: of a first chunk without a possible word, −inf − (−inf) would be NaN.
  lowest = jnp.full(targets.shape, jnp.finfo(jnp.float32).min)
  start = (lowest, zeros, zeros, jnp.zeros(hidden.shape, jnp.float32) if with_pull else None)
  (rival, others, target, pull), _ = jax.lax.scan(body, start, jnp.arange(count))
  largest = jnp.maximum(rival, target)
  shrink = jnp.exp(rival - largest)
  total = others * shrink + jnp.exp(target - largest)
  log_total = largest + jnp.log(total)
  losses = TokenLosses(log_total - target, (target > rival).astype(jnp.float32))
  share, pull = others * shrink / total, None if pull is None else pull * (shrink / total)[:, None]
  return losses, _Residual(log_total, share, pull)


def _losses_fwd(
  hidden: Any, head: Any, targets: Any, transposed: bool, policy: Policy, chunk: int
) -> tuple[TokenLosses, Any]:
  weight = jax.tree.map(lambda p: p.value, head, is_leaf=lambda p: hasattr(p, 'perturbed'))
  is_trained = not isinstance(weight, QTensor) and head.perturbed
  losses, residual = _forward(
    hidden.value, weight, targets.value, transposed, policy, chunk, hidden.perturbed and not is_trained
  )
  return losses, (hidden.value, weight, targets.value, residual, () if is_trained else None)


def _losses_bwd(
  transposed: bool, policy: Policy, chunk: int, residual: Any, g: TokenLosses
) -> tuple[Any, Any, None]:
  hidden, head, targets, found, is_trained = residual
  if isinstance(g.nll, SymbolicZero):
    return None, None, None
  if is_trained is None:
    if found.pull is None:
      return None, None, None
    columns = head if transposed else jax.tree.map(jnp.transpose, head)
    push = take_rows(columns, targets).astype(policy.compute).astype(jnp.float32)
    d_hidden = g.nll[:, None] * (found.pull - found.share[:, None] * push)
    return d_hidden.astype(hidden.dtype), None, None
  axis = 0 if transposed else 1
  count, size = chunks(head.shape[axis], chunk)
  assert not isinstance(head, QTensor)  # what is trained is plain
  dtype = head.dtype
  # Gradients accumulate over chunks in float32 whatever the dtypes of the operands.
  wide = hidden.astype(jnp.float32)

  def body(carry: Any, index: jax.Array) -> tuple[Any, None]:
    d_hidden, d_head = carry
    logits, is_new, start, part = chunk_logits(hidden, head, transposed, policy, index, size)
    is_target = start + jnp.arange(size) == targets[:, None]
    d_logits = (jnp.exp(logits - found.log_total[:, None]) - is_target.astype(jnp.float32)) * g.nll[:, None]
    d_logits = jnp.where(is_new, d_logits, 0)
    assert not isinstance(part, QTensor)
    product = jax.vjp(lambda x, w: matmul(x, w, policy, transposed), wide, part.astype(jnp.float32))[1]
    d_x, d_part = product(d_logits)
    before = jax.lax.dynamic_slice_in_dim(d_head, start, size, axis)
    d_head = jax.lax.dynamic_update_slice_in_dim(d_head, before + d_part, start, axis)
    return (d_hidden + d_x, d_head), None

  start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
  (d_hidden, d_head), _ = jax.lax.scan(body, start, jnp.arange(count))
  return d_hidden.astype(hidden.dtype), d_head.astype(dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd, symbolic_zeros=True)


def token_losses(
  hidden: jax.Array, head: Weight, targets: jax.Array, policy: Policy, transposed: bool, chunk: int = 4096
) -> TokenLosses:
  """Negative log-likelihood and correctness of every target.

  Args:
    hidden: [B, T, D] in the compute dtype.
    head: [D, vocab], or [vocab, D] if `transposed`.
    targets: int [B, T].
    policy: dtypes; logits are rounded to `policy.output`, everything after is float32.
    transposed: how `head` is stored.
    chunk: most words at a time.
  """
  flat = hidden.reshape(-1, hidden.shape[-1])
  losses = _losses(flat, head, targets.reshape(-1), transposed, policy, chunk)
  return TokenLosses(losses.nll.reshape(targets.shape), losses.is_correct.reshape(targets.shape))
