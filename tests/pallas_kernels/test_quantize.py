"""Kernels that quantize, interpreted, give the bytes of qjax's own quantizers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.quantize import gpu, reference, tpu
from qjax import kernels
from qjax.precision import stochastic_round
from qjax.quant import activations, fake
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import quantize

BACKENDS: dict[str, Any] = {'reference': reference, 'tpu': tpu, 'gpu': gpu}
SCHEMES = (
  'nf4:block=64', 'fp4:block=32', 'int4:block=32', 'int4:axis=channel', 'int2:block=128', 'nf2:block=64',
  'int8:axis=channel', 'int8:block=64',
)  # fmt: skip


def draw(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def layout_of(scheme: str, inputs: int) -> Layout:
  return kernels.layout_in(parse_scheme(scheme), inputs)


def of(name: str, function: str) -> Callable[..., Any]:
  """A backend's function, interpreted where it is a kernel."""
  found = getattr(BACKENDS[name], function)
  return found if name == 'reference' else functools.partial(found, interpret=True)


@pytest.mark.parametrize('name', BACKENDS)
class TestContract:
  """What every backend guarantees."""

  @pytest.mark.parametrize(
    'scheme,shape',
    [(scheme, (131, 17)) for scheme in SCHEMES]
    + [('nf4:block=64', (1536, 64)), ('int4:block=32', (576, 131)), ('int4:axis=channel', (127, 7))],
  )
  def test_weights_have_the_same_bytes(self, name: str, scheme: str, shape: tuple[int, int]):
    layout = layout_of(scheme, shape[0])
    w = draw(*shape).at[:, 0].set(0)
    # Ties are common in bfloat16.
    for given in (w.astype(jnp.bfloat16), w)[: 2 if scheme == 'int4:block=32' else 1]:
      wanted = quantize(given, scheme)
      codes, scale = of(name, 'weight')(given, layout)
      assert codes.dtype == wanted.codes.dtype
      np.testing.assert_array_equal(codes, wanted.codes)
      np.testing.assert_array_equal(scale, wanted.scales)

  @pytest.mark.parametrize('shape', [(7, 131), (64, 576), (1, 17)])
  def test_tokens_have_the_same_codes(self, name: str, shape: tuple[int, int]):
    # Ties, zeros and large numbers among them; float32 and bfloat16.
    x = draw(*shape).at[0, :3].set(jnp.asarray([127.0, 0.5, -2.5])) * 10
    for given in (x, x.astype(jnp.bfloat16).at[0].set(0)):
      wanted = activations.encode(given, activations.parse_activations('int8:axis=token'))
      for found, want in zip(of(name, 'tokens')(given), wanted, strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)

  def test_a_row_that_is_not_finite_is_read_back_as_nan(self, name: str):
    x = draw(4, 17).at[1, 3].set(jnp.nan).at[2, 5].set(-jnp.inf)
    codes, scale = of(name, 'tokens')(x)
    read = np.asarray(codes, np.float32) * np.asarray(scale)
    assert np.isnan(read[1:3]).all() and np.isfinite(read[[0, 3]]).all()

  def test_codes_that_no_kernel_packs_are_refused(self, name: str):
    refused = ('int3:block=32', '3 bits'), ('int4:block=32,asym', 'offset'), ('int8:block=32,asym', 'offset')
    for scheme, says in refused:
      layout = layout_of(scheme, 64)
      with pytest.raises(NotImplementedError, match=says):
        of(name, 'weight')(draw(64, 8), layout)


@pytest.mark.parametrize(
  'scheme,inputs', [('nf4:block=64', 1100), ('int4:block=32', 576), ('int8:block=64', 640)]
)
def test_weights_of_several_tiles_have_the_same_bytes(
  scheme: str, inputs: int, monkeypatch: pytest.MonkeyPatch
):
  # Tiles of eight blocks and 128 outputs: two or three each way, ragged at both ends. Sizes that no other
  # test has, as a call traced before would keep its tiles.
  monkeypatch.setattr(tpu, 'TILE', 2**13)
  layout, wanted = layout_of(scheme, inputs), quantize(draw(inputs, 300), scheme)
  assert layout.blocks > 8 and tpu._weight_tile(300, layout) == (8, 128)
  codes, scale = tpu.weight(draw(inputs, 300), layout, interpret=True)
  np.testing.assert_array_equal(codes, wanted.codes)
  np.testing.assert_array_equal(scale, wanted.scales)


def test_tokens_of_several_tiles_have_the_same_codes(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(tpu, 'TILE', 2**12)
  x, key = draw(75, 133), jax.random.key(1)
  assert tpu._tile_rows(75, 133) == 32
  wanted = activations.encode(x, activations.parse_activations('int8:axis=token'))
  for found, want in zip(tpu.tokens(x, interpret=True), wanted, strict=True):
    np.testing.assert_array_equal(found, want)
  bits = jax.random.bits(key, x.shape, jnp.uint32)
  for found, want in zip(tpu.tokens(x, bits=bits, interpret=True), reference.tokens(x, bits), strict=True):
    np.testing.assert_array_equal(found, want)
  found = tpu.stochastic_round(x, bits=bits >> 16, interpret=True)
  np.testing.assert_array_equal(found, reference.stochastic_round(x, bits >> 16))


@pytest.mark.parametrize('name', ['reference', 'tpu'])
class TestRounding:
  """Rounding at random, with bits that are given."""

  def test_gradients_have_the_same_codes(self, name: str):
    g, key = draw(40, 131), jax.random.key(1)
    wanted = fake.gradient_codes(g, -1, key)
    found = of(name, 'tokens')(g, bits=jax.random.bits(key, g.shape, jnp.uint32))
    for each, want in zip(found, wanted, strict=True):
      np.testing.assert_array_equal(each, want)

  def test_bfloat16_is_that_of_the_optimizer(self, name: str):
    x, key = draw(40, 131) * 1e3, jax.random.key(2)
    x = x.at[0, :5].set(jnp.asarray([jnp.inf, -jnp.inf, 3.4e38, -3.4e38, 0.0]))
    bits = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    found = of(name, 'stochastic_round')(x, bits=bits)
    np.testing.assert_array_equal(found, stochastic_round(x, jnp.dtype('bfloat16'), key))


def test_rounding_at_random_is_right_in_the_mean():
  x = jnp.full((64, 4096), 1 + 2.0**-10, jnp.float32)
  bits = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32)
  found = tpu.stochastic_round(x, bits=bits, interpret=True).astype(jnp.float32)
  # One in eight rounds up by 2^-7; five standard deviations of 2^18 draws.
  assert abs(float(jnp.mean(found)) - (1 + 2.0**-10)) < 5 * 2.0**-7 * (0.125 * 0.875) ** 0.5 / 512
  assert set(np.unique(found)) == {1.0, 1 + 2.0**-7}


def test_a_seed_or_bits_are_needed():
  x, bits = jnp.ones((8, 128)), jnp.zeros((8, 128), jnp.uint32)
  with pytest.raises(ValueError, match='a seed or bits'):
    tpu.stochastic_round(x, interpret=True)
  with pytest.raises(ValueError, match='not both'):
    tpu.tokens(x, seed=jnp.int32(0), bits=bits, interpret=True)
