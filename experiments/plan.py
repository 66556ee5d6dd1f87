"""Says before anything is bought or started whether a training fits, what takes the room, and its best speed.

  python -m experiments.plan --config=configs/qlora_7b.py --chip=rtx4090,v5e
  python -m experiments.plan --config=configs/lora_7b.py --chip=rtx4090 --compile --picture=plan.png
  python -m experiments.plan --config=configs/qlora_7b.py --config.model.path=shapes:llama3_8b --find=batch
  python -m experiments.plan --config=configs/full_7b_16gb.py --beside=configs/lora_7b.py,configs/qlora_7b.py
  python -m experiments.plan --validate

The model need not be there: model.path may be 'shapes:llama2_7b' (a misspelt name lists them all) or
'shapes:DIRECTORY' with a Hugging Face config.json. Nor need the data, or the chip.

Numbers come from arithmetic over the traced step, in seconds. With --compile they come from XLA's own
compiler for the chip, which runs here in a process of its own and takes half a minute or more (pip install
'qjax[plan]' for chips that are not a CPU); answers are kept. Where the config does not fit, what would make
it fit is listed, the cheapest first, each with its effect on top of what saved before.

--find=batch      the most rows at a time that fit
--find=sequence   the most tokens a row that fit
--find=method     full fine-tuning, LoRA, QLoRA: the first of them that fits

The exit status is 0 if it fits on one of the chips, 1 if on none, 2 if something was given that cannot work.
"""

import hashlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import cli
from pallas_kernels import dispatch
from qjax import build, chips, files, report, train
from qjax.cache import cache_dir
from qjax.chips import GIB, Chip
from qjax.errors import UserError
from qjax.plan import PARTS, Plan, Traced, capacity, compile_for, from_compiler, largest
from qjax.progress import stage

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Lab note to plan, such as configs/qlora_7b.py.')
_BESIDE = flags.DEFINE_list('beside', [], 'Further lab notes to plan for the same chips.')
_CHIP = flags.DEFINE_list('chip', ['cpu'], f'Chips: {", ".join([*chips.CHIPS, *chips.ALIASES])}.')
_COMPILE = flags.DEFINE_bool('compile', False, "Ask the chip's compiler instead of the arithmetic.")
_FIND = flags.DEFINE_enum('find', None, ['batch', 'sequence', 'method'], 'What to search for.')
_PICTURE = flags.DEFINE_string('picture', None, 'PNG to draw: what takes the room, as stacked bars.')
_JSON = flags.DEFINE_bool('json', False, 'End with one line of JSON.')
_VALIDATE = flags.DEFINE_bool('validate', False, 'Hold the arithmetic against the compilers, case by case.')

METHODS = ('full', 'lora', 'qlora')
SEQUENCE_STEP = 128
MOST_ROWS = 4096
CACHE = 'plans'
# What changes neither the program nor its size.
_COSMETIC = ('name', 'seed', 'eval_every', 'checkpoint_every', 'max_skips')
# Sources of ours that no program is made of.
_APART = ('operations.py', 'liveness.py', 'report.py')


