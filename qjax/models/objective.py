"""What training minimizes and evaluation reports: sums over the tokens of a batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qjax.errors import UserError
from qjax.models.distill import token_kl
from qjax.models.loss import token_losses
from qjax.models.transformer import Transformer, head_of
from qjax.ops import Weight
from qjax.precision import Policy

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Distillation:
  """What the loss takes from a teacher: (1 - weight) · nll + weight · T² · KL(teacher ‖ student).

  Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", §2.

  Attributes:
    weight: in (0, 1].
    temperature: T, which divides the logits of both.
  """

  weight: float
  temperature: float = 1.0

  def __post_init__(self) -> None:
    if not 0 < self.weight <= 1:
      raise UserError(f'distill.weight = {self.weight} must be above 0 and at most 1')
    if not self.temperature > 0:
      raise UserError(f'distill.temperature = {self.temperature} must be above 0')


class LossSums(NamedTuple):
  """Sums over the trained targets of a batch, float32 scalars; a mean divides once, at the end.

  Attributes:
    nll: in nats.
    correct: how many targets were the likeliest word.
    tokens: how many targets there were.
    objective: what training minimizes: the nll, or what a distillation makes of it.
    seen: the largest magnitude of each projection's inputs, float32 [L] by path, if asked for.
  """

  nll: jax.Array
  correct: jax.Array
  tokens: jax.Array
  objective: jax.Array
  seen: Any = ()


def nll_sums(
  hidden: jax.Array, head: Weight, transposed: bool, batch: Batch, policy: Policy, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """Summed nll and count of correct targets, from the hidden states [B, T, D] before the head."""
  losses = token_losses(hidden, head, batch['targets'], policy, transposed, chunk)
  weights = batch['weights']
  return jnp.sum(losses.nll * weights), jnp.sum(losses.is_correct * weights)


def loss_sums(
  model: Transformer,
  variables: Any,
  batch: Batch,
  chunk: int = 4096,
  rngs: dict[str, jax.Array] | None = None,
  distillation: Distillation | None = None,
  with_seen: bool = False,
) -> LossSums:
  """The sums over one batch.

  Args:
    model: the decoder.
    variables: {'params': …} and perhaps others; 'teacher' are the parameters of a distillation's teacher.
    batch: 'tokens', 'targets', 'segments', 'positions' int32 and 'weights' float32, each [B, T].
    chunk: most words of the vocabulary at a time.
    rngs: 'dropout' for adapters that drop inputs, 'rounding' for gradients that round at random; None in
      evaluation.
    distillation: what the objective takes from the teacher; None is nothing.
    with_seen: whether to fill `seen`.
  """
  inputs = [batch[name] for name in ('tokens', 'segments', 'positions')]
  own = {name: tree for name, tree in variables.items() if name != 'teacher'}
  found: Any = model.apply(own, *inputs, rngs=rngs, mutable=['seen'] if with_seen else False)
  hidden, seen = (found[0], found[1]['seen']) if with_seen else (found, ())
  policy = model.numerics.policy
  head, transposed = head_of(model.config, variables['params'])
  nll, correct = nll_sums(hidden, head, transposed, batch, policy, chunk)
  weights = batch['weights']
  objective = nll
  if distillation is not None:
    teacher = model.clone(numerics=model.numerics.plain)
    taught: Any = teacher.apply({'params': variables['teacher']}, *inputs)
    teacher_head, _ = head_of(model.config, variables['teacher'])
    kl = token_kl(
      hidden, head, taught, teacher_head, policy, transposed, distillation.temperature, chunk
    )
    objective = (1 - distillation.weight) * nll + distillation.weight * jnp.sum(kl * weights)
  return LossSums(nll, correct, jnp.sum(weights), objective, seen)
