"""A run that is killed or stopped goes on as if nothing had happened: the same numbers, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qjax import records
from tests import small

ROOT = Path(__file__).parents[1]
# An epoch is about one batch, so every stop below lies in another epoch than the one before.
STEPS, EVALUATE, CHECKPOINT = 40, 10, 4

# experiments.train, which asks itself to stop in the middle of the evaluation after a step.
STOPS_IN_EVALUATION = '''
import os, runpy, signal, sys
from qjax import evaluate
count, stop_at = 0, int(sys.argv.pop(1))
evaluate_all = evaluate.evaluate
def patched(*args):
  global count
  count += 1
  if count == stop_at:
    os.kill(os.getpid(), signal.SIGTERM)
  return evaluate_all(*args)
evaluate.evaluate = patched
sys.argv[0] = 'train.py'
runpy.run_module('experiments.train', run_name='__main__', alter_sys=True)
'''


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('kill')
  small.write(directory)
  return directory


class Command:
  """experiments.train on the small model, in a process of its own; processes share compiled programs."""

  def __init__(self, directory: Path, workdir: str, *arguments: str, stop_in_evaluation: int | None = None):
    self.workdir = directory / workdir
    more = {'num_steps': STEPS, 'eval_every': EVALUATE, 'checkpoint_every': CHECKPOINT, 'lora.rank': 4}
    flags = [f'--config.{name}={value}' for name, value in small.overrides(directory, **more).items()]
    start = ['-m', 'experiments.train']
    if stop_in_evaluation is not None:
      start = ['-c', STOPS_IN_EVALUATION, str(stop_in_evaluation)]
    cache = {
      'JAX_COMPILATION_CACHE_DIR': str(directory / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'XLA_FLAGS': '--xla_backend_optimization_level=0',
    }  # fmt: skip
    self.process = subprocess.Popen(
      [sys.executable, *start, '--config=configs/qlora.py', *flags, f'--workdir={self.workdir}', *arguments],
      cwd=ROOT, env=os.environ | cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

  def signal_after(self, step: int, number: int) -> int:
    """Sends a signal when the step has been measured; returns the last step measured by then."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and self.process.poll() is None:
      rows = records.read_metrics(self.workdir)
      if rows and rows[-1]['step'] >= step:
        self.process.send_signal(number)
        return rows[-1]['step']
      time.sleep(0.002)
    raise AssertionError(f'no step {step}: {self.end()}')

  def end(self) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err = self.process.communicate(timeout=180)
    return self.process.returncode, out, err


def record_of(directory: Path, workdir: str) -> dict[str, Any]:
  found = records.read_record(directory / workdir)
  assert found is not None
  return found


@pytest.fixture(scope='module')
def uninterrupted(directory: Path) -> list[dict[str, Any]]:
  status, _, err = Command(directory, 'whole').end()
  assert status == 0, err
  return records.read_metrics(directory / 'whole')


def test_a_run_measures_every_step_and_its_evaluations(directory: Path, uninterrupted: list[dict[str, Any]]):
  steps = [row['step'] for row in uninterrupted if row['kind'] == 'train']
  assert steps == list(range(1, STEPS + 1))
  assert [row['step'] for row in uninterrupted if row['kind'] == 'eval'] == [0, 10, 20, 30, 40]
  results = record_of(directory, 'whole')['results']
  evals = [row for row in uninterrupted if row['kind'] == 'eval']
  for name, row in (('before', evals[0]), ('after', evals[-1])):
    assert results[name] == {field: value for field, value in row.items() if field not in ('step', 'kind')}
  assert evals[-1]['nll'] < evals[0]['nll']


def test_a_run_that_is_stopped_in_every_way_gives_the_same_numbers(
  directory: Path, uninterrupted: list[dict[str, Any]]
):
  whole = record_of(directory, 'whole')['results']

  # Killed without a warning, between checkpoints.
  command = Command(directory, 'stopped')
  command.signal_after(5, signal.SIGKILL)
  assert command.end()[0] == -signal.SIGKILL
  assert record_of(directory, 'stopped')['status'] == 'running'
  assert os.listdir(directory / 'stopped' / 'checkpoints')

  # Asked to stop while it evaluates (the first evaluation of this process is that of step 10).
  status, _, err = Command(directory, 'stopped', stop_in_evaluation=1).end()
  assert status == 128 + signal.SIGTERM, err
  assert 'resuming after step' in err and 'stopped by SIGTERM after step 10' in err and 'Traceback' not in err
  found = record_of(directory, 'stopped')
  assert found['status'] == 'interrupted' and found['step'] == 10
  assert '10' in os.listdir(directory / 'stopped' / 'checkpoints')

  # Ctrl-C while it trains: it stops within the step and saves it.
  command = Command(directory, 'stopped')
  seen = command.signal_after(15, signal.SIGINT)
  status, _, err = command.end()
  assert status == 128 + signal.SIGINT, err
  assert 'resuming after step 10' in err and 'Traceback' not in err
  found = record_of(directory, 'stopped')
  rows = records.read_metrics(directory / 'stopped')
  assert found['status'] == 'interrupted' and found['step'] == rows[-1]['step'] <= seen + 2
  assert str(found['step']) in os.listdir(directory / 'stopped' / 'checkpoints')

  status, out, err = Command(directory, 'stopped').end()
  assert status == 0, err
  assert f'resuming after step {found["step"]}' in err
  assert records.read_metrics(directory / 'stopped') == uninterrupted
  results = record_of(directory, 'stopped')['results']
  assert record_of(directory, 'stopped')['status'] == 'finished'
  for name in ('before', 'after', 'steps', 'skipped_steps', 'trainable_parameters', 'optimizer_bytes'):
    assert results[name] == whole[name]
  assert f'{whole["before"]["nll"]:.4f} -> {whole["after"]["nll"]:.4f}' in out


def test_a_finished_run_shows_its_summary_again(directory: Path, uninterrupted: list[dict[str, Any]]):
  status, out, err = Command(directory, 'whole').end()
  after = record_of(directory, 'whole')['results']['after']
  assert status == 0 and f'-> {after["nll"]:.4f} nats a token' in out and 'finished' in err
  assert records.read_metrics(directory / 'whole') == uninterrupted


def test_another_config_is_refused_and_leaves_the_run_alone(
  directory: Path, uninterrupted: list[dict[str, Any]]
):
  before = (directory / 'whole' / 'record.json').read_bytes()
  status, _, err = Command(directory, 'whole', '--config.lora.rank=2', '--config.mesh.fsdp=-1').end()
  assert status == 2 and 'config.lora.rank was 4 and is 2' in err and '--restart' in err
  assert 'mesh' not in err  # a run may go on with other devices
  assert (directory / 'whole' / 'record.json').read_bytes() == before


def test_restart_keeps_the_earlier_run_aside(directory: Path, uninterrupted: list[dict[str, Any]]):
  command = Command(directory, 'whole', '--config.seed=1', '--restart')
  while command.process.poll() is None and not list(directory.glob('whole.*')):
    time.sleep(0.01)
  command.signal_after(0, signal.SIGKILL)
  command.end()
  (aside,) = directory.glob('whole.*')
  assert records.read_metrics(aside) == uninterrupted
  assert json.loads((aside / 'record.json').read_text())['status'] == 'finished'
  new = record_of(directory, 'whole')
  assert new['status'] == 'running' and new['config']['seed'] == 1