def main(argv: list[str]) -> int:
  del argv
  # Nothing runs here: compilers of other chips have processes of their own, and no device is looked for.
  jax.config.update('jax_platforms', 'cpu')
  if _VALIDATE.value:
    return _validate()
  config = cli.config_of(_CONFIG)
  wanted = _chips(_CHIP.value)
  notes = [config, *map(cli.lab_note, _BESIDE.value)]
  for each in notes:
    _check_kernels(each, wanted)
  if _FIND.value:
    return _find(config, wanted, _FIND.value)
  plans, records = [], []
  for each in notes:
    found = _show(each, wanted)
    plans += found
    records += [{'config': each.name} | plan.record() for plan in found]
  _remark(plans)
  if _PICTURE.value:
    path = Path(_PICTURE.value)
    png = report.plan_picture(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    print(f'drew {path}', file=sys.stderr)
  if _JSON.value:
    print(json.dumps(files.plain(records[0] if len(records) == 1 else {'plans': records})))
  return 0 if any(plan.fits for plan in plans) else 1


def _show(config: ConfigDict, wanted: Sequence[Chip]) -> list[Plan]:
  """Plans a config for each chip, and prints them, with advice where it does not fit."""
  with stage(f'tracing the step of {config.name}'):
    traced = Traced(_program(config))
  plans = [_plan(config, traced, chip) for chip in wanted]
  console = _console()
  console.print(_table(config, plans))
  for chip, plan in zip(wanted, plans, strict=True):
    if not plan.fits:
      console.print(_advice(config, chip, traced.plan(chip)))
  return plans


def _program(config: ConfigDict) -> train.Program:
  """What is traced here, for any chip: a kernel by name is the chip's own, and not one of this machine."""
  return build.program(_changed(config, kernels='auto') if config.kernels in dispatch.PLATFORMS else config)


def _check_kernels(config: ConfigDict, wanted: Sequence[Chip]) -> None:
  """Refuses a kernel by name that a chip does not run, before anything is traced or compiled."""
  for chip in wanted:
    if reason := dispatch.unavailable(config.kernels, chip.kind):
      raise UserError(f"config.kernels = {config.kernels!r}, for {chip.name}: {reason}; use 'auto' or 'xla'")


def _chips(names: Sequence[str]) -> list[Chip]:
  if not any(names):
    raise UserError(f'--chip is empty; there are {", ".join(chips.CHIPS)}')
  return list({chip.name: chip for chip in map(chips.find, names)}.values())


def _plan(config: ConfigDict, traced: Traced, chip: Chip) -> Plan:
  plan = traced.plan(chip)
  if not _COMPILE.value:
    return plan
  with stage(f'compiling for {chip.name}'):
    return from_compiler(_compiled(config, chip), chip, plan)


# ---- the compiler ------------------------------------------------------------------------------------------


def compile_step(config: Mapping[str, Any], chip: str) -> dict[str, Any]:
  """`plan.compile_for` a config on a chip, in a process that `chips.call` started."""
  devices = chips.devices(chips.find(chip))
  return compile_for(build.program(ConfigDict(config), devices))


def _compiled(config: ConfigDict, chip: Chip) -> dict[str, Any]:
  """The compiler's answer, from the cache if it was asked before.

  Raises:
    UserError: the compiler is not installed, or could not compile the step.
  """
  path = cache_dir() / CACHE / f'{_meaning(config, chip)}.json'
  if path.exists():
    return json.loads(path.read_text(encoding='utf-8'))
  try:
    found = chips.call('experiments.plan:compile_step', {'config': config.to_dict(), 'chip': chip.name})
  except chips.CompileError as error:
    reason = f'{chip.name}: the step was not compiled: {error}'
    raise UserError(f'{reason}. Without --compile it is estimated') from error
  files.write_json(path, found)
  return found


def _meaning(config: ConfigDict, chip: Chip) -> str:
  """A name for what the answer depends on: the config's meaning, the chip, the compilers and our sources."""
  fields = {name: value for name, value in config.to_dict().items() if name not in _COSMETIC}
  fields['data'] = {'seq_len': config.data.seq_len}
  compilers = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'flax', 'optax')
  versions = dict(_versions(compilers))
  digest = hashlib.sha256(json.dumps([fields, repr(chip), versions], sort_keys=True).encode())
  root = Path(build.__file__).parents[1]
  for folder in ('qjax', 'pallas_kernels'):
    for path in sorted((root / folder).rglob('*.py')):
      digest.update(path.read_bytes() if path.name not in _APART else b'')
  return digest.hexdigest()[:24]


def _versions(names: Sequence[str]) -> Iterator[tuple[str, str]]:
  for name in names:
    try:
      yield name, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue


# ---- other configs -----------------------------------------------------------------------------------------


def _changed(config: ConfigDict, **fields: Any) -> ConfigDict:
  """A copy with other values, '__' between levels."""
  changed = config.copy_and_resolve_references()
  with changed.unlocked(), changed.ignore_type():
    changed.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return changed


def _by(method: str, config: ConfigDict) -> ConfigDict:
  """configs/<method>.py with the model, the shapes of batches and the numbers of `config`."""
  if method == config.method:
    return config
  other = importlib.import_module(f'configs.{method}').get_config()
  for name in ('model', 'data', 'mesh', 'batch_size', 'micro_batch', 'kernels', 'precision'):
    other[name] = config[name]
  if config.method == 'lora' and method == 'qlora':
    other.lora = config.lora
  if method != 'qlora' and config.kernels != 'xla':
    other.kernels = 'auto'  # one by name is refused where no weight is in few bits
  return other


def _estimate(config: ConfigDict, chip: Chip) -> Plan:
  return Traced(_program(config)).plan(chip)


