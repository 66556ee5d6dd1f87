"""From `Update` to an optax transformation over exactly what is trained."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from qjax import precision, trees
from qjax.errors import UserError, nearest
from qjax.method import Update
from qjax.quant import moments
from qjax.quant.moments import Moment

Tree = Any
F = TypeVar('F', bound=Callable[..., Any])
SCHEDULES = ('constant', 'linear', 'cosine')
KINDS = ('separate', 'fused', 'fused_global')
# The smallest leaf, of one layer, whose moments rest in 8 bits, as in Dettmers et al. 2022.
LEAST_8BIT = 4096


def check(update: Update, total_steps: int) -> None:
  """Refuses settings that cannot work.

  Raises:
    UserError: naming the field.
  """
  if update.name not in OPTIMIZERS:
    raise UserError(f'optimizer.name = {update.name!r} is not known{nearest(update.name, OPTIMIZERS)}')
  if update.kind not in KINDS:
    raise UserError(f'optimizer.kind = {update.kind!r} is not known{nearest(update.kind, KINDS)}')
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Adam8bit:
  """Counter, and both moments of each leaf: a `Moment`, or float32 where those would save nothing."""

  count: jax.Array
  mu: Tree
  nu: Tree


def _scale_by_adam8bit(update: Update) -> optax.GradientTransformation:
  """Adam's direction from moments that rest in 8 bits; the arithmetic between is float32.

  Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Leaves of fewer than 4096 elements
  a layer, and those that weight decay spares, keep float32 moments.
  """

  def init(params: Tree) -> _Adam8bit:
    def zeros(signed: bool) -> Tree:
      def one(path: str, w: jax.Array, is_matrix: bool) -> Any:
        size = math.prod(w.shape[1:] if trees.is_stacked(path) else w.shape)
        is_narrow = is_matrix and size >= LEAST_8BIT
        return moments.zeros(w.shape, signed) if is_narrow else jnp.zeros(w.shape, jnp.float32)

      return trees.map_with_path(one, params, _decays(params))

    return _Adam8bit(jnp.zeros((), jnp.int32), zeros(True), zeros(False))

  inner = optax.scale_by_adam(update.beta1, update.beta2, update.eps)

  def one(g: jax.Array, mu: Any, nu: Any, count: jax.Array) -> tuple[jax.Array, Any, Any]:
    if not isinstance(mu, Moment):
      direction, after = inner.update(g, optax.ScaleByAdamState(count, mu, nu))
      return direction, after.mu, after.nu
    if g.ndim > 2:  # a layer of a stack at a time, or float32 moments of all of them would be there at once
      return jax.lax.map(lambda x: one(x[0], x[1], x[2], count), (g, mu, nu))
    direction, after = inner.update(g, optax.ScaleByAdamState(count, mu.decode(), nu.decode()))
    return direction, moments.encode(after.mu), moments.encode(after.nu, signed=False)

  def step(gradients: Tree, state: _Adam8bit, params: Tree | None = None) -> tuple[Tree, _Adam8bit]:
    del params
    leaves, structure = jax.tree.flatten(gradients)
    is_moment = lambda x: isinstance(x, Moment)
    held = (jax.tree.leaves(tree, is_leaf=is_moment) for tree in (state.mu, state.nu))
    found = [one(g, mu, nu, state.count) for g, mu, nu in zip(leaves, *held, strict=True)]
    direction, mu, nu = (jax.tree.unflatten(structure, column) for column in zip(*found, strict=True))
    return direction, _Adam8bit(optax.safe_increment(state.count), mu, nu)

  return optax.GradientTransformation(init, step)


def _clip_by_rms() -> optax.GradientTransformation:
  """Shortens a direction whose mean square exceeds 1; each layer of a stack is one of its own."""

  def one(path: str, u: jax.Array) -> jax.Array:
    axes = tuple(range(1 if trees.is_stacked(path) else 0, u.ndim))
    return u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(u), axes, keepdims=True)))

  return optax.stateless(lambda updates, _: trees.map_with_path(one, updates))


def _sgd() -> optax.GradientTransformation:
  """The gradient; of a range, that of its logarithm, so that `_relative` makes a step of the logarithm."""

  def one(path: str, g: jax.Array, p: jax.Array) -> jax.Array:
    return g * jnp.abs(p) if is_range(path) else g

  return optax.stateless(lambda gradients, params: trees.map_with_path(one, gradients, params))


# What multiplies the learning rate, from the fields that `Update` lists.
OPTIMIZERS: dict[str, Callable[[Update], optax.GradientTransformation]] = {
  'adamw': lambda u: optax.scale_by_adam(u.beta1, u.beta2, u.eps),
  'adamw8bit': _scale_by_adam8bit,
  # Second moments of a matrix as the product of a row and a column, over a window that widens with the steps;
  # a direction longer than 1 in the mean square is shortened (Shazeer and Stern 2018, algorithm 4). The two
  # largest axes are a row and a column as long as there are fewer layers than either has elements, or than
  # 128.
  'adafactor': lambda u: optax.chain(optax.scale_by_factored_rms(), _clip_by_rms()),
  'lion': lambda u: optax.scale_by_lion(u.beta1, u.beta2),
  'sgd': lambda u: _sgd(),
}


def make(update: Update, total_steps: int) -> optax.GradientTransformation:
  """Clip by global norm, then the optimizer, in float32 whatever the dtype of the weights.

  Raises:
    UserError: as `check`.
  """
  check(update, total_steps)
  clip = [optax.clip_by_global_norm(update.clip_norm)] if update.clip_norm else []
  moves = optax.chain(
    OPTIMIZERS[update.name](update),
    optax.add_decayed_weights(update.weight_decay, _decays),
    optax.scale_by_learning_rate(schedule(update, total_steps)),
  )
  inner = optax.chain(*clip, moves)

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
