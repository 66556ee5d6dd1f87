"""Times ways to cut the products of kernels on the accelerator that is here, and keeps the fastest.

  python -m experiments.tune_kernels
  python -m experiments.tune_kernels --kernels=low_bit_matmul --formats=nf4:block=64,dq --shapes=1x4096x4096
  python -m experiments.tune_kernels --kernels=int8_matmul,grouped_adapter

For each product, format and shape the tiles that the kernel chooses by itself are timed in the same turns as
other candidates, whose results are compared with theirs first. One that is faster by --gain becomes a row of
the table that kernels read (pallas_kernels/tuned.json, or --table); where none is, the row that an earlier
search left is taken out. Rows of other devices and shapes stay. Tiles that do not compile are passed over and
counted. Without an accelerator the command refuses.
"""

import dataclasses
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cli, kernel_cases, kernel_times
from experiments.kernel_cases import LOW_BIT, Case
from pallas_kernels import dispatch, target, tuned
from pallas_kernels.grouped_adapter import tiling as grouped
from pallas_kernels.int8_matmul import tiling as int8
from pallas_kernels.low_bit_matmul import tiling as low_bit
from qjax.errors import UserError, nearest
from qjax.progress import Bar
from qjax.quant.formats import parse_scheme

# How far results may lie apart, as a share of the largest. Integers not at all; sums of floats in another
# order, as many terms as there are inputs, a little; and x·A may then be rounded to the next number.
APART = {**dict.fromkeys(LOW_BIT, 1e-3), dispatch.INT8: 0.0, dispatch.GROUPED_ADAPTER: 2.0**-7}

_SHAPES = flags.DEFINE_list('shapes', [], 'Tokens x K x N of products; those of bench_kernels if empty.')
_KERNELS = flags.DEFINE_list('kernels', [], f'Of {", ".join(APART)}; all if empty.')
# Schemes hold commas, so each is a flag of its own.
_FORMATS = flags.DEFINE_multi_string(
  'formats', ['nf4:block=64,dq'], f'Scheme of a weight for {" and ".join(LOW_BIT)}; may be repeated.'
)
_MOST = flags.DEFINE_integer('most', 12, 'Candidates a product.', lower_bound=2)
_REPEATS = flags.DEFINE_integer('repeats', 10, 'Timed calls of each, in turn.', lower_bound=3)
_GAIN = flags.DEFINE_float('gain', 0.03, 'Share of time that a row must save.', lower_bound=0.0)
_TABLE = flags.DEFINE_string('table', str(tuned.TABLE), 'The table to write.')


def main(argv: list[str]) -> int:
  del argv
  shapes = [_shape(text) for text in _SHAPES.value] or list(kernel_cases.SHAPES)
  for scheme in _FORMATS.value:
    parse_scheme(scheme)
  if unknown := [name for name in _KERNELS.value if name not in APART]:
    raise UserError(f'--kernels: {unknown[0]!r} has no tiles to tune{nearest(unknown[0], APART)}')
  platform = dispatch.target_platform()
  if platform not in ('tpu', 'gpu'):
    raise UserError(f'there is no TPU or NVIDIA GPU here, only a {platform}: nothing can be measured')
  path = Path(_TABLE.value)
  try:
    rows = tuned.read(path)
  except ValueError as error:
    raise UserError(f'{error}; move it away, or give another --table') from None
  cases = [
    Case(kernel, each, shape, platform)
    for kernel in _KERNELS.value or APART
    for each in (_FORMATS.value if kernel in LOW_BIT else kernel_cases.KERNELS[kernel]) for shape in shapes
  ]  # fmt: skip
  searched: set[tuned.Key] = set()
  with Bar('tuning', len(cases)) as bar:
    for index, case in enumerate(cases):
      found = tune(case, _MOST.value, _REPEATS.value, _GAIN.value, searched)
      searched |= {found.key} if found.key else set()
      print(f'{case.kernel} {case.format} {"x".join(map(str, case.shape))}: {found.told}')
      if put(found, rows):
        tuned.write(rows, path)
      bar.advance(index + 1)
  print(f'{len(rows)} rows in {path}')
  return 0


def _shape(text: str) -> tuple[int, int, int]:
  parts = text.split('x')
  if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
    raise UserError(f'--shapes: {text!r} is no shape; write tokens, K and N, such as 2048x4096x4096')
  m, k, n = map(int, parts)
  return m, k, n


