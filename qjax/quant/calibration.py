"""Ranges that calibration found: the file that keeps them, and what each observer's do to the same data."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import files
from qjax.errors import UserError
from qjax.quant.calibrate import OBSERVERS, Observer, Range, observer

VERSION = 1
KIND = 'qjax calibration'


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Ranges and what they mean.

  Attributes:
    ranges: by the path of the parameter whose inputs (or which itself) they are for.
    observer: its name in `OBSERVERS`.
    options: its fields.
    bits: for which the ranges were chosen.
    tokens: how many were observed.
    fingerprint: of the model (`Source.fingerprint`).
  """

  ranges: dict[str, Range]
  observer: str
  options: dict[str, Any]
  bits: int
  tokens: int
  fingerprint: str

  @classmethod
  def of(
    cls, observer: Observer, states: Mapping[str, Any], bits: int, tokens: int, fingerprint: str
  ) -> 'Calibration':
    """From an observer's states by path.

    Raises:
      UserError: with the path, for NaN, infinity or nothing observed.
    """
    ranges = {}
    for path, state in states.items():
      try:
        ranges[path] = observer.range(state, bits)
      except UserError as error:
        raise UserError(f'{path}: {error}') from None
    options = dataclasses.asdict(observer)  # type: ignore[call-overload]
    if isinstance(OBSERVERS[observer.name], functools.partial):
      options = {}  # its name says it all
    return cls(ranges, observer.name, options, bits, tokens, fingerprint)

  def largest(self, path: str, layer: int, bits: int) -> float:
    """The largest magnitude of the inputs of a projection of one layer, for ranges [L] of a stack.

    Raises:
      UserError: there is no such range, or it was chosen for integers of another width.
    """
    if path not in self.ranges:
      raise UserError(f'the calibration has no range for {path}; it has {", ".join(self.ranges)}')
    found = self.ranges[path]
    if found.high.ndim != 1 or layer >= len(found.high):
      raise UserError(f'the calibration has ranges {found.high.shape} for {path}, none for layer {layer}')
    if bits != self.bits:
      raise UserError(f'the calibration chose ranges for {self.bits} bits, {path} is to have {bits}')
    return float(max(-found.low[layer], found.high[layer]))

  def save(self, path: Path) -> None:
    """Writes JSON; a reader, or a crash, finds the old file or the new one."""
    plain = {
      'kind': KIND,
      'version': VERSION,
      **{field: getattr(self, field) for field in _MEANING},
      'ranges': {
        name: {'low': found.low.tolist(), 'high': found.high.tolist()} for name, found in self.ranges.items()
      },
    }
    files.write_json(path, plain)

  @classmethod
  def load(cls, path: str | Path, fingerprint: str | None = None) -> 'Calibration':
    """Reads what `save` wrote.

    Args:
      path: of the file.
      fingerprint: of the model that the ranges are wanted for; None only to look at them.

    Raises:
      UserError: there is no such file, it is torn or not a calibration, of another version, or made with
        another model.
    """
    again = 'calibrate again and save to this path'
    try:
      text = Path(path).read_text(encoding='utf-8')
    except FileNotFoundError:
      raise UserError(f'{path}: there is no such file; calibrate and save to this path first') from None
    except UnicodeDecodeError:
      raise UserError(f'{path} is not a calibration; {again}') from None
    try:
      plain = json.loads(text)
    except json.JSONDecodeError as error:
      raise UserError(f'{path} is torn or is not JSON ({error}); {again}') from None
    if not isinstance(plain, dict) or plain.get('kind') != KIND:
      raise UserError(f'{path} is JSON, but not a calibration; {again}')
    if plain.get('version') != VERSION:
      raise UserError(
        f'{path} is a calibration of version {plain.get("version")!r}; this qjax reads version {VERSION}. '
        f'Either {again}, or use the qjax that wrote it'
      )
    try:
      meaning = {field: plain[field] for field in _MEANING}
      if any(type(meaning[field]) is not kind for field, kind in _MEANING.items()):
        raise TypeError('a field of another type')
      ranges = {name: _read_range(found) for name, found in plain['ranges'].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(f'{path} is damaged ({error}); {again}') from None
    if fingerprint is not None and meaning['fingerprint'] != fingerprint:
      raise UserError(
        f'{path} was made with the model {meaning["fingerprint"]}, not with {fingerprint}; '
        'calibrate with this model, or name the file that was made with it'
      )
    return cls(ranges, **meaning)


# What a file says beside the ranges, and as which type.
_MEANING: dict[str, type] = {'observer': str, 'options': dict, 'bits': int, 'tokens': int, 'fingerprint': str}


def _read_range(plain: Mapping[str, Any]) -> Range:
  found = Range(np.asarray(plain['low'], np.float32), np.asarray(plain['high'], np.float32))
  finite = np.isfinite(found.low).all() and np.isfinite(found.high).all()
  if not finite or found.low.shape != found.high.shape or (found.low > found.high).any():
    raise ValueError('a range is not two finite numbers in order')
  return found


def score(
  observers: Mapping[str, Observer] | Sequence[str],
  batches: Sequence[jax.Array | np.ndarray | tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]],
  bits: int,
) -> list[dict[str, Any]]:
  """What each observer's range does to the data it was made from, one row each.

  Args:
    observers: names in `OBSERVERS`, or observers under names of one's own.
    batches: each x [..., K], or (x, mask).
    bits: of the integers: symmetric, but for ranges whose low is not -high, which have 2^bits levels from
      low to high.

  Returns:
    Rows with `observer`, `bits`, `range`, `threshold` (the largest magnitude in the range), `clipped` (share
    of values outside it), `sqnr_db` (infinite without an error) and `kl`: in nats, of the histogram of x in
    4096 bins from that of its quantized values, each level spread evenly over the bins that hold something
    that rounds to it. Unlike the one that `KL` minimises it leaves outliers where they are.

  Raises:
    UserError: an unknown name, or data without tokens or with NaN or infinity.
  """
  if not isinstance(observers, Mapping):
    observers = {name: observer(name) for name in observers}
  pairs = [batch if isinstance(batch, tuple) else (batch, None) for batch in batches]
  rows = []
  for name, current in observers.items():
    update, state = jax.jit(current.update), current.init()
    for x, mask in pairs:
      state = update(state, jnp.asarray(x), None if mask is None else jnp.asarray(mask))
    found = current.range(state, bits)
    rows.append({'observer': name, 'bits': bits, 'range': found} | _effect(found, pairs, bits))
  return rows