def _steps_down(config: ConfigDict) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
  """What may save memory, as other fields or another method: first what changes no result, then what does."""
  fields: list[dict[str, Any]] = []
  if min(config.micro_batch, config.batch_size) > 1:
    fields.append({'micro_batch': 1})
  if config.model.remat != 'full':
    fields.append({'model__remat': 'full'})
  if config.model.loss_chunk > 2048:
    fields.append({'model__loss_chunk': 2048})
  if config.method == 'full' and config.optimizer.kind == 'separate':
    at_once = {'micro_batch': config.batch_size, 'model__remat': 'full', 'optimizer__kind': 'fused'}
    at_once['optimizer__name'] = 'adafactor'
    fields.append(at_once | {'precision__param': 'bfloat16', 'precision__rounding': 'stochastic'})
  for change in fields:
    yield _spelled(change), change
  simpler = {'full': METHODS[1:], 'qat': METHODS[1:], 'lora': METHODS[2:]}
  for method in simpler.get(config.method, ()):
    yield f'{method} (configs/{method}.py with this model and these batches)', method
  length = config.data.seq_len // 2
  while length >= SEQUENCE_STEP:
    yield _spelled({'data__seq_len': length}), {'data__seq_len': length}
    length //= 2


def _spelled(fields: Mapping[str, Any]) -> str:
  return ' '.join(f'--config.{name.replace("__", ".")}={value}' for name, value in fields.items())


def _advice(config: ConfigDict, chip: Chip, plan: Plan) -> Table:
  table = Table(title=f'{chip.name}: what would make it fit, each on top of what saved before (arithmetic)')
  for heading in ('change', 'peak', 'saves', 'fits'):
    table.add_column(heading)
  table.add_row('as it is', _gib(plan.peak_bytes), '', 'no')
  for text, change in _steps_down(config):
    changed = _by(change, config) if isinstance(change, str) else _changed(config, **change)
    found = _estimate(changed, chip)
    saved = plan.peak_bytes - found.peak_bytes
    if saved <= 0:
      continue
    table.add_row(text, _gib(found.peak_bytes), _gib(saved), 'yes' if found.fits else 'no')
    if found.fits:
      break
    config, plan = changed, found
  return table


def _find(config: ConfigDict, wanted: Sequence[Chip], what: str) -> int:
  """Searches for each chip; the status is 0 if something fits on one of them."""
  found = [{'chip': chip.name, what: _search(config, chip, what)} for chip in wanted]
  for row in found:
    print(f'{row["chip"]}: {what} {row[what] if row[what] is not None else "nothing fits"}')
  if _JSON.value:
    print(json.dumps(found[0] if len(found) == 1 else {'plans': found}))
  return 0 if any(row[what] is not None for row in found) else 1


def _search(config: ConfigDict, chip: Chip, what: str) -> int | str | None:
  def fits(changed: ConfigDict) -> bool:
    plan = _estimate(changed, chip)
    print(f'  {_shape(changed)}: {_gib(plan.peak_bytes)}', file=sys.stderr)
    return plan.fits

  with stage(f'searching for the {what} on {chip.name}, which has {_gib(capacity(chip))}'):
    if what == 'method':
      return next((method for method in METHODS if fits(_by(method, config))), None)
    if what == 'batch':
      return largest(lambda n: fits(_changed(config, batch_size=n, micro_batch=n)), 1, MOST_ROWS)
    longest = _program(config).model.config.context_length
    step = min(SEQUENCE_STEP, longest)
    return largest(lambda n: fits(_changed(config, data__seq_len=n)), step, longest)


# ---- what is shown -----------------------------------------------------------------------------------------


def _console() -> Console:
  """Standard output, wide enough for every table where it is no terminal."""
  return Console(width=None if sys.stdout.isatty() else 100)


def _gib(size: float) -> str:
  return f'{size / GIB:.2f} GiB'


def _shape(config: ConfigDict) -> str:
  return f'{config.method}, {config.batch_size} x {config.data.seq_len} tokens'


def _table(config: ConfigDict, plans: Sequence[Plan]) -> Table:
  at_a_time = f', {config.micro_batch} at a time' if config.micro_batch < config.batch_size else ''
  title = f'{config.name}: {config.model.path}, {_shape(config)}{at_a_time}, remat {config.model.remat}'
  table = Table(title=title, min_width=len(title))
  table.add_column('')
  for plan in plans:
    table.add_column(plan.chip, justify='right')
  for part in PARTS:
    table.add_row(part, *(_gib(plan.breakdown[part]) for plan in plans))
  table.add_section()
  if any(plan.host_bytes for plan in plans):
    table.add_row('host memory', *(_gib(plan.host_bytes) for plan in plans))
    table.add_row('copied from it a step', *(_gib(plan.host_traffic_bytes) for plan in plans))
    hidden = (f'{plan.hiding_tokens:,.0f}' if plan.hiding_tokens else '–' for plan in plans)
    table.add_row('tokens at a time that hide it', *hidden)
  table.add_row('peak', *(_gib(plan.peak_bytes) for plan in plans))
  table.add_row('has', *(_gib(plan.capacity_bytes) for plan in plans))
  table.add_row('fits', *('yes' if plan.fits else 'no' for plan in plans))
  table.add_section()
  seconds = ('–' if plan.step_seconds is None else f'≥ {plan.step_seconds:.3g} s' for plan in plans)
  rates = (plan.tokens_per_second for plan in plans)
  table.add_row('a step', *seconds)
  table.add_row('tokens a second', *('–' if rate is None else f'≤ {rate:,.0f}' for rate in rates))
  table.add_row('by', *(plan.source for plan in plans))
  return table


