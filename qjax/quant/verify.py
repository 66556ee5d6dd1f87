"""What a quantized model does differently from the original, token by token, channel by channel, answer by
answer.

Mean numbers hide local damage: one ruined channel among millions moves a perplexity by less than its error.
So the weights and the outputs of every projection are compared channel by channel too, each against the
error that its own scheme makes.

Nothing here knows a model: logits, outputs and texts come from the caller.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import trees
from qjax.errors import UserError, nearest
from qjax.quant.qtensor import QTensor, dequantize, is_qtensor, quantize

Tree = Any
Batch = Mapping[str, Any]
Logits = Callable[[Batch], jax.Array]

# An error below 1e-10 of the signal's power is no error, and a signal below 1e-10 of the error's no signal.
EXACT_DB = 100.0
# Channels of one matrix never agree better than this, so that equal ones have a spread to be measured by.
SPREAD_DB = 0.25


# ---- tokens ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
  """Two models on the same tokens. KL and NLL are nats a token, KL is KL(reference ‖ candidate).

  Attributes:
    tokens: trained tokens seen.
    documents: the clusters of the standard error.
    nll_reference: mean NLL of the reference.
    nll_candidate: mean NLL of the candidate.
    nll_difference: candidate − reference.
    nll_error: standard error of that difference, over documents; infinite if there is only one.
    nll_interval: 95 % confidence interval of that difference.
    kl_mean: mean KL.
    kl_p50: median KL.
    kl_p99: 99th percentile of KL.
    kl_max: largest KL.
    top1: share of tokens at which both find the same word most likely.
    token_kl: float32 [n] of the kept tokens, in the order seen.
    token_nll_reference: the same of NLL.
    token_nll_candidate: the same of NLL.
    nonfinite: a line for each quantity that was NaN or infinite anywhere, with its first place.
  """

  tokens: int
  documents: int
  nll_reference: float
  nll_candidate: float
  nll_difference: float
  nll_error: float
  nll_interval: tuple[float, float]
  kl_mean: float
  kl_p50: float
  kl_p99: float
  kl_max: float
  top1: float
  token_kl: np.ndarray
  token_nll_reference: np.ndarray
  token_nll_candidate: np.ndarray
  nonfinite: tuple[str, ...] = ()

  @property
  def perplexity_reference(self) -> float:
    return math.exp(min(self.nll_reference, 700.0))

  @property
  def perplexity_candidate(self) -> float:
    return math.exp(min(self.nll_candidate, 700.0))

  def as_dict(self, points: int = 5000) -> dict[str, Any]:
    """For a record: every number, and evenly spaced `points` at most of the kept tokens."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    chosen = np.unique(np.linspace(0, len(self.token_kl) - 1, points).astype(int))
    for name in ('token_kl', 'token_nll_reference', 'token_nll_candidate'):
      values[name] = [float(value) for value in values[name][chosen]]
    return values | {
      'nll_interval': list(self.nll_interval),
      'nonfinite': list(self.nonfinite),
      'perplexity_reference': self.perplexity_reference,
      'perplexity_candidate': self.perplexity_candidate,
    }


def kl_divergence(reference: jax.Array, candidate: jax.Array) -> jax.Array:
  """KL(softmax(reference) ‖ softmax(candidate)) over the last axis, float32 [...].

  Σ p·(eᵈ − 1 − d) with d = log q − log p. The probabilities sum to one, so this is −Σ p·d; but every term is
  positive, so nothing cancels, and an error of the normalizers counts only squared. Two nearly equal
  distributions keep a relative error near 1e-4 where −Σ p·d would drown in rounding.
  """
  logp = jax.nn.log_softmax(reference.astype(jnp.float32))
  logq = jax.nn.log_softmax(candidate.astype(jnp.float32))
  p, q, d = jnp.exp(logp), jnp.exp(logq), logq - logp
  # eᵈ − 1 − d by its series where subtraction would cancel: the next term is below 2e-8 of the first.
  series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6 * (1 + d / 7)))))
  term = jnp.where(jnp.abs(d) < 0.25, p * series, q - p - p * d)
  # A word that the reference excludes costs what the candidate spends on it; 0·∞ is no NaN here.
  return jnp.sum(jnp.where(p == 0, q, term), axis=-1)


