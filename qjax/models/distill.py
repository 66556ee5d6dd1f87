"""Distillation from a teacher's next-word distribution over vocabulary chunks, without full logits.

The loss of a token is T² · KL(softmax(z_teacher / T) ‖ softmax(z_student / T)), whose gradient for the
student's logits is T · (softmax_student − softmax_teacher); T² keeps that gradient's size when T changes
(Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", §2).

Forward: one pass over the chunks keeps of both models the largest logit and a sum (online log-sum-exp), and
the sum of exp(z_t − largest) · (z_t − z_s), each logit as seen from the largest of its model. Backward: a
second pass computes each chunk's logits of both again. Between the two rest two numbers a token.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from qjax.models.loss import chunk_logits, chunks
from qjax.ops import Weight, matmul
from qjax.precision import Policy
from qjax.quant.qtensor import QTensor


class _Totals(NamedTuple):
  """Per token, float32: log Σ exp(z / T) of the student and of the teacher."""

  student: jax.Array
  teacher: jax.Array


def _grow(
  largest: jax.Array, total: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """One step of log-sum-exp: largest and total [N] with logits [N, size]; their shares; old sums' factor."""
  new = jnp.maximum(largest, jnp.max(logits, axis=-1))
  shares = jnp.exp(logits - new[:, None])
  shrink = jnp.exp(largest - new)
  return new, total * shrink + jnp.sum(shares, axis=-1), shares, shrink


def _forward(
  hidden: jax.Array,
  head: Weight,
  teacher_hidden: jax.Array,
  teacher_head: Weight,
  policy: Policy,
  transposed: bool,
  temperature: float,
  chunk: int,
) -> tuple[jax.Array, _Totals]:
  count, size = chunks(head.shape[0 if transposed else 1], chunk)

  def body(carry: Any, index: jax.Array) -> tuple[Any, None]:
    s_largest, s_total, t_largest, t_total, apart = carry
    student, is_new, _, _ = chunk_logits(hidden, head, transposed, policy, index, size)
    teacher, _, _, _ = chunk_logits(teacher_hidden, teacher_head, transposed, policy, index, size)
    student = jnp.where(is_new, student / temperature, -jnp.inf)
    teacher = jnp.where(is_new, teacher / temperature, -jnp.inf)
    # As seen from the largest logits, which are `shift` apart: of what both have in common, however large,
    # no rounding stays.
    before, t_before = t_largest - s_largest, t_total
    s_largest, s_total, _, _ = _grow(s_largest, s_total, student)
    t_largest, t_total, shares, shrink = _grow(t_largest, t_total, teacher)
    shift = t_largest - s_largest
    # 0 · log 0 is 0: a word that the teacher rules out costs nothing, whatever the student thinks of it.
    apart = jnp.where(shrink > 0, (apart + t_before * (before - shift)) * shrink, 0)
    terms = shares * ((teacher - student) - shift[:, None])
    apart = apart + jnp.sum(jnp.where(shares > 0, terms, 0), axis=-1)
    return (s_largest, s_total, t_largest, t_total, apart), None

  zeros = jnp.zeros(hidden.shape[:1], jnp.float32)
  # Not −inf: of a first chunk without a possible word, −inf − (−inf) would be NaN.
  lowest = jnp.full(hidden.shape[:1], jnp.finfo(jnp.float32).min)
  found, _ = jax.lax.scan(body, (lowest, zeros, lowest, zeros, zeros), jnp.arange(count))
  s_largest, s_total, t_largest, t_total, apart = found
  # The logarithm of a ratio: of two models that are nearly one, a difference of two would be their rounding.
  kl = apart / t_total + jnp.log(s_total / t_total)
  totals = _Totals(s_largest + jnp.log(s_total), t_largest + jnp.log(t_total))
  # The gradient is not that of this maximum: rounding below 0 stops nothing.
  return temperature**2 * jnp.maximum(kl, 0), totals


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _kl(
  hidden: jax.Array,
  head: Weight,
  teacher_hidden: jax.Array,
  teacher_head: Weight,
  policy: Policy,
  transposed: bool,
  temperature: float,
  chunk: int,
) -> jax.Array:
  return _forward(hidden, head, teacher_hidden, teacher_head, policy, transposed, temperature, chunk)[0]


