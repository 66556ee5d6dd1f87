"""From a data set's name to batches: tokenized documents, an endless training stream, a finite evaluation.

Every document is tokenized once before the first batch, which finds bad rows early and gives exact counts;
what stays in memory is each document's length, and its tokens as long as they are few.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import grain
import grain.experimental
import numpy as np

from qjax.data.packing import Batch, assemble, first_fit
from qjax.data.sources import JsonlSource, RowSource, held_out_rows, question_key
from qjax.data.templates import (
  TEMPLATES,
  Messages,
  Template,
  Tokenized,
  parse_example,
  question,
  tokenize_example,
)
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError, nearest

CONSTRUCTION_FAQ = 'construction_faq'
CACHED_TOKENS = 2**24
"""Documents of more tokens than this in all are read and tokenized again whenever they are needed."""
_BATCHES_AHEAD = 2

TooLong = Literal['drop', 'truncate', 'error']
Shard = tuple[int, int]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataSpec:
  """How documents become batches of `batch_size` rows of `seq_len` slots.

  `pack` puts several documents into a row. `too_long` says what happens to a document of more than
  `seq_len` + 1 tokens: it is left out, cut, or an error; the first two are counted in `Counts`.
  """

  batch_size: int
  seq_len: int
  seed: int
  pack: bool
  template: Template = 'chat'
  too_long: TooLong = 'drop'

  def __post_init__(self) -> None:
    for name in ('batch_size', 'seq_len'):
      if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
        raise UserError(f'{name} must be a positive integer, not {getattr(self, name)!r}')
    if not _is_int(self.seed) or self.seed < 0:
      raise UserError(f'seed must be an integer from 0 on, not {self.seed!r}')
    if not isinstance(self.pack, bool):
      raise UserError(f'pack must be true or false, not {self.pack!r}')
    for name, valid in (('template', TEMPLATES), ('too_long', get_args(TooLong))):
      if getattr(self, name) not in valid:
        raise UserError(f'{name} is {getattr(self, name)!r}{nearest(str(getattr(self, name)), valid)}')


@dataclasses.dataclass(frozen=True)
class Counts:
  """What became of a set's rows. Tokens count what is kept, a document's first token included."""

  rows: int
  documents: int
  dropped: int
  truncated: int
  tokens: int
  trained_tokens: int

  def __str__(self) -> str:
    return (f'{self.documents:,} documents of {self.rows:,} rows ({self.dropped:,} too long and left out, '
            f'{self.truncated:,} cut), {self.tokens:,} tokens, {self.trained_tokens:,} trained on')


class Documents:
  """The tokenized documents of some rows of a source.

  `lengths[i]`: the slots that document i takes, its tokens less one, at most `seq_len`. `rows[i]`: its row
  in the source. `fingerprint` covers all token ids and marks, thus the data, the tokenizer and the template.
  """

  def __init__(
    self,
    source: RowSource,
    rows: Sequence[int] | np.ndarray,
    tokenizer: Tokenizer,
    spec: DataSpec,
    name: str = 'data',
  ):
    self.source, self.tokenizer, self.spec, self.name = source, tokenizer, spec, name
    self._may_fit_chars = _longest_text(tokenizer, spec.seq_len + 1)
    self._cache: list[Tokenized] | None = []
    kept, lengths, longest = [], [], 0
    truncated = tokens = trained = 0
    digest = hashlib.blake2b(digest_size=16)
    for row in map(int, rows):
      document, n_tokens = self._tokenize(row)
      longest = max(longest, n_tokens)
      if document is None:
        continue
      kept.append(row)
      lengths.append(len(document.ids) - 1)
      truncated += n_tokens > len(document.ids)
      tokens += len(document.ids)
      trained += int(document.trained.sum())
      digest.update(len(document.ids).to_bytes(8, 'little'))
      digest.update(document.ids.tobytes() + document.trained.tobytes())
      if self._cache is not None:
        self._cache.append(document)
        if tokens > CACHED_TOKENS:
          self._cache = None
    self.rows = np.asarray(kept, np.int64)
    self.lengths = np.asarray(lengths, np.int64)
    self.fingerprint = digest.hexdigest()
    self.counts = Counts(len(rows), len(kept), len(rows) - len(kept), truncated, tokens, trained)
    if not kept:
      raise UserError(
        f'{name}: no document is left of {len(rows)} rows: with seq_len {spec.seq_len} a document has at '
        f'most {spec.seq_len + 1} tokens, and the longest here has {longest} or more; raise seq_len'
      )
    if self.counts.dropped or truncated:
      _log.warning('%s: %s', name, self.counts)

  def __len__(self) -> int:
    return len(self.lengths)

  def __getitem__(self, index: int) -> Tokenized:
    if self._cache is not None:
      return self._cache[index]
    document, _ = self._tokenize(int(self.rows[index]))
    assert document is not None, 'the source gave another row than before'
    return document

  def _tokenize(self, row: int) -> tuple[Tokenized | None, int]:
    """The row's document, None when it is left out, and how many tokens (at least) it had before cutting."""
    where, limit = self.source.where(row), self.spec.seq_len + 1
    messages = parse_example(self.source[row], where)
    if self.spec.too_long != 'truncate' and _n_chars(messages) > self._may_fit_chars:
      # Tokenizing a text of megabytes takes a hundred times its size in memory; that it is too long is known.
      self._refuse(where, f'{_n_chars(messages):,} characters')
      return None, limit + 1
    document = tokenize_example(messages, self.tokenizer, self.spec.template, where)
    n_tokens = len(document.ids)
    if n_tokens <= limit:
      return document, n_tokens
    self._refuse(where, f'{n_tokens:,} tokens')
    if self.spec.too_long == 'drop':
      return None, n_tokens
    cut = Tokenized(document.ids[:limit], document.trained[:limit])
    return (cut if cut.trained.any() else None), n_tokens  # Without any of its answer it teaches nothing.

  def _refuse(self, where: str, length: str) -> None:
    if self.spec.too_long == 'error':
      raise UserError(
        f'{where}: {length}, and with seq_len {self.spec.seq_len} a document has at most '
        f"{self.spec.seq_len + 1} tokens; raise seq_len, or set too_long to 'drop' or 'truncate'"
      )


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Documents to train on and documents to evaluate on; `shared_questions` counts questions in both."""

  train: Documents
  eval: Documents
  shared_questions: int

  @property
  def counts(self) -> dict[str, Counts]:
    return {'train': self.train.counts, 'eval': self.eval.counts}

  def __str__(self) -> str:
    return f'train: {self.train.counts}\neval: {self.eval.counts}'


def load(
  path: str | os.PathLike[str],
  tokenizer: Tokenizer,
  spec: DataSpec,
  held_out: float = 0.2,
  seed: int = 0,
  eval_path: str | os.PathLike[str] | None = None,
) -> Dataset:
  """The data set 'construction_faq', or a .jsonl file's, divided into training and evaluation documents.

  A share `held_out` of the questions, drawn by `seed`, is for evaluation; all rows of a question lie on one
  side. With `eval_path` nothing is held out: all of `path` is for training and all of `eval_path` for
  evaluation.
  """
  path = os.path.expanduser(os.fspath(path))
  if eval_path is None:
    parts = _faq_parts(held_out, seed) if path == CONSTRUCTION_FAQ else _file_parts(path, held_out, seed)
    shared = 0
  else:
    parts = _whole(path), _whole(os.fspath(eval_path))
    train_keys, eval_keys = (np.unique(_keys(source, seed)) for source, _ in parts)
    shared = len(np.intersect1d(train_keys, eval_keys))
    if shared:
      _log.warning('%s: %d of its %d questions are in %s, too: the evaluation is not of unseen questions',
                   eval_path, shared, len(eval_keys), path)
  train, held = (
    Documents(source, rows, tokenizer, spec, f'{name} ({part})')
    for (source, rows), name, part in zip(parts, (path, eval_path or path), ('train', 'eval'), strict=True)
  )
  return Dataset(train, held, shared)


_Part = tuple[RowSource, np.ndarray]


def _faq_parts(held_out: float, seed: int) -> tuple[_Part, _Part]:
  from qjax.data import tfds_builders  # Imports tensorflow_datasets, which takes a second.

  builder = tfds_builders.prepare(held_out=held_out, seed=seed)
  sources = (tfds_builders.SplitSource(builder, split) for split in ('train', 'validation'))
  train, held = ((source, np.arange(len(source))) for source in sources)
  return train, held


def _file_parts(path: str, held_out: float, seed: int) -> tuple[_Part, _Part]:
  source, _ = _whole(path)
  held = held_out_rows(_keys(source, seed), held_out, path)
  return (source, np.flatnonzero(~held)), (source, np.flatnonzero(held))


def _whole(path: str) -> _Part:
  if path == CONSTRUCTION_FAQ:
    raise UserError(f'{CONSTRUCTION_FAQ!r} is divided by held_out; eval_path goes with a .jsonl file')
  if not path.endswith('.jsonl'):
    raise UserError(f'data must be {CONSTRUCTION_FAQ!r} or a file that ends in .jsonl, not {path!r}')
  source = JsonlSource(path)
  if not len(source):
    raise UserError(f'{path} has no rows')
  return source, np.arange(len(source))


def _keys(source: RowSource, seed: int) -> np.ndarray:
  questions = (question(parse_example(source[i], source.where(i))) for i in range(len(source)))
  return np.fromiter((question_key(q, seed) for q in questions), np.uint64, len(source))


_Plan = list[list[int]]
"""The documents of each row of a batch."""


class TrainIterator(Iterator[Batch]):
  """Batches without end, in a new order each epoch, which `get_state` and `set_state` resume exactly.

  The order follows from `spec.seed` and the epoch alone, and what a batch takes from the order follows from
  the documents' lengths; so the position in the stream of documents is the whole state. With `shard`
  (i, n) the same global batches are planned and the i-th n-th of each one's rows is built, whatever n is:
  a run may resume on another number of processes.

  grain builds the next batches in a thread while one is in use. State, `epoch` and `row_ids` are those of
  the batches handed out, however many are built.
  """

  def __init__(self, documents: Documents, spec: DataSpec, shard: Shard = (0, 1)):
    self._documents, self._spec = documents, spec
    stream = _Stream(documents, spec, _shard_rows(spec.batch_size, shard))
    ahead = grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=_BATCHES_AHEAD)
    self._batches = iter(ahead)
    # The thread ends with this iterator, or at the interpreter's exit while the modules that grain needs to
    # stop it are still whole; left to `__del__` alone, an iterator that lives to the end prints errors.
    weakref.finalize(self, vars(self).pop, '_batches')
    self._plan: _Plan = []

  def __next__(self) -> Batch:
    self._plan, batch = next(self._batches)
    return batch

  @property
  def epoch(self) -> int:
    """How often every document has been seen."""
    return self._batches.get_state()['next'] // len(self._documents)

  @property
  def row_ids(self) -> list[list[int]]:
    """The source rows in each row of the last batch."""
    return [[int(self._documents.rows[i]) for i in row] for row in self._plan]

  def get_state(self) -> dict[str, Any]:
    return self._batches.get_state() | {'epoch': self.epoch} | self._identity()

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues where `get_state` was called. Refuses a state of other data or another spec, naming which."""
    position = state.get('next')
    if not isinstance(position, int) or isinstance(position, bool) or position < 0:
      raise UserError(f'this is no state of a data iterator: "next" is {position!r}')
    for field, now in self._identity().items():
      then = state.get(field)
      if then != now:
        what = 'the training documents (data, tokenizer or template)' if field == 'fingerprint' else field
        raise UserError(f'cannot resume: {what} was {then!r} when the state was saved and is {now!r} now')
    self._batches.set_state({'next': position})
    self._plan = []

  def _identity(self) -> dict[str, Any]:
    return dataclasses.asdict(self._spec) | {
      'documents': len(self._documents), 'fingerprint': self._documents.fingerprint
    }


