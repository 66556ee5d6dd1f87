"""Measures a training step of full fine-tuning, LoRA and QLoRA: bytes by the compiler, seconds by the clock.

  python -m experiments.bench_step
  python -m experiments.bench_step --methods=lora,qlora --batch_size=4 --seq_len=512 --json
  python -m experiments.bench_step --methods=lora --beside='path/to/python interop/bench_peft.py --turns'

Every method runs its own config from configs/, on full rows of random tokens. Bytes are what the compiled
program says of itself (arguments, temporaries); seconds are medians over steps taken in turn, one method
after the other, so that a busy machine slows all of them alike. A field is overridden for every method by
--override=field=value, for instance --override=precision.compute=float32.

--beside starts another program that takes its steps in the same turns: for every line that it reads it does a
step and prints the seconds.
"""

import importlib
import json
import shlex
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import cli
from qjax import build, train, trees
from qjax.errors import UserError
from qjax.progress import Bar, stage
from qjax.records import human_bytes

_METHODS = flags.DEFINE_list('methods', ['full', 'lora', 'qlora'], 'Names of configs in configs/.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Rows a step.', lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer('seq_len', 256, 'Tokens a row.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 5, 'Timed steps of each method; 0 only compiles.', lower_bound=0)
_OVERRIDE = flags.DEFINE_multi_string(
  'override', [], 'field=value for every config; may be given several times.'
)
_BESIDE = flags.DEFINE_string('beside', None, 'Command of a program that takes steps in the same turns.')
_JSON = flags.DEFINE_bool('json', False, 'End with one line of JSON: results by method.')


def main(argv: list[str]) -> int:
  del argv
  if not any(_METHODS.value):
    raise UserError('--methods is empty; for instance --methods=full,lora,qlora')
  measured: dict[str, dict[str, Any]] = {}
  running = {}
  for name in _METHODS.value:
    run = build.run(_config(name), Path('runs') / f'bench-{name}')
    with stage(f'{name}: preparing and compiling'), jax.set_mesh(run.mesh):
      trainable, frozen = train.prepare(run)
      state = train.init_state(run, trainable)
      state = jax.device_put(state, train.state_shardings(run, state))
      batch = train.place_batch(_full_rows(run), run.loop.accumulate, run.mesh)
      key = jax.random.key(0)
      compiled = train.compile_step(run, state, frozen, batch, key)
    memory = compiled.memory
    sizes = train.measure(trainable, frozen, state)
    measured[name] = {
      'train_bytes': memory.argument_size_in_bytes
      + memory.temp_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes,
      'argument_bytes': memory.argument_size_in_bytes,
      'temp_bytes': memory.temp_size_in_bytes,
      'held_bytes': trees.nbytes((state, frozen)),
      'step_seconds': None,
      'compile_seconds': compiled.seconds,
      'batch_size': _BATCH_SIZE.value,
      'seq_len': _SEQ_LEN.value,
      'compute': run.method.numerics.policy.compute.name,
      **sizes,
    }
    running[name] = [compiled, state, frozen, batch, key, run.mesh]
    del trainable, state, frozen
  beside = _time(running, measured)
  print(_table(measured))
  for name, m in measured.items() if beside else ():
    print(f'beside: {beside:.2f} s a step, {beside / m["step_seconds"]:.2f} x {name}')
  if _JSON.value:
    print(json.dumps(measured))
  return 0


def _config(name: str) -> Any:
  try:
    config = importlib.import_module(f'configs.{name}').get_config()
  except (AttributeError, ModuleNotFoundError):
    raise UserError(f'--methods: there is no configs/{name}.py with a get_config()') from None
  config.batch_size, config.data.seq_len = _BATCH_SIZE.value, _SEQ_LEN.value
  for override in _OVERRIDE.value:
    field, equals, value = override.partition('=')
    if not equals:
      raise UserError(f'--override={override} is not field=value')
    try:
      config.update_from_flattened_dict({field: _parsed(value, _get(config, field))})
    except (KeyError, AttributeError, TypeError, ValueError) as error:
      raise UserError(f'--override={override} does not fit configs/{name}.py: {error}') from None
  if (config.batch_size, config.data.seq_len) != (_BATCH_SIZE.value, _SEQ_LEN.value):
    raise UserError('--override: give rows and tokens as --batch_size and --seq_len')
  return config


def _parsed(value: str, now: Any) -> Any:
  """The text as the type that the field has now."""
  if isinstance(now, bool):
    return {'true': True, 'false': False}[value.lower()]
  if isinstance(now, int | float | str):
    return type(now)(value)
  raise TypeError('only numbers, text and true or false can be overridden here')


def _get(config: Any, field: str) -> Any:
  for part in field.split('.'):
    config = config[part]
  return config


def _full_rows(run: train.Run) -> dict[str, np.ndarray]:
  """Rows without padding, one document each, every token trained on: the most work the shape can hold."""
  shape = (run.data.batch_size, run.data.seq_len)
  tokens = np.random.default_rng(0).integers(0, run.model.config.vocab_size, shape, np.int32)
  return {
    'tokens': tokens,
    'targets': np.roll(tokens, -1, axis=1),
    'weights': np.ones(shape, np.float32),
    'segments': np.ones(shape, np.int32),
    'positions': np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
  }


def _time(running: dict[str, list[Any]], measured: dict[str, dict[str, Any]]) -> float | None:
  """Adds the seconds of a step of each method; returns those of the program beside, if there is one."""
  rounds = _STEPS.value + 1 if _STEPS.value else 0  # the first round warms up
  seconds: dict[str, list[float]] = {name: [] for name in running}
  if _BESIDE.value and rounds:
    seconds[_BESIDE.value] = []
    other = subprocess.Popen(
      shlex.split(_BESIDE.value), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
  with Bar('steps', rounds * len(seconds)) as bar:
    for index in range(rounds * len(seconds)):
      name = list(seconds)[index % len(seconds)]
      elapsed = _our_step(running[name], name) if name in running else _their_step(other)
      if index >= len(seconds):
        seconds[name].append(elapsed)
      bar.advance(index + 1, f'{name} {elapsed:.2f} s')
  for name in running if rounds else ():
    measured[name]['step_seconds'] = statistics.median(seconds[name])
    measured[name]['step_seconds_all'] = seconds[name]
  if _BESIDE.value not in seconds:
    return None
  other.communicate()
  return statistics.median(seconds[_BESIDE.value])


def _our_step(running: list[Any], name: str) -> float:
  compiled, state, frozen, batch, key, mesh = running
  with jax.set_mesh(mesh):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(compiled.call(state, frozen, batch, key))
    elapsed = time.perf_counter() - start
  if not np.isfinite(metrics.loss):
    raise RuntimeError(f'{name}: the loss of a timed step is {metrics.loss}')
  running[1] = state
  return elapsed


def _their_step(other: subprocess.Popen[str]) -> float:
  assert other.stdin and other.stdout
  try:
    print(file=other.stdin, flush=True)
    return float(other.stdout.readline())
  except (BrokenPipeError, ValueError):
    raise UserError('--beside: the program did not answer a line with the seconds of a step') from None


def _table(measured: dict[str, dict[str, Any]]) -> str:
  """One line a method."""
  devices = jax.devices()
  lines = [
    f'one step of {_BATCH_SIZE.value} x {_SEQ_LEN.value} tokens on {len(devices)} x {devices[0].device_kind}',
    f'{"method":<8} {"trained":>12} {"weights":>11} {"adapters":>11} {"optimizer":>11} {"arguments":>11} '
    f'{"temporaries":>11} {"in all":>11} {"s a step":>9}',
  ]
  for name, m in measured.items():
    sizes = (
      m['weight_bytes'],
      m['adapter_bytes'],
      m['optimizer_bytes'],
      m['argument_bytes'],
      m['temp_bytes'],
      m['train_bytes'],
    )
    seconds = '-' if m['step_seconds'] is None else f'{m["step_seconds"]:.2f}'
    lines.append(
      f'{name:<8} {m["trainable_parameters"]:>12,} '
      + ' '.join(f'{human_bytes(s):>11}' for s in sizes)
      + f' {seconds:>9}'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  cli.run(main)