def _effect(found: Range, pairs: Sequence[tuple[Any, Any]], bits: int) -> dict[str, float]:
  """`score`'s columns for one range."""
  tokens = []
  for x, mask in pairs:
    x = np.asarray(x, np.float64)
    keep = np.ones(x.shape[:-1], bool) if mask is None else np.broadcast_to(np.asarray(mask), x.shape[:-1])
    tokens.append(x[keep])
  x = np.concatenate(tokens)
  low, high = found.low.astype(np.float64), found.high.astype(np.float64)
  is_symmetric = bool((low == -high).all())
  least, most = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if is_symmetric else (0, 2**bits - 1)
  step = (high - low) / (most - least)
  safe, zero = np.where(step == 0, 1, step), 0.0 if is_symmetric else low
  codes = np.clip(np.round((x - zero) / safe), least, most)
  error = float(np.sum((codes * step + zero - x) ** 2))

  edge = float(np.abs(x).max())
  bins = np.clip((x + edge) * (2048 / (edge or 1.0)), 0, 4095).astype(np.int64)
  # Bins by codes: a bin may round to two codes, and to many where each channel has its own range.
  cells = np.bincount((bins * 2**bits + (codes - least).astype(np.int64)).ravel(), minlength=4096 * 2**bits)
  cells = cells.reshape(4096, 2**bits)
  q = np.broadcast_to(cells.sum(0) / np.maximum((cells > 0).sum(0), 1), cells.shape)[cells > 0]
  p = cells[cells > 0]
  kl = float(np.sum(p * np.log(p / q)) / x.size)
  signal = float(np.sum(x**2))
  return {
    'threshold': float(np.maximum(-low, high).max()),
    'clipped': float(np.mean((x < low) | (x > high))),
    'sqnr_db': 10 * math.log10(signal / error) if error and signal else math.inf,
    'kl': kl,
  }
