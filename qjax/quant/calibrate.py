"""Ranges of tensors from the data that flows through them.

An observer sees batches, keeps a small state and says in the end between which two numbers a tensor is to be
quantized. All share one interface, for activations and weights alike:

  state = observer.init()
  state = observer.update(state, x, mask)     x [..., K]; jit it, scan it, vmap it over a stack of layers
  observer.range(state, bits)                 on the host; a state stacked by vmap gives stacked ranges

Tokens that `mask` leaves out never count. But for the moving average, whose point it is, the order of
batches, their size and the side of the padding change no bit of a range: states hold largest values and whole
counts.

Histograms have bins of |x| whose width is a power of two. When a batch does not fit, neighbours are merged
until it does, which is exact: the counts are those of one pass with the final width. A count is 64 bits in
two words, because JAX has no 64-bit integers by default, and a million tokens may hold 2^31 values that fall
into one bin. What is computed from the counts is computed on the host in float64.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError, nearest

# Bins of a histogram: the largest magnitude falls into the upper half of them, so a bin is at most 1/32768 of
# it. Activations have outliers a thousand times larger than the rest, which must not end up in one bin.
LOG_BINS = 16
BINS = 2**LOG_BINS
# The least exponent of a bin's width; its inverse is then a normal float32, too.
LEAST_EXPONENT = -126


@dataclasses.dataclass(frozen=True)
class Range:
  """Between which numbers a tensor is quantized; float32 [], or [K] for one range a channel.

  Symmetric observers give low = -high. Both are 0 for a tensor of zeros.
  """

  low: np.ndarray
  high: np.ndarray


class Observer(Protocol):
  """What turns batches into a range; a frozen dataclass, and its state a pytree of arrays."""

  @property
  def name(self) -> str:
    """Its name in `OBSERVERS`."""

  def init(self) -> Any:
    """The state before anything was seen."""

  def update(self, state: Any, x: jax.Array, mask: jax.Array | None = None) -> Any:
    """The state after x [..., K] of any floating dtype.

    Args:
      state: what `init` or `update` returned.
      x: values, one token a row.
      mask: bool, broadcastable to the leading axes of x: True for what counts. None: all does.
    """

  def range(self, state: Any, bits: int) -> Range:
    """The range for integers of `bits` bits (2 to 8).

    Raises:
      UserError: nothing was seen, or something that is not finite.
    """


# ---- largest values ----------------------------------------------------------------------------------------


def _counted(x: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Which of the rows of x [..., K] count, as bool [..., 1]."""
  if mask is None:
    return jnp.ones((*x.shape[:-1], 1), bool)
  return jnp.broadcast_to(mask, x.shape[:-1])[..., None]


def _largest(x: jax.Array, counted: jax.Array, channels: int | None) -> jax.Array:
  """The largest x that counts, float32 [] or [K]; -inf if there is none, NaN if there is one."""
  axes = tuple(range(x.ndim - (channels is not None)))
  return jnp.max(jnp.where(counted, x, -np.inf), axis=axes, initial=-np.inf)


def _check_bits(bits: int) -> None:
  if not 2 <= bits <= 8:
    raise UserError(f'ranges are for integers of 2 to 8 bits, not {bits}')


def _checked(values: np.ndarray) -> np.ndarray:
  """float32 values that an observer gathered; -inf stands for 'nothing seen' throughout."""
  values = np.asarray(values, np.float32)
  if (values == -np.inf).any():
    raise UserError('no token was observed: every one was masked out, or no batch was given')
  if not np.isfinite(values).all():
    raise UserError(
      'NaN or infinity was observed. A range cannot hold it: compute in bfloat16 or float32 instead of '
      'float16, and look for a NaN in the weights'
    )
  return values


def _symmetric(threshold: np.ndarray) -> Range:
  return Range(-threshold, threshold)


def _check_channels(channels: int | None) -> None:
  if channels is not None and channels < 1:
    raise UserError(f'channels = {channels}: give the size of the last axis, or None for one range a tensor')


