"""Whether a quantized model may replace the original: the evidence of `quant.verify` held against limits.

A verdict names the place of what failed. What was not measured never counts as passed.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.errors import UserError, nearest
from qjax.quant.verify import Answers, Comparison, MatrixError

# Failures of one kind that a verdict spells out; it counts the rest.
NAMED = 20


@dataclasses.dataclass(frozen=True)
class Thresholds:
  """What a replacement may cost at most.

  Attributes:
    nll_difference: upper end of the 95 % interval of the NLL difference, nats a token.
    kl_mean: mean KL(reference ‖ candidate), nats a token.
    kl_p99: its 99th percentile.
    top1: least share of tokens with the same most likely word.
    weight_matrix_drop_db: dB that a weight matrix may be worse than its format rounded to nearest.
    weight_channel_drop_db: dB that a channel of it may be worse still.
    output_sqnr_db: least SQNR of a projection's outputs.
    output_channel_drop_db: dB that a channel of them may lie below the median of its projection.
    channel_z: a channel is an outlier only if its drop exceeds this many robust standard deviations, too.
    exact_match: least share of equal answers.
    adapter_survival: least share of an adapter that survives in any matrix.
  """

  nll_difference: float = 0.01
  kl_mean: float = 0.02
  kl_p99: float = 0.2
  top1: float = 0.97
  weight_matrix_drop_db: float = 10.0
  weight_channel_drop_db: float = 6.0
  output_sqnr_db: float = 10.0
  output_channel_drop_db: float = 12.0
  channel_z: float = 6.0
  exact_match: float = 0.9
  adapter_survival: float = 0.9

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not math.isfinite(value):
        raise UserError(f'thresholds.{field.name} = {value} is no limit; give a finite number')


@dataclasses.dataclass(frozen=True)
class Check:
  """One line of the verdict's table: the worst value found, the limit, and 'passed', 'failed' or
  'not measured'.
  """

  name: str
  value: float | None
  limit: str
  status: str
  where: str = ''


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Whether the candidate may replace the reference.

  Attributes:
    passed: nothing failed, something was measured, and all that was required.
    failures: what, where, the value and its limit, a line each.
    checks: every check, those that were not measured too.
  """

  passed: bool
  failures: tuple[str, ...]
  checks: tuple[Check, ...]

  def as_dict(self) -> dict[str, Any]:
    return {
      'passed': self.passed,
      'failures': list(self.failures),
      'checks': [dataclasses.asdict(check) for check in self.checks],
    }


# Each kind of evidence, with its checks.
EVIDENCE = {
  'comparison': ('finite', 'nll_difference', 'kl_mean', 'kl_p99', 'top1'),
  'weights': ('weight_matrix_drop_db', 'weight_channel_drop_db'),
  'outputs': ('output_sqnr_db', 'output_channel_drop_db'),
  'answers': ('exact_match',),
  'survival': ('adapter_survival',),
}
AT_LEAST = ('top1', 'output_sqnr_db', 'exact_match', 'adapter_survival')


@dataclasses.dataclass(frozen=True)
class _Finding:
  """One value of a check; `is_good` decides, so that a NaN is never good."""

  value: float
  is_good: bool
  where: str = ''
  text: str = ''


def _number(value: float) -> str:
  return f'{value:.4g}'


