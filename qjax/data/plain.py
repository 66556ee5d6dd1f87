"""Plain text in rows of consecutive tokens, every one of them a target: for calibration and verification."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError

STATE_OF_THE_UNION = 'state_of_the_union'
CONSTRUCTION_FAQ = 'construction_faq'
_FAQ = Path(__file__).with_name('construction_faq.jsonl')
_FILE = Path(__file__).with_name('state_of_the_union.jsonl')
# Addresses up to this year calibrate, later ones verify: nothing is judged on what it was tuned on.
_LAST_CALIBRATION_YEAR = 2013


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows of one set of documents.

  Attributes:
    tokens, targets, segments, positions: int32 [R, T]; a segment is 1, or 0 where a document ended.
    weights: float32 [R, T], 1 where there is a target.
    documents: the document of each row, int32 [R].
    names: of the documents.
  """

  tokens: np.ndarray
  targets: np.ndarray
  segments: np.ndarray
  positions: np.ndarray
  weights: np.ndarray
  documents: np.ndarray
  names: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.tokens)

  @property
  def num_tokens(self) -> int:
    """Targets in all rows."""
    return int(self.weights.sum())

  def batches(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `batch_size` rows; the last one is filled up with rows that are all padding."""
    for start in range(0, len(self), batch_size):
      yield {name: _filled(getattr(self, name)[start : start + batch_size], batch_size) for name in _ARRAYS}


_ARRAYS = ('tokens', 'targets', 'segments', 'positions', 'weights')


def _filled(x: np.ndarray, rows: int) -> np.ndarray:
  return np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])


def read(path: str, part: str) -> list[tuple[str, str]]:
  """(name, text) of each document.

  Args:
    path: 'state_of_the_union', a .txt file (one document), or a .jsonl file with a "text" in each line.
    part: 'calibration' or 'held_out'; the embedded addresses are divided between the two, and a file of the
      user's is taken whole.

  Raises:
    UserError: no such file, a line without text, or no text at all.
  """
  if path == STATE_OF_THE_UNION:
    documents = _jsonl(_FILE)
    is_early = [int(name[:4]) <= _LAST_CALIBRATION_YEAR for name, _ in documents]
    wanted = {'calibration': True, 'held_out': False}[part]
    return [document for document, early in zip(documents, is_early, strict=True) if early == wanted]
  file = Path(path).expanduser()
  if not file.is_file():
    raise UserError(
      f'there is no text at {path}; accepted: a .txt or .jsonl file, or {STATE_OF_THE_UNION!r}'
    )
  if file.suffix == '.jsonl':
    return _jsonl(file)
  try:
    text = file.read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{path} is not UTF-8 text: {error}') from error
  if not text.strip():
    raise UserError(f'{path} is empty')
  return [(file.name, text)]


def _jsonl(file: Path) -> list[tuple[str, str]]:
  documents = []
  for number, line in enumerate(file.read_text(encoding='utf-8').splitlines(), 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      text = row['text']
    except (json.JSONDecodeError, KeyError, TypeError):
      raise UserError(f'{file}, line {number}: expected {{"text": "…"}}, found {line[:60]!r}') from None
    if not isinstance(text, str) or not text.strip():
      raise UserError(f'{file}, line {number}: "text" must be text that is not empty, not {text!r}')
    documents.append((str(row.get('id', f'line {number}')), text))
  if not documents:
    raise UserError(f'{file} holds no document')
  return documents


def rows(
  documents: Sequence[tuple[str, str]], tokenizer: Tokenizer, seq_len: int, max_tokens: int | None = None
) -> Rows:
  """Documents cut into rows of `seq_len` slots; a row sees nothing of the one before it.

  Every token but a document's first is a target once. With `max_tokens` rows are taken from all documents
  alike, evenly spread, until they hold that many targets.

  Raises:
    UserError: no document has two tokens.
  """
  found: dict[str, list[np.ndarray]] = {'tokens': [], 'targets': [], 'weights': []}
  owners = []
  for index, (_, text) in enumerate(documents):
    ids = np.asarray(tokenizer.encode(text).ids, np.int32)
    count = len(ids) - 1
    for start in range(0, count, seq_len):
      length = min(seq_len, count - start)
      tokens, targets, weights = np.zeros((3, seq_len), np.int32)
      tokens[:length], targets[:length] = ids[start : start + length], ids[start + 1 : start + length + 1]
      weights[:length] = 1
      for name, row in (('tokens', tokens), ('targets', targets), ('weights', weights)):
        found[name].append(row)
      owners.append(index)
  if not owners:
    raise UserError('the text has no document of at least two tokens')
  arrays = {name: np.stack(list_) for name, list_ in found.items()}
  if max_tokens is not None and arrays['weights'].sum() > max_tokens:
    kept = np.unique(np.linspace(0, len(owners) - 1, max(1, max_tokens // seq_len)).astype(int))
    arrays = {name: array[kept] for name, array in arrays.items()}
    owners = [owners[index] for index in kept]
  positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), arrays['tokens'].shape).copy()
  return Rows(
    tokens=arrays['tokens'],
    targets=arrays['targets'],
    segments=arrays['weights'].astype(np.int32),
    positions=positions,
    weights=arrays['weights'].astype(np.float32),
    documents=np.asarray(owners, np.int32),
    names=tuple(name for name, _ in documents),
  )


def prompts(path: str, count: int) -> list[str]:
  """`count` questions to a model.

  Args:
    path: 'construction_faq' for evenly spread questions of that set, or a .txt file with one on each line.
    count: at most.

  Raises:
    UserError: no such file, or no prompt in it.
  """
  if path == CONSTRUCTION_FAQ:
    lines = [json.loads(line)['instruction'] for line in _FAQ.read_text(encoding='utf-8').splitlines()]
  else:
    file = Path(path).expanduser()
    if not file.is_file():
      raise UserError(f'there are no prompts at {path}; accepted: a .txt file, or {CONSTRUCTION_FAQ!r}')
    lines = [line.strip() for line in file.read_text(encoding='utf-8').splitlines() if line.strip()]
    if not lines:
      raise UserError(f'{path} holds no prompt')
  chosen = np.unique(np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int))
  return [lines[index] for index in chosen]