@dataclasses.dataclass(frozen=True)
class AbsMax:
  """The largest magnitude. `channels`: None for one range a tensor, or K for one each of the last axis."""

  channels: int | None = None
  name = 'absmax'

  def __post_init__(self) -> None:
    _check_channels(self.channels)

  def init(self) -> jax.Array:
    return jnp.full(() if self.channels is None else (self.channels,), -np.inf, jnp.float32)

  def update(self, state: jax.Array, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    return jnp.maximum(state, _largest(jnp.abs(x.astype(jnp.float32)), _counted(x, mask), self.channels))

  def range(self, state: jax.Array, bits: int) -> Range:
    _check_bits(bits)
    return _symmetric(_checked(np.asarray(state)))


@dataclasses.dataclass(frozen=True)
class MinMax:
  """The least and the largest value, for asymmetric integers. `channels` as in `AbsMax`.

  The state is float32 [2] or [2, K]: the largest of -x and the largest of x.
  """

  channels: int | None = None
  name = 'minmax'

  def __post_init__(self) -> None:
    _check_channels(self.channels)

  def init(self) -> jax.Array:
    return jnp.full((2,) if self.channels is None else (2, self.channels), -np.inf, jnp.float32)

  def update(self, state: jax.Array, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    x, counted = x.astype(jnp.float32), _counted(x, mask)
    both = [_largest(-x, counted, self.channels), _largest(x, counted, self.channels)]
    return jnp.maximum(state, jnp.stack(both))

  def range(self, state: jax.Array, bits: int) -> Range:
    _check_bits(bits)
    axis = -1 if self.channels is None else -2
    values = _checked(np.asarray(state))
    return Range(-np.take(values, 0, axis), np.take(values, 1, axis))


@dataclasses.dataclass(frozen=True)
class MovingAverage:
  """The exponential moving average of each batch's largest magnitude. `channels` as in `AbsMax`.

  average = momentum · average + (1 - momentum) · absmax, from the first batch's absmax on. A batch of which
  nothing counts changes nothing. Alone among the observers it depends on how tokens are dealt into batches.
  """

  momentum: float = 0.9
  channels: int | None = None
  name = 'moving_average'

  def __post_init__(self) -> None:
    _check_channels(self.channels)
    if not 0 <= self.momentum < 1:
      raise UserError(f'momentum = {self.momentum} of a moving average must be at least 0 and less than 1')

  def init(self) -> jax.Array:
    return AbsMax(self.channels).init()

  def update(self, state: jax.Array, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    new = _largest(jnp.abs(x.astype(jnp.float32)), _counted(x, mask), self.channels)
    average = self.momentum * state + (1 - self.momentum) * new
    return jnp.where(new == -np.inf, state, jnp.where(state == -np.inf, new, average))

  def range(self, state: jax.Array, bits: int) -> Range:
    _check_bits(bits)
    return _symmetric(_checked(np.asarray(state)))


# ---- histograms --------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histogram:
  """How many |x| lie in [i · 2^exponent, (i + 1) · 2^exponent).

  Attributes:
    counts: uint32 [2, BINS], the low words and the high words.
    exponent: int32, the least for which the largest |x| fits.
    largest: float32, the largest |x| itself; -inf if nothing was seen.
  """

  counts: jax.Array
  exponent: jax.Array
  largest: jax.Array

  @classmethod
  def empty(cls) -> Self:
    return cls(jnp.zeros((2, BINS), jnp.uint32), jnp.int32(LEAST_EXPONENT), jnp.float32(-np.inf))

  def add(self, x: jax.Array, mask: jax.Array | None) -> 'Histogram':
    """With the values of x [..., K] whose rows count; at most 2^32 - 1 values at a time."""
    x, counted = jnp.abs(x.astype(jnp.float32)), _counted(x, mask)
    largest = jnp.maximum(self.largest, _largest(x, counted, None))
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, 0), jnp.int32)
    # 2^(biased exponent - 126) is the least power of two above the largest value. An infinity, which `range`
    # refuses, is kept from overflowing here.
    exponent = jnp.clip((bits >> 23) - 126 - LOG_BINS, LEAST_EXPONENT, 128 - LOG_BINS)
    # After LOG_BINS mergers everything is in the first bin and stays there.
    mergers = jnp.minimum(exponent - self.exponent, LOG_BINS)
    counts = jax.lax.fori_loop(0, mergers, lambda _, counts: _merged(counts), self.counts)
    # Dividing by a power of two is exact, so that merging bins later is the same as wide bins now.
    inverse = jax.lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
    index = (jnp.where(counted, x, 0) * inverse).astype(jnp.int32)
    ones = jnp.broadcast_to(counted, x.shape).astype(jnp.uint32)
    new = jnp.zeros(BINS, jnp.uint32).at[index.ravel()].add(ones.ravel(), mode='drop')
    return Histogram(_sum(counts, jnp.stack([new, jnp.zeros_like(new)])), exponent, largest)


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """a + b of 64-bit numbers [2, …] in two words each."""
  low = a[0] + b[0]
  return jnp.stack([low, a[1] + b[1] + (low < a[0]).astype(jnp.uint32)])


def _merged(counts: jax.Array) -> jax.Array:
  """The counts [2, BINS] of bins twice as wide."""
  half = _sum(counts[:, ::2], counts[:, 1::2])
  return jnp.concatenate([half, jnp.zeros_like(half)], axis=1)


class _Counts:
  """A histogram on the host, in float64. Within a bin values are taken to be spread evenly.

  Attributes:
    width: of a bin.
    counts: int64, up to and including the bin of the largest value.
    largest: the largest |x|.
    total: how many values there are.
  """

  def __init__(self, histogram: Histogram) -> None:
    self.largest = float(_checked(np.asarray(histogram.largest)))
    self.width = 2.0 ** int(histogram.exponent)
    words = np.asarray(histogram.counts).astype(np.int64)
    self.counts = (words[0] + (words[1] << 32))[: int(self.largest / self.width) + 1]
    self.total = int(self.counts.sum())
    edges = np.arange(len(self.counts) + 1) * self.width
    # Densities, and what lies below each edge: how many, the sum of |x| and of x².
    self._edges = edges
    self._density = self.counts / self.width
    parts = [self._density * np.diff(edges ** (p + 1)) / (p + 1) for p in range(3)]
    self._below = np.stack([np.concatenate([[0.0], np.cumsum(part)]) for part in parts])

  def below(self, t: np.ndarray) -> np.ndarray:
    """Sums of 1, |x| and x² over |x| < t, [3, …] for t of any shape."""
    t = np.minimum(t, self._edges[-1])
    i = np.minimum((t / self.width).astype(np.int64), len(self.counts) - 1)
    parts = [self._density[i] * (t ** (p + 1) - self._edges[i] ** (p + 1)) / (p + 1) for p in range(3)]
    return self._below[:, i] + np.stack(parts)

  def moments(self) -> tuple[float, float]:
    """E|x| and E x²."""
    return self._below[1, -1] / self.total, self._below[2, -1] / self.total

  def squared_errors(self, clips: np.ndarray, bits: int) -> np.ndarray:
    """Mean squared error of symmetric integers of `bits` bits for each clip [C].

    Between two midpoints of levels the sum of (x - level)² needs only the sums of 1, |x| and x².
    """
    largest = 2 ** (bits - 1) - 1
    level = clips[:, None] * np.arange(largest + 1) / largest
    ends = np.full_like(clips, np.inf)[:, None]
    upper = self.below(np.concatenate([(level[:, 1:] + level[:, :-1]) / 2, ends], axis=1))
    count, first, second = np.diff(upper, axis=-1, prepend=0.0)
    return (second - 2 * level * first + level**2 * count).sum(-1) / self.total


class _HistogramObserver(abc.ABC):
  """What the observers that read a histogram share; theirs is `_threshold`."""

  def init(self) -> Histogram:
    return Histogram.empty()

  def update(self, state: Histogram, x: jax.Array, mask: jax.Array | None = None) -> Histogram:
    return state.add(x, mask)

  def range(self, state: Histogram, bits: int) -> Range:
    _check_bits(bits)
    shape = np.shape(state.largest)
    host = jax.tree.map(np.asarray, state)
    thresholds = np.empty(shape, np.float32)
    for index in np.ndindex(shape):
      counts = _Counts(jax.tree.map(lambda leaf, index=index: leaf[index], host))
      found = self._threshold(counts, bits) if counts.largest > 0 else 0.0
      thresholds[index] = min(found, counts.largest)
    return _symmetric(thresholds)

  @abc.abstractmethod
  def _threshold(self, counts: _Counts, bits: int) -> float:
    """Where to clip; what is above the largest |x| is lowered to it."""


@dataclasses.dataclass(frozen=True)
class Percentile(_HistogramObserver):
  """The least edge of a bin that at least `percentile` % of all |x| lie below, at most the largest |x|.

  It is less than one bin, 1/32768 of the largest |x|, above the exact one.
  """

  percentile: float = 99.9
  name = 'percentile'

  def __post_init__(self) -> None:
    if not 0 < self.percentile <= 100:
      raise UserError(f'percentile = {self.percentile} must be above 0 and at most 100')

  def _threshold(self, counts: _Counts, bits: int) -> float:
    # Exact, lest 99.9 % of 1000 be 999.0000000000001 and thus the last.
    rank = math.ceil(counts.total * Fraction(str(self.percentile)) / 100)
    return (int(np.searchsorted(np.cumsum(counts.counts), rank)) + 1) * counts.width


@dataclasses.dataclass(frozen=True)
class MSE(_HistogramObserver):
  """The clip with the least mean squared error of symmetric integers, clipping included.

  The error may have several minima, so it is computed for 64 clips an octave from the largest |x| down to a
  bin, and again for 128 clips around the best of them.
  """

  name = 'mse'

  def _threshold(self, counts: _Counts, bits: int) -> float:
    clips = counts.largest * 2.0 ** (-np.arange(64 * (LOG_BINS - 1)) / 64)
    best = int(np.argmin(counts.squared_errors(clips, bits)))
    above, below = clips[max(best - 1, 0)], clips[min(best + 1, len(clips) - 1)]
    # From large to small, and the grid's best among them: a tie goes to the larger clip.
    fine = np.sort(np.append(np.linspace(above, below, 128), clips[best]))[::-1]
    return float(fine[np.argmin(counts.squared_errors(fine, bits))])


@dataclasses.dataclass(frozen=True)
class KL(_HistogramObserver):
  """Entropy calibration (Migacz 2017, "8-bit inference with TensorRT").

  Over `bins` bins up to the largest |x| (a few less, to be a whole number of the histogram's). For each clip
  of at least `least` bins: P is what lies below with the outliers folded into its last bin; Q is what lies
  below, in 2^(bits - 1) levels, each spread evenly over those of its bins that P uses. The clip with the
  least KL(P‖Q) wins; a Q that rules out what P holds is infinitely far from it, and a tie goes to the larger
  clip.
  """

  bins: int = 2048
  least: int = 128
  name = 'kl'

  def __post_init__(self) -> None:
    if not 128 <= self.least <= self.bins <= BINS // 2:
      raise UserError(
        f'kl with bins = {self.bins}, least = {self.least}: 128 ≤ least ≤ bins ≤ {BINS // 2} is needed'
      )

  def _threshold(self, counts: _Counts, bits: int) -> float:
    used = len(counts.counts)
    merged = -(-used // self.bins)
    coarse = np.add.reduceat(counts.counts, np.arange(0, used, merged)).astype(np.float64)
    levels = 2 ** (bits - 1)
    best, clip = np.inf, counts.largest
    for n in range(len(coarse), self.least - 1, -1):
      p = coarse[:n].copy()
      level = np.arange(n) * levels // n
      mass = np.bincount(level, p, levels)
      p[-1] += coarse[n:].sum()
      holds = p > 0
      sharing = np.bincount(level, holds, levels)
      q = (mass / np.maximum(sharing, 1))[level][holds]
      p = p[holds]
      if (q == 0).any():
        continue
      distance = float(np.sum(p * np.log(p / q)) / p.sum() + math.log(q.sum() / p.sum()))
      if distance < best:
        best, clip = distance, n * merged * counts.width
    return clip


def aciq_clip(distribution: Literal['gauss', 'laplace'], bits: int) -> float:
  """The optimal clip, in σ of a normal or in b = E|x| of a Laplace distribution, for 2^bits levels.

  Where what clipping costs grows as fast as what rounding, uniform within a step, saves (Banner et al. 2019,
  "Post training 4-bit quantization", eq. 5 to 10):

    Gauss    2 (φ(a) - a (1 - Φ(a))) = a / (3 · 4^bits)
    Laplace  exp(-a) = a / (3 · 4^bits)
  """

  def excess(a: float) -> float:
    if distribution == 'laplace':
      gain = math.exp(-a)
    else:
      density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
      gain = 2 * density - a * math.erfc(a / math.sqrt(2))
    return gain - a / (3 * 4**bits)

  low, high = 0.0, 64.0  # The excess falls all the way, from above 0 to below it.
  while low < (middle := (low + high) / 2) < high:
    low, high = (middle, high) if excess(middle) > 0 else (low, middle)
  return low


@dataclasses.dataclass(frozen=True)
class ACIQ(_HistogramObserver):
  """The closed-form clip of a normal or a Laplace distribution (Banner et al. 2019), centred at zero.

  Attributes:
    distribution: which; None takes the one whose E|x| / √(E x²) (√(2/π) and √(1/2)) is nearer to the data's.
  """

  distribution: Literal['gauss', 'laplace'] | None = None

  def __post_init__(self) -> None:
    if self.distribution not in (None, 'gauss', 'laplace'):
      raise UserError(f'distribution = {self.distribution!r}{nearest(str(self.distribution), LIKELY)}')

  @property
  def name(self) -> str:
    return f'aciq_{self.distribution}' if self.distribution else 'aciq'

  def _threshold(self, counts: _Counts, bits: int) -> float:
    first, second = counts.moments()
    deviation = math.sqrt(second)
    fit = {name: abs(first / deviation - ratio) for name, ratio in LIKELY.items()}
    chosen = self.distribution or ('gauss' if fit['gauss'] <= fit['laplace'] else 'laplace')
    return aciq_clip(chosen, bits) * (deviation if chosen == 'gauss' else first)


# E|x| / √(E x²) of the distributions that ACIQ knows.
LIKELY = {'gauss': math.sqrt(2 / math.pi), 'laplace': math.sqrt(0.5)}

OBSERVERS: dict[str, Callable[..., Observer]] = {
  'absmax': AbsMax,
  'minmax': MinMax,
  'moving_average': MovingAverage,
  'percentile': Percentile,
  'mse': MSE,
  'kl': KL,
  'aciq': ACIQ,
  'aciq_gauss': functools.partial(ACIQ, 'gauss'),
  'aciq_laplace': functools.partial(ACIQ, 'laplace'),
}


def observer(name: str, **options: Any) -> Observer:
  """The observer of this name; options are its fields.

  Raises:
    UserError: there is none of that name, or it has no such field, or the value cannot be.
  """
  if name not in OBSERVERS:
    raise UserError(f'observer {name!r} is not known{nearest(name, OBSERVERS)}')
  found = OBSERVERS[name]
  valid = [] if isinstance(found, functools.partial) else [f.name for f in dataclasses.fields(found)]  # type: ignore[arg-type]
  for option in options:
    if option not in valid:
      raise UserError(f'observer {name!r} has no option {option!r}{nearest(option, valid)}')
  return found(**options)
