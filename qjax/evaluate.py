"""Held-out quality: token-weighted negative log-likelihood, perplexity, token accuracy."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from qjax import trees
from qjax.models.objective import LossSums, loss_sums
from qjax.models.transformer import Transformer

Tree = Any
EvalStep = Callable[[Tree, Tree, Mapping[str, jax.Array]], LossSums]


@dataclasses.dataclass(frozen=True)
class Score:
  """What an evaluation found.

  Attributes:
    nll: nats a trained token.
    accuracy: share of trained tokens that no other word beats.
    tokens: trained tokens seen.
  """

  nll: float
  accuracy: float
  tokens: int

  @property
  def perplexity(self) -> float:
    return math.exp(min(self.nll, 700.0))

  def as_dict(self, prefix: str = '') -> dict[str, float | int]:
    values = {
      'nll': self.nll,
      'perplexity': self.perplexity,
      'accuracy': self.accuracy,
      'tokens': self.tokens,
    }
    return {prefix + name: value for name, value in values.items()}


def make_step(model: Transformer, chunk: int) -> EvalStep:
  """A compiled function of (trainable, frozen, batch) to the batch's sums."""

  def step(trainable: Tree, frozen: Tree, batch: Mapping[str, jax.Array]) -> LossSums:
    return loss_sums(model, trees.combine(trainable, frozen), batch, chunk)

  return jax.jit(step)


def evaluate(
  step: EvalStep,
  trainable: Tree,
  frozen: Tree,
  batches: Iterable[Mapping[str, jax.Array]],
  progress: Callable[[int], None] = lambda done: None,
) -> Score:
  """The score over all batches: sums in float64 over batches, divided once.

  Raises:
    ValueError: no batch holds a trained token.
  """
  nll = correct = tokens = 0.0
  for index, batch in enumerate(batches):
    sums = jax.device_get(step(trainable, frozen, batch))
    nll, correct, tokens = (
      nll + np.float64(sums.nll),
      correct + np.float64(sums.correct),
      tokens + float(sums.tokens),
    )
    progress(index + 1)
  if not tokens:
    raise ValueError('no trained token in the evaluation data')
  return Score(float(nll / tokens), float(correct / tokens), int(tokens))
