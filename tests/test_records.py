"""What a run leaves behind is whole, and equal in every form, whatever happened while it was written."""

import json
import math
import stat
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qjax import files, progress, records
from qjax.errors import UserError


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
  found = EventAccumulator(str(directory / 'tensorboard'))
  found.Reload()
  return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()['scalars']}


def from_rows(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
  """The same as `events`, from metrics.jsonl."""
  found: dict[str, list[tuple[int, float]]] = {}
  for row in rows:
    for name, value in row.items():
      if name not in ('step', 'kind') and value is not None:
        found.setdefault(f'{row["kind"]}/{name}', []).append((row['step'], float(np.float32(value))))
  return found


def write(metrics: records.Metrics, steps: range) -> None:
  for step in steps:
    metrics.write(step, 'train', {'loss': 1 / step, 'tokens': 100 * step})
    if step % 4 == 0:
      metrics.write(step, 'eval', {'nll': 0.1 * step})


def test_metrics_are_json_lines_and_tensorboard_shows_the_same(tmp_path: Path):
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 9))
  metrics.close()
  lines = (tmp_path / records.METRICS).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert len(rows) == 10 and rows == records.read_metrics(tmp_path)
  assert rows[0] == {'step': 1, 'kind': 'train', 'loss': 1.0, 'tokens': 100}
  assert events(tmp_path) == from_rows(rows)


def test_a_run_that_was_killed_has_lost_nothing_when_it_goes_on(tmp_path: Path):
  killed = records.Metrics(tmp_path)
  write(killed, range(1, 4))  # neither closed nor flushed
  assert [row['step'] for row in records.read_metrics(tmp_path)] == [1, 2, 3]
  metrics = records.Metrics(tmp_path, after_step=3)
  write(metrics, range(4, 6))
  metrics.close()
  assert events(tmp_path) == from_rows(records.read_metrics(tmp_path))
  assert len(events(tmp_path)['train/loss']) == 5
  killed.close()


def test_resuming_cuts_off_what_will_be_measured_again(tmp_path: Path):
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 9))
  metrics.close()
  metrics = records.Metrics(tmp_path, after_step=4)
  rows = records.read_metrics(tmp_path)
  assert [row['step'] for row in rows] == [1, 2, 3, 4, 4]
  write(metrics, range(5, 7))
  metrics.close()
  rows = records.read_metrics(tmp_path)
  assert [row['step'] for row in rows if row['kind'] == 'train'] == [1, 2, 3, 4, 5, 6]
  assert events(tmp_path) == from_rows(rows)


def test_resuming_cuts_off_an_evaluation_that_is_still_due(tmp_path: Path):
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 6))
  metrics.close()
  records.Metrics(tmp_path, after_step=4, is_scored=False).close()
  rows = records.read_metrics(tmp_path)
  assert [(row['step'], row['kind']) for row in rows] == [(step, 'train') for step in range(1, 5)]


def test_beginning_anew_forgets_everything(tmp_path: Path):
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 9))
  metrics.close()
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 3))
  metrics.close()
  assert [row['step'] for row in records.read_metrics(tmp_path)] == [1, 2]
  assert events(tmp_path)['train/loss'] == [(1, 1.0), (2, 0.5)]


