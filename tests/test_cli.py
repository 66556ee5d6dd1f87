"""What a user can get wrong is one clear message and exit status 2, before a weight is read; help helps."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments import cli
from qjax.errors import UserError
from tests import small

ROOT = Path(__file__).parents[1]

# Imports everything slow once and forks for each command, which then runs as if it had been started.
SERVER = '''
import json, os, runpy, sys
from experiments import cli
from qjax import build
for line in sys.stdin:
  argv, out, err = json.loads(line)
  child = os.fork()
  if not child:
    for path, number in ((out, 1), (err, 2)):
      os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = argv
    status = 0
    try:
      runpy.run_module('experiments.train', run_name='__main__', alter_sys=True)
    except SystemExit as stop:
      status = stop.code or 0
    except BaseException:
      import traceback
      traceback.print_exc()
      status = 1
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''


class Ended(NamedTuple):
  status: int
  out: str
  err: str


Command = Callable[..., Ended]


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('cli')
  small.write(directory)
  return directory


@pytest.fixture(scope='module')
def command(directory: Path) -> Iterator[Command]:
  """Runs experiments.train with these arguments."""
  start = [sys.executable, '-W', 'ignore', '-c', SERVER]
  pipe = subprocess.PIPE
  with subprocess.Popen(start, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as server:
    assert server.stdin is not None and server.stdout is not None
    stdin, stdout = server.stdin, server.stdout
    count = 0

    def run(*arguments: str) -> Ended:
      nonlocal count
      count += 1
      out, err = (directory / f'{count}.{name}' for name in ('out', 'err'))
      print(json.dumps([['experiments/train.py', *arguments], str(out), str(err)]), file=stdin, flush=True)
      status = int(stdout.readline())
      return Ended(status, out.read_text(), err.read_text())

    yield run
    stdin.close()


def given(directory: Path, note: str = 'lora', **more: object) -> list[str]:
  """--config and the overrides that point it to the small model."""
  values = {f'--config.{name}={value}' for name, value in small.overrides(directory, **more).items()}
  return [f'--config=configs/{note}.py', *sorted(values), f'--workdir={directory}/refused']


REFUSALS: dict[str, tuple[list[str], str]] = {
  'misspelt field': (['--config.lora.rnk=8'], "lora.rnk=8: there is no field 'rnk'; did you mean 'rank'?"),
  'misspelt section': (['--config.optimiser.eps=1'], "no field 'optimiser'; did you mean 'optimizer'?"),
  'text for a number': (['--config.num_steps=abc'], '--config.num_steps=abc: it must be a whole number'),
  'fraction for a whole number': (['--config.lora.rank=1.5'], 'lora.rank=1.5: it must be a whole number'),
  'text for a boolean': (['--config.data.pack=maybe'], '--config.data.pack=maybe: it must be true or false'),
  'rank 0': (['--config.lora.rank=0'], 'lora.rank = 0 must be at least 1'),
  'rank too large': (['--config.lora.rank=65'], 'lora.rank = 65 exceeds'),
  'batch 0': (['--config.batch_size=0'], 'config.batch_size = 0 must be at least 1'),
  'steps 0': (['--config.num_steps=0'], 'config.num_steps = 0 must be at least 1'),
  'micro batch 0': (['--config.micro_batch=0'], 'config.micro_batch = 0 must be at least 1'),
  'targets': (['--config.lora.targets=.*/query/kernel'], "lora.targets: '.*/query/kernel' matches none"),
  'targets of norms': (['--config.lora.targets=.*'], 'only projections'),
  'broken expression': (['--config.lora.targets=('], 'is not a regular expression'),
  'storage rule': (["--config.storage.rules=(('layers/moe/.*','int8'),)"], "'layers/moe/.*' matches none"),
  'storage rules of another form': (['--config.storage.rules=(1,2)'], 'storage.rules'),
  'scheme': (['--config.storage.projections=nf5'], "a scheme is FORMAT[:OPTION"),
  'scheme option': (['--config.storage.projections=nf4:blck=64'], "a scheme is FORMAT[:OPTION"),
  'dtype': (['--config.precision.compute=bfloat17'], "did you mean 'bfloat16'?"),
  'schedule': (['--config.optimizer.schedule=cosin'], "did you mean 'cosine'?"),
  'method': (['--config.method=loraa'], "did you mean 'lora'?"),
  'full with lora': (['--config.method=full'], 'takes no section lora; remove it'),
  'remat': (['--config.model.remat=some'], 'model.remat'),
  'attention': (['--config.model.attention=flash'], 'model.attention'),
  'kernels': (['--config.kernels=cuda'], 'kernels'),
  'template': (['--config.data.template=chatt'], "did you mean 'chat'?"),
  'too_long': (['--config.data.too_long=cut'], 'too_long'),
  'context': (['--config.data.seq_len=65'], 'config.data.seq_len = 65 exceeds the context 64'),
  'model': (['--config.model.path=/nowhere/model'], 'there is no model at /nowhere/model'),
  'data': (['--config.data.path=/nowhere/rows.jsonl'], 'cannot read /nowhere/rows.jsonl'),
  'data of another kind': (['--config.data.path=alpaca'], 'alpaca'),
  'eval data': (['--config.data.eval_path=5'], "'5'"),
  'learning rate NaN': (['--config.optimizer.learning_rate=nan'], 'config.optimizer.learning_rate = nan'),
  'learning rate infinite': (['--config.optimizer.learning_rate=inf'], 'optimizer.learning_rate = inf'),
  'learning rate 0': (['--config.optimizer.learning_rate=0'], 'optimizer.learning_rate'),
  'learning rate below 0': (['--config.optimizer.learning_rate=-1'], 'optimizer.learning_rate'),
  'alpha infinite': (['--config.lora.alpha=inf'], 'config.lora.alpha = inf'),
  'warm-up as long as the run': (['--config.optimizer.warmup_steps=12'], 'optimizer.warmup_steps = 12'),
  'loss scale beyond float32': (['--config.precision.loss_scale_initial=1e39'], 'loss_scale_initial'),
  'held out': (['--config.data.held_out=1.5'], 'config.data.held_out = 1.5'),
  'mesh': (['--config.mesh.data=16', '--config.batch_size=16'], 'needs 16 devices; 8 are visible'),
  'batch over a mesh': (['--config.mesh.data=8'], 'does not divide over data × fsdp = 8 devices; 8 would'),
  'mesh 0': (['--config.mesh.fsdp=0'], 'mesh'),
  'text for a fraction': (['--config.optimizer.eps=x'], '--config.optimizer.eps=x: it must be a number'),
  'seed': (['--config.seed=-1'], 'config.seed = -1'),
  'unknown flag': (['--workdr=x'], "there is no flag --workdr; did you mean 'workdir'?"),
  'flag of an unknown field': (['--config.sed'], 'sed'),
  'value missing': (['--config.seed'], 'config.seed'),
  'section as a value': (['--config.lora=4'], '--config.lora=4'),
  'extra argument': (['configs/lora.py'], "unexpected argument 'configs/lora.py'"),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSALS)
def test_what_cannot_work_is_refused_in_one_message(directory: Path, command: Command, case: str):
  arguments, message = REFUSALS[case]
  ended = command(*given(directory), *arguments)
  print(ended.err)
  assert message in ended.err
  assert_refused(ended)
  assert not (directory / 'refused').exists()


def assert_refused(ended: Ended) -> None:
  assert ended.status == 2
  assert ended.err.startswith('error: ') and ended.err.count('error: ') == 1
  assert 'Traceback' not in ended.err and 'reading the model' not in ended.err


NOTES = {
  'no file': (None, 'there is no config file'),
  'syntax': ('def get_config(:', 'line 1)'),
  'no function': ('x = 1', "no attribute 'get_config'"),
  'not a ConfigDict': ('def get_config(): return {}', 'returns dict; it must return a ConfigDict'),
  'an import': ('from configs import loraa', "cannot import name 'loraa'"),
  'a name': ('def get_config(): return x', "NameError: name 'x' is not defined"),
  'a type': ('from configs import lora\ndef get_config():\n  lora.get_config().lora.rank = "x"', "line 3)"),
  'an extra field': (
    'from configs import lora\ndef get_config():\n  c = lora.get_config()\n  c.lora.ranks = 8\n  return c',
    "config.lora.ranks is not a field; did you mean 'rank'?"),
  'a missing field': (
    'from configs import lora\ndef get_config():\n  c = lora.get_config()\n  del c.lora.rank\n  return c',
    'config.lora.rank is missing; it is int'),
}  # fmt: skip


@pytest.mark.parametrize('case', NOTES)
def test_a_config_file_that_cannot_be_used_is_refused(directory: Path, command: Command, case: str):
  text, message = NOTES[case]
  note = directory / f'{case}.py'
  if text is not None:
    note.write_text(text)
  ended = command(f'--config={note}', f'--workdir={directory}/refused')
  print(ended.err)
  assert message in ended.err
  assert_refused(ended)
  assert len(ended.err.splitlines()) == 1


def test_a_missing_config_file_names_the_nearest_note(command: Command):
  for arguments in (['--config=configs/qlor.py'], ['--config=configs/qlor.py', '--config.lora.rank=8']):
    ended = command(*arguments)
    assert_refused(ended)
    assert "there is no config file configs/qlor.py; did you mean 'configs/qlora.py'?" in ended.err


def test_without_config_the_message_shows_how_to_give_one(command: Command):
  for arguments in ([], ['--workdir=x'], ['--config.lora.rank=8']):
    ended = command(*arguments)
    assert_refused(ended)
    assert '--config=configs/qlora.py' in ended.err


def test_a_workdir_that_cannot_be_made_is_refused(directory: Path, command: Command):
  ended = command(*given(directory)[:-1], f'--workdir={directory}/data.jsonl')
  assert_refused(ended)
  assert 'data.jsonl' in ended.err


def test_a_model_without_chat_template_names_the_way_out(directory: Path, command: Command):
  bare = small.write_model(directory / 'bare')
  (bare / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<|end|>'}))
  ended = command(*given(directory, **{'model.path': bare}))
  assert_refused(ended)
  assert "'plain'" in ended.err


def test_a_damaged_record_is_refused(directory: Path, command: Command):
  workdir = directory / 'damaged'
  workdir.mkdir()
  (workdir / 'record.json').write_text('{"status": ')
  ended = command(*given(directory)[:-1], f'--workdir={workdir}')
  assert_refused(ended)
  assert '--restart' in ended.err


def test_help_tells_a_newcomer_what_to_type(command: Command):
  ended = command('--help')
  text = ended.out + ended.err
  assert ended.status == 0 and 'Traceback' not in text
  for wanted in (
    'Fine-tunes a language model', 'python -m experiments.train --config=configs/qlora.py',
    '--config.lora.rank=8', '--workdir', '--[no]restart', '"instruction"', 'metrics.jsonl', 'Ctrl-C',
  ):  # fmt: skip
    assert wanted in text, wanted


def test_a_lab_note_may_take_an_argument():
  config = cli.lab_note('configs/targeted.py:adapters')
  assert config.targeted.train == 'adapters' and 'lora' in config
  assert cli.lab_note('configs/targeted.py').targeted.train == 'weights'
  with pytest.raises(UserError, match=r"did you mean 'configs/targeted.py'"):
    cli.lab_note('configs/targetted.py')
