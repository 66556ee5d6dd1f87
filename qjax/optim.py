"""From `Update` to an optax transformation over exactly what is trained."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from qjax import precision, trees
from qjax.errors import UserError, nearest
from qjax.method import Update

Tree = Any
F = TypeVar('F', bound=Callable[..., Any])
SCHEDULES = ('constant', 'linear', 'cosine')


def check(update: Update, total_steps: int) -> None:
  """Refuses settings that cannot work.

  Raises:
    UserError: naming the field.
  """
  if not update.learning_rate > 0:
    raise UserError(f'optimizer.learning_rate = {update.learning_rate} must be above 0')
  if update.schedule not in SCHEDULES:
    raise UserError(
      f'optimizer.schedule = {update.schedule!r} is not known{nearest(update.schedule, SCHEDULES)}'
    )
  if not 0 <= update.warmup_steps < max(total_steps, 1):
    raise UserError(
      f'optimizer.warmup_steps = {update.warmup_steps} must be at least 0 and below num_steps = {total_steps}'
    )
  if not 0 < update.range_rate < 1:
    raise UserError(f'qat.range_rate = {update.range_rate} must lie between 0 and 1, such as 0.01')
  for name in ('beta1', 'beta2'):
    if not 0 <= getattr(update, name) < 1:
      raise UserError(f'optimizer.{name} = {getattr(update, name)} must be at least 0 and below 1')
  if not update.eps > 0:
    raise UserError(f'optimizer.eps = {update.eps} must be above 0')
  for name in ('weight_decay', 'clip_norm'):
    if not getattr(update, name) >= 0:
      raise UserError(f'optimizer.{name} = {getattr(update, name)} must be at least 0')
  if update.rounding not in precision.ROUNDINGS:
    raise UserError(
      f'precision.rounding = {update.rounding!r} is not known{nearest(update.rounding, precision.ROUNDINGS)}'
    )


def _promoting(fn: F) -> F:
  """fn under JAX's usual promotion: optax mixes floats with integer counters, which strict mode refuses."""

  @functools.wraps(fn)
  def call(*args: Any) -> Any:
    with jax.numpy_dtype_promotion('standard'):
      return fn(*args)

  return call  # type: ignore[return-value]


def schedule(update: Update, total_steps: int) -> optax.Schedule:
  """Learning rate by count of applied updates; a skipped step does not advance it."""
  after = max(total_steps - update.warmup_steps, 1)
  peak = update.learning_rate
  main = {
    'constant': lambda: optax.constant_schedule(peak),
    'linear': lambda: optax.linear_schedule(peak, 0.0, after),
    'cosine': lambda: optax.cosine_decay_schedule(peak, after),
  }[update.schedule]()
  if not update.warmup_steps:
    return _promoting(main)
  # The first update of a warm-up from zero would do nothing, so the rise starts one step in.
  rise = optax.linear_schedule(peak / (update.warmup_steps + 1), peak, update.warmup_steps)
  return _promoting(optax.join_schedules([rise, main], [update.warmup_steps]))


def is_range(path: str) -> bool:
  """Whether a leaf of what is trained is the range of a quantizer."""
  return trees.is_match('(ranges|act)/.*|slices/.*/high', path)


def _decays(tree: Tree) -> Tree:
  return trees.map_with_path(
    lambda path, _: path.rsplit('/', 1)[-1] not in ('scale', 'bias') and not is_range(path), tree
  )


def _relative(updates: Tree, params: Tree, ratio: float) -> Tree:
  """Updates of ranges as shares of themselves, as if their logarithms moved.

  Ranges lie orders of magnitude apart, so that no absolute step suits all (Jain et al. 2020, "Trained
  Quantization Thresholds", §5.2).
  """
  return trees.map_with_path(
    lambda path, u, p: u * (ratio * jnp.abs(p)) if is_range(path) else u, updates, params
  )


def make(update: Update, total_steps: int) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW, in float32 whatever the dtype of the weights.

  Raises:
    UserError: as `check`.
  """
  check(update, total_steps)
  clip = [optax.clip_by_global_norm(update.clip_norm)] if update.clip_norm else []
  adamw = optax.adamw(
    schedule(update, total_steps),
    b1=update.beta1,
    b2=update.beta2,
    eps=update.eps,
    weight_decay=update.weight_decay,
    mask=_decays,
  )
  inner = optax.chain(*clip, adamw)

  # Moments start from float32 views of the weights, or a bfloat16 weight would get bfloat16 moments.
  def init(params: Tree) -> Tree:
    return inner.init(precision.cast_floating(params, jnp.dtype('float32')))

  @_promoting
  def step(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    wide = [precision.cast_floating(tree, jnp.dtype('float32')) for tree in (gradients, params)]
    updates, state = inner.update(wide[0], state, wide[1])
    return _relative(updates, wide[1], update.range_rate / update.learning_rate), state

  return optax.GradientTransformation(init, step)


def apply(params: Tree, updates: Tree, rounding: str, key: jax.Array) -> Tree:
  """params + updates, added in float32 and rounded once to each leaf's dtype."""
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(key, max(len(leaves), 1))
  into = precision.ROUNDINGS[rounding]
  moved = [
    into(p.astype(jnp.float32) + u.astype(jnp.float32), p.dtype, k)
    for p, u, k in zip(leaves, jax.tree.leaves(updates), keys, strict=False)
  ]
  return jax.tree.unflatten(structure, moved)


def applied_steps(state: Tree) -> jax.Array:
  """How many updates were applied, from the optimizer's own counter."""
  counts = [leaf for path, leaf in trees.flatten(state).items() if path.rsplit('/', 1)[-1] == 'count']
  return counts[0]