class _Stream(grain.IterDataset):
  """The rows `rows` of every global batch of the endless training stream, each batch with its plan."""

  def __init__(self, documents: Documents, spec: DataSpec, rows: slice):
    super().__init__()
    self._of = documents, spec, rows

  def __iter__(self) -> grain.DatasetIterator:
    return _StreamIterator(*self._of)


class _StreamIterator(grain.DatasetIterator):
  """Its state is {'next': the position in the stream of documents at which the next batch begins}."""

  def __init__(self, documents: Documents, spec: DataSpec, rows: slice):
    super().__init__()
    self._documents, self._spec, self._rows = documents, spec, rows
    self._next = 0

  def __next__(self) -> tuple[_Plan, Batch]:
    self._assert_not_closed()
    spec, documents = self._spec, self._documents
    drawn: list[int] = []

    def slots() -> Iterator[int]:
      for position in itertools.count(self._next):
        epoch, index = divmod(position, len(documents))
        drawn.append(int(_epoch_order(spec.seed, epoch, len(documents))[index]))
        yield int(documents.lengths[drawn[-1]])

    rows = _plan_batch(slots(), spec)
    plan = [[drawn[i] for i in row] for row in rows[self._rows]]
    batch = _build(documents, plan, len(plan), spec)
    self._next += sum(map(len, rows))  # Only now: a batch that could not be read is tried again.
    return plan, batch

  def get_state(self) -> dict[str, int]:
    return {'next': self._next}

  def set_state(self, state: dict[str, int]) -> None:
    self._next = state['next']


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
  """A permutation of n that is the same on every machine and in every version: numpy keeps raw bits stable.

  (grain's index shuffle needs no memory but takes 30 ms an epoch however small the set, and adds the epoch
  to the seed, so that seed 0's second epoch is seed 1's first.)
  """
  bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
  return np.argsort(bits, kind='stable')