def _cuts(case: Case) -> tuple[tuned.Product, Sequence[Any]]:
  """The product of a case as the table has it, and ways to cut it, the kernel's own choice first."""
  (m, k, n), is_tpu = case.shape, case.kind == 'tpu'
  itemsize = jnp.dtype(case.dtype).itemsize
  if case.kernel == dispatch.INT8:
    size = {'nn': (m, n, k), 'nt': (m, k, n), 'tn': (k, n, m)}[case.format]
    # Results are in float32.
    tried = int8.candidates(*size, 4) if is_tpu else int8.candidates_gpu(*size)
    return int8.product(case.format, *size, 4), tried
  if case.kernel == dispatch.GROUPED_ADAPTER:
    of = m, case.sizes(), itemsize
    return grouped.product(*of), grouped.candidates(*of) if is_tpu else grouped.candidates_gpu(*of)
  m = max(m, low_bit.FEWEST_TOKENS) if is_tpu else m  # the kernel fills rows up
  args = m, n, case.multiplied(), itemsize, case.kernel == LOW_BIT[1]
  return low_bit.product(*args), low_bit.candidates(*args) if is_tpu else low_bit.candidates_gpu(*args)


class Found(NamedTuple):
  """What a search for tiles of a product ended with.

  Attributes:
    told: in words.
    key: of the product's row, None if nothing was measured.
    row: that the product deserves, None if the kernel's own choice is as good.
  """

  told: str
  key: tuned.Key | None = None
  row: tuned.Row | None = None


def put(found: Found, rows: dict[tuned.Key, tuned.Row]) -> bool:
  """Whether what was found changes a table: a row is put in, or taken out for the kernel's own choice."""
  if found.row is not None:
    rows[found.row.key] = found.row
    return True
  return found.key is not None and rows.pop(found.key, None) is not None


def tune(
  case: Case, most: int, repeats: int, gain: float, searched: Container[tuned.Key] = (),
  interpret: bool = False,
) -> Found:  # fmt: skip
  """Times the ways to cut a product.

  Args:
    case: the product, its chip 'tpu' or 'gpu'.
    most: candidates.
    repeats: timed calls of each.
    gain: share of time that a row must save.
    searched: keys of products that this run has timed: other tokens may have the same row, and so may other
      formats, whose scales are read before the kernel.
    interpret: run on a CPU, which shows that all works and times nothing of use.

  Raises:
    UserError: tiles compute something else than others.
  """
  if (reason := kernel_cases.why_not(case, target.device().device_kind)) is not None:
    return Found(reason)
  product, tried = _cuts(case)
  if (key := tuned.key(product)) in searched:
    return Found('has the row of a product above')
  copies = kernel_times.copied(tuple(kernel_times.drawn(case, kernel_cases.program(case)[1])))
  programs, failed, wanted, why = {}, 0, None, ''
  for tiles in tried[:most]:
    call, _ = kernel_cases.program(case, tiles=tiles, interpret=interpret)
    try:
      program = kernel_times.cold(call, copies)
      found = np.asarray(program()[0])
    except Exception as error:  # Whatever a compiler says of tiles that it can't place.
      failed, why = failed + 1, why or f'{type(error).__name__}: {error}'.splitlines()[0]
      continue
    wanted = found if wanted is None else wanted
    if not np.max(np.abs(found - wanted)) <= APART[case.kernel] * np.max(np.abs(wanted)):
      raise UserError(f'{case.kernel} with {tiles} computes something else than with {tried[0]}')
    programs[tiles] = program
  if tried[0] not in programs:
    return Found(f'its own tiles do not compile: {tried[0]}: {why}')
  seconds = kernel_times.in_turn(
    {str(tiles): each for tiles, each in programs.items()}, repeats, kernel_times.TOGETHER
  )
  best = min(programs, key=lambda tiles: seconds[str(tiles)])
  own, least = (seconds[str(tiles)] / len(copies) for tiles in (tried[0], best))
  told = f'{1e6 * own:.1f} us, the fastest of {len(programs)} {1e6 * least:.1f} us; {failed} do not compile'
  if least > (1 - gain) * own:
    return Found(told, key)
  return Found(told, key, tuned.Row(*key, dataclasses.asdict(best), 1e6 * least, 1e6 * own))


if __name__ == '__main__':
  cli.run(main)
