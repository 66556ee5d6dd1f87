"""The command that compiles and times kernels, and the count of bytes that its table rests on."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import kernel_cases
from experiments.kernel_cases import Case, Panel
from qjax import chips

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
  for each in kernel_cases.KERNELS[kernel][:2]:
    case = Case(kernel, each, (64, 576, 131), chip)
    if kernel_cases.obstacle(case) is None:
      found = kernel_cases.traffic(case)
      assert 1 <= found['bytes_over_least'] <= 1.5


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
    (Case('stochastic_round', 'bfloat16', shape, 'h100'), 'falls back to XLA'),
    (Case('grouped_adapter', '8:16 float16', shape, 'v5e'), 'no products in float16'),
    (Case('grouped_adapter', '8:256', shape, 'h100'), 'a rank of 256'),
  ):
    reason = kernel_cases.obstacle(case) or ''
    assert says in reason and reason.endswith('falls back to XLA')
  assert kernel_cases.obstacle(Case('int8_matmul', 'nn', shape, 'v5e')) is None
  assert kernel_cases.obstacle(Case('low_bit_matmul', 'nf4:block=64 float16', shape, 'h100')) is None


def test_wrong_names_are_refused():
  assert "there is no 'int9_matmul'" in run('--compile_only', '--kernels=int9_matmul', status=2)
  assert "no chip 'v5f'; did you mean 'v5" in run('--compile_only', '--chip=v5f', status=2)


def test_kernels_that_would_not_be_timed_are_refused():
  assert "'grouped_adapter' is not timed; low_bit_matmul," in run('--kernels=grouped_adapter', status=2)
  assert 'a CPU is timed with no kernel of ours' in run('--cpu', '--kernels=int8_matmul', status=2)


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


def test_a_cpu_is_timed_where_there_is_nothing_else(tmp_path: Path):
  printed = run('--quick', '--repeats=1', f'--workdir={tmp_path}', '--json')
  assert 'no accelerator here' in printed
  rows = rows_of(printed)
  assert {row['what'] for row in rows} == {'nf4 product', 'few rows', 'nf4 decoding'}
  ways = next(row for row in rows if row['what'] == 'nf4 decoding')
  assert ways['errors']['lookup'] == ways['errors']['select tree'] == ways['errors']['byte table']
  assert ways['errors']['lookup'] < 1e-7 and ways['errors']['arithmetic'] < 1e-5
  assert json.loads((tmp_path / 'cpu.json').read_text())['rows'] == rows
