"""Times ways to cut products with weights in few bits on the accelerator that is here, and keeps the fastest.

  python -m experiments.tune_kernels
  python -m experiments.tune_kernels --formats=nf4:block=64,dq --shapes=1x4096x4096,2048x4096x4096

For each product, format and shape the tiles that the kernel chooses by itself are timed in the same turns as
other candidates, whose results are compared with theirs first. One that is faster by --gain becomes a row of
the table that kernels read (pallas_kernels/tuned.json, or --table); rows of other devices and shapes stay.
Tiles that do not compile are passed over and counted. Without an accelerator the command refuses.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import cli, kernel_cases, kernel_times
from experiments.kernel_cases import Case
from pallas_kernels import dispatch, tuned
from pallas_kernels.low_bit_matmul import tiling
from qjax import kernels
from qjax.errors import UserError
from qjax.progress import Bar
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import quantize

_SHAPES = flags.DEFINE_list('shapes', [], 'Tokens x K x N of products; those of bench_kernels if empty.')
# Schemes hold commas, so each is a flag of its own.
_FORMATS = flags.DEFINE_multi_string('formats', ['nf4:block=64,dq'], 'Scheme of a weight; may be repeated.')
_MOST = flags.DEFINE_integer('most', 12, 'Candidates a product.', lower_bound=2)
_REPEATS = flags.DEFINE_integer('repeats', 10, 'Timed calls of each, in turn.', lower_bound=3)
_GAIN = flags.DEFINE_float('gain', 0.03, 'Share of time that a row must save.', lower_bound=0.0)
_TABLE = flags.DEFINE_string('table', str(tuned.TABLE), 'The table to write.')


def main(argv: list[str]) -> int:
  del argv
  shapes = [_shape(text) for text in _SHAPES.value] or list(kernel_cases.SHAPES)
  for scheme in _FORMATS.value:
    parse_scheme(scheme)
  platform = dispatch.target_platform()
  if platform not in ('tpu', 'gpu'):
    raise UserError(f'there is no TPU or NVIDIA GPU here, only a {platform}: nothing can be measured')
  path = Path(_TABLE.value)
  try:
    rows = tuned.read(path) if path.exists() else {}
  except ValueError as error:
    raise UserError(f'{error}; move it away, or give another --table') from None
  cases = [
    Case(kernel, scheme, shape, platform)
    for scheme in _FORMATS.value for shape in shapes for kernel in kernel_cases.LOW_BIT
  ]  # fmt: skip
  with Bar('tuning', len(cases)) as bar:
    for index, case in enumerate(cases):
      row, told = tune(case, platform, _MOST.value, _REPEATS.value, _GAIN.value)
      print(f'{case.kernel} {case.format} {"x".join(map(str, case.shape))}: {told}')
      if row is not None:
        rows[row.key] = row
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


def tune(
  case: Case, platform: str, most: int, repeats: int, gain: float, interpret: bool = False
) -> tuple[tuned.Row | None, str]:
  """The row that a product deserves, None if its own choice is as good; and what was found, in words.

  Args:
    case: the product.
    platform: 'tpu' or 'gpu', whose kernel it is.
    most: candidates.
    repeats: timed calls of each.
    gain: share of time that a row must save.
    interpret: run on a CPU, which shows that all works and times nothing of use.
  """
  m, k, n = case.shape
  is_transposed = case.kernel != kernel_cases.LOW_BIT[0]
  w = jax.jit(lambda w: quantize(w, case.format))(kernel_times.draw((k, n), 'float32'))
  x, arrays = kernel_times.draw((m, n if is_transposed else k), 'bfloat16', 1), kernels.arrays_of(w)
  layout = kernels.layout_of(w)
  size = (m, n, layout, x.dtype.itemsize)
  (implementation,) = (r for r in dispatch.TABLE if (r.op, r.platform) == (dispatch.LOW_BIT, platform))
  if (reason := implementation.why_not(layout, x.dtype)) is not None:
    return None, reason
  product = implementation.products[case.kernel.removeprefix('low_bit_')]
  if platform == 'tpu':
    filled = (max(m, tiling.FEWEST_TOKENS), *size[1:])
    tried: tuple[Any, ...] = tiling.candidates(*filled, is_transposed)
  else:
    tried = tiling.candidates_gpu(*size, is_transposed)
  programs, failed, wanted = {}, 0, None
  for tiles in tried[:most]:
    try:
      program = kernel_times.bound(
        lambda x, w, tiles=tiles: product(x, *w, layout, interpret=interpret, tiles=tiles), x, arrays
      )
      found = np.asarray(program())
    except Exception:  # Whatever a compiler says of tiles that it can't place.
      failed += 1
      continue
    wanted = found if wanted is None else wanted
    # Sums in another order, of as many terms as there are inputs, in float32.
    if np.max(np.abs(found - wanted)) > 1e-3 * np.max(np.abs(wanted)):
      raise UserError(f'{case.kernel} with {tiles} computes something else than with {tried[0]}')
    programs[tiles] = program
  if tried[0] not in programs:
    return None, f'its own tiles do not compile: {tried[0]}'
  seconds = kernel_times.in_turn({str(tiles): each for tiles, each in programs.items()}, repeats)
  best = min(programs, key=lambda tiles: seconds[str(tiles)])
  own, least = seconds[str(tried[0])], seconds[str(best)]
  told = f'{1e6 * own:.1f} us, the fastest of {len(programs)} {1e6 * least:.1f} us; {failed} do not compile'
  if least > (1 - gain) * own:
    return None, told
  key = tuned.key(case.kernel, m, n, layout, x.dtype.itemsize)
  return tuned.Row(*key, dataclasses.asdict(best), 1e6 * least, 1e6 * own), told


if __name__ == '__main__':
  cli.run(main)