def test_a_line_that_a_crash_cut_short_is_no_row(tmp_path: Path):
  metrics = records.Metrics(tmp_path)
  write(metrics, range(1, 4))
  metrics.close()
  path = tmp_path / records.METRICS
  path.write_text(path.read_text()[:-9])
  assert [row['step'] for row in records.read_metrics(tmp_path)] == [1, 2]
  records.Metrics(tmp_path, after_step=3).close()
  assert path.read_text().endswith('}\n')


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_no_file_holds_a_number_that_json_lacks(tmp_path: Path, value: float):
  metrics = records.Metrics(tmp_path)
  metrics.write(1, 'train', {'loss': value, 'tokens': 3})
  metrics.close()
  strict = json.loads((tmp_path / records.METRICS).read_text(), parse_constant=pytest.fail)
  assert strict == {'step': 1, 'kind': 'train', 'loss': None, 'tokens': 3}
  assert events(tmp_path) == {'train/tokens': [(1, 3.0)]}
  results = {'after': {'nll': value}, 'list': [value, (value, 1)]}
  records.Record(tmp_path / records.RECORD, {}).update(results=results)
  found = json.loads((tmp_path / records.RECORD).read_text(), parse_constant=pytest.fail)
  assert found == {'results': {'after': {'nll': None}, 'list': [None, [None, 1]]}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
  path = tmp_path / 'record.json'
  files.write_json(path, {'a': 1})
  with pytest.raises(TypeError):
    files.write_json(path, {'a': 2, 'b': object()})
  assert json.loads(path.read_text()) == {'a': 1}
  files.write_json(path, {'a': 3})
  assert json.loads(path.read_text()) == {'a': 3}
  assert [p.name for p in tmp_path.iterdir()] == ['record.json']


def test_others_may_read_what_a_run_writes(tmp_path: Path):
  plain = tmp_path / 'plain'
  plain.touch()
  files.write_json(tmp_path / 'record.json', {})
  records.Metrics(tmp_path).close()
  modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir() if p.is_file()}
  assert set(modes) == {'plain', 'record.json', records.METRICS} and len(set(modes.values())) == 1


def test_a_record_grows_by_its_updates(tmp_path: Path):
  record = records.Record(tmp_path / 'run' / records.RECORD, {'meaning': {}})
  record.update(status='running')
  record.update(status='finished', results={'steps': 3})
  found = records.read_record(tmp_path / 'run')
  assert found == {'meaning': {}, 'status': 'finished', 'results': {'steps': 3}}
  assert records.read_record(tmp_path) is None


def test_a_damaged_record_is_named(tmp_path: Path):
  for text in ('{"a": ', '{}', '[]', '3'):
    (tmp_path / records.RECORD).write_text(text)
    with pytest.raises(UserError, match='record.json is damaged'):
      records.read_record(tmp_path)


def test_the_environment_says_what_is_needed_to_run_it_again():
  found = json.loads(json.dumps(records.environment()))
  assert found['versions']['jax'] == jax.__version__
  assert found['versions'].keys() >= {'flax', 'optax', 'numpy'}
  kind = jax.devices()[0].device_kind
  assert found['devices'] == {'platform': 'cpu', 'kind': kind, 'count': 8}
  assert found['command'] and found['python'] and 'cores' in found['machine']
  assert records.peak_memory()['host'] >= 0.9 * records.resident_bytes() > 2**20


@pytest.mark.parametrize(
  ('count', 'text'),
  [(512, '512 B'), (1536, '1.5 KiB'), (128.3 * 2**20, '128.3 MiB'), (12.8 * 2**30, '12.80 GiB')],
)
def test_bytes_for_people(count: float, text: str):
  assert records.human_bytes(count) == text


# ---- progress ---------------------------------------------------------------------------------------------

DURATIONS = [(7, '0:07'), (750, '12:30'), (11100, '3:05:00'), (59.6, '1:00')]


@pytest.mark.parametrize(('seconds', 'text'), DURATIONS)
def test_durations_for_people(seconds: float, text: str):
  assert progress.clock(seconds) == text


def test_a_log_gets_a_line_now_and_then_and_always_the_last(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
  now = 100.0
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now)
  with progress.Bar('training', 100) as bar:
    for done in range(1, 101):
      now += 0.5
      bar.advance(done, 'loss 1')
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 11  # the first, one each five seconds, the last
  assert lines[0] == 'training 1/100  loss 1  0:50 left'
  assert lines[-1] == 'training 100/100  loss 1  0:00 left'
  assert bar.seconds_a_step == pytest.approx(0.5)


def test_what_is_no_step_does_not_count_as_one(monkeypatch: pytest.MonkeyPatch):
  now = 100.0
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now)
  bar = progress.Bar('training', 10)
  assert bar.seconds_a_step == 0
  for done in range(1, 5):
    now += 2
    bar.advance(done)
  now += 60  # an evaluation
  bar.restart_clock()
  assert bar.seconds_a_step == pytest.approx(2)
  now += 4
  bar.advance(5)
  assert bar.seconds_a_step == pytest.approx(3)
