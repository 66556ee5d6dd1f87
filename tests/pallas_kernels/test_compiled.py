"""Kernels and a step, compiled for chips that are not here, each in a process of its own."""

import importlib.util

import pytest

from pallas_kernels.low_bit_matmul import tiling
from qjax import chips

# A decode step, a batch, and a shape that nothing divides, in every way that codes are laid out.
CASES = [
  ('nf4:block=64', 'bfloat16', 1, 576, 1536),
  ('nf4:block=64', 'bfloat16', 256, 1536, 576),
  ('int4:block=32,asym', 'bfloat16', 17, 131, 127),
  ('nf3:block=64', 'bfloat16', 64, 576, 192),
  ('int2:block=128', 'float32', 7, 576, 64),
  ('int8:axis=channel', 'bfloat16', 64, 576, 576),
]
PROJECTIONS = ('attn/q', 'attn/k', 'attn/v', 'attn/o', 'mlp/gate', 'mlp/up', 'mlp/down')
HALF = [('nf4:block=64', 'float16', 64, 576, 576)]


def need(chip: str) -> None:
  module = 'libtpu' if chips.find(chip).kind == 'tpu' else 'jax_cuda12_plugin'
  if importlib.util.find_spec(module) is None:
    pytest.skip(f"{module} is not installed, which compiles for {chip}: pip install 'qjax[plan]'")


@pytest.mark.slow
@pytest.mark.parametrize('chip', ['v5e', 'v6e', 'sm80', 'sm89', 'sm90'])
def test_products_compile(chip: str):
  need(chip)
  cases = CASES + (HALF if chips.find(chip).kind == 'gpu' else [])
  assert chips.call('tests.pallas_kernels.compiling:products', {'chip': chip, 'cases': cases}) == {}


@pytest.mark.slow
@pytest.mark.parametrize('chip', ['v5e', 'sm90'])
def test_a_step_runs_kernels_and_holds_no_decoded_weight(chip: str):
  """The default finds the chip by the mesh, though JAX itself runs on a CPU."""
  need(chip)
  by_kernels, by_xla = (
    chips.call('tests.pallas_kernels.compiling:gradient', {'chip': chip, 'name': name})
    for name in ('auto', 'xla')
  )
  assert by_xla['forward'] == by_xla['transposed'] == 0 and by_xla['weights'] > 0
  # Seven projections, in a loop over layers; full remat runs the forward products again.
  assert by_kernels['forward'] >= 7 and by_kernels['transposed'] >= 7
  assert by_kernels['weights'] == 0


@pytest.mark.slow
@pytest.mark.parametrize(('chip', 'name'), [('v5e', 'pallas_tpu'), ('sm90', 'pallas_gpu')])
def test_the_step_of_qlora_multiplies_bytes(chip: str, name: str):
  need(chip)
  found = chips.call('tests.pallas_kernels.compiling:training', {'chip': chip, 'name': 'qlora'})
  assert found['weights'] == 0
  assert found['calls'] == dict.fromkeys(tiling.NAMES, 7)  # seven projections there and back
  assert set(found['products'][f'{name}: low_bit_matmul']) == {
    f'layers/{path}/kernel {product}' for path in PROJECTIONS for product in ('forward', 'adapter', 'dx')
  }


@pytest.mark.slow
@pytest.mark.parametrize(('chip', 'name'), [('v5e', 'pallas_tpu'), ('sm90', 'pallas_gpu')])
def test_the_step_of_int8_training_multiplies_codes(chip: str, name: str):
  need(chip)
  found = chips.call('tests.pallas_kernels.compiling:training', {'chip': chip, 'name': 'int8_training'})
  assert found['calls']['int8_matmul'] == 3 * 7
  assert ('quantize_tokens' in found['calls']) == (chip == 'v5e')
  assert found['products'][f'{name}: int8_matmul'] == sorted(
    f'layers/{path}/kernel {product}' for path in PROJECTIONS for product in ('forward', 'dx', 'dw')
  )
