"""Fine-tunes a language model by full fine-tuning, LoRA or QLoRA.

  python -m experiments.train --config=configs/qlora.py
  python -m experiments.train --config=configs/lora.py --config.lora.rank=8 --workdir=runs/rank8
  python -m experiments.train --config=configs/qlora.py --config.data.path=my.jsonl

--config names a lab note in configs/ (full, lora, qlora, bf16, fp16); every field it lists can be overridden
as --config.field=value. Your own data is a .jsonl file with one of these on each line:

  {"instruction": "…", "output": "…"}      {"prompt": "…", "completion": "…"}
  {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

The working directory receives metrics.jsonl, tensorboard/, checkpoints/ and record.json. Ctrl-C saves and
stops; the same command goes on where it stopped, also after a crash.
"""

import signal
import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from experiments import cli
from qjax import build, checkpoint, records, train
from qjax.errors import UserError
from qjax.records import human_bytes

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Lab note to run, for instance configs/qlora.py.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where results go; runs/<name of the config> if not given.')
_RESTART = flags.DEFINE_bool('restart', False, 'Move what the working directory holds aside and begin anew.')


def main(argv: list[str]) -> int:
  del argv
  config = cli.config_of(_CONFIG)
  workdir = Path(_WORKDIR.value or f'runs/{config.get("name") or "unnamed"}')

  # Setup: check everything that can be checked before anything is loaded or moved.
  print(config, flush=True)
  run = build.run(config, workdir)
  if _RESTART.value and workdir.exists():
    if workdir.resolve() in (Path.cwd(), *Path.cwd().parents):
      raise UserError(f'--restart would move {workdir.resolve()}, which you are in; give another --workdir')
    aside = workdir.with_name(f'{workdir.name}.{time.strftime("%Y%m%d-%H%M%S")}')
    try:
      workdir.rename(aside)
    except OSError as error:
      raise UserError(f'{workdir} cannot be moved aside: {error.strerror}') from error
    print(f'kept the earlier run in {aside}', file=sys.stderr)
  before = records.read_record(workdir)
  if before is not None:
    changed = checkpoint.changes(before['meaning'], run.meaning)
    if changed:
      raise UserError(
          f'{workdir} holds a run of another config ({before["status"]}):\n  ' + '\n  '.join(changed)
          + '\nGive another --workdir, or --restart to keep that one aside and begin anew'
      )  # fmt: skip
    if before['status'] == 'finished':
      print(f'{workdir} holds this run, finished; --restart begins anew', file=sys.stderr)
      print(summary(config.name, before['results']))
      return 0
  elif found := [name for name in (records.METRICS, records.EVENTS) if (workdir / name).exists()]:
    raise UserError(
        f'{workdir} holds {" and ".join(found)} but no {records.RECORD}: they are of no run known here and'
        ' would be overwritten. Give another --workdir'
    )
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--workdir={workdir} cannot be made: {error.strerror}') from error

  # The run.
  print(run.dataset)
  what = {'name': config.name, 'meaning': run.meaning, 'config': build.json_ready(config.to_dict())}
  record = records.Record(workdir / records.RECORD, what | records.environment())
  try:
    results = train.train(run, record)
  except train.Interrupted as stopped:
    print(stopped, file=sys.stderr)
    return 128 + (stopped.signal_number or signal.SIGINT)
  print(summary(config.name, results))
  return 0


def summary(name: str, results: dict) -> str:
  """The closing table of a run."""
  before, after = (
      {key: float('nan') if value is None else value for key, value in results[when].items()}
      for when in ('before', 'after')
  )
  peak = results['peak_memory_bytes']
  rows = [
      ('held-out nll', f'{before["nll"]:.4f} -> {after["nll"]:.4f} nats a token'),
      ('perplexity', f'{before["perplexity"]:.2f} -> {after["perplexity"]:.2f}'),
      ('token accuracy', f'{before["accuracy"]:.3f} -> {after["accuracy"]:.3f}'),
      ('steps', f'{results["steps"]}, of which skipped {results["skipped_steps"]}'),
      ('trainable', f'{results["trainable_parameters"]:,} parameters'),
      ('weights', human_bytes(results['weight_bytes'])),
      ('adapters', human_bytes(results['adapter_bytes'])),
      ('optimizer state', human_bytes(results['optimizer_bytes'])),
      ('peak memory', ', '.join(f'{human_bytes(size)} ({where})' for where, size in peak.items())),
      ('time', f'{results["seconds"]:.0f} s, {results["step_seconds"]:.2f} s a step'),
  ]
  width = max(len(label) for label, _ in rows)
  return '\n'.join([f'{name}:', *(f'  {label:<{width}}  {value}' for label, value in rows)])


if __name__ == '__main__':
  cli.run(main)
