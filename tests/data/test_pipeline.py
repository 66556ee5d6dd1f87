"""A run resumed anywhere sees the same batches; splits are exact; nothing is lost; bad files say where."""

import copy
import gc
import itertools
import json
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest

from qjax.data import pipeline
from qjax.data.packing import Batch, first_fit
from qjax.data.pipeline import (
  DataSpec,
  Documents,
  EvalBatches,
  TrainIterator,
  eval_batches,
  load,
  train_iterator,
)
from qjax.data.sources import JsonlSource, held_out_rows, question_key
from qjax.data.templates import parse_example, question
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError

Write = Callable[..., str]


def alpaca(n: int, seed: int = 0) -> list[dict[str, str]]:
  rng = np.random.default_rng(seed)
  return [{'instruction': f'question {i}', 'output': 'x' * int(rng.integers(1, 40))} for i in range(n)]


def spec(**changes: Any) -> DataSpec:
  return DataSpec(**({'batch_size': 4, 'seq_len': 200, 'seed': 3, 'pack': True} | changes))


def documents(path: str, tokenizer: Tokenizer, spec: DataSpec) -> Documents:
  source = JsonlSource(path)
  return Documents(source, range(len(source)), tokenizer, spec, path)


def take(iterator: TrainIterator, n: int) -> list[tuple[Batch, list[list[int]]]]:
  return [(next(iterator), iterator.row_ids) for _ in range(n)]


def assert_same(a: list[tuple[Batch, list[list[int]]]], b: list[tuple[Batch, list[list[int]]]]) -> None:
  assert [ids for _, ids in a] == [ids for _, ids in b]
  for (x, _), (y, _) in zip(a, b, strict=True):
    assert x.keys() == y.keys()
    for name in x:
      np.testing.assert_array_equal(x[name], y[name])


# Training.


@pytest.mark.parametrize('pack', [True, False])
def test_resuming_is_exact(write: Write, tokenizer: Tokenizer, pack: bool) -> None:
  # 23 documents, 4 or some 8 a batch: 16 batches are nearly three epochs or more, and none ends with a batch.
  how = spec(pack=pack)
  docs = documents(write(alpaca(23)), tokenizer, how)
  whole = take(train_iterator(docs, how), 16)
  for stop in (0, 1, 2, 3, 5, 6, 8, 11, 15, 16):
    first = train_iterator(docs, how)
    take(first, stop)
    state = json.loads(json.dumps(first.get_state()))
    second = train_iterator(docs, how)
    next(second)  # Whatever it did before must not matter.
    second.set_state(state)
    assert second.get_state() == state
    assert_same(take(second, 16 - stop), whole[stop:])


def test_an_epoch_sees_every_row_once_in_its_own_order(write: Write, tokenizer: Tokenizer) -> None:
  how = spec(pack=False, batch_size=5)
  docs = documents(write(alpaca(20)), tokenizer, how)
  iterator = train_iterator(docs, how)
  epochs = []
  for epoch in range(3):
    assert iterator.epoch == epoch
    epochs.append([row for _, rows in take(iterator, 4) for ids in rows for row in ids])
  assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs} | {tuple(range(20))}) == 4
  # Another seed is another order, not the same one an epoch later.
  other = train_iterator(docs, spec(pack=False, batch_size=5, seed=4))
  orders = [[row for _, rows in take(other, 4) for ids in rows for row in ids] for _ in range(3)]
  assert not {tuple(epoch) for epoch in epochs} & {tuple(order) for order in orders}


def test_packed_epochs_see_every_row_equally_often(write: Write, tokenizer: Tokenizer) -> None:
  how = spec()
  docs = documents(write(alpaca(23)), tokenizer, how)
  stream = [row for _, rows in take(train_iterator(docs, how), 40) for row in sorted(itertools.chain(*rows))]
  seen = Counter(stream)
  assert set(seen) == set(range(23))
  assert max(seen.values()) - min(seen.values()) <= 1


