"""Weights and inputs that are trained through their quantizer.

The forward pass computes what the converted model computes, by the same functions, so that converting changes
nothing. Rounding has a gradient of zero almost everywhere; what stands in for it is chosen by name:

  ste    straight through: 1 for what the range holds, its bounds included, 0 beyond them (Bengio et al.
         2013, "Estimating or Propagating Gradients Through Stochastic Neurons"). The range is given, or the
         largest magnitude there is.
  lsq    ste, and the range learns: a step s with codes up to q has the gradient round(x/s) - x/s inside and
         ±q beyond, times 1/sqrt(count · q) (Esser et al. 2020, "Learned Step Size Quantization", §2.1, 2.2)
  pact   ste, and the range learns from what lies beyond it: ±1 there, 0 inside (Choi et al. 2018, "PACT")

What learns is the range, q · s, not the step: it has the size of the weights themselves in every format, and
one learning rate serves both.
"""

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from qjax.quant import activations, qtensor
from qjax.quant.activations import ActivationScheme
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor

# What stands in for the gradient of rounding; see above.
GRADIENTS = ('ste', 'lsq', 'pact')
LEARNED = ('lsq', 'pact')
# A range that training drives to zero or below counts as this.
LEAST_RANGE = 1e-8


class Correction(Protocol):
  """What is added to a weight before it is quantized, such as an adapter."""

  def delta(self) -> jax.Array:
    """float32 [K, N]."""


def usable(high: jax.Array) -> jax.Array:
  """A learned range as it is used: float32, at least 1e-8."""
  return jnp.maximum(high.astype(jnp.float32), LEAST_RANGE)


def _range_gradient(
  share: jax.Array, level: jax.Array, is_inside: jax.Array, largest: float, gradient: str
) -> jax.Array:
  """d Q(x) / d range for each x = share · step with Q(x) = level · step, as `lsq` or `pact` has it."""
  inside = (level - share) / np.float32(largest) if gradient == 'lsq' else jnp.zeros_like(share)
  return jnp.where(is_inside, inside, jnp.sign(share))


