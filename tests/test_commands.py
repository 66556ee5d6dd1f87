"""The commands around quantization, each as a user starts it, on a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qjax.io import native
from tests import small

ROOT = Path(__file__).parents[1]


class Directory:
  """A tiny model, a text, and commands that run there."""

  def __init__(self, path: Path):
    self.path = path
    self.model = small.write_model(path / 'model')
    words = ' '.join(f'{chr(97 + i * i % 26) * (1 + i % 4)}{i % 7}' for i in range(500))
    self.text = path / 'text.txt'
    self.text.write_text(words)

  def run(self, command: str, *args: str, status: int = 0) -> str:
    """What the command prints; it must end with this status."""
    ended = subprocess.run(
      [sys.executable, '-m', f'experiments.{command}', *args],
      cwd=ROOT, capture_output=True, text=True, env=os.environ | {'PYTHONPATH': str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr

  def quantize(self, name: str, *args: str, status: int = 0) -> str:
    return self.run(
      'quantize', '--config=configs/ptq_int8.py', f'--config.model.path={self.model}',
      f'--config.calibration.path={self.text}', '--config.calibration.max_tokens=512',
      '--config.calibration.batch_size=2', f'--workdir={self.path / name}', *args, status=status,
    )  # fmt: skip

  def verify(self, name: str, *args: str, status: int = 0) -> str:
    return self.run(
      'verify', '--config=configs/verify.py', f'--config.reference={self.model}',
      f'--config.candidate={self.path / name / "model"}', f'--config.text.path={self.text}',
      '--config.text.max_tokens=512', '--config.prompts.count=1', '--config.prompts.new_tokens=2',
      '--config.thresholds.exact_match=0', '--config.thresholds.nll_difference=0.1', *args, status=status,
    )  # fmt: skip


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
  return Directory(tmp_path_factory.mktemp('commands'))


def test_a_model_is_quantized_and_judged(directory: Directory) -> None:
  assert 'bits a projection weight' in directory.quantize('int8')
  record = json.loads((directory.path / 'int8' / 'record.json').read_text())
  assert record['results']['bits_per_projection_weight'] == pytest.approx(8 + 32 / 75, abs=0.2)
  assert 'exists' in directory.quantize('int8', status=2)
  assert 'PASSED' in directory.verify('int8')
  report = directory.path / 'int8' / 'verify'
  for name in ('report.json', 'report.md', 'report.html'):
    assert (report / name).stat().st_size > 500
  printed = directory.verify('int8', '--config.thresholds.kl_mean=0', status=1)
  assert 'FAILED' in printed and 'kl_mean' in printed.partition('FAILED')[2]


def test_saved_ranges_feed_a_quantization(directory: Directory) -> None:
  where = directory.path / 'calibration'
  printed = directory.run(
    'calibrate', f'--model={directory.model}', f'--text={directory.text}', '--max_tokens=512',
    '--observers=absmax,mse', '--keep=mse', f'--workdir={where}',
  )  # fmt: skip
  assert '| absmax |' in printed and '| mse |' in printed
  flags = (
    "--config.activations=(('.*', 'int8:axis=tensor,static'),)",
    f'--config.calibration.ranges={where / "calibration.json"}',
  )
  directory.quantize('static', *flags)
  (where / 'calibration.json').write_text('{')
  assert 'torn' in directory.quantize('torn', *flags, status=2)
  assert not (directory.path / 'torn').exists()


def test_sensitivity_chooses_what_the_table_measures_and_a_table_goes_on(directory: Directory) -> None:
  where = directory.path / 'sensitivity'
  printed = directory.run(
    'sensitivity', f'--model={directory.model}', f'--text={directory.text}', '--max_tokens=512',
    '--schemes=nf2:block=64+nf3:block=64+nf4:block=64', f'--workdir={where}',
  )  # fmt: skip
  assert '--config.storage.projections=' in printed
  table = [
    'ptq_table', f'--model={directory.model}', f'--text={directory.text}', '--max_tokens=512',
    f'--workdir={directory.path / "table"}', f'--sensitivity={where / "sensitivity.json"}',
  ]  # fmt: skip
  directory.run(*table, '--only=fp32,int8-channel')
  before = json.loads((directory.path / 'table' / 'table.json').read_text())['rows']
  assert before['fp32']['difference'] == 0 and before['fp32']['top1'] == 1
  assert abs(before['int8-channel']['difference']) < 0.01
  directory.run(*table, '--only=int8-channel,mixed')
  after = json.loads((directory.path / 'table' / 'table.json').read_text())['rows']
  assert after['mixed']['weights'] == 'mixed'
  assert {name: after[name] for name in before} == before  # not measured again: their seconds are the same
  assert "did you mean 'int8-channel'" in directory.run(*table, '--only=int8-chanel', status=2)
  assert 'other settings' in directory.run(*table, '--calibration_tokens=300', status=2)


def test_a_forward_pass_is_timed_and_explained(directory: Directory) -> None:
  printed = directory.run(
    'bench_forward', f'--model={directory.model}', '--rows=2', '--seq_len=8', '--repeats=2', '--json'
  )
  seconds = json.loads(next(line for line in printed.splitlines() if line.startswith('{')))
  assert list(seconds) == ['float32', 'bfloat16', 'int8:axis=channel, int8:axis=token']
  assert 'integer: codes of x as int8:axis=token' in printed
  printed = directory.run(
    'bench_forward', f'--model={directory.model}', '--rows=1', '--seq_len=1', '--repeats=1',
    '--weights=int4:block=16', '--logits=last',
  )  # fmt: skip
  assert 'fake: x as int8:axis=token' in printed and 'blocks of a weight are slower as integers' in printed


def test_the_worst_matrices_are_trained_and_converted(directory: Directory) -> None:
  where = directory.path / 'each'
  printed = directory.run(
    'sensitivity', f'--model={directory.model}', f'--text={directory.text}', '--max_tokens=256',
    '--each_layer', '--schemes=int4:axis=channel', '--bits=5', f'--workdir={where}',
  )  # fmt: skip
  assert 'layers/mlp/down/kernel' in printed
  found = json.loads((where / 'sensitivity.json').read_text())
  assert len(found['paths']) == 7 * small.CONFIG.num_layers
  assert (where / 'heatmap-int4-axis-channel.png').stat().st_size > 5000
  run, data = directory.path / 'targeted', small.write_data(directory.path / 'data.jsonl')
  settings = small.overrides(directory.path, num_steps=2, optimizer__warmup_steps=0, data__path=data)
  train = [
    'train', '--config=configs/targeted.py', f'--workdir={run}',
    f'--config.targeted.record={where / "sensitivity.json"}',
    *(f'--config.{name}={value}' for name, value in settings.items()),
  ]  # fmt: skip
  assert 'holds no matrix' in directory.run(*train, '--config.targeted.budget=0.001', status=2)
  directory.run(*train)
  trained = json.loads((run / 'record.json').read_text())['trained']
  assert trained['layers'] and all(path.startswith('slices/') for path in trained['leaves'])
  whole = (run / 'record.json').read_text()
  (run / 'record.json').write_text(json.dumps(json.loads(whole) | {'status': 'interrupted'}))
  assert 'has not finished (interrupted)' in directory.run('convert', f'--run={run}', status=2)
  (run / 'record.json').write_text(whole)
  assert 'held-out nll as trained' in directory.run('convert', f'--run={run}')
  assert 'exists' in directory.run('convert', f'--run={run}', status=2)
  assert 'no working directory of a run' in directory.run('convert', f'--run={where}', status=2)
  lax = {'nll_difference': 1e9, 'kl_mean': 1e9, 'kl_p99': 1e9, 'top1': 0, 'output_sqnr_db': -1e9}
  lax |= dict.fromkeys(('output_channel_drop_db', 'weight_channel_drop_db', 'weight_matrix_drop_db'), 1e9)
  assert 'PASSED' in directory.verify('targeted', *(f'--config.thresholds.{k}={v}' for k, v in lax.items()))


def test_adapters_are_merged_and_what_that_costs_is_said(directory: Directory) -> None:
  run, data = directory.path / 'beside', small.write_data(directory.path / 'data.jsonl')
  settings = small.overrides(directory.path, num_steps=2, optimizer__warmup_steps=0, data__path=data)
  settings |= {'lora.rank': 4, 'storage.projections': 'nf4:block=32'}
  given = [f'--config.{name}={value}' for name, value in settings.items()]
  directory.run('train', '--config=configs/qlora.py', f'--workdir={run}', *given)
  convert = ['convert', f'--run={run}', f'--out={directory.path / "merged"}']
  assert "'nf5' is not a format" in directory.run(*convert, '--merge=nf5', status=2)
  printed = directory.run(*convert, '--merge=nf4:block=32')
  scores = re.search(r'as trained ([\d.]+), as stored ([\d.]+), on', printed)
  assert scores is not None and scores[1] != scores[2]
  assert 'of the adapters survived' in printed
  assert 'lora' not in native.load(directory.path / 'merged').variables
  inside = directory.path / 'inside'
  settings['storage.projections'] = 'int8:axis=channel'
  given = [f'--config.{name}={value}' for name, value in settings.items()]
  directory.run('train', '--config=configs/qat_lora.py', f'--workdir={inside}', *given)
  printed = directory.run('convert', f'--run={inside}')
  scores = re.search(r'as trained ([\d.]+), as stored ([\d.]+), on', printed)
  assert scores is not None and scores[1] == scores[2]
  assert 'no adapter to merge' in directory.run(
    'convert', f'--run={inside}', f'--out={directory.path / "again"}', '--merge=nf4', status=2
  )


def test_recovery_is_measured_and_goes_on(directory: Directory) -> None:
  settings = small.overrides(directory.path, num_steps=2, optimizer__warmup_steps=0)
  small.write_data(directory.path / 'data.jsonl')
  del settings['model.path']
  given = ['recovery', '--only=qat_int4,full', f'--workdir={directory.path / "recovery"}']
  first = [f'--set={name}={value}' for name, value in settings.items()]
  directory.run(*given, *first, f'--model={directory.model}')
  rows = json.loads((directory.path / 'recovery/table.json').read_text())['rows']
  assert [row['row'] for row in rows] == ['qat_int4', 'full']
  assert rows[0]['share'].endswith('%') and 'share' not in rows[1]
  assert rows[0]['float'] == rows[1]['float'] != rows[1]['trained']
  again = directory.run(*given, *first, f'--model={directory.model}')
  assert 'holds this run, finished' in again
  assert "did you mean 'targeted'" in directory.run('recovery', '--only=targetted', status=2)