def test_one_document_is_a_data_set(write: Write, tokenizer: Tokenizer) -> None:
  how = spec(pack=False, batch_size=3)
  docs = documents(write(alpaca(1)), tokenizer, how)
  assert [rows for _, rows in take(train_iterator(docs, how), 2)] == [[[0], [0], [0]]] * 2


@pytest.mark.parametrize('count', [1, 2, 4])
def test_shards_are_slices_of_the_same_batches(write: Write, tokenizer: Tokenizer, count: int) -> None:
  how = spec()
  docs = documents(write(alpaca(30)), tokenizer, how)
  parts = [train_iterator(docs, how, (i, count)) for i in range(count)]
  for whole, whole_ids in take(train_iterator(docs, how), 10):
    shards = [next(part) for part in parts]
    for name, x in whole.items():
      np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards]), x)
    assert [ids for part in parts for ids in part.row_ids] == whole_ids
  assert len({json.dumps(part.get_state()) for part in parts}) == 1  # So the number of processes may change.
  evals = [eval_batches(docs, how, (i, count)) for i in range(count)]
  for whole, *shards in zip(eval_batches(docs, how), *evals, strict=True):
    for name, x in whole.items():
      np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards]), x)


def test_shards_must_divide_the_batch(write: Write, tokenizer: Tokenizer) -> None:
  docs = documents(write(alpaca(3)), tokenizer, spec())
  with pytest.raises(UserError, match='batch_size 4 does not divide among 3'):
    train_iterator(docs, spec(), (0, 3))


def test_a_state_of_something_else_is_refused_by_name(write: Write, tokenizer: Tokenizer) -> None:
  rows = alpaca(12)
  docs = documents(write(rows), tokenizer, spec())
  iterator = train_iterator(docs, spec())
  next(iterator)
  state = iterator.get_state()
  for change in ({'batch_size': 2}, {'seed': 4}, {'pack': False}, {'too_long': 'error'}, {'seq_len': 201}):
    with pytest.raises(UserError, match=f'cannot resume: {next(iter(change))} was'):
      train_iterator(docs, spec(**change)).set_state(state)
  longer = documents(write([*rows, rows[0]], 'longer.jsonl'), tokenizer, spec())
  with pytest.raises(UserError, match='documents was 12 .* and is 13'):
    train_iterator(longer, spec()).set_state(state)
  rows[5] = rows[5] | {'output': 'y' * len(rows[5]['output'])}
  changed = documents(write(rows, 'changed.jsonl'), tokenizer, spec())
  with pytest.raises(UserError, match='the training documents'):
    train_iterator(changed, spec()).set_state(state)
  # The same tokens, other marks.
  plain = spec(template='plain')
  paths = [write([{'prompt': 'abc'[:n], 'completion': 'abc'[n:]}], f'{n}.jsonl') for n in (1, 2)]
  cuts = [documents(path, tokenizer, plain) for path in paths]
  assert cuts[0].fingerprint != cuts[1].fingerprint
  for broken in ({}, state | {'next': -1}, state | {'next': '3'}, state | {'next': True}):
    with pytest.raises(UserError, match='no state'):
      train_iterator(docs, spec()).set_state(broken)
  assert iterator.get_state() == state


