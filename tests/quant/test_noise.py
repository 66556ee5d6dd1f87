"""The noise of every format on N(0, 1), against published and closed-form figures."""

import functools

import jax
import numpy as np
import pytest

from qjax.quant.formats import FORMATS
from qjax.quant.qtensor import dequantize, quantize


@functools.cache
def normal() -> np.ndarray:
  """2^22 numbers, blocks along the first axis."""
  return np.random.default_rng(0).standard_normal(2**22).astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
def _there_and_back(w: jax.Array, scheme: str) -> jax.Array:
  return dequantize(quantize(w, scheme))


def sqnr(w: np.ndarray, scheme: str) -> float:
  """Signal to quantization noise in dB."""
  error = np.asarray(_there_and_back(w, scheme), np.float64) - w
  return float(10 * np.log10(np.mean(np.float64(w) ** 2) / np.mean(error**2)))


# dB in blocks of 32, 64 and 128 that share a float32 scale.
BLOCKWISE = {
  'nf4': (21.18, 20.73, 20.39),
  'int4:asym': (22.14, 20.95, 20.01),
  'fp4': (19.90, 19.52, 19.26),
  'int4': (20.26, 19.36, 18.61),
  'bnb_fp4': (18.85, 18.27, 17.81),
  'nf3': (14.43, 13.91, 13.53),
  'nf2': (5.72, 4.99, 4.45),
  'int8': (45.43, 44.53, 43.78),
}


@pytest.mark.parametrize('name', BLOCKWISE)
def test_blockwise_noise(name: str) -> None:
  format_name, _, asym = name.partition(':')
  for block, wanted in zip((32, 64, 128), BLOCKWISE[name], strict=True):
    # Consecutive numbers are a block: [2^22 / 4096, 4096] transposed puts them along the inputs.
    w = np.ascontiguousarray(normal().reshape(-1, 4096).T)
    found = sqnr(w, f'{format_name}:block={block}' + (f',{asym}' if asym else ''))
    assert found == pytest.approx(wanted, abs=0.03), block


@pytest.mark.parametrize(('inputs', 'int8', 'int4'), [(4096, 41.21, 16.03), (576, 42.49, 17.31)])
def test_noise_with_one_scale_a_channel(inputs: int, int8: float, int4: float) -> None:
  w = normal()[: inputs * 1024].reshape(inputs, 1024)
  assert sqnr(w, 'int8:axis=channel') == pytest.approx(int8, abs=0.1)
  assert sqnr(w, 'int4:axis=channel') == pytest.approx(int4, abs=0.1)


@pytest.mark.parametrize(('name', 'wanted'), [('fp8_e4m3', 31.52), ('fp8_e5m2', 25.54)])
def test_noise_of_float8_without_a_scale(name: str, wanted: float) -> None:
  w = normal()[: 2**20]
  numbers = FORMATS[name]
  error = np.asarray(numbers.decode(numbers.encode(w)), np.float64) - w
  assert 10 * np.log10(np.mean(np.float64(w) ** 2) / np.mean(error**2)) == pytest.approx(wanted, abs=0.03)


def test_microscaling_costs_little_beside_float32_scales() -> None:
  w = np.ascontiguousarray(normal()[: 2**20].reshape(-1, 4096).T)
  for block, scale, least, most in (32, 'e8m0', 0.5, 1.5), (16, 'e4m3', 0.0, 0.5):
    loss = sqnr(w, f'fp4:block={block}') - sqnr(w, f'fp4:block={block},scale={scale}')
    assert least < loss < most, scale


@pytest.mark.parametrize(('dtype', 'wanted'), [('bfloat16', 55.59), ('float16', 73.65)])
def test_rounding_noise(dtype: str, wanted: float) -> None:
  # Not under jit, where XLA may drop a cast that is undone at once.
  w = normal()[: 2**20].reshape(1024, 1024)
  error = np.asarray(dequantize(quantize(w, dtype)), np.float64) - w
  assert 10 * np.log10(np.mean(np.float64(w) ** 2) / np.mean(error**2)) == pytest.approx(wanted, abs=0.03)


def test_double_quantization_adds_little_noise_and_saves_most_of_the_scales() -> None:
  w = np.ascontiguousarray(normal().reshape(-1, 4096).T)
  plain, double = quantize(w, 'nf4:block=64'), quantize(w, 'nf4:block=64,dq')
  errors = [np.mean((np.asarray(dequantize(q)) - w) ** 2) / np.mean(w**2) for q in (plain, double)]
  assert abs(errors[1] - errors[0]) < 5e-3
  assert plain.bits_per_weight == 4.5
  assert double.bits_per_weight == pytest.approx(4.127, abs=0.001)
