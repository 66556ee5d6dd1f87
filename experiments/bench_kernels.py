"""Compiles every kernel for chips that are not here, or times kernels on the accelerator or CPU that is.

  python -m experiments.bench_kernels --compile_only --chip=v5e,sm90
  python -m experiments.bench_kernels --compile_only --chip=v5e,v5p,v6e,sm80,sm89,sm90 --quick --json
  python -m experiments.bench_kernels
  python -m experiments.bench_kernels --cpu

With --compile_only each kernel, format and shape is compiled in another process and gets a row: whether it
compiles or why not, the bytes it moves over the least possible, what its tiles hold, and the least time by
the chip's data sheet. That is what compilers say, not a measurement. A row that should compile and does not
makes the exit status 1; what a chip cannot do is refused before it is compiled, and is no failure.

Without it, each kernel is timed beside XLA's way to do the same and, of products, beside a dense one in
bfloat16, at sizes of a 7B model's decoding and training, with arguments that no cache holds, against ceilings
measured at the same time. Errors of products are taken against float64, codes are compared with XLA's; what
errs too much makes the exit status 1. A machine with a CPU alone times what XLA makes of weights in few bits.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import cli, cpu_times, kernel_cases, kernel_times
from experiments.kernel_cases import Case
from qjax import chips, files, records
from qjax.chips import CompileError
from qjax.errors import UserError, nearest
from qjax.progress import Bar

_COMPILE_ONLY = flags.DEFINE_bool('compile_only', False, 'Compile for the chips of --chip; time nothing.')
_CHIP = flags.DEFINE_list('chip', ['v5e', 'v5p', 'v6e', 'sm80', 'sm89', 'sm90'], 'Names of chips.')
_QUICK = flags.DEFINE_bool('quick', False, 'One shape a kernel; timed, the first format of each.')
_KERNELS = flags.DEFINE_list('kernels', [], 'Only these kernels; all if empty.')
_CPU = flags.DEFINE_bool('cpu', False, 'Time the CPU even where there is an accelerator.')
_REPEATS = flags.DEFINE_integer('repeats', 20, 'Timed calls of each program, in turn.', lower_bound=1)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/bench_kernels', 'Where measured times go.')
_JSON = flags.DEFINE_bool('json', False, 'End with one line of JSON.')

# Cases compiled in one process: starting one takes seconds, and one that aborts takes the others with it.
TOGETHER = 8


def main(argv: list[str]) -> int:
  del argv
  if unknown := [name for name in _KERNELS.value if name not in kernel_cases.KERNELS]:
    raise UserError(f'--kernels: there is no {unknown[0]!r}{nearest(unknown[0], kernel_cases.KERNELS)}')
  if _COMPILE_ONLY.value and _CPU.value:
    raise UserError('--cpu times the CPU, and --compile_only times nothing; give one of them')
  return _compile() if _COMPILE_ONLY.value else _time()


def _compile() -> int:
  names = list(dict.fromkeys(chips.find(name).name for name in _CHIP.value if name.strip()))
  if not names or any(chips.find(name).kind == 'cpu' for name in names):
    raise UserError('--chip names TPUs and GPUs, for instance --chip=v5e,sm90; --cpu times the CPU')
  todo = [
    case for case in kernel_cases.cases(names, _QUICK.value)
    if not _KERNELS.value or case.kernel in _KERNELS.value
  ]  # fmt: skip
  rows: list[dict[str, Any]] = []
  with Bar('compiling', len(todo)) as bar:
    for chip in dict.fromkeys(case.chip for case in todo):
      waiting = []
      for case in (case for case in todo if case.chip == chip):
        if reason := kernel_cases.obstacle(case):
          rows.append(_row(case, {'compiled': False, 'refused': True, 'reason': reason}))
        else:
          waiting.append(case)
      for start in range(0, len(waiting), TOGETHER):
        group = waiting[start : start + TOGETHER]
        bar.advance(len(rows), f'{chip} {group[0].kernel}')
        rows += [_row(case, found) for case, found in zip(group, _compiled(group), strict=True)]
    bar.advance(len(rows))
  print(_compile_table(rows))
  failed = [row for row in rows if not row['compiled'] and not row['refused']]
  refused = sum(row['refused'] for row in rows)
  print(f'{len(rows) - len(failed) - refused} compile, {refused} are refused, {len(failed)} fail')
  if _JSON.value:
    print(json.dumps({'rows': rows}))
  return 1 if failed else 0


def _row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
  return dataclasses.asdict(case) | {'operations': case.operations, 'refused': False} | found


def _compiled(group: list[Case]) -> list[dict[str, Any]]:
  """What became of each, in one process; where that ends early, each in one of its own."""
  try:
    found: list[dict[str, Any]] = chips.call(
      'experiments.kernel_cases:compile_all', {'rows': [dataclasses.asdict(case) for case in group]}
    )
    return found
  except CompileError as error:
    if len(group) == 1:
      return [{'compiled': False, 'reason': str(error)}]
  return [_compiled([case])[0] for case in group]


def _compile_table(rows: list[dict[str, Any]]) -> str:
  lines = [
    f'{"kernel":<26} {"format":<21} {"chip":<8} {"M x K x N":<17} {"moved/least":>11} {"MiB least":>9} '
    f'{"Gops":>7} {"bound us":>9} {"VMEM MiB":>8} {"by":>5} {"regs":>4} {"spill B":>7}  compiles'
  ]
  for row in rows:
    numbers = ' ' * 65
    if 'bytes_least' in row:
      vmem = f'{row["vmem_bytes"] / 2**20:.1f}' if row['vmem_bytes'] else '-'
      numbers = (
        f'{row["bytes_over_least"]:>11.2f} {row["bytes_least"] / 2**20:>9.1f} '
        f'{row["operations"] / 1e9:>7.1f} '
        f'{row.get("roofline_us", 0):>9.1f} {vmem:>8} {row.get("instruction") or "-":>5} '
        f'{row.get("registers", "-"):>4} {row.get("spilled_bytes", "-"):>7}'
      )
    says = 'yes' if row['compiled'] else f'{"refused" if row["refused"] else "NO"}: {row["reason"]}'
    shape = 'x'.join(map(str, row['shape']))
    lines.append(f'{row["kernel"]:<26} {row["format"]:<21} {row["chip"]:<8} {shape:<17} {numbers}  {says}')
  return '\n'.join(lines)


def _time() -> int:
  platform = jax.default_backend()
  is_cpu = _CPU.value or platform == 'cpu'
  if flags.FLAGS['chip'].present:
    raise UserError('--chip is for --compile_only; what is timed is what is here')
  if is_cpu and _KERNELS.value:
    raise UserError('--kernels: a CPU is timed with no kernel of ours; leave it out, or give --compile_only')
  if is_cpu and not _CPU.value:
    print('there is no accelerator here, only a CPU: it is timed instead, with no kernel of ours')
  where = Path(_WORKDIR.value) / f'{"cpu" if is_cpu else platform}.json'
  try:
    where.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--workdir={_WORKDIR.value} cannot be made: {error.strerror}') from error
  if is_cpu:
    with jax.default_device(jax.devices('cpu')[0]):
      found, table = cpu_times.measure(_REPEATS.value, _QUICK.value), cpu_times.table
  else:
    found, table = kernel_times.measure_all(_REPEATS.value, _QUICK.value, _KERNELS.value), kernel_times.table
  print(table(found))
  files.write_json(where, records.environment() | found)
  print(f'written to {where}')
  if _JSON.value:
    print(json.dumps(found))
  return 0 if all(row.get('is_right', True) for row in found['rows']) else 1


if __name__ == '__main__':
  cli.run(main)