def _kl_fwd(
  hidden: Any,
  head: Any,
  teacher_hidden: Any,
  teacher_head: Any,
  policy: Policy,
  transposed: bool,
  temperature: float,
  chunk: int,
) -> tuple[jax.Array, Any]:
  inputs = jax.tree.map(
    lambda p: p.value,
    (hidden, head, teacher_hidden, teacher_head),
    is_leaf=lambda p: hasattr(p, 'perturbed'),
  )
  student, weight, teacher, teacher_weight = inputs
  is_trained = not isinstance(weight, QTensor) and head.perturbed
  kl, totals = _forward(student, weight, teacher, teacher_weight, policy, transposed, temperature, chunk)
  # What is known while tracing travels as the structure of the residuals.
  return kl, (inputs, totals, () if hidden.perturbed else None, () if is_trained else None)


def _kl_bwd(
  policy: Policy, transposed: bool, temperature: float, chunk: int, residual: Any, g: Any
) -> tuple[Any, Any, None, None]:
  (hidden, head, teacher_hidden, teacher_head), totals, is_needed, is_trained = residual
  if isinstance(g, SymbolicZero) or (is_needed is None and is_trained is None):
    return None, None, None, None
  axis = 0 if transposed else 1
  count, size = chunks(head.shape[axis], chunk)
  # Gradients accumulate over chunks in float32 whatever the dtypes of the operands.
  wide = hidden.astype(jnp.float32)

  def body(carry: Any, index: jax.Array) -> tuple[Any, None]:
    d_hidden, d_head = carry
    student, is_new, start, part = chunk_logits(hidden, head, transposed, policy, index, size)
    teacher, _, _, _ = chunk_logits(teacher_hidden, teacher_head, transposed, policy, index, size)
    p = jnp.exp(student / temperature - totals.student[:, None])
    q = jnp.exp(teacher / temperature - totals.teacher[:, None])
    d_logits = jnp.where(is_new, (p - q) * (temperature * g)[:, None], 0)
    if d_hidden is not None:
      (d_x,) = jax.vjp(lambda x: matmul(x, part, policy, transposed), wide)[1](d_logits)
      d_hidden = d_hidden + d_x
    if d_head is not None:
      assert not isinstance(part, QTensor)  # what is trained is plain
      wide_part = part.astype(jnp.float32)
      (d_part,) = jax.vjp(lambda w: matmul(wide, w, policy, transposed), wide_part)[1](d_logits)
      before = jax.lax.dynamic_slice_in_dim(d_head, start, size, axis)
      d_head = jax.lax.dynamic_update_slice_in_dim(d_head, before + d_part, start, axis)
    return (d_hidden, d_head), None

  d_hidden = None if is_needed is None else jnp.zeros(hidden.shape, jnp.float32)
  d_head = None if is_trained is None else jnp.zeros(head.shape, jnp.float32)
  (d_hidden, d_head), _ = jax.lax.scan(body, (d_hidden, d_head), jnp.arange(count))
  d_hidden = None if d_hidden is None else d_hidden.astype(hidden.dtype)
  d_head = None if d_head is None else d_head.astype(head.dtype)
  return d_hidden, d_head, None, None


_kl.defvjp(_kl_fwd, _kl_bwd, symbolic_zeros=True)


def token_kl(
  hidden: jax.Array,
  head: Weight,
  teacher_hidden: jax.Array,
  teacher_head: Weight,
  policy: Policy,
  transposed: bool,
  temperature: float,
  chunk: int = 4096,
) -> jax.Array:
  """T² · KL(softmax(z_teacher / T) ‖ softmax(z_student / T)) of every token, float32 [...], in nats.

  Never negative. Infinite where the student's logit is −inf, as float16 makes of large ones, of a word to
  which the teacher gives a share. Gradients reach the student's hidden states and a plain head that is
  trained; the teacher gets none.

  Args:
    hidden: the student's, [..., D] in the compute dtype.
    head: [D, vocab], or [vocab, D] if `transposed`; plain, or a `QTensor` of 16-bit floats, which is frozen.
    teacher_hidden: [..., E] with the leading axes of `hidden`.
    teacher_head: [E, vocab] or [vocab, E].
    policy: dtypes of both; logits are rounded to `policy.output`, everything after is float32.
    transposed: how both heads are stored.
    temperature: T, above 0; static.
    chunk: most words at a time.

  Raises:
    ValueError: numbers of tokens or of words that differ.
  """
  axis = 0 if transposed else 1
  if hidden.shape[:-1] != teacher_hidden.shape[:-1] or head.shape[axis] != teacher_head.shape[axis]:
    raise ValueError(
      f'student {hidden.shape} with head {head.shape} and teacher {teacher_hidden.shape} with head'
      f' {teacher_head.shape} differ in tokens or words'
    )
  flat = hidden.reshape(-1, hidden.shape[-1])
  teacher_flat = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
  kl = _kl(flat, head, teacher_flat, teacher_head, policy, transposed, temperature, chunk)
  return kl.reshape(hidden.shape[:-1])