def train_iterator(documents: Documents, spec: DataSpec, shard: Shard = (0, 1)) -> TrainIterator:
  """The training stream's first batch is the next one; see `TrainIterator`."""
  return TrainIterator(documents, spec, shard)


class EvalBatches:
  """Every document once, in the set's order. Can be iterated again; the last batch has rows of padding.

  With `shard` each process gets its rows of the same batches, so all get equally many.
  """

  def __init__(self, documents: Documents, spec: DataSpec, shard: Shard = (0, 1)):
    self._documents, self._spec = documents, spec
    self._rows = _shard_rows(spec.batch_size, shard)
    self._plans: list[_Plan] = []
    done = 0
    while done < len(documents):
      rows = _plan_batch(map(int, documents.lengths[done:]), spec)
      self._plans.append([[done + i for i in row] for row in rows])
      done += sum(map(len, rows))

  def __len__(self) -> int:
    return len(self._plans)

  def __iter__(self) -> Iterator[Batch]:
    n_rows = self._rows.stop - self._rows.start
    for plan in self._plans:
      yield _build(self._documents, plan[self._rows], n_rows, self._spec)


def eval_batches(documents: Documents, spec: DataSpec, shard: Shard = (0, 1)) -> EvalBatches:
  """Finite, deterministic, every document once; see `EvalBatches`."""
  return EvalBatches(documents, spec, shard)