def test_documents_read_again_are_the_same(
  write: Write, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = write(alpaca(9))
  kept = documents(path, tokenizer, spec())
  monkeypatch.setattr(pipeline, 'CACHED_TOKENS', 100)
  streamed = documents(path, tokenizer, spec())
  assert streamed._cache is None and kept._cache is not None
  assert streamed.fingerprint == kept.fingerprint
  assert_same(take(train_iterator(streamed, spec()), 5), take(train_iterator(kept, spec()), 5))


# Reading ahead.


def wait_for(is_reached: Callable[[], bool]) -> None:
  deadline = time.monotonic() + 60
  while not is_reached():
    assert time.monotonic() < deadline
    time.sleep(0.001)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
  """One entry, the number of documents, for each batch that was built; building the sixth fails once."""
  built: list[int] = []
  original = pipeline._build

  def build(docs: Documents, plan: list[list[int]], *args: Any) -> Batch:
    built.append(sum(map(len, plan)))
    if len(built) == 6:
      raise UserError('the sixth')
    return original(docs, plan, *args)

  monkeypatch.setattr(pipeline, '_build', build)
  return built


def test_state_is_that_of_batches_handed_out(write: Write, tokenizer: Tokenizer, builds: list[int]) -> None:
  how = spec()
  docs = documents(write(alpaca(7)), tokenizer, how)
  iterator = train_iterator(docs, how)
  assert iterator.get_state()['next'] == 0 and not builds
  for handed in (1, 2):
    batch = next(iterator)
    wait_for(lambda handed=handed: len(builds) > handed + 1)  # Built while nobody asks.
    done = sum(builds[:handed])
    assert batch['segments'].max(axis=1).sum() == builds[handed - 1] == sum(map(len, iterator.row_ids))
    assert iterator.get_state()['next'] == done
    assert iterator.epoch == iterator.get_state()['epoch'] == done // 7


def test_a_batch_that_cannot_be_built_is_an_error_in_its_turn(
  write: Write, tokenizer: Tokenizer, builds: list[int]
) -> None:
  how = spec()
  docs = documents(write(alpaca(23)), tokenizer, how)
  iterator = train_iterator(docs, how)
  found = take(iterator, 5)
  wait_for(lambda: len(builds) == 6)
  state = iterator.get_state()
  with pytest.raises(UserError, match='the sixth'):
    next(iterator)
  assert iterator.get_state() == state
  found += take(iterator, 3)  # The file is back, say: nothing was skipped.
  builds.extend([0] * 9)
  assert_same(take(train_iterator(docs, how), 8), found)


def test_threads_end_with_their_iterators(write: Write, tokenizer: Tokenizer) -> None:
  gc.collect()
  before = set(threading.enumerate())
  iterators = [train_iterator(documents(write(alpaca(9)), tokenizer, spec()), spec()) for _ in range(3)]
  for iterator in iterators:
    next(iterator)
  assert len(set(threading.enumerate()) - before) == 3
  del iterator, iterators
  gc.collect()
  assert not set(threading.enumerate()) - before


def test_an_iterator_that_lives_to_the_end_leaves_in_silence(write: Write) -> None:
  path = write([{'prompt': f'q {i}', 'completion': 'x' * 2000} for i in range(50)])
  script = f"""
import tokenizers
from qjax.data import pipeline
from qjax.data.sources import JsonlSource
from qjax.data.tokenizer import Tokenizer
model = tokenizers.models.BPE(vocab={{chr(i): i for i in range(128)}}, merges=[])
tokenizer = Tokenizer(tokenizers.Tokenizer(model), eos_id=0, pad_id=0)
spec = pipeline.DataSpec(batch_size=8, seq_len=4096, seed=0, pack=True, template='plain')
pipeline.CACHED_TOKENS = 0  # So that the thread tokenizes.
documents = pipeline.Documents(JsonlSource({path!r}), range(50), tokenizer, spec)
iterator = pipeline.train_iterator(documents, spec)
print(next(iterator)['tokens'].shape)
"""
  command = [sys.executable, '-W', 'error', '-c', script]
  root = pathlib.Path(pipeline.__file__).parents[2]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
  assert (done.returncode, done.stdout, done.stderr) == (0, '(8, 4096)\n', '')


# Filling rows.


def test_a_batch_holds_the_longest_prefix_that_fits_with_the_long_documents_first() -> None:
  how = spec(batch_size=2, seq_len=8)
  assert first_fit([3, 3, 5, 5, 1], 2, 8) == [[0, 1], [2]]
  assert pipeline._plan_batch(iter([3, 3, 5, 5, 1]), how) == [[0, 2], [1, 3]]
  assert pipeline._plan_batch(itertools.repeat(8), how) == [[0], [1]]
  assert pipeline._plan_batch(iter([5, 5, 4]), how) == [[0], [1]]
  assert pipeline._plan_batch(iter([1, 1, 1]), how) == [[0, 1, 2]]
  rng = np.random.default_rng(0)
  filled: dict[str, list[int]] = {'in order': [], 'longest first': []}
  how = spec(batch_size=8, seq_len=40)
  for _ in range(50):
    slots = rng.integers(1, 33, 80).tolist()
    rows = pipeline._plan_batch(iter(slots), how)
    count = sum(map(len, rows))
    assert sorted(itertools.chain(*rows)) == list(range(count)) and 8 <= count < 80
    assert len(rows) <= 8 and all(sum(slots[i] for i in row) <= 40 for row in rows)
    assert rows == sorted(map(sorted, rows))
    filled['longest first'].append(sum(slots[:count]))
    filled['in order'].append(sum(slots[: sum(map(len, first_fit(slots, 8, 40)))]))
  assert np.mean(filled['longest first']) > 1.05 * np.mean(filled['in order'])


# Evaluation.


@pytest.mark.parametrize('pack', [True, False])
@pytest.mark.parametrize('n', [1, 7, 8, 9])
def test_evaluation_sees_every_document_once(write: Write, tokenizer: Tokenizer, n: int, pack: bool) -> None:
  how = spec(pack=pack)
  docs = documents(write(alpaca(n)), tokenizer, how)
  batches = eval_batches(docs, how)
  found = []
  for batch in batches:
    assert batch['tokens'].shape == (4, 200)
    for row in range(4):
      for segment in range(1, batch['segments'][row].max() + 1):
        here = batch['segments'][row] == segment
        found.append((*batch['tokens'][row][here].tolist(), int(batch['targets'][row][here][-1])))
  assert Counter(found) == Counter(tuple(ids.tolist()) for ids, _ in docs)
  assert sum(int(b['weights'].sum()) for b in batches) == docs.counts.trained_tokens
  assert len(list(batches)) == len(batches) == (len(batches) if pack else -(-n // 4))
  for once, again in zip(batches, EvalBatches(docs, how), strict=True):
    np.testing.assert_array_equal(once['tokens'], again['tokens'])


# Lengths.


def test_what_is_too_long_is_counted(
  write: Write, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
  rows = [{'instruction': 'q', 'output': 'x' * n} for n in (1, 50, 5)]
  path = write(rows)
  lengths = [len(d.ids) for d in documents(path, tokenizer, spec())]
  just = spec(seq_len=lengths[1] - 1)
  assert documents(path, tokenizer, just).counts.dropped == 0
  below = lengths[1] - 2
  docs = documents(path, tokenizer, spec(seq_len=below))
  assert docs.rows.tolist() == [0, 2] and docs.counts.dropped == 1 and docs.counts.rows == 3
  assert '1 too long and left out' in caplog.text
  docs = documents(path, tokenizer, spec(seq_len=below, too_long='truncate'))
  assert docs.counts.truncated == 1 and docs.counts.dropped == 0 and docs.lengths[1] == below
  with pytest.raises(UserError, match=rf'rows\.jsonl:2: {lengths[1]} tokens.*at most {below + 1}'):
    documents(path, tokenizer, spec(seq_len=below, too_long='error'))
  # Cut before the answer begins, a document teaches nothing.
  docs = documents(write([{'instruction': 'q' * 300, 'output': 'A'}, *rows], 'b.jsonl'), tokenizer,
                   spec(seq_len=lengths[1], too_long='truncate'))
  assert docs.counts.dropped == 1 and docs.counts.documents == 3
  with pytest.raises(UserError, match='no document is left of 3 rows.*raise seq_len'):
    documents(path, tokenizer, spec(seq_len=5))


def test_a_huge_text_is_left_out_without_tokenizing_it(
  write: Write, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = write([*alpaca(2), {'instruction': 'q', 'output': 'x' * 1_000_000}])
  tokenized = []
  original = pipeline.tokenize_example
  monkeypatch.setattr(pipeline, 'tokenize_example', lambda *a: tokenized.append(a[3]) or original(*a))
  docs = documents(path, tokenizer, spec())
  assert docs.counts.dropped == 1 and len(tokenized) == 2
  with pytest.raises(UserError, match='rows.jsonl:3: 1,000,001 characters'):
    documents(path, tokenizer, spec(too_long='error'))


# Splits.


def test_splits_are_disjoint_complete_and_of_the_stated_size(write: Write, tokenizer: Tokenizer) -> None:
  # P25's 150 rows and 33 %; every third question is asked twice, in other letters and spacing.
  rows = alpaca(150)
  rows += [{'instruction': f'  QUESTION   {i}', 'output': 'again'} for i in range(0, 150, 3)]
  path = write(rows)
  data = load(path, tokenizer, spec(), 0.33, 0)
  train, held = set(data.train.rows.tolist()), set(data.eval.rows.tolist())
  assert not train & held and train | held == set(range(200))
  questions = [question(parse_example(row, '')).split()[1] for row in rows]
  held_questions = {questions[i] for i in held}
  assert not held_questions & {questions[i] for i in train}
  assert len(held_questions) == 50  # round(.33 · 150)
  assert data.counts['train'].rows + data.counts['eval'].rows == 200
  assert load(path, tokenizer, spec(), 0.33, 0).eval.rows.tolist() == data.eval.rows.tolist()
  assert load(path, tokenizer, spec(), 0.33, 1).eval.rows.tolist() != data.eval.rows.tolist()
  # The choice belongs to the questions: another order of rows holds out the same ones.
  turned = load(write(rows[::-1], 'turned.jsonl'), tokenizer, spec(), 0.33, 0)
  assert {questions[199 - i] for i in turned.eval.rows} == held_questions


@pytest.mark.parametrize(
  ('n', 'fraction', 'expected'), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 3), (1000, 0.2, 200)]
)
def test_the_number_held_out(n: int, fraction: float, expected: int) -> None:
  keys = [question_key(str(i), 0) for i in range(n)]
  assert held_out_rows(keys, fraction, 'set').sum() == expected


def test_splits_that_cannot_be(write: Write, tokenizer: Tokenizer) -> None:
  for rows in (alpaca(1), alpaca(1) * 5):
    with pytest.raises(UserError, match='1 distinct questions: at least two'):
      load(write(rows), tokenizer, spec(), 0.5, 0)
  with pytest.raises(UserError, match='no rows'):
    load(write(['', ' ']), tokenizer, spec(), 0.5, 0)
  for fraction in (0.0, 1.0, -1.0, float('nan')):
    with pytest.raises(UserError, match='held_out must lie between 0 and 1'):
      load(write(alpaca(9)), tokenizer, spec(), fraction, 0)


def test_a_separate_evaluation_file(
  write: Write, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
  train, held = write(alpaca(5), 'train.jsonl'), write(alpaca(8)[4:], 'eval.jsonl')
  data = load(train, tokenizer, spec(), 0.0, 0, eval_path=held)
  assert (len(data.train), len(data.eval), data.shared_questions) == (5, 4, 1)
  assert '1 of its 4 questions' in caplog.text


# Files.


def test_lines_of_any_length_in_bounded_memory(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'long.jsonl'
  size = 20 * 2**20
  with path.open('w', encoding='utf-8') as file:
    for i in range(2000):
      file.write(json.dumps({'instruction': f'q {i}', 'output': 'A'}) + '\n')
      if i == 1000:
        file.write(json.dumps({'instruction': 'long', 'output': 'x' * size}) + '\n\n')
  tracemalloc.start()
  source = JsonlSource(path)
  kept, peak = tracemalloc.get_traced_memory()
  assert kept < 2**20 and peak < 3 * size  # While reading, a line and its buffer; afterwards, offsets.
  assert len(source) == 2001
  questions = [source[i]['instruction'] for i in (0, 1000, 1001, 1002, 2000)]
  assert questions == ['q 0', 'q 1000', 'long', 'q 1001', 'q 1999']
  assert len(source[1001]['output']) == size
  assert tracemalloc.get_traced_memory()[0] < 2**20
  tracemalloc.stop()
  assert source.where(1002) == f'{path}:1004'


def test_lines_as_people_write_them(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'rows.jsonl'
  path.write_bytes('\ufeff{"a": "ক\u2028খ"}\r\n\r\n  {"a": 2}  \n\t\n{"a": 3}'.encode())
  source = JsonlSource(path)
  assert [source[i]['a'] for i in range(3)] == ['ক\u2028খ', 2, 3]
  assert [source.where(i).rpartition(':')[2] for i in range(3)] == ['1', '3', '5']


@pytest.mark.parametrize(
  ('line', 'says'),
  [
    (b'{"a": 1', 'not JSON'),
    (b'{"a": 1} {"a": 2}', 'not JSON: Extra data at character 9'),
    (b'[1]', 'must be one JSON object, not list'),
    (b'{"a": "\xff"}', 'not UTF-8.*byte 7'),
    (b'[' * 100_000, 'nested too deeply'),
  ],
)
def test_bad_lines_say_where(tmp_path: pathlib.Path, line: bytes, says: str) -> None:
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b'{"a": 1}\n\n' + line + b'\n')
  with pytest.raises(UserError, match=rf'rows\.jsonl:3: .*{says}'):
    JsonlSource(path)[1]


def test_bad_rows_are_found_before_training(write: Write, tokenizer: Tokenizer) -> None:
  with pytest.raises(UserError, match=r'rows\.jsonl:10: .*answer, is empty'):
    load(write([*alpaca(9), {'instruction': 'q', 'output': ''}]), tokenizer, spec(), 0.2, 0)


def test_bad_paths(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
  (tmp_path / 'folder.jsonl').mkdir()
  expected = {'missing.jsonl': 'No such file', 'folder.jsonl': 'directory', 'rows.csv': r'ends in \.jsonl'}
  for name, says in expected.items():
    with pytest.raises(UserError, match=says):
      load(tmp_path / name, tokenizer, spec())


def test_a_file_that_changes_is_refused(write: Write) -> None:
  path = write(alpaca(3))
  source = JsonlSource(path)
  with open(path, 'a') as file:
    file.write('{}\n')
  with pytest.raises(UserError, match='changed while it was in use'):
    source[0]


def test_a_source_travels_between_processes_and_threads(write: Write) -> None:
  source = JsonlSource(write(alpaca(50)))
  source[0]  # Opens the file.
  for other in (pickle.loads(pickle.dumps(source)), copy.copy(source)):
    assert [other[i] for i in range(50)] == alpaca(50)
  wrong = []

  def read() -> None:
    wrong.extend(i for i in range(50) if source[i] != alpaca(50)[i])

  threads = [threading.Thread(target=read) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong
  assert list(grain.MapDataset.source(source)) == alpaca(50)


@pytest.mark.parametrize(
  ('change', 'says'),
  [
    ({'batch_size': 0}, 'batch_size must be a positive integer'),
    ({'seq_len': 1.5}, 'seq_len must be a positive integer'),
    ({'seed': True}, 'seed must be an integer'),
    ({'seed': -1}, 'seed must be an integer from 0 on'),
    ({'pack': 'yes'}, 'pack must be true or false'),
    ({'template': 'chatml'}, "template is 'chatml'"),
    ({'too_long': 'trunc'}, "did you mean 'truncate'"),
  ],
)
def test_specs_are_checked(change: dict[str, Any], says: str) -> None:
  with pytest.raises(UserError, match=says):
    spec(**change)
