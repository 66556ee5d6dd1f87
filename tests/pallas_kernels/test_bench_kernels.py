"""The command that compiles and times kernels, and the count of bytes that its table rests on."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_cases, kernel_times
from experiments.kernel_cases import Case, Panel
from qjax import chips
from qjax.errors import UserError

ROOT = Path(__file__).parents[2]


def run(*flags: str, status: int = 0) -> str:
  """What the command prints, as a user starts it; it must end with this status."""
  environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  ended = subprocess.run(
    [sys.executable, '-m', 'experiments.bench_kernels', *flags],
    cwd=ROOT, capture_output=True, text=True, env=environment | {'PYTHONPATH': os.pathsep.join(sys.path)},
  )  # fmt: skip
  assert ended.returncode == status, ended.stdout + ended.stderr
  return ended.stdout + ended.stderr


def rows_of(printed: str) -> list[dict]:
  return json.loads(next(line for line in printed.splitlines() if line.startswith('{')))['rows']


def test_a_block_that_comes_again_is_counted_once_on_a_tpu():
  # A grid of 2 by 3: one operand follows the first axis, the other the second; the last block is short.
  places = np.indices((2, 3)).reshape(2, -1).T
  first = Panel((20, 8), (16, 8), np.stack([places[:, 0], 0 * places[:, 0]], 1), 4)
  second = Panel((8, 40), (8, 16), np.stack([0 * places[:, 1], places[:, 1]], 1), 2)
  tpu = chips.find('v5e')
  assert kernel_cases.moved(first, tpu) == first.nbytes
  assert kernel_cases.moved(second, tpu) == 2 * second.nbytes


def test_programs_of_one_wave_share_what_they_read_on_a_gpu():
  gpu = chips.find('h100')
  programs = np.arange(2 * gpu.cores)
  panel = Panel((8, 2**26), (8, 2**20), np.stack([0 * programs, programs % 4], 1), 1)
  assert panel.nbytes > gpu.l2_bytes
  assert kernel_cases.moved(panel, gpu) == 2 * 4 * 8 * 2**20


@pytest.mark.parametrize('chip', ['v5e', 'h100'])
@pytest.mark.parametrize('kernel', kernel_cases.KERNELS)
def test_no_kernel_moves_less_than_it_must(kernel: str, chip: str):
  cases = [Case(kernel, each, (64, 576, 131), chip) for each in kernel_cases.KERNELS[kernel][:2]]
  served = [case for case in cases if kernel_cases.obstacle(case) is None]
  assert bool(served) == ((kernel, chip) != ('stochastic_round', 'h100'))
  for case in served:
    assert 1 <= kernel_cases.traffic(case)['bytes_over_least'] <= 1.5


def test_scales_that_are_read_before_the_kernel_are_counted():
  m, k, n = shape = 2048, 11008, 4096
  found = kernel_cases.traffic(Case('low_bit_matmul', 'nf4:block=64,dq', shape, 'v5e'))
  scales = k // 64 * n
  # What rests: inputs, codes, scales in 8 bits; and the result. Those scales are read, written, read again.
  least = 2 * m * k + k * n // 2 + scales + 4 * m * n
  assert least <= found['bytes_least'] <= 1.01 * least
  assert found['bytes_moved'] - found['bytes_least'] >= 8 * scales
  assert found['bytes_over_least'] <= 1.1


def test_products_of_integers_move_little_where_a_tpu_holds_an_operand():
  for form in kernel_cases.KERNELS['int8_matmul']:
    for shape in kernel_cases.SHAPES:
      found = kernel_cases.traffic(Case('int8_matmul', form, shape, 'v5e'))
      assert found['bytes_over_least'] <= (1.4 if form == 'tn' else 1.1)


def test_several_adapters_move_each_array_once():
  for name in ('v5e', 'h100'):
    for shape in kernel_cases.SHAPES:
      found = kernel_cases.traffic(Case('grouped_adapter', '64:16', shape, name))
      assert 1 <= found['bytes_over_least'] <= 1.1
      # Eight rows have eight adapters, whatever else there is.
      m, k, n = shape
      factors = 2 * 16 * min(64, m) * (k + n)
      assert found['bytes_least'] <= 1.2 * (2 * m * k + 8 * m * n + factors) + 2**19


def test_products_with_few_bits_move_little_where_a_tpu_holds_the_result():
  # A long summed axis: x does not fit into vector memory, the result does if it is held once.
  for kernel, k, n in (('low_bit_matmul', 11008, 4096), ('low_bit_matmul_transposed', 4096, 11008)):
    for each in ('nf4:block=64', 'int4:block=32', 'nf3:block=64', 'int8:axis=channel'):
      assert kernel_cases.traffic(Case(kernel, each, (2048, k, n), 'v5e'))['bytes_over_least'] <= 1.1


def test_what_a_chip_cannot_do_is_refused_with_what_does():
  shape = kernel_cases.SHAPES[0]
  for case, says in (
    (Case('int8_matmul', 'nn', shape, 'v4'), 'multiplies no integers; falls back to XLA'),
    (Case('low_bit_matmul', 'nf4:block=64 float16', shape, 'v5e'), 'no products in float16'),
    (Case('low_bit_matmul', 'nf4:block=64', shape, 'v4'), '16 MiB of vector memory'),
    (Case('stochastic_round', 'bfloat16', shape, 'h100'), 'falls back to XLA'),
    (Case('grouped_adapter', '8:16 float16', shape, 'v5e'), 'no products in float16'),
    (Case('grouped_adapter', '8:256', shape, 'h100'), 'a rank of 256'),
  ):
    reason = kernel_cases.obstacle(case) or ''
    assert says in reason and reason.endswith('falls back to XLA')
  assert kernel_cases.obstacle(Case('int8_matmul', 'nn', shape, 'v5e')) is None
  assert kernel_cases.obstacle(Case('low_bit_matmul', 'nf4:block=64 float16', shape, 'h100')) is None


TOP = {'bytes': 1e9, 'flops': 1e9}
# Every kernel as it is timed, in two formats of weights; but an interpreter's random bits are zeros.
TIMED = {
  (case.kernel, case.format, platform): None for platform in ('tpu', 'gpu')
  for case in kernel_times.cases(platform, False, [])
  if kernel_cases.why_not(case, '') is None and case.kernel != 'stochastic_round'
  and (case.kernel not in kernel_cases.LOW_BIT or case.format in kernel_times.TWO)
}  # fmt: skip


def timed(kernel: str, form: str, platform: str) -> dict[str, Any]:
  """A row, interpreted on a CPU."""
  return kernel_times.measure(Case(kernel, form, (80, 128, 192), platform), 1, TOP, interpret=True)


@pytest.mark.parametrize(('kernel', 'form', 'platform'), TIMED)
def test_what_is_timed_is_right_or_said_to_be_wrong(
  kernel: str, form: str, platform: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(kernel_times, 'MOST_CALLS', 1)
  row = timed(kernel, form, platform)
  assert row['is_right'], row['error']
  is_product = kernel in (*kernel_cases.LOW_BIT, kernel_cases.ADAPTED, 'int8_matmul')
  assert set(row['milliseconds']) == {'kernel', 'xla'} | ({'dense'} if is_product else set())
  found = {'device': 'CPU', 'ceilings': TOP, 'rows': [row], 'refused': {}}
  assert kernel in kernel_times.table(found) and 'WRONG' not in kernel_times.table(found)

  cold = kernel_times.cold
  # Each array of a result alone, in its last row.
  for which in range(2 if kernel.startswith('quantize') else 1):
    programs: list[Any] = []

    def first_is_wrong(*arguments, programs=programs, which=which):
      program, is_first = cold(*arguments), not programs
      programs.append(program)

      def damaged() -> Any:
        leaves, tree = jax.tree.flatten(program())
        leaves[which] = leaves[which].at[-1].add(leaves[which].dtype.type(1)) if is_first else leaves[which]
        return jax.tree.unflatten(tree, leaves)

      return damaged

    monkeypatch.setattr(kernel_times, 'cold', first_is_wrong)
    row = timed(kernel, form, platform)
    assert not row['is_right']
    assert 'WRONG' in kernel_times.table(found | {'rows': [row]})


def test_rounding_at_random_is_told_from_other_rounding():
  contest = kernel_times.contest(Case('stochastic_round', 'bfloat16', (1, 256, 512), 'tpu'))
  by_xla, (x, seed) = contest.programs['xla']
  assert contest.error(by_xla(x, seed)) <= contest.limit
  cut = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000)
  wrong = [x.astype(jnp.bfloat16), jax.lax.bitcast_convert_type(cut, jnp.float32)]
  for each in (*wrong, *(by_xla(x, seed).at[3, 5].set(one) for one in (4, jnp.nan))):
    assert not contest.error(each) <= contest.limit


def test_times_are_those_of_a_call(monkeypatch: pytest.MonkeyPatch):
  case = Case('int8_matmul', 'nn', (32, 64, 128), 'tpu')
  monkeypatch.setattr(kernel_times, 'COLD', 4 * (32 * 64 + 64 * 128 + 4 * (32 + 128)))
  seconds = {'kernel': 8.0, 'xla': 12.0, 'dense': 3.0}
  monkeypatch.setattr(kernel_times, 'in_turn', lambda *_: seconds)
  row = kernel_times.measure(case, 1, {'bytes': 100.0, 'flops': 1000.0}, interpret=True)
  # Four copies; three of floats, which are twice as large and have no scales.
  assert row['milliseconds'] == {'kernel': 2e3, 'xla': 3e3, 'dense': 1e3}
  assert row['share_of_bandwidth'] == (32 * 64 + 64 * 128 + 4 * (32 + 128) + 4 * 32 * 128) / 2 / 100
  assert row['share_of_bfloat16_flops'] == 2 * 32 * 64 * 128 / 2 / 1000


def test_every_call_has_arguments_of_its_own():
  copies = kernel_times.copied((jnp.ones(2**24),))
  assert len(copies) == kernel_times.COLD // 2**26
  assert len({each.unsafe_buffer_pointer() for (each,) in copies}) == len(copies)
  program = kernel_times.cold(lambda x: x + 1, [(jnp.float32(i),) for i in range(3)])
  assert [float(each) for each in program()] == [1, 2, 3]


def test_every_kernel_is_timed(monkeypatch: pytest.MonkeyPatch):
  assert {case.kernel for case in kernel_times.cases('tpu', False, [])} == set(kernel_cases.KERNELS)
  assert {case.kernel for case in kernel_times.cases('gpu', False, ['int8_matmul'])} == {'int8_matmul'}
  with pytest.raises(UserError, match='only a cpu'):
    kernel_times.measure_all(1, True, [])
  monkeypatch.setattr(kernel_times.dispatch, 'target_platform', lambda: 'gpu')
  monkeypatch.setattr(kernel_times, 'ceilings', lambda repeats: TOP)
  monkeypatch.setattr(kernel_times, 'measure', lambda case, repeats, top: {'kernel': case.kernel})
  found = kernel_times.measure_all(1, True, ['int8_matmul', 'stochastic_round'])
  assert {row['kernel'] for row in found['rows']} == {'int8_matmul'}
  assert 'XLA fuses' in found['refused']['stochastic_round bfloat16']
  assert 'stochastic_round bfloat16 is not timed: XLA' in kernel_times.table(found | {'rows': []})


def test_wrong_names_are_refused():
  assert "there is no 'int9_matmul'; did you mean 'int8_" in run('--kernels=int9_matmul', status=2)
  assert "no chip 'v5f'; did you mean 'v5" in run('--compile_only', '--chip=v5f', status=2)


def test_kernels_that_would_not_be_timed_are_refused():
  assert 'a CPU is timed with no kernel of ours' in run('--cpu', '--kernels=int8_matmul', status=2)
  assert '--chip is for --compile_only' in run('--cpu', '--chip=v5e', status=2)
  assert 'give one of them' in run('--cpu', '--compile_only', status=2)
  assert 'cannot be made' in run('--cpu', f'--workdir={__file__}', status=2)


@pytest.mark.parametrize(('chip', 'module'), [('v5e', 'libtpu'), ('sm90', 'jax_cuda12_plugin')])
def test_kernels_are_compiled_for_chips_that_are_not_here(chip: str, module: str):
  if importlib.util.find_spec(module) is None:
    pytest.skip(f"the compiler of {chip} is not installed; pip install 'qjax[plan]'")
  rows = rows_of(
    run('--compile_only', f'--chip={chip}', '--quick', '--kernels=int8_matmul,quantize_tokens', '--json')
  )
  assert len(rows) == 5
  for row in rows:
    assert row['compiled'] or row['refused'], row['reason']
    assert not row['compiled'] or (row['bytes_over_least'] >= 1 and row['roofline_us'] > 0)
    if chip == 'sm90' and row['kernel'] == 'int8_matmul':
      assert row['instruction'] == 'wgmma'


def test_a_cpu_is_timed_where_there_is_nothing_else(tmp_path: Path):
  printed = run('--quick', '--repeats=1', f'--workdir={tmp_path}', '--json')
  assert 'no accelerator here' in printed
  rows = rows_of(printed)
  assert {row['what'] for row in rows} == {'nf4 product', 'few rows', 'nf4 decoding'}
  ways = next(row for row in rows if row['what'] == 'nf4 decoding')
  assert ways['errors']['lookup'] == ways['errors']['select tree'] == ways['errors']['byte table']
  assert ways['errors']['lookup'] < 1e-7 and ways['errors']['arithmetic'] < 1e-5
  assert json.loads((tmp_path / 'cpu.json').read_text())['rows'] == rows
