"""Rows by index: a JSON-lines file of any size, and how rows are divided into training and held-out ones.

A source is what grain calls a random-access data source, of rows as dicts, that can also say where a row is
written (`where`), for error messages.
"""

import hashlib
import json
import os
import pathlib
import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from qjax.errors import UserError


class RowSource(Protocol):
  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> dict[str, Any]: ...

  def where(self, index: int) -> str:
    """'file:line' of a row."""
    ...


class JsonlSource:
  """The rows of a JSON-lines file, read when asked for. Blank lines are no rows.

  Memory holds three integers a row, and one line while it is being read. Instances can be pickled and used
  from several threads and processes. A file that changes after it was opened is refused, not misread.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    self._descriptor: int | None = None
    starts, stops, lines = [], [], []
    try:
      with self.path.open('rb') as file:
        self._stamp = _stamp(file.fileno())
        offset = 0
        for number, line in enumerate(file, 1):
          if number == 1 and line.startswith(b'\xef\xbb\xbf'):  # A byte order mark is no part of the row.
            offset, line = 3, line[3:]
          if not line.isspace() and line:
            starts.append(offset)
            stops.append(offset + len(line))
            lines.append(number)
          offset += len(line)
    except OSError as e:
      raise UserError(f'cannot read {self.path}: {e.strerror}') from e
    self._starts, self._stops, self._lines = (np.asarray(x, np.int64) for x in (starts, stops, lines))

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> dict[str, Any]:
    start, stop = int(self._starts[index]), int(self._stops[index])
    where = self.where(index)
    try:
      row = json.loads(self._read(start, stop).decode())
    except UnicodeDecodeError as e:
      raise UserError(f'{where}: not UTF-8: {e.reason} at byte {e.start} of the line') from None
    except json.JSONDecodeError as e:
      raise UserError(
        f'{where}: not JSON: {e.msg} at character {e.pos} of the line; each line must be one JSON object'
      ) from None
    except RecursionError:
      raise UserError(f'{where}: nested too deeply') from None
    if not isinstance(row, dict):
      raise UserError(f'{where}: each line must be one JSON object, not {type(row).__name__}')
    return row

  def where(self, index: int) -> str:
    return f'{self.path}:{self._lines[index]}'

  def __repr__(self) -> str:
    return f'JsonlSource({str(self.path)!r}, {len(self)} rows)'

  def __getstate__(self) -> dict[str, Any]:
    return self.__dict__ | {'_descriptor': None}  # Another process opens the file for itself.

  def __del__(self) -> None:
    descriptor = getattr(self, '_descriptor', None)
    if descriptor is not None:
      os.close(descriptor)

  def _read(self, start: int, stop: int) -> bytes:
    if self._descriptor is None:
      try:
        self._descriptor = os.open(self.path, os.O_RDONLY)
      except OSError as e:
        raise UserError(f'cannot read {self.path}: {e.strerror}') from e
    if _stamp(self._descriptor) != self._stamp:
      raise UserError(f'{self.path} changed while it was in use; start again')
    parts = []
    while start < stop:  # pread keeps no position: threads and forks cannot disturb each other.
      part = os.pread(self._descriptor, stop - start, start)
      if not part:
        raise UserError(f'{self.path} became shorter while it was in use; start again')
      parts.append(part)
      start += len(part)
    return b''.join(parts)


def _stamp(descriptor: int) -> tuple[int, int]:
  status = os.fstat(descriptor)
  return status.st_size, status.st_mtime_ns


def question_key(question: str, seed: int) -> int:
  """A 64-bit number for a question; letter case, spacing and Unicode composition do not count."""
  normalized = ' '.join(unicodedata.normalize('NFKC', question).casefold().split())
  digest = hashlib.blake2b(f'{seed}\n{normalized}'.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big')


def held_out_rows(keys: Sequence[int] | np.ndarray, fraction: float, name: str) -> np.ndarray:
  """bool [rows]: which rows are held out, so that one question never has rows on both sides.

  `keys` come from `question_key`. Of the n distinct questions, those with the `round(fraction · n)` smallest
  keys are held out, though at least one and not all: the number is exact, the choice depends on the
  questions alone, not on their order.
  """
  if not 0 < fraction < 1:
    raise UserError(f'held_out must lie between 0 and 1, not {fraction}')
  keys = np.asarray(keys, np.uint64)
  distinct = np.unique(keys)
  if len(distinct) < 2:
    raise UserError(
      f'{name} has {len(keys)} rows and {len(distinct)} distinct questions: at least two questions are '
      'needed, one to train on and one to hold out; or give a separate eval file'
    )
  n_held = min(max(1, int(fraction * len(distinct) + 0.5)), len(distinct) - 1)
  return keys <= distinct[n_held - 1]
