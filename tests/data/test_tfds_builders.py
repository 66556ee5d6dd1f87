"""The vendored set: what is in it, that it is prepared once and whole, what the embedded model sees."""

import concurrent.futures
import multiprocessing
import pathlib
import socket
from typing import Any

import pytest

from qjax.cache import cache_dir
from qjax.data import tfds_builders
from qjax.data.packing import packing_efficiency
from qjax.data.pipeline import DataSpec, eval_batches, load, train_iterator
from qjax.data.sources import JsonlSource, question_key
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  def refuse(*_: Any) -> None:
    raise OSError('this test has no network')

  monkeypatch.setattr(socket.socket, 'connect', refuse)
  monkeypatch.setenv('QJAX_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('QJAX_CACHE', '/own')
  monkeypatch.setenv('XDG_CACHE_HOME', '/shared')
  monkeypatch.setenv('HOME', '/somewhere')
  assert cache_dir() == pathlib.Path('/own')
  monkeypatch.setenv('QJAX_CACHE', '')
  assert cache_dir() == pathlib.Path('/shared/qjax')
  monkeypatch.delenv('XDG_CACHE_HOME')
  assert cache_dir() == pathlib.Path('/somewhere/.cache/qjax')


def test_splits_are_the_file(cache: pathlib.Path) -> None:
  builder = tfds_builders.prepare()
  assert str(builder.data_dir).startswith(str(cache))
  source = JsonlSource(tfds_builders.DATA_FILE)
  splits = {split: tfds_builders.SplitSource(builder, split) for split in ('train', 'validation')}
  # The set is fixed, so are these. Should they move, the split rule moved: old runs are no longer comparable.
  expected = {'train': 403, 'validation': 100}
  assert {split: len(rows) for split, rows in splits.items()} == expected
  assert {split: info.num_examples for split, info in builder.info.splits.items()} == expected
  lines: dict[str, list[int]] = {}
  questions: dict[str, set[int]] = {}
  for split, rows in splits.items():
    lines[split] = [int(rows.where(i).rpartition(':')[2]) for i in range(len(rows))]
    assert lines[split] == sorted(lines[split])
    assert [rows[i] for i in range(len(rows))] == [source[line - 1] for line in lines[split]]
    questions[split] = {question_key(rows[i]['instruction'], 0) for i in range(len(rows))}
  assert sorted(lines['train'] + lines['validation']) == list(range(1, 504))
  assert not questions['train'] & questions['validation']
  assert (len(questions['train']), len(questions['validation'])) == (398, 99)


def test_other_splits_live_beside(cache: pathlib.Path) -> None:
  half = tfds_builders.prepare(held_out=0.5, seed=1)
  other = tfds_builders.prepare(held_out=0.5, seed=2)
  assert half.data_dir != other.data_dir
  held = [tfds_builders.SplitSource(builder, 'validation')[0] for builder in (half, other)]
  assert held[0] != held[1]
  with pytest.raises(UserError, match='held_out'):
    tfds_builders.prepare(held_out=1.5)
  assert len(list((cache / 'tfds').iterdir())) == 2  # The failed one left nothing.


def test_a_killed_run_leaves_nothing_that_counts(
  cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(tfds_builders.shutil, 'rmtree', lambda *_, **__: None)  # A killed process tidies nothing.
    patch.setattr(tfds_builders.os, 'replace', interrupted)
    with pytest.raises(KeyboardInterrupt):
      tfds_builders.prepare()
  assert len(list((cache / 'tfds').iterdir())) == 1
  assert len(tfds_builders.SplitSource(tfds_builders.prepare(), 'train')) == 403


def test_prepared_data_are_used_again(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  tfds_builders.prepare()
  monkeypatch.setattr(tfds_builders.tempfile, 'mkdtemp', lambda **_: pytest.fail('prepared twice'))
  assert tfds_builders.prepare().info.splits['train'].num_examples == 403


def _prepare(directory: str) -> int:
  return len(tfds_builders.SplitSource(tfds_builders.prepare(directory), 'train'))


def test_runs_at_once(tmp_path: pathlib.Path) -> None:
  spawn = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(3, mp_context=spawn) as pool:
    assert list(pool.map(_prepare, [str(tmp_path)] * 3)) == [403] * 3
  assert len(list((tmp_path / 'tfds').iterdir())) == 1


def test_load_by_name(cache: pathlib.Path, tokenizer: Tokenizer) -> None:
  spec = DataSpec(batch_size=4, seq_len=1024, seed=0, pack=True)
  data = load('construction_faq', tokenizer, spec)
  assert (data.counts['train'].rows, data.counts['eval'].rows) == (403, 100)
  assert next(train_iterator(data.train, spec))['tokens'].shape == (4, 1024)
  with pytest.raises(UserError, match='eval_path'):
    load('construction_faq', tokenizer, spec, eval_path='other.jsonl')
  with pytest.raises(UserError, match=r"construction_faq' or a file that ends in \.jsonl"):
    load('construction-faq', tokenizer, spec)


@pytest.mark.slow
def test_embedded_model_reads_the_set(embedded_source: Any) -> None:
  tokenizer = embedded_source.tokenizer
  spec = DataSpec(batch_size=8, seq_len=256, seed=0, pack=True, too_long='error')
  data = load('construction_faq', tokenizer, spec)
  # Measured once with this set and tokenizer. If they move, the template, tokenizer or split moved.
  assert (data.train.counts.tokens, data.train.counts.trained_tokens) == (41113, 24645)
  assert (data.eval.counts.tokens, data.eval.counts.trained_tokens) == (9924, 5900)
  iterator = train_iterator(data.train, spec)
  assert packing_efficiency(next(iterator) for _ in range(40)) > 0.8
  assert sum(int(b['weights'].sum()) for b in eval_batches(data.eval, spec)) == 5900
  document = data.train[0]
  answer = tokenizer.decode(document.ids[document.trained].tolist(), skip_special=False)
  assert answer.startswith('A bygglov is an official') and answer.endswith('process.<|im_end|>')