def _scale_of_gradient(count: jax.Array | float, largest: float, gradient: str) -> jax.Array:
  """The factor of LSQ, §2.2, which balances the update of one step with those of `count` weights."""
  return jax.lax.rsqrt(jnp.float32(count) * np.float32(largest)) if gradient == 'lsq' else jnp.float32(1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def through(w: jax.Array, high: jax.Array | None, scheme: Scheme, gradient: str = 'ste') -> jax.Array:
  """The float32 values [..., K, N] that w takes in a scheme, with a gradient for w and its ranges.

  Args:
    w: of any floating dtype.
    high: float32 in the shape of the scales, the largest magnitudes represented; None takes those of w.
    scheme: symmetric where `high` is given.
    gradient: a name in `GRADIENTS`.
  """
  return _through_fwd(w, high, scheme, gradient)[0]


def _through_fwd(
  w: jax.Array, high: jax.Array | None, scheme: Scheme, gradient: str
) -> tuple[jax.Array, Any]:
  return qtensor.dequantize(quantized(w, high, scheme)), (w, high)


def _through_bwd(
  scheme: Scheme, gradient: str, residual: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  w, high = residual
  if high is None or scheme.numbers.is_float:  # nothing lies beyond its own largest magnitude
    return g.astype(w.dtype), None
  k, n = w.shape[-2:]
  largest = scheme.numbers.largest
  scale = qtensor.read_scales(qtensor.scales_for(usable(high), scheme))
  step = qtensor.spread(scale, scheme, k, n)
  share = w.astype(jnp.float32) / jnp.where(step == 0, 1, step)
  # A bound is the range itself where scales rest in float32: their product with the largest code may round.
  rests_exactly = scheme.scale == 'float32' and not scheme.double_quantized
  bound = usable(high) if rests_exactly else jnp.abs(scale) * largest
  is_inside = jnp.abs(w.astype(jnp.float32)) <= qtensor.spread(bound, scheme, k, n)
  dw = jnp.where(is_inside, g, 0)
  if gradient == 'ste':
    return dw.astype(w.dtype), None
  level = scheme.numbers.decode(qtensor.encode(w, scheme, scale))
  each = g.astype(jnp.float32) * _range_gradient(share, level, is_inside, largest, gradient)
  d_high = qtensor.sum_over(each, scheme)
  count = qtensor.sum_over(jnp.ones((k, n), jnp.float32), scheme)
  d_high = d_high * _scale_of_gradient(count, largest, gradient)
  return dw.astype(w.dtype), d_high.astype(high.dtype)


through.defvjp(_through_fwd, _through_bwd)


def quantized(
  w: jax.Array, high: jax.Array | None, scheme: Scheme, key: jax.Array | None = None
) -> QTensor:
  """w [..., K, N] at rest, in its own range or a given one, in training as after conversion.

  With a key integers are rounded up or down at random, so that their mean is w.
  """
  high = None if high is None else usable(high)
  if key is None:
    return qtensor.quantize(w, scheme, high=high)
  assert scheme.numbers.is_integer, 'the caller has refused tables'
  stored, offset = qtensor.ranges(w, scheme) if high is None else (qtensor.scales_for(high, scheme), None)
  scale = qtensor.read_scales(stored)
  share = jax.random.uniform(key, w.shape, jnp.float32, -0.5, 0.5)
  noise = share * qtensor.spread(scale, scheme, *w.shape[-2:])
  return qtensor.assemble(qtensor.encode(w + noise, scheme, scale, offset), stored, offset, scheme)


def first_range(w: jax.Array, scheme: Scheme) -> jax.Array:
  """Where a learned range starts: the largest magnitudes of w, in the shape of the scales."""
  return usable(qtensor.absmax(w.astype(jnp.float32), scheme))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeQuantized:
  """A weight [K, N] of one layer that moves in full precision and is multiplied in few bits.

  Attributes:
    base: plain, or itself at rest in a scheme.
    high: float32 in the shape of the scales, the ranges; None takes the largest magnitudes.
    correction: what is added to the base before quantizing; None is nothing.
    scheme: in which it is multiplied.
    gradient: a name in `GRADIENTS`.
    key: draws how it is rounded; None is to nearest.
  """

  base: jax.Array | QTensor
  high: jax.Array | None
  correction: Correction | None
  key: jax.Array | None
  scheme: Scheme = dataclasses.field(metadata={'static': True})
  gradient: str = dataclasses.field(default='ste', metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    return self.base.shape

  @property
  def ndim(self) -> int:
    return self.base.ndim

  @property
  def inputs(self) -> int:
    return self.shape[-2]

  def value(self) -> jax.Array:
    """float32 [K, N], before quantizing."""
    base = self.base
    w = qtensor.dequantize(base) if isinstance(base, QTensor) else base.astype(jnp.float32)
    return _corrected(w, self.correction)

  def quantized(self) -> QTensor:
    """The weight at rest, as conversion stores it."""
    return quantized(self.value(), self.high, self.scheme, self.key)

  def pull(self, g: jax.Array) -> 'FakeQuantized':
    """Gradients of base, ranges and correction for g = dL/dW [K, N] of the quantized weight W."""

    def values(base: Any, high: Any, correction: Any) -> jax.Array:
      whole = dataclasses.replace(self, base=base, high=high, correction=correction)
      return through(whole.value(), high, self.scheme, self.gradient)

    is_plain = not isinstance(self.base, QTensor)
    parts = (self.base, self.high, self.correction)
    _, back = jax.vjp(values, *parts) if is_plain else jax.vjp(partial(values, parts[0]), *parts[1:])
    found: Any = back(g.astype(jnp.float32))
    base, high, correction = found if is_plain else (None, *found)
    return dataclasses.replace(self, base=base, high=high, correction=correction, key=None)


def _corrected(w: jax.Array, correction: Correction | None) -> jax.Array:
  # Rounded to float32 by name: a compiler may keep more digits of a sum in one program than in another.
  return w if correction is None else exact(w + exact(correction.delta()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slices:
  """What moves of a stack of layers: some of its matrices, each trained through its quantizer.

  Attributes:
    w: [n, K, N] of any floating dtype.
    high: float32 [n, …] in the shape of their scales, the ranges; None takes the largest magnitudes.
    correction: of each, a stack of n; None is nothing.
  """

  w: jax.Array
  high: jax.Array | None = None
  correction: Correction | None = None

  def __getitem__(self, slot: int) -> 'Slices':
    """One of them, without the leading axis."""
    return jax.tree.map(lambda stack: stack[slot], self)

  def value(self) -> jax.Array:
    """float32, before quantizing."""
    return _corrected(self.w.astype(jnp.float32), self.correction)

  def quantized(self, scheme: Scheme) -> QTensor:
    """At rest, as products see them."""
    return quantized(self.value(), self.high, scheme)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patched:
  """A weight [K, N] of one layer that rests, unless the layer is among those that move.

  Attributes:
    rest: at rest in a scheme, which is also that of the slices.
    slices: those of the whole stack.
    slot: int32 [], which slice takes the place of this layer's weight; -1 is none.
    gradient: a name in `GRADIENTS`.
  """

  rest: QTensor
  slices: Slices
  slot: jax.Array
  gradient: str = dataclasses.field(default='ste', metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    return self.rest.shape

  @property
  def ndim(self) -> int:
    return self.rest.ndim

  @property
  def inputs(self) -> int:
    return self.rest.inputs

  @property
  def scheme(self) -> Scheme:
    return self.rest.scheme

  def _own(self, slices: Slices) -> Slices:
    index = jnp.maximum(self.slot, 0)
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), slices)

  def quantized(self) -> QTensor:
    """The weight at rest, as conversion stores it."""
    mine = self._own(self.slices).quantized(self.scheme)
    return jax.tree.map(lambda new, old: jnp.where(self.slot >= 0, new, old), mine, self.rest)

  def pull(self, g: jax.Array) -> 'Patched':
    """Gradients of the slices for g = dL/dW [K, N] of this layer's weight, zeros for a layer that rests."""

    def values(slices: Slices) -> jax.Array:
      own = self._own(slices)
      return through(own.value(), own.high, self.scheme, self.gradient)

    def moving() -> Slices:
      return jax.vjp(values, self.slices)[1](g.astype(jnp.float32))[0]

    found = jax.lax.cond(self.slot >= 0, moving, lambda: jax.tree.map(jnp.zeros_like, self.slices))
    nothing: Any = None
    return dataclasses.replace(self, rest=nothing, slices=found, slot=nothing)


# A weight that training moves and products see in few bits.
Trained = FakeQuantized | Patched


def exact(x: jax.Array) -> jax.Array:
  """float32 x, rounded before what follows: no compiler may fuse the two and round once."""
  return jax.lax.reduce_precision(x, 8, 23)


def pull_input(
  x: jax.Array, high: jax.Array, scheme: ActivationScheme, g: jax.Array, gradient: str
) -> tuple[jax.Array, jax.Array]:
  """Gradients of x [..., K] and its range float32 [] for g, that of x as a static scheme has it.

  LSQ counts the K features of a layer, not the tokens (§2.2).
  """
  share = x.astype(jnp.float32) * (scheme.largest / jnp.maximum(high, activations.TINY))
  is_inside = jnp.abs(x.astype(jnp.float32)) <= high
  dx = jnp.where(is_inside, g, jnp.zeros((), g.dtype))
  level = jnp.clip(jnp.round(share), -scheme.largest, scheme.largest)
  each = g.astype(jnp.float32) * _range_gradient(share, level, is_inside, scheme.largest, gradient)
  d_high = jnp.sum(each) * _scale_of_gradient(x.shape[-1], scheme.largest, gradient)
  return dx, d_high.astype(high.dtype)


def gradient_codes(
  g: jax.Array, axis: int, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """A gradient as int8 codes of its shape and float32 scales [..., 1, ...], one for all along `axis`.

  With a key codes round up or down at random, so that their mean is the gradient; without, to nearest.
  """
  wide = g.astype(jnp.float32)
  top = jnp.maximum(jnp.max(jnp.abs(wide), axis, keepdims=True, initial=0.0), activations.TINY)
  share = wide * (127 / top)
  if key is None:
    rounded = jnp.round(share)
  else:
    rounded = jnp.floor(share + jax.random.uniform(key, share.shape, jnp.float32))
  # What shares a scale with a NaN or an infinity is NaN when it is read back, so that the step is skipped.
  scale = jnp.where(jnp.isfinite(top), top * np.float32(1 / 127), np.float32(np.nan))
  return jnp.clip(rounded, -127, 127).astype(jnp.int8), scale
