"""In which numbers a model rests, computes, accumulates and answers, and what keeps float16 finite.

`Policy` names four dtypes. A loss scale is one of three values with the same methods, so that one train
step serves float32, bfloat16 and float16: `NoLossScale` does nothing, `StaticLossScale` multiplies by a
constant, `DynamicLossScale` halves on overflow and doubles after a run of finite steps (Micikevicius et
al. 2018, "Mixed Precision Training", §3.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from qjax.errors import UserError, nearest

Tree = Any

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16, 'float16': jnp.float16}


def dtype_named(name: str, what: str) -> jnp.dtype:
  """The floating dtype of that name.

  Raises:
    UserError: the name is not one of float32, bfloat16, float16.
  """
  if name not in DTYPES:
    raise UserError(f'{what} = {name!r} is not a dtype of this library{nearest(name, DTYPES)}')
  return jnp.dtype(DTYPES[name])


@dataclasses.dataclass(frozen=True)
class Policy:
  """The four doors at which a dtype is decided.

  Attributes:
    param: what trainable weights rest in. Gradients are summed and moments kept in float32.
    compute: the operands of matrix products and the residual stream.
    accum: the result of a matrix product before it is cast back to `compute`.
    output: logits and everything after them.
  """

  param: jnp.dtype
  compute: jnp.dtype
  accum: jnp.dtype
  output: jnp.dtype


def policy(
  param: str = 'float32', compute: str = 'float32', accum: str = 'float32', output: str = 'float32'
) -> Policy:
  """A policy from dtype names.

  Raises:
    UserError: an unknown name, or accumulation that is narrower than float32 has a reason to be.
  """
  names = {'param': param, 'compute': compute, 'accum': accum, 'output': output}
  dtypes = {field: dtype_named(name, f'precision.{field}') for field, name in names.items()}
  if dtypes['accum'].itemsize < dtypes['compute'].itemsize:
    raise UserError(
      f'precision.accum = {accum!r} is narrower than precision.compute = {compute!r}: sums would lose what'
      f' the products hold. Use accum = {compute!r} or float32'
    )
  return Policy(**dtypes)


def cast_floating(tree: Tree, dtype: jnp.dtype) -> Tree:
  """The tree with its floating leaves in `dtype`; integers and booleans stay."""
  return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def is_all_finite(tree: Tree) -> jax.Array:
  """Scalar bool: no leaf of the tree holds a NaN or an infinity."""
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.stack(leaves).all() if leaves else jnp.asarray(True)


def stochastic_round(x: jax.Array, dtype: jnp.dtype, key: jax.Array) -> jax.Array:
  """x (float32) in `dtype`, rounded up or down with the probability that makes the mean exact.

  For bfloat16 the low 16 bits of the float32 pattern get a uniform 16-bit integer added before they are
  cut off, which is exact for either sign. Infinities and NaN pass unchanged, and a finite value never
  becomes infinite. float32 is returned as it is.

  Raises:
    NotImplementedError: float16, whose exponent differs: keep float32 master weights there.
  """
  if dtype == jnp.float32:
    return x
  if dtype != jnp.bfloat16:
    raise NotImplementedError(f'stochastic rounding to {dtype} is not implemented; bfloat16 is')
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  rounded = (bits + noise) & jnp.uint32(0xFFFF0000)
  is_special = (bits & jnp.uint32(0x7F800000)) == jnp.uint32(0x7F800000)
  overflows = (rounded & jnp.uint32(0x7F800000)) == jnp.uint32(0x7F800000)
  rounded = jnp.where(overflows, bits & jnp.uint32(0xFFFF0000), rounded)
  value = jax.lax.bitcast_convert_type(rounded, jnp.float32)
  return jnp.where(is_special, x.astype(jnp.float32), value).astype(jnp.bfloat16)


Rounding = Callable[[jax.Array, jnp.dtype, jax.Array], jax.Array]

ROUNDINGS: dict[str, Rounding] = {
  'nearest': lambda x, dtype, key: x.astype(dtype),
  'stochastic': stochastic_round,
}


class LossScale(Protocol):
  """State that multiplies the loss before the backward pass and divides the gradients after it."""

  @property
  def skipped(self) -> jax.Array: ...

  @property
  def consecutive(self) -> jax.Array: ...

  def scale(self, loss: jax.Array) -> jax.Array: ...

  def unscale(self, gradients: Tree) -> Tree: ...

  def adjust(self, is_finite: jax.Array) -> Self: ...

  def factor(self) -> jax.Array: ...


def _counted(state: Any, is_finite: jax.Array) -> dict[str, Any]:
  skip = 1 - is_finite.astype(jnp.int32)
  return {'skipped': state.skipped + skip, 'consecutive': (state.consecutive + skip) * skip}


def _zero() -> jax.Array:
  return jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoLossScale:
  """Scale one. Still counts the steps whose gradients were not finite, which every policy skips."""

  skipped: jax.Array = dataclasses.field(default_factory=_zero)
  consecutive: jax.Array = dataclasses.field(default_factory=_zero)

  def scale(self, loss: jax.Array) -> jax.Array:
    return loss

  def unscale(self, gradients: Tree) -> Tree:
    return gradients

  def adjust(self, is_finite: jax.Array) -> Self:
    return dataclasses.replace(self, **_counted(self, is_finite))

  def factor(self) -> jax.Array:
    return jnp.ones((), jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
  """A constant scale (float32 scalar)."""

  value: jax.Array
  skipped: jax.Array = dataclasses.field(default_factory=_zero)
  consecutive: jax.Array = dataclasses.field(default_factory=_zero)

  def scale(self, loss: jax.Array) -> jax.Array:
    return loss * self.value.astype(loss.dtype)

  def unscale(self, gradients: Tree) -> Tree:
    """Gradients in float32, divided by the scale."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) / self.value, gradients)

  def adjust(self, is_finite: jax.Array) -> Self:
    return dataclasses.replace(self, **_counted(self, is_finite))

  def factor(self) -> jax.Array:
    return self.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(StaticLossScale):
  """Halved on overflow, never below one; doubled after `period` finite steps in a row, up to 2^24."""

  good_steps: jax.Array = dataclasses.field(default_factory=_zero)
  period: int = dataclasses.field(default=2000, metadata={'static': True})

  def adjust(self, is_finite: jax.Array) -> Self:
    good = jnp.where(is_finite, self.good_steps + 1, 0)
    grows = good >= self.period
    # A scale that the user started above the ceiling may fall to it but is never raised.
    grown = jnp.maximum(self.value, jnp.minimum(self.value * 2, 2.0**24))
    lowered = jnp.maximum(self.value / 2, 1.0)
    value = jnp.where(is_finite, jnp.where(grows, grown, self.value), lowered)
    return dataclasses.replace(
      self, value=value, good_steps=jnp.where(grows, 0, good), **_counted(self, is_finite)
    )


def loss_scale(kind: str, initial: float = 2.0**15, period: int = 2000) -> LossScale:
  """The loss scale of a kind: 'none', 'static' or 'dynamic'."""
  kinds = ('none', 'static', 'dynamic')
  if kind not in kinds:
    raise UserError(f'precision.loss_scale = {kind!r} is not known{nearest(kind, kinds)}')
  if kind == 'none':
    return NoLossScale()
  if not initial >= 1:
    raise UserError(f'precision.loss_scale_initial = {initial} must be at least 1')
  value = jnp.asarray(initial, jnp.float32)
  if kind == 'static':
    return StaticLossScale(value)
  if period < 1:
    raise UserError(f'precision.loss_scale_period = {period} must be at least 1 step')
  return DynamicLossScale(value, period=period)