@jax.jit
def _token_values(reference: jax.Array, candidate: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
  """KL, agreement and both NLLs, each [B, T], from logits [B, T, V]; row by row, to bound temporaries."""

  def nll(logits: jax.Array, target: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen

  def row(args: tuple[jax.Array, jax.Array, jax.Array]) -> dict[str, jax.Array]:
    r, c, target = args[0].astype(jnp.float32), args[1].astype(jnp.float32), args[2]
    return {
      'kl': kl_divergence(r, c),
      'same': jnp.argmax(r, axis=-1) == jnp.argmax(c, axis=-1),
      'nll_reference': nll(r, target),
      'nll_candidate': nll(c, target),
    }

  return jax.lax.map(row, (reference, candidate, targets))


class _Sample:
  """A uniform sample of a stream's rows, in their order, of at most `size`; all of them if they fit."""

  def __init__(self, size: int):
    self._size = size
    self._random = np.random.default_rng(0)
    self._keys = np.zeros(0)
    self._rows = np.zeros((0, 3), np.float32)

  def add(self, rows: np.ndarray) -> None:
    keys = np.concatenate([self._keys, self._random.random(len(rows))])
    rows = np.concatenate([self._rows, rows])
    if len(keys) > self._size:
      kept = np.sort(np.argpartition(keys, self._size - 1)[: self._size])
      keys, rows = keys[kept], rows[kept]
    self._keys, self._rows = keys, rows

  @property
  def columns(self) -> np.ndarray:
    return self._rows.T


def _t_quantile(freedom: int) -> float:
  """Student's t at 97.5 %: exact for 1 and 2 degrees of freedom, elsewhere within 2e-3 by the expansion in
  Abramowitz & Stegun (1964), 26.7.5.
  """
  if freedom == 1:
    return math.tan(math.pi * 0.475)
  if freedom == 2:
    return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
  z = statistics.NormalDist().inv_cdf(0.975)
  terms = (
    (z**3 + z) / 4,
    (5 * z**5 + 16 * z**3 + 3 * z) / 96,
    (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
  )
  return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def clustered_error(sums: np.ndarray, counts: np.ndarray) -> float:
  """Standard error of Σ sums / Σ counts over clusters that are independent of each other, not inside.

  The linearized ratio estimator with the small-sample factor G / (G − 1) (Cochran 1977, "Sampling
  Techniques", §6.4). Infinite for a single cluster.
  """
  clusters = len(sums)
  if clusters < 2:
    return math.inf
  mean = sums.sum() / counts.sum()
  residual = sums - mean * counts
  return float(math.sqrt(clusters / (clusters - 1) * np.sum(residual**2)) / counts.sum())


def compare(
  reference: Logits,
  candidate: Logits,
  batches: Iterable[Batch],
  keep: int = 200_000,
  progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
  """Both models on every trained token of the batches; logits of one batch exist at a time.

  A token counts if its weight is positive and it is no padding (segment 0).

  Tokens of one document share a topic and a style, so their differences are correlated and a standard error
  that took them for independent would be too small. The document, segment of a row of a batch, is the unit:
  see `clustered_error`. A document that packing cut in two counts as two.

  Args:
    reference: from a batch to its logits [B, T, V].
    candidate: the same of the model that is to replace it.
    batches: 'tokens', 'targets', 'segments' int [B, T] and 'weights' [B, T], and what the models read.
    keep: tokens kept for percentiles and plots; of more, a uniform sample, while sums and the largest KL
      always cover all.
    progress: told the number of batches done.

  Raises:
    ValueError: logits of different shapes, or no trained token.
  """
  names = ('kl', 'nll_reference', 'nll_candidate')
  sample, totals, same, largest = _Sample(keep), np.zeros(3), 0, -math.inf
  document_sums: list[np.ndarray] = []
  document_counts: list[np.ndarray] = []
  broken: dict[str, tuple[int, str]] = {}
  for index, batch in enumerate(batches):
    left, right = reference(batch), candidate(batch)
    targets, segments = np.asarray(batch['targets']), np.asarray(batch['segments'])
    if left.shape != right.shape or left.shape[:-1] != targets.shape:
      raise ValueError(f'logits {left.shape} and {right.shape} for targets {targets.shape} do not fit')
    found = jax.device_get(_token_values(left, right, jnp.asarray(targets)))
    counts = (np.asarray(batch['weights']) > 0) & (segments > 0)
    rows = np.stack([found[name][counts] for name in names], axis=-1)
    if len(rows):
      for column, name in enumerate(names):
        bad = np.flatnonzero(~np.isfinite(rows[:, column]))
        if len(bad):
          row, position = np.argwhere(counts)[bad[0]]
          place = f'{rows[bad[0], column]} at batch {index}, row {row}, position {position}'
          before, first = broken.get(name, (0, place))
          broken[name] = before + len(bad), first
      wide = rows.astype(np.float64)
      totals += wide.sum(axis=0)
      same += int(np.count_nonzero(found['same'] & counts))
      largest = float(np.maximum(largest, rows[:, 0].max()))
      sample.add(rows)
      document = (np.arange(len(counts))[:, None] * (int(segments.max()) + 1) + segments)[counts]
      _, which = np.unique(document, return_inverse=True)
      document_sums.append(np.bincount(which, wide[:, 2] - wide[:, 1]))
      document_counts.append(np.bincount(which))
    progress(index + 1)
  per_document = np.concatenate(document_counts) if document_counts else np.zeros(0)
  tokens = int(per_document.sum())
  if not tokens:
    raise ValueError('no trained token to compare on')
  kl, nll_reference, nll_candidate = (float(total / tokens) for total in totals)
  sums = np.concatenate(document_sums)
  difference = float(sums.sum() / tokens)
  error = clustered_error(sums, per_document)
  margin = math.inf if len(sums) < 2 else _t_quantile(len(sums) - 1) * error
  token_kl, token_reference, token_candidate = sample.columns
  with np.errstate(invalid='ignore'):
    p50, p99 = (float(value) for value in np.quantile(token_kl, (0.5, 0.99)))
  return Comparison(
    tokens,
    len(sums),
    nll_reference,
    nll_candidate,
    difference,
    error,
    (difference - margin, difference + margin),
    kl,
    p50,
    p99,
    largest,
    same / tokens,
    token_kl,
    token_reference,
    token_candidate,
    tuple(f'{name}: {place}, {count} tokens in all' for name, (count, place) in broken.items()),
  )


# ---- channels ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixError:
  """The error of one projection of one layer: of its weights or of its outputs.

  SQNR is 10·log10(Σ reference² / Σ (candidate − reference)²) in dB, held to ±100.

  Attributes:
    path: of the leaf, or the name of the output.
    layer: index into the stack, None for a leaf that has none.
    sqnr: of the whole matrix.
    expected: what the candidate's own format gives, rounded to nearest; None for outputs.
    channel_sqnr: float32 [N], NaN where a channel holds a NaN or an infinity.
    channel_drop: float32 [N], dB that a channel is worse than expected, beyond what is usual in its matrix:
      the median is 0.
    channel_z: float32 [N], that drop in robust standard deviations of the matrix (1.4826 · the median
      absolute deviation, at least 0.25 dB).
  """

  path: str
  layer: int | None
  sqnr: float
  expected: float | None
  channel_sqnr: np.ndarray
  channel_drop: np.ndarray
  channel_z: np.ndarray

  @property
  def place(self) -> str:
    return self.path if self.layer is None else f'{self.path} layer {self.layer}'

  @property
  def worst_channel(self) -> int:
    """The first channel that is not finite, else the one with the lowest SQNR."""
    return int(np.argmin(self.channel_sqnr))

  @property
  def worst_sqnr(self) -> float:
    return float(self.channel_sqnr[self.worst_channel])

  def outliers(self, drop_db: float, z: float) -> list[int]:
    """Channels beyond both limits or not finite, the worst first."""
    is_out = (self.channel_drop > drop_db) & (self.channel_z > z) | np.isnan(self.channel_sqnr)
    order = np.argsort(-np.nan_to_num(self.channel_drop, nan=np.inf), kind='stable')
    return [int(channel) for channel in order if is_out[channel]]

  def as_dict(self) -> dict[str, Any]:
    """For a record: a row without the channels."""
    return {
      'path': self.path,
      'layer': self.layer,
      'sqnr': self.sqnr,
      'expected': self.expected,
      'worst_channel': self.worst_channel,
      'worst_sqnr': self.worst_sqnr,
      'worst_drop': float(self.channel_drop[self.worst_channel]),
    }


def _sqnr(signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
  """dB in float64, held to ±EXACT_DB; NaN where either is not finite."""
  with np.errstate(divide='ignore', invalid='ignore'):
    decibels = 10 * (np.log10(signal) - np.log10(noise))
  decibels = np.where(noise == 0, EXACT_DB, np.clip(decibels, -EXACT_DB, EXACT_DB))
  return np.where(np.isfinite(signal) & np.isfinite(noise), decibels, np.nan)


def _sums(reference: jax.Array, candidate: jax.Array) -> tuple[jax.Array, jax.Array]:
  reference, candidate = reference.astype(jnp.float32), candidate.astype(jnp.float32)
  return jnp.sum(reference**2, axis=0), jnp.sum((candidate - reference) ** 2, axis=0)


@jax.jit
def _output_sums(reference: jax.Array, candidate: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Power of the reference and of the error in each channel, two float32 [N], from [n, N]."""
  return _sums(reference, candidate)


@jax.jit
def _weight_sums(
  reference: jax.Array, candidate: jax.Array | QTensor
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """The same of weights [K, N], and the power of the error that the candidate's own format makes."""
  reference = reference.astype(jnp.float32)
  if isinstance(candidate, QTensor) and candidate.scheme.numbers.is_float:
    candidate = dequantize(candidate, jnp.dtype(candidate.scheme.format))
  if isinstance(candidate, QTensor):
    rounded = dequantize(quantize(reference, candidate.scheme))
    return _sums(reference, dequantize(candidate)), _sums(reference, rounded)[1]
  info = jnp.finfo(candidate.dtype)
  # Not a cast there and back, which XLA would drop.
  rounded = jax.lax.reduce_precision(reference, info.nexp, info.nmant)
  return _sums(reference, candidate), _sums(reference, rounded)[1]


def _matrix(
  path: str, layer: int | None, signal: np.ndarray, noise: np.ndarray, usual: np.ndarray | None
) -> MatrixError:
  signal, noise = np.asarray(signal, np.float64), np.asarray(noise, np.float64)
  channels = _sqnr(signal, noise)
  expected = None
  excess = -channels
  if usual is not None:
    usual = np.asarray(usual, np.float64)
    expected = float(_sqnr(signal.sum(), usual.sum()))
    excess = _sqnr(signal, usual) - channels
  known = excess[np.isfinite(excess)]
  centre = np.median(known) if known.size else 0.0
  spread = 1.4826 * np.median(np.abs(known - centre)) if known.size else 0.0
  drop = excess - centre
  return MatrixError(
    path,
    layer,
    float(_sqnr(signal.sum(), noise.sum())),
    expected,
    channels.astype(np.float32),
    drop.astype(np.float32),
    (drop / max(spread, SPREAD_DB)).astype(np.float32),
  )


def _same_paths(reference: Mapping[str, Any], candidate: Mapping[str, Any], what: str) -> None:
  for path in (*reference, *candidate):
    if path not in reference or path not in candidate:
      side, other = ('candidate', reference) if path in reference else ('reference', candidate)
      hint = nearest(path, candidate if side == 'candidate' else reference)
      raise UserError(f'{what}: {path} (of {len(other)} leaves) is missing in the {side}{hint}')
    if reference[path].shape != candidate[path].shape:
      raise UserError(
        f'{what}: {path} is {reference[path].shape} in the reference and {candidate[path].shape} in the '
        'candidate; give two forms of one model'
      )


def weight_sqnr(reference: Tree, candidate: Tree) -> Iterator[MatrixError]:
  """The weights of two models, layer by layer and leaf by leaf.

  A kernel or an embedding is [..., K, N] with channels n; any other leaf is a vector [..., N]. Leading axes
  count as layers. Each channel is held against the error that its own scheme, or dtype, makes when the
  reference is rounded to nearest, so that a channel which is hard to represent is no alarm.

  The reference is meant to have gone through every exact transformation (a merged adapter, a rotation, an
  equalization) that the candidate went through.

  Args:
    reference: params, plain arrays.
    candidate: the same paths and shapes; leaves are arrays or `QTensor`s.

  Raises:
    UserError: the trees differ in paths or shapes.
  """
  old, new = trees.flatten(reference), trees.flatten(candidate, is_qtensor)
  _same_paths(old, new, 'comparing weights')
  for path, leaf in old.items():
    axes = 2 if path.split('/')[-1] in ('kernel', 'embedding') else 1
    lead = leaf.shape[: leaf.ndim - axes]
    for layer, index in enumerate(np.ndindex(*lead)):
      left, right = leaf[index], new[path][index] if index else new[path]
      if axes == 1:
        left, right = left[None], right[None]
      (signal, noise), usual = _weight_sums(left, right)
      yield _matrix(path, layer if lead else None, np.asarray(signal), np.asarray(noise), np.asarray(usual))


def output_sqnr(layers: Iterable[Iterable[tuple[str, jax.Array, jax.Array]]]) -> Iterator[MatrixError]:
  """The outputs of every projection of every layer.

  Channels have no scheme to be held against here: a drop is from the median of the channels.

  Args:
    layers: for each layer, (name, reference output [n, N], candidate output [n, N]); consumed one at a time.
  """
  for layer, outputs in enumerate(layers):
    for name, reference, candidate in outputs:
      signal, noise = _output_sums(reference, candidate)
      yield _matrix(name, layer, np.asarray(signal), np.asarray(noise), None)


# ---- answers and adapters ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Disagreement:
  """Two answers to one prompt that part at character `position`."""

  prompt: str
  reference: str
  candidate: str
  position: int


@dataclasses.dataclass(frozen=True)
class Answers:
  """Greedy answers compared.

  Attributes:
    count: prompts.
    exact: share of answers that are equal, character by character; NaN without prompts.
    disagreements: the worst first: those that part earliest.
  """

  count: int
  exact: float
  disagreements: tuple[Disagreement, ...]

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {'disagreements': [dataclasses.asdict(d) for d in self.disagreements]}


def answers(
  reference: Sequence[str], candidate: Sequence[str], prompts: Sequence[str], shown: int = 20
) -> Answers:
  """How many answers are the same, and the `shown` that part earliest.

  Raises:
    UserError: the three are not of one length.
  """
  if not len(reference) == len(candidate) == len(prompts):
    raise UserError(
      f'{len(prompts)} prompts have {len(reference)} reference and {len(candidate)} candidate answers; '
      'give one of each for every prompt'
    )
  parted = []
  for prompt, old, new in zip(prompts, reference, candidate, strict=True):
    if old != new:
      common = min(len(old), len(new))
      position = next((i for i in range(common) if old[i] != new[i]), common)
      parted.append(Disagreement(prompt, old, new, position))
  count = len(prompts)
  exact = 1 - len(parted) / count if count else math.nan
  return Answers(count, exact, tuple(sorted(parted, key=lambda d: d.position)[:shown]))


@jax.jit
def _survival(base: jax.Array, delta: jax.Array, merged: jax.Array | QTensor) -> jax.Array:
  plain = dequantize(merged) if isinstance(merged, QTensor) else merged.astype(jnp.float32)
  delta = delta.astype(jnp.float32)
  kept = jnp.sum(delta * (plain - base.astype(jnp.float32)), axis=(-2, -1))
  whole = jnp.sum(delta * delta, axis=(-2, -1))
  return jnp.where(whole == 0, 1, kept / whole)


def adapter_survival(base: Tree, delta: Tree, merged: Tree) -> dict[str, np.ndarray]:
  """The share of an adapter that is still there after merging and quantizing again, by path.

  <Δ, Q(W + Δ) − W> / <Δ, Δ> for each matrix: 1 if all of Δ survived, 0 if rounding undid it. A Δ smaller
  than the step of the format is mostly rounded away when W already lies on the grid.

  Args:
    base: weights W [..., K, N] of the adapted projections, plain: what the adapter was trained on.
    delta: Δ, the same paths and shapes.
    merged: Q(W + Δ), the same paths and shapes, arrays or `QTensor`s.

  Returns:
    float32 [...] over leading axes (a number for a matrix alone); 1 where Δ is zero and there is nothing to
    lose.

  Raises:
    UserError: the trees differ in paths or shapes.
  """
  old, change, new = trees.flatten(base), trees.flatten(delta), trees.flatten(merged, is_qtensor)
  _same_paths(old, change, 'adapter survival')
  _same_paths(old, new, 'adapter survival')
  return {path: np.asarray(_survival(old[path], change[path], new[path])) for path in old}