def _remark(plans: Sequence[Plan]) -> None:
  """What the numbers are for."""
  for plan in plans:
    told = ', '.join(f'{what} = {which}' for what, which in plan.kernels.items())
    calls = ', '.join(f'{count} of {name}' for name, count in plan.kernel_calls.items())
    print(f'{plan.chip}: {told}' + (f'; calls of kernels: {calls}' if calls else ''), file=sys.stderr)
  print('nothing here was measured on a chip')
  compiled = [plan for plan in plans if plan.host_bytes and plan.source == 'compiler']
  if any(chips.find(plan.chip).kind != 'tpu' for plan in compiled):
    print(
      'compilers for GPUs show no host memory: what waits there was taken off by arithmetic, and the copy of '
      'a layer is not counted'
    )


# ---- arithmetic against compilers -------------------------------------------------------------------------

# (config, model, rows, tokens, other fields, chips).
CASES: tuple[tuple[str, str, int, int, dict[str, Any], str], ...] = (
  ('full', 'smollm2_135m', 8, 256, {}, 'cpu rtx4090 v5e'),
  ('lora', 'smollm2_135m', 8, 256, {}, 'cpu rtx4090 v5e'),
  ('qlora', 'smollm2_135m', 8, 256, {}, 'cpu rtx4090 v5e'),
  ('qat_int8', 'smollm2_135m', 8, 256, {}, 'cpu rtx4090 v5e'),
  ('full', 'tinyllama_1b', 1, 1024, {}, 'h100 v6e'),
  ('qat_int8', 'tinyllama_1b', 1, 1024, {}, 'h100'),
  ('lora', 'tinyllama_1b', 1, 2048, {}, 'rtx4090 v5e'),
  ('qlora', 'tinyllama_1b', 1, 2048, {}, 'rtx4090 v6e'),
  ('qlora', 'tinyllama_1b', 1, 2048, {'model__remat': 'full'}, 'rtx4090'),
  ('full', 'llama2_7b', 1, 1024, {}, 'h100'),
  ('lora', 'llama2_7b', 1, 2048, {}, 'v6e'),
  ('lora_7b', 'llama2_7b', 1, 1024, {}, 'rtx4090 v5e'),
  ('qlora_7b', 'llama2_7b', 1, 1024, {}, 'rtx4090 v5e'),
  ('qlora', 'llama2_7b', 1, 1024, {}, 'rtx4090 v5e'),
)


def _validate() -> int:
  """Prints a row for each case; the status is 0 if the arithmetic is within 5 % in at least twelve."""
  rows: list[dict[str, Any]] = []
  for name, model, batch, length, fields, where in CASES:
    config = importlib.import_module(f'configs.{name}').get_config()
    shape = {'model__path': f'shapes:{model}', 'batch_size': batch, 'micro_batch': batch}
    config = _changed(config, **shape, data__seq_len=length, **fields)
    traced = Traced(_program(config))
    for chip in map(chips.find, where.split()):
      estimate = traced.plan(chip)
      with stage(f'{name} {model} {batch} x {length}: compiling for {chip.name}'):
        compiled = from_compiler(_compiled(config, chip), chip, estimate)
      rows.append({
        'config': name, 'model': model, 'batch': f'{batch} x {length}', 'chip': chip.name,
        'compiler_gib': compiled.peak_bytes / GIB, 'arithmetic_gib': estimate.peak_bytes / GIB,
        'off': estimate.peak_bytes / compiled.peak_bytes - 1,
      })  # fmt: skip
  table = Table(title='Peak device memory of one step', box=box.SIMPLE)
  for heading in ('config', 'model', 'batch', 'chip', 'compiler', 'arithmetic', 'off'):
    table.add_column(heading, no_wrap=True)
  for row in rows:
    sizes = (f'{row[name]:.2f} GiB' for name in ('compiler_gib', 'arithmetic_gib'))
    what = (str(row[name]) for name in ('config', 'model', 'batch', 'chip'))
    table.add_row(*what, *sizes, f'{row["off"]:+.1%}')
  _console().print(table)
  near = sum(abs(row['off']) <= 0.05 for row in rows)
  print(f'within 5 %: {near} of {len(rows)}')
  if _JSON.value:
    print(json.dumps({'rows': rows, 'within_5_percent': near}))
  return 0 if near >= 12 else 1


if __name__ == '__main__':
  cli.run(main)