def judge(
  thresholds: Thresholds,
  comparison: Comparison | None = None,
  weights: Iterable[MatrixError] | None = None,
  outputs: Iterable[MatrixError] | None = None,
  answers: Answers | None = None,
  survival: Mapping[str, np.ndarray] | None = None,
  required: Collection[str] = ('comparison',),
) -> Verdict:
  """Holds all evidence against the limits.

  What is None, or empty, is reported as not measured; it fails if it is `required` (names in `EVIDENCE`). A
  NaN fails, wherever it is.
  """
  for name in required:
    if name not in EVIDENCE:
      raise UserError(f'required evidence {name!r} is unknown{nearest(name, EVIDENCE)}')
  findings: dict[str, list[_Finding]] = {}

  def hold(name: str, value: float, where: str = '', text: str = '') -> None:
    limit = getattr(thresholds, name)
    is_good = value >= limit if name in AT_LEAST else value <= limit
    findings.setdefault(name, []).append(_Finding(value, is_good, where, text))

  if comparison is not None:
    broken = [_Finding(math.nan, False, line) for line in comparison.nonfinite]
    findings['finite'] = broken or [_Finding(0.0, True)]
    low, high = comparison.nll_interval
    hold(
      'nll_difference',
      high,
      text=f' nats a token, the upper end of the 95 % interval from {_number(low)}'
      f' ({comparison.documents} documents)',
    )
    hold('kl_mean', comparison.kl_mean, text=' nats a token')
    hold('kl_p99', comparison.kl_p99, text=' nats a token')
    hold('top1', comparison.top1)
  for error in weights or ():
    expected = error.sqnr if error.expected is None else error.expected
    gives = f' dB below what its format gives (SQNR {_number(error.sqnr)} dB)'
    hold('weight_matrix_drop_db', expected - error.sqnr, error.place, gives)
    _channels(findings, 'weight_channel_drop_db', error, thresholds)
  for error in outputs or ():
    hold('output_sqnr_db', error.sqnr, error.place, ' dB')
    _channels(findings, 'output_channel_drop_db', error, thresholds)
  if answers is not None and answers.count:
    hold('exact_match', answers.exact, text=f' of {answers.count} answers')
  for path, shares in (survival or {}).items():
    for layer, share in enumerate(np.ravel(shares)):
      hold('adapter_survival', float(share), f'{path} layer {layer}' if np.ndim(shares) else path)

  failures: list[str] = []
  checks: list[Check] = []
  for evidence, names in EVIDENCE.items():
    if evidence in required and not any(name in findings for name in names):
      failures.append(f'{evidence}: required, but not measured')
    for name in names:
      limit = _limit(name, thresholds)
      if name not in findings:
        checks.append(Check(name, None, limit, 'not measured'))
        continue
      found = _worst_first(findings[name], lowest=name in AT_LEAST)
      bad = [finding for finding in found if not finding.is_good]
      worst = (bad or found)[0]
      checks.append(Check(name, worst.value, limit, 'failed' if bad else 'passed', worst.where))
      for finding in bad[:NAMED]:
        if name == 'finite':
          failures.append(f'not finite: {finding.where}')
        else:
          place = f' at {finding.where}' if finding.where else ''
          failures.append(f'{name}{place}: {_number(finding.value)}{finding.text}; limit: {limit}')
      if len(bad) > NAMED:
        failures.append(f'{name}: {len(bad) - NAMED} more places fail')
  if not findings and not failures:
    failures.append('nothing was measured')
  return Verdict(not failures, tuple(failures), tuple(checks))


def _limit(name: str, thresholds: Thresholds) -> str:
  if name == 'finite':
    return 'no NaN, no infinity'
  return f'at {"least" if name in AT_LEAST else "most"} {_number(getattr(thresholds, name))}'


def _worst_first(found: Sequence[_Finding], lowest: bool) -> list[_Finding]:
  """NaN first, then from the lowest or the highest value on; equals stay in order."""
  sign = 1 if lowest else -1
  return sorted(found, key=lambda f: (not math.isnan(f.value), sign * f.value))


def _channels(
  findings: dict[str, list[_Finding]], name: str, error: MatrixError, thresholds: Thresholds
) -> None:
  """The outliers of a matrix among the findings, or its worst channel that is none."""
  outliers = error.outliers(getattr(thresholds, name), thresholds.channel_z)
  fallback = int(np.argmax(np.where(np.isfinite(error.channel_drop), error.channel_drop, -np.inf)))
  for channel in outliers or [fallback]:
    drop, sqnr = float(error.channel_drop[channel]), float(error.channel_sqnr[channel])
    text = ' (it holds a NaN or an infinity)'
    if not math.isnan(sqnr):
      text = f' dB worse than the channels beside it (SQNR {_number(sqnr)} dB)'
    findings.setdefault(name, []).append(
      _Finding(drop, not outliers, f'{error.place} channel {channel}', text)
    )


def record(
  verdict: Verdict,
  comparison: Comparison | None = None,
  weights: Iterable[MatrixError] = (),
  outputs: Iterable[MatrixError] = (),
  answers: Answers | None = None,
  survival: Mapping[str, np.ndarray] | None = None,
  **about: Any,
) -> dict[str, Any]:
  """All of it as plain values, for a report. `about` adds names: model, candidate, data, versions."""
  return about | {
    'verdict': verdict.as_dict(),
    'comparison': comparison.as_dict() if comparison else None,
    'weights': [error.as_dict() for error in weights],
    'outputs': [error.as_dict() for error in outputs],
    'answers': answers.as_dict() if answers else None,
    'survival': {path: np.asarray(share).tolist() for path, share in (survival or {}).items()},
  }