def _plan_batch(slots: Iterable[int], spec: DataSpec) -> _Plan:
  """Rows of indices into `slots`, the lengths of the documents to come, that hold as many as fit in a batch.

  These are always a prefix of `slots`, so that a position in the stream stays all that resuming needs: the
  longest that fits when longer documents choose a row first ("first fit decreasing"). Eight rows of 256
  slots of the FAQ are then 0.90 full on average, and 0.85 when documents choose in the stream's order.
  """
  if not spec.pack:
    return first_fit(slots, spec.batch_size, spec.seq_len, pack=False)
  room, lengths = spec.batch_size * spec.seq_len, []
  for n in slots:
    room -= n
    if room < 0:
      break
    lengths.append(n)
  while True:
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    rows = first_fit((lengths[i] for i in longest_first), spec.batch_size, spec.seq_len)
    if sum(map(len, rows)) == len(lengths):
      # Back in the stream's order, so that no row, and no process's share of them, is that of the long ones.
      return sorted(sorted(longest_first[i] for i in row) for row in rows)
    lengths.pop()


def _build(documents: Documents, plan: _Plan, n_rows: int, spec: DataSpec) -> Batch:
  rows = [[documents[i] for i in row] for row in plan]
  return assemble(rows, n_rows, spec.seq_len, documents.tokenizer.pad_id)


def _shard_rows(batch_size: int, shard: Shard) -> slice:
  index, count = shard
  if not 0 <= index < count:
    raise ValueError(f'shard {index} of {count}')
  if batch_size % count:
    raise UserError(f'batch_size {batch_size} does not divide among {count} processes')
  each = batch_size // count
  return slice(index * each, (index + 1) * each)


def _n_chars(messages: Messages) -> int:
  return sum(len(message['content'].strip()) for message in messages)


def _longest_text(tokenizer: Tokenizer, n_tokens: int) -> float:
  """No text of more characters than this has only `n_tokens` tokens; infinite where that isn't known.

  A token stands for at most as many characters as it is spelled with, unless a normalizer shortens the text
  first or an unknown-token stands for a run of any length.
  """
  backend = tokenizer.backend
  if backend.normalizer is not None or getattr(backend.model, 'unk_token', None) is not None:
    return float('inf')
  return n_tokens * max(map(len, backend.get_vocab(with_added_tokens=True)))


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
