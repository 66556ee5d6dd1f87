"""One step: a batch in, the next state out. Here all moves after the backward pass; in `fused`, inside it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qjax import optim, trees
from qjax.method import Method, Update
from qjax.models.objective import LossSums, loss_sums
from qjax.models.transformer import Transformer
from qjax.precision import LossScale, is_all_finite

Tree = Any
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Loop:
  """How long and how often.

  Attributes:
    num_steps: batches to train on.
    accumulate: micro-batches a step; the batch's rows are divided among them.
    eval_every: steps between evaluations; there is always one before and one after.
    checkpoint_every: steps between checkpoints; there is always one at each evaluation.
    max_skips: give up after this many steps in a row without a finite gradient.
    loss_chunk: most words of the vocabulary for which logits exist at a time.
    seed: of adapters, dropout and stochastic rounding (the data has its own copy).
  """

  num_steps: int
  accumulate: int
  eval_every: int
  checkpoint_every: int
  max_skips: int
  loss_chunk: int
  seed: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """What a step changes.

  Attributes:
    step: int32, batches consumed (skipped steps too, so it is also the data's position).
    trainable: what moves.
    optimizer: optax state over `trainable` alone.
    loss_scale: scale and skip counters.
  """

  step: jax.Array
  trainable: Tree
  optimizer: Tree
  loss_scale: LossScale


class StepMetrics(NamedTuple):
  """Of one step, float32 or int32 scalars. `loss` and `accuracy` are means over its trained tokens."""

  loss: jax.Array
  accuracy: jax.Array
  tokens: jax.Array
  gradient_norm: jax.Array
  learning_rate: jax.Array
  loss_scale: jax.Array
  skipped: jax.Array
  consecutive_skips: jax.Array


StepFunction = Callable[[State, Tree, Arrays, jax.Array], tuple[State, StepMetrics]]


def init_optimizer(
  update: Update, total_steps: int, trainable: Tree, set_aside: Callable[[Tree], Tree] | None = None
) -> Tree:
  """The optimizer's state before the first step, all of it on the device."""
  assert set_aside is None, 'moments wait elsewhere only where a layer moves at a time'
  return optim.make(update, total_steps).init(trainable)


class Gradients(NamedTuple):
  """Of a batch: unscaled float32 gradients of its mean objective; summed nll and correct tokens; `seen`."""

  tree: Tree
  nll: jax.Array
  correct: jax.Array
  seen: Tree


def gradients(
  model: Transformer,
  method: Method,
  loss_scale: LossScale,
  chunk: int,
  trainable: Tree,
  frozen: Tree,
  batch: Arrays,
  key: jax.Array,
) -> Gradients:
  """One backward pass a micro-batch; `batch` arrays are [micro-batches, rows, T].

  Each micro-batch's sum is divided by the tokens of the whole batch before its backward pass, so unequal
  micro-batches weigh exactly what their tokens weigh, and half-precision gradients have the size of a mean.
  """
  total = jnp.maximum(jnp.sum(batch['weights']), 1)
  lora = method.trainable.lora
  names = ['dropout'] if lora is not None and lora.dropout > 0 else []
  names += ['rounding'] if model.numerics.draws else []
  with_seen = method.course.momentum is not None

  def loss(trainable: Tree, micro: Arrays, index: jax.Array) -> tuple[jax.Array, LossSums]:
    keys = jax.random.split(jax.random.fold_in(key, index), max(len(names), 1))
    rngs = dict(zip(names, keys, strict=False)) or None
    variables = trees.combine(trainable, frozen)
    sums = loss_sums(model, variables, micro, chunk, rngs, method.distillation, with_seen)
    return loss_scale.scale(sums.objective / total), sums

  def one(micro: Arrays, index: jax.Array) -> Gradients:
    tree, sums = jax.grad(loss, has_aux=True)(trainable, micro, index)
    return Gradients(tree, sums.nll, sums.correct, sums.seen)

  def add(sum_: Gradients, x: Gradients) -> Gradients:
    widened = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sum_, x)
    return widened._replace(seen=jax.tree.map(jnp.maximum, sum_.seen, x.seen))

  count = batch['weights'].shape[0]
  first = {name: x[0] for name, x in batch.items()}
  if count == 1:
    found = one(first, jnp.zeros((), jnp.int32))
  else:
    like = jax.eval_shape(one, first, jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    steps = (dict(batch), jnp.arange(count))
    found, _ = jax.lax.scan(lambda carry, step: (add(carry, one(*step)), None), zeros, steps)
  grads = jax.tree.map(lambda x: x.astype(jnp.float32), loss_scale.unscale(found.tree))
  return found._replace(tree=grads)


def _follow(moved: Tree, seen: Tree, momentum: float) -> Tree:
  """`moved` with each range of inputs a step of its moving average nearer to what was seen."""
  latest = trees.flatten(seen)

  def average(path: str, high: jax.Array) -> jax.Array:
    if not path.startswith('act/'):
      return high
    return (momentum * high + (1 - momentum) * latest[path.removeprefix('act/')]).astype(high.dtype)

  return trees.map_with_path(average, moved)


def make_step(model: Transformer, method: Method, loop: Loop) -> StepFunction:
  """The pure function of one step: (state, frozen, batch, key) to the next state and its metrics."""
  tx = optim.make(method.update, loop.num_steps)
  rate = optim.schedule(method.update, loop.num_steps)
  course = method.course

  def step(state: State, frozen: Tree, batch: Arrays, key: jax.Array) -> tuple[State, StepMetrics]:
    step_key, rounding_key = jax.random.split(jax.random.fold_in(key, state.step))
    found = gradients(
        model, method, state.loss_scale, loop.loss_chunk, state.trainable, frozen, batch, step_key
    )  # fmt: skip
    grads, nll, correct = found.tree, found.nll, found.correct
    if course.freeze_step is not None:
      is_frozen = state.step >= course.freeze_step
      grads = trees.map_with_path(
          lambda path, g: jnp.where(is_frozen, jnp.zeros_like(g), g) if optim.is_range(path) else g, grads
      )
    tokens = jnp.sum(batch['weights'])
    is_finite = is_all_finite(grads) & jnp.isfinite(nll)
    updates, optimizer = tx.update(grads, state.optimizer, state.trainable)
    moved = optim.apply(state.trainable, updates, method.update.rounding, rounding_key)
    if course.momentum is not None:
      moved = _follow(moved, found.seen, course.momentum)
    if course.freeze_step is not None:  # moments go on moving what has no gradient any more
      moved = trees.map_with_path(
          lambda path, new, old: jnp.where(is_frozen, old, new) if optim.is_range(path) else new,
          moved,
          state.trainable,
      )
    # Finite gradients may still carry a weight past its dtype's largest value; that step is skipped too.
    is_finite = is_finite & is_all_finite(moved)

    def keep(new: Tree, old: Tree) -> Tree:
      return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

    scale = state.loss_scale.adjust(is_finite)
    after = State(state.step + 1, keep(moved, state.trainable), keep(optimizer, state.optimizer), scale)
    total = jnp.maximum(tokens, 1)
    metrics = StepMetrics(
        loss=nll / total,
        accuracy=correct / total,
        tokens=tokens,
        gradient_norm=optax.tree.norm(grads),
        learning_rate=jnp.asarray(rate(optim.applied_steps(state.optimizer)), jnp.float32),
        loss_scale=state.loss_scale.factor(),
        skipped=scale.skipped,
        consecutive_skips=scale.consecutive,
    )
    return after, metrics

  return step
