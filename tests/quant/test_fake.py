"""Straight-through, LSQ and PACT gradients; fake quantization against conversion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.quant import fake
from qjax.quant.activations import parse_activations
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import dequantize, quantize, spread, sum_over

INT4 = parse_scheme('int4:axis=channel')
SCHEMES = (
  'int8:axis=channel', 'int8:axis=tensor', 'int4:axis=channel', 'int4:block=16', 'int3:block=16',
  'int2:block=8', 'int8:tile=8x4', 'int4:block=16,scale=bfloat16', 'int4:block=16,dq', 'nf4:block=16',
  'nf4:block=16,dq',
  'fp4:block=16', 'fp8_e4m3:axis=channel', 'int4:block=16,asym',
)  # fmt: skip
LEARNABLE = tuple(spelling for spelling in SCHEMES if 'asym' not in spelling)


def weights(k: int = 37, n: int = 11, seed: int = 0, dtype: str = 'float32') -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=(k, n)), dtype)


def ones(w: jax.Array) -> jax.Array:
  return jnp.ones(w.shape, jnp.float32)


class TestStraightThrough:
  def test_inside_at_and_beyond_the_bounds(self):
    w = jnp.asarray([[0.3], [1.0], [1.2], [-1.0]])
    high = jnp.asarray([[1.0]])
    for gradient in fake.GRADIENTS:
      found = jax.grad(lambda w, gradient=gradient: jnp.sum(fake.through(w, high, INT4, gradient)))(w)
      np.testing.assert_array_equal(found[:, 0], [1, 1, 0, 1])

  @pytest.mark.parametrize('high', [0.1, 0.3, 1 / 3, 0.7, 1.1, 2.3, 1e-3, 77.7])
  def test_a_bound_is_inside_however_it_rounds(self, high: float):
    w = jnp.asarray([[high], [-high], [np.nextafter(np.float32(high), np.float32(1e9))]], jnp.float32)
    grad = jax.grad(lambda w: jnp.sum(fake.through(w, jnp.full((1, 1), high, jnp.float32), INT4, 'ste')))
    np.testing.assert_array_equal(grad(w)[:, 0], [1, 1, 0])

  @pytest.mark.parametrize('spelling', SCHEMES)
  def test_nothing_lies_beyond_its_own_largest_magnitude(self, spelling: str):
    w = weights()
    g = weights(seed=1)
    found = jax.grad(lambda w: jnp.sum(g * fake.through(w, None, parse_scheme(spelling), 'ste')))(w)
    np.testing.assert_array_equal(found, g)

  @pytest.mark.parametrize('spelling', SCHEMES)
  def test_values_are_those_of_the_quantizer(self, spelling: str):
    w, scheme = weights(), parse_scheme(spelling)
    np.testing.assert_array_equal(fake.through(w, None, scheme), dequantize(quantize(w, scheme)))

  def test_in_scan_vmap_remat_and_bfloat16(self):
    stack = jnp.stack([weights(seed=seed) for seed in range(3)])
    high = jnp.full((3, 1, 11), 1.5)

    def total(w: jax.Array, high: jax.Array) -> jax.Array:
      return jnp.sum(fake.through(w, high, INT4, 'lsq') ** 2)

    grads = jax.grad(total, argnums=(0, 1))
    expected = [grads(w, h) for w, h in zip(stack, high, strict=True)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    for found in (
      jax.jit(jax.vmap(grads))(stack, high),
      jax.grad(lambda w, h: jnp.sum(jax.vmap(total)(w, h)), argnums=(0, 1))(stack, high),
      jax.grad(
        lambda w, h: jax.lax.scan(lambda c, x: (c + jax.checkpoint(total)(*x), None), 0.0, (w, h))[0],
        argnums=(0, 1),
      )(stack, high),
    ):
      # Sums of 37 terms in another order.
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    half = jax.grad(total)(stack[0].astype(jnp.bfloat16), high[0])
    assert half.dtype == jnp.bfloat16


class TestLearnedRanges:
  @pytest.mark.parametrize('gradient', fake.LEARNED)
  @pytest.mark.parametrize('spelling', LEARNABLE)
  def test_range_gradient_is_the_definition(self, spelling: str, gradient: str):
    scheme, w, g = parse_scheme(spelling), weights(), weights(seed=1)
    high = 0.7 * fake.first_range(w, scheme)
    found = jax.jit(jax.grad(lambda h: jnp.sum(g * fake.through(w, h, scheme, gradient))))(high)
    # Element by element in NumPy, from codes and scales alone.
    q = quantize(w, scheme, high=high)
    step = np.asarray(spread(q.scales, scheme, *w.shape))
    x, value = np.asarray(w, np.float64), np.asarray(dequantize(q), np.float64)
    largest = scheme.numbers.largest
    share, level = x / step, value / step
    beyond = np.abs(x) > step * largest * (1 + 1e-6)
    inside = (level - share) / largest if gradient == 'lsq' else 0 * share
    each = np.asarray(g, np.float64) * np.where(beyond, np.sign(x), inside)
    expected = np.asarray(sum_over(jnp.asarray(each, jnp.float32), scheme))
    if gradient == 'lsq':
      expected = expected / np.sqrt(np.asarray(sum_over(ones(w), scheme)) * largest)
    assert found.shape == high.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())

  def test_lsq_is_the_slope_of_its_surrogate(self):
    # With the rounding error of each weight, in steps, held constant, Q(w) = clip(w/s + error)·s is smooth.
    w, g = np.asarray(weights(), np.float64), np.asarray(weights(seed=1), np.float64)
    high = np.full((1, 11), 1.3)
    largest = 7

    def surrogate(high: np.ndarray, error: np.ndarray) -> float:
      step = high / largest
      return float(np.sum(g * np.where(np.abs(w) > high0, np.sign(w) * high, (w / step + error) * step)))

    high0 = high
    error = np.round(w / (high / largest)) - w / (high / largest)
    slope = np.zeros(11)
    for column in range(11):
      ahead, behind = high.copy(), high.copy()
      ahead[0, column] += 1e-5
      behind[0, column] -= 1e-5
      slope[column] = (surrogate(ahead, error) - surrogate(behind, error)) / 2e-5
    loss = lambda h: jnp.sum(jnp.asarray(g, jnp.float32) * fake.through(weights(), h, INT4, 'lsq'))
    found = jax.grad(loss)(jnp.asarray(high, jnp.float32))[0] * np.sqrt(37 * 7)
    np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-4)

  def test_pact_is_the_slope_of_clipping(self):
    w, g, high = weights(), weights(seed=1), jnp.full((1, 11), 0.9)
    clip = lambda h: jnp.sum(g * jnp.clip(w, -h, h))
    step = 1e-2
    slope = [
      (clip(high.at[0, i].add(step)) - clip(high.at[0, i].add(-step))) / (2 * step) for i in range(11)
    ]
    found = jax.grad(lambda h: jnp.sum(g * fake.through(w, h, INT4, 'pact')))(high)[0]
    is_smooth = ~np.any(np.abs(np.abs(np.asarray(w)) - 0.9) < 2 * step, axis=0)
    assert is_smooth.sum() >= 5
    np.testing.assert_allclose(found[is_smooth], np.asarray(slope)[is_smooth], rtol=1e-3, atol=1e-3)

  def test_a_range_at_or_below_zero_stays_usable(self):
    for high in (0.0, -1.0):
      value = fake.through(weights(), jnp.full((1, 11), high), INT4, 'lsq')
      assert np.isfinite(value).all()

  @pytest.mark.parametrize('gradient', fake.LEARNED)
  def test_activation_range(self, gradient: str):
    scheme = parse_activations('int8:axis=tensor,static')
    x, g, high = weights(5, 23), weights(5, 23, seed=1), jnp.float32(1.1)
    dx, d_high = fake.pull_input(x, high, scheme, g, gradient)
    xs, gs = np.asarray(x, np.float64), np.asarray(g, np.float64)
    share = xs * 127 / 1.1
    beyond = np.abs(xs) > np.float32(1.1)
    inside = (np.round(share) - share) / 127 if gradient == 'lsq' else 0
    expected = np.sum(gs * np.where(beyond, np.sign(xs), inside))
    expected = expected / np.sqrt(23 * 127) if gradient == 'lsq' else expected
    np.testing.assert_allclose(d_high, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(dx, np.where(beyond, 0, g))

