"""How much of the loss that rounding adds each way of training takes back.

  python -m experiments.recovery
  python -m experiments.recovery --only=qat_int4,targeted --seeds=0,1,2 --workdir=runs/recovery

For each seed: the model is fine-tuned in full precision (configs/full.py) and that is the float model. Then
each config of --only goes on from it, through its quantizers; before its first step that is plain rounding to
nearest. What counts is the best score of a run, whose checkpoint experiments.convert takes. The share taken
back is (rounded - trained) / (rounded - float), in nats a token on the held-out questions. The row full goes
on from the float model without a quantizer: what these steps do by themselves.

Every run is a command of this project, printed as it starts, in a directory of its own; the same command goes
on where it stopped. The working directory receives table.md and table.json.
"""

import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from qjax import files, records, report
from qjax.errors import UserError, nearest

_MODEL = flags.DEFINE_string('model', 'embedded', 'A .gguf file, a Hugging Face directory, or embedded.')
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'Seeds: of data order, adapters and stochastic rounding.')
_ONLY = flags.DEFINE_list('only', [], 'Rows to measure; all if not given.')
_SET = flags.DEFINE_multi_string('set', [], 'field=value for every training config; may be repeated.')
_TOKENS = flags.DEFINE_integer(
  'sensitivity_tokens', 1024, 'Tokens that decide what is targeted.', lower_bound=256
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/recovery', 'Where runs and the table go.')

FLOAT = 'full'
TARGETED = 'targeted'
ROWS = ('qat_int4', 'distill', TARGETED, 'qat_int8', FLOAT)
COLUMNS = {
  'row': 'config',
  'trainable': 'trained parameters',
  'float': 'float [nats]',
  'rounded': 'rounded',
  'trained': 'trained',
  'share': 'taken back',
  'spread': 'from … to',
  'seeds': 'seeds',
  'seconds': 'training [s]',
}


def main(argv: list[str]) -> int:
  del argv
  wanted = _ONLY.value or list(ROWS)
  for name in wanted:
    if name not in ROWS:
      raise UserError(f'--only: there is no row {name!r}{nearest(name, ROWS)}')
  for seed in _SEEDS.value:
    if not seed.isdecimal():
      raise UserError(f'--seeds: {seed!r} is no whole number')
  workdir = Path(_WORKDIR.value)
  found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
  for seed in _SEEDS.value:
    start = workdir / f'float-{seed}'
    _train(FLOAT, start, seed, f'--config.model.path={_MODEL.value}')
    float_nll = _results(start)['best']
    if not (start / 'model').exists():
      _run('convert', f'--run={start}')
    for name in wanted:
      more = [f'--config.model.path={start / "model"}']
      if name == TARGETED:
        more.append(f'--config.targeted.record={_sensitivity(workdir, seed, start / "model")}')
      run = workdir / f'{name}-{seed}'
      _train(name, run, seed, *more)
      found[name].append({'float': float_nll} | _results(run))
      rows = [_row(row, measured) for row, measured in found.items() if measured]
      files.write_json(workdir / 'table.json', {'rows': rows, 'environment': records.environment()})
  table = report.markdown_table(rows, COLUMNS)
  (workdir / 'table.md').write_text(table, encoding='utf-8')
  print(table)
  return 0


def _train(config: str, workdir: Path, seed: str, *more: str) -> None:
  given = [f'--config.{field}' for field in _SET.value]
  _run(
    'train', f'--config=configs/{config}.py', f'--config.seed={seed}', f'--workdir={workdir}', *more, *given
  )


def _sensitivity(workdir: Path, seed: str, model: Path) -> Path:
  """The record of what each matrix of the float model costs in the scheme of the targeted model."""
  where = workdir / f'sensitivity-{seed}'
  if not (where / 'sensitivity.json').exists():
    _run(
      'sensitivity', f'--model={model}', '--each_layer', '--schemes=int4:axis=channel', '--bits=8',
      f'--max_tokens={_TOKENS.value}', f'--workdir={where}',
    )  # fmt: skip
  return where / 'sensitivity.json'


def _run(command: str, *args: str) -> None:
  line = [sys.executable, '-m', f'experiments.{command}', *args]
  print('$ ' + shlex.join(['python', *line[1:]]), flush=True)
  status = subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode
  if status:
    raise UserError(f'the command above ended with status {status}; mend what it says and start again')


def _results(run: Path) -> dict[str, Any]:
  record = records.read_record(run)
  assert record is not None, 'a run that ended well has a record'
  scores = [row['nll'] for row in records.read_metrics(run) if row['kind'] == 'eval']
  return record['results'] | {'best': min(scores)}


def _row(name: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
  def mean(read: Callable[[dict[str, Any]], float]) -> float:
    return statistics.mean(read(m) for m in measured)

  row = {
    'row': name,
    'trainable': f'{measured[0]["trainable_parameters"]:,}',
    'float': round(mean(lambda m: m['float']), 4),
    'trained': round(mean(lambda m: m['best']), 4),
    'seeds': len(measured),
    'seconds': round(mean(lambda m: m['seconds'])),
  }
  if name == FLOAT:
    return row
  shares = [(m['before']['nll'] - m['best']) / (m['before']['nll'] - m['float']) for m in measured]
  return row | {
    'rounded': round(mean(lambda m: m['before']['nll']), 4),
    'share': f'{statistics.mean(shares):.0%}',
    'spread': f'{min(shares):.0%} … {max(shares):.0%}',
  }


if __name__ == '__main__':
  cli.run(main)
