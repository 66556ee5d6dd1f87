"""A config becomes typed objects, or is refused by field; what a checkpoint means follows from it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import bf16, common, fp16, full, lora, qlora
from qjax import build
from qjax.checkpoint import differences
from qjax.errors import UserError
from tests import small

NOTES = {'full': full, 'lora': lora, 'qlora': qlora, 'bf16': bf16, 'fp16': fp16}


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('build')
  small.write(directory)
  return directory


@pytest.mark.parametrize('name', NOTES)
def test_every_lab_note_is_complete_and_right(name: str):
  config = NOTES[name].get_config()
  fields = build.read(config)
  assert fields.name == name
  assert build.method_of(fields).name == config.method
  # What is printed is what runs: every field of the config arrives, and nothing is filled in.
  arrived = {key: value for key, value in dataclasses.asdict(fields).items() if value is not None}
  assert differences(build.json_ready(config.to_dict()), arrived) == []


def changed(**more: Any) -> ConfigDict:
  return small.config(Path('/nowhere'), 'lora', **more)


@pytest.mark.parametrize(
  ('more', 'message'),
  [
    ({'num_steps': 0}, 'config.num_steps = 0 must be at least 1'),
    ({'num_steps': 1.5}, r'config.num_steps = 1.5 \(float\) must be int'),
    ({'num_steps': True}, r'config.num_steps = True \(bool\) must be int'),
    ({'data__pack': 1}, r'config.data.pack = 1 \(int\) must be bool'),
    ({'data__eval_path': 5}, r'config.data.eval_path = 5 \(int\) must be str \| None'),
    ({'lora__alpha': 'x'}, r"config.lora.alpha = 'x' \(str\) must be float"),
    ({'lora__alpha': float('inf')}, 'config.lora.alpha = inf must be a finite number'),
    ({'optimizer__learning_rate': float('nan')}, 'optimizer.learning_rate = nan must be a finite number'),
    ({'precision__loss_scale_initial': 1e300}, 'loss_scale_initial = 1e.300 is beyond float32'),
    ({'micro_batch': 0}, 'must be at least 1'),
    ({'data__held_out': 0.0}, 'config.data.held_out'),
    ({'seed': -1}, 'config.seed = -1'),
    ({'model__loss_chunk': 0}, 'config.model.loss_chunk'),
    ({'storage__rules': ('a', 'b')}, 'config.storage.rules'),
    ({'lora': 4}, r'config.lora = 4 \(int\) must be'),
  ],
)
def test_a_value_that_cannot_work_is_refused_by_field(more: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message):
    build.read(changed(**more))


def test_fields_are_refused_where_unknown_and_where_missing():
  config = common.base()
  config.name = config.method = 'full'
  config.optimizer.warmup = 3
  with pytest.raises(UserError, match="config.optimizer.warmup is not a field; did you mean 'warmup_steps'"):
    build.read(config)
  del config.optimizer.warmup
  del config.optimizer.eps
  with pytest.raises(UserError, match='config.optimizer.eps is missing; it is float'):
    build.read(config)


def test_a_field_that_may_be_none_still_has_a_type():
  """A placeholder refuses another type itself; a field that is None without one is caught here."""
  config = common.base()
  with pytest.raises(TypeError):
    config.data.eval_path = 5
  config.data.eval_path = 'rows.jsonl'
  assert config.data.eval_path == 'rows.jsonl'


@pytest.mark.parametrize(
  ('more', 'message'),
  [
    ({'method': 'loraa'}, "did you mean 'lora'"),
    ({'method': 'full'}, 'takes no section lora; remove it'),
    ({'precision__compute': 'float16'}, "needs a loss scale.*'dynamic'"),
    ({'precision__accum': 'bfloat16', 'precision__compute': 'float32'}, 'narrower'),
    ({'precision__param': 'float16', 'precision__rounding': 'stochastic'}, 'stochastic'),
    ({'precision__loss_scale': 'dynamc'}, "did you mean 'dynamic'"),
    ({'data__seq_len': 65}, 'exceeds the context 64'),
    ({'data__seq_len': 0}, 'seq_len'),
    ({'mesh__data': 3, 'batch_size': 4}, 'does not divide over data × fsdp = 3 devices; 3 would'),
    ({'mesh__data': -1, 'mesh__fsdp': -1}, 'one of them may be -1'),
    ({'mesh__data': 16, 'batch_size': 16}, 'needs 16 devices; 8 are visible'),
    ({'model__path': '/nowhere/at/all'}, 'there is no model at /nowhere/at/all'),
    ({'data__path': '/nowhere/rows.jsonl'}, 'cannot read /nowhere/rows.jsonl'),
    ({'lora__rank': 65}, 'exceeds the rank 64'),
  ],
)
def test_parts_that_do_not_fit_each_other_are_refused(directory: Path, more: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message):
    small.run(directory, 'lora', **more)


def test_full_needs_no_sections_and_lora_needs_both():
  with pytest.raises(UserError, match='needs the section storage'):
    config = changed()
    del config.storage
    build.method_of(build.read(config))


def meaning(directory: Path, **more: Any) -> Any:
  return small.run(directory, 'lora', **more).meaning


@pytest.mark.parametrize(
  'more',
  [
    {'name': 'another'}, {'eval_every': 5}, {'checkpoint_every': 5}, {'max_skips': 5}, {'mesh__data': 4},
    {'mesh__fsdp': 2},
  ],
)  # fmt: skip
def test_what_changes_no_number_may_change_when_a_run_goes_on(directory: Path, more: dict[str, Any]):
  assert differences(meaning(directory), meaning(directory, **more)) == []


@pytest.mark.parametrize(
  ('more', 'field'),
  [
    ({'lora__rank': 2}, 'config.lora.rank'),
    ({'seed': 1}, 'config.seed'),
    ({'num_steps': 13}, 'config.num_steps'),
    ({'precision__compute': 'float32'}, 'config.precision.compute'),
    ({'data__pack': False}, 'config.data.pack'),
    ({'storage__projections': 'int8'}, 'config.storage.projections'),
  ],
)
def test_what_changes_a_number_is_part_of_the_meaning(directory: Path, more: dict[str, Any], field: str):
  lines = differences(meaning(directory), meaning(directory, **more))
  assert any(line.startswith(f'{field} was') for line in lines)


def test_the_meaning_is_of_contents_not_of_places(directory: Path, tmp_path: Path):
  small.write(tmp_path)
  assert differences(meaning(directory), meaning(tmp_path)) == []
  small.write_data(tmp_path / 'data.jsonl', rows=13)
  assert any('data.train was' in line for line in differences(meaning(directory), meaning(tmp_path)))
  small.write_data(tmp_path / 'data.jsonl')
  small.write_model(tmp_path / 'model', seed=1)
  assert any('model.fingerprint was' in line for line in differences(meaning(directory), meaning(tmp_path)))


def test_building_reads_no_weight(directory: Path, monkeypatch: pytest.MonkeyPatch):
  from qjax.io.source import Source

  monkeypatch.setattr(Source, '_load', lambda *_: pytest.fail('a weight was read'))
  small.run(directory, 'qlora')


@pytest.mark.parametrize(
  ('batch_size', 'micro_batch', 'data', 'parts'),
  [(8, 8, 1, 1), (8, 9, 1, 1), (8, 2, 1, 4), (8, 3, 1, 4), (8, 2, 4, 1), (7, 2, 1, 7), (6, 4, 1, 2)],
)
def test_a_device_takes_at_most_a_micro_batch_at_a_time(
  batch_size: int, micro_batch: int, data: int, parts: int, directory: Path
) -> None:
  run = small.run(directory, batch_size=batch_size, micro_batch=micro_batch, mesh__data=data)
  assert run.loop.accumulate == parts
