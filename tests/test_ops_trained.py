"""Products with weights that are trained through their quantizer, against conversion and plain math."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import ops
from qjax.adapters import Adapter
from qjax.errors import UserError
from qjax.ops import Backward, Numerics
from qjax.precision import policy
from qjax.quant import fake
from qjax.quant.fake import FakeQuantized
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import QTensor, dequantize, quantize, spread

PATH = 'layers/mlp/down/kernel'
K, N, M = 67, 29, 13
WEIGHTS = (
  'int8:axis=channel', 'int8:axis=tensor', 'int4:axis=channel', 'int4:block=32', 'int4:block=32,asym',
  'nf4:block=32,dq', 'int3:block=32', 'fp4:block=32',
)  # fmt: skip
INPUTS = ('none', 'int8:axis=token', 'int8:axis=tensor', 'int8:axis=tensor,static')


def numerics(weights: str, inputs: str = 'none', compute: str = 'float32', **more: Any) -> Numerics:
  rules = () if inputs == 'none' else (('.*', inputs),)
  return Numerics(policy(compute=compute), activations=rules, weights=(('.*', weights),), **more)


def draw(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def adapter(rank: int = 4) -> Adapter:
  return Adapter(draw(rank, K, seed=5) * 0.1, draw(rank, N, seed=6) * 0.1, 2.0)


def converted(w: jax.Array | QTensor, low_rank: Adapter | None, weights: str) -> QTensor:
  return jax.jit(FakeQuantized.quantized)(FakeQuantized(w, None, low_rank, None, parse_scheme(weights)))


class TestConversion:
  @pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
  @pytest.mark.parametrize('inputs', INPUTS)
  @pytest.mark.parametrize('weights', WEIGHTS)
  def test_the_product_is_that_of_the_converted_weight(self, weights: str, inputs: str, compute: str):
    x, w, high = draw(M, K).astype(compute), draw(K, N, seed=1), jnp.float32(2.0)
    how = numerics(weights, inputs, compute)
    training = jax.jit(lambda x, w: ops.dot(x, w, how, path=PATH, high=high))
    q = quantize(w, weights)
    after = jax.jit(lambda x, q: ops.dot(x, q, how, path=PATH, high=high))
    np.testing.assert_array_equal(training(x, w), after(x, q))
    first = lambda x, w: jnp.sum(ops.dot(x, w, how, path=PATH, high=high)[0, :1])
    assert jax.jit(jax.value_and_grad(first))(x, w)[0] == after(x, q)[0, 0]

  @pytest.mark.parametrize('base', ['plain', 'bfloat16', 'int8:axis=channel', 'nf4:block=32,dq'])
  @pytest.mark.parametrize('weights', ['int8:axis=channel', 'int4:axis=channel', 'nf4:block=32'])
  def test_an_adapter_is_inside_the_quantizer(self, weights: str, base: str):
    w: Any = draw(K, N, seed=1)
    w = w if base == 'plain' else quantize(w, base)
    x, how = draw(M, K), numerics(weights)
    y = jax.jit(lambda x, w, a: ops.dot(x, w, how, a, path=PATH))(x, w, adapter())
    q = converted(w, adapter(), weights)
    after = jax.jit(lambda x, q: ops.dot(x, q, how, path=PATH))(x, q)
    np.testing.assert_array_equal(y, after)
    merged = (dequantize(w) if isinstance(w, QTensor) else w) + adapter().delta()
    np.testing.assert_allclose(dequantize(q), dequantize(quantize(merged, weights)), atol=1e-6)

  def test_another_order_of_operations_would_show(self):
    # What the tests above guard against: the step's inverse instead of the step, and the adapter outside.
    w, scheme = draw(K, N, seed=1), parse_scheme('int4:block=32,scale=bfloat16')
    q = quantize(w, scheme)
    step = jnp.max(jnp.abs(w[:32]), axis=0) / 7  # before it is rounded to bfloat16
    codes = jnp.clip(jnp.round(w[:32] / step), -7, 7)
    assert np.any(np.asarray(codes, np.int8) != np.asarray(q.unpacked()[:32]))
    x, how = draw(M, K), numerics('int4:axis=channel')
    inside = ops.dot(x, w, how, adapter(), path=PATH)
    a = adapter()
    outside = ops.dot(x, quantize(w, 'int4:axis=channel'), Numerics(policy()), a, path=PATH)
    assert np.abs(np.asarray(inside - outside)).max() > 1e-2

  def test_other_paths_stay_plain(self):
    how = dataclasses.replace(numerics('int4:axis=channel'), weights=(('.*/up/kernel', 'int4:axis=channel'),))
    x, w = draw(M, K), draw(K, N, seed=1)
    np.testing.assert_array_equal(ops.dot(x, w, how, path=PATH), ops.dot(x, w, Numerics(policy()), path=PATH))

  def test_a_resting_weight_stays_as_it_is(self):
    how, q = numerics('int4:axis=channel'), quantize(draw(K, N, seed=1), 'int8:axis=channel')
    x = draw(M, K)
    np.testing.assert_array_equal(ops.dot(x, q, how, path=PATH), ops.dot(x, q, Numerics(policy()), path=PATH))


class TestGradients:
  @pytest.mark.parametrize('gradient', fake.GRADIENTS)
  @pytest.mark.parametrize('inputs', ['none', 'int8:axis=token', 'int8:axis=tensor,static'])
  def test_against_autodiff_of_the_parts(self, inputs: str, gradient: str):
    spelling = 'int4:block=32'
    how = numerics(spelling, inputs, weight_gradient=gradient, activation_gradient=gradient)
    scheme, act = parse_scheme(spelling), how.scheme_of(PATH)
    x, w, g = draw(M, K), draw(K, N, seed=1), draw(M, N, seed=2)
    weight_high, high = 0.8 * fake.first_range(w, scheme), jnp.float32(1.5)

    def mine(x: Any, w: Any, weight_high: Any, high: Any) -> jax.Array:
      return jnp.sum(g * ops.dot(x, w, how, path=PATH, high=high, weight_high=weight_high))

    def read(x: jax.Array, high: jax.Array) -> jax.Array:
      if act.is_none:
        return x
      value = jax.lax.stop_gradient(fake.activations.fake(x, act, high))
      inside = jnp.clip(x, -high, high) if act.is_static else x
      return inside + jax.lax.stop_gradient(value - inside)

    def plain(x: Any, w: Any, weight_high: Any, high: Any) -> jax.Array:
      w_hat = fake.through(w, weight_high, scheme, gradient)
      return jnp.sum(g * jnp.matmul(read(x, high), w_hat, precision='highest'))

    found = jax.jit(jax.grad(mine, argnums=(0, 1, 2, 3)))(x, w, weight_high, high)
    wanted = jax.grad(plain, argnums=(0, 1, 2))(x, w, weight_high, high)
    for a, b in zip(found, wanted, strict=False):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    if not act.is_static or gradient == 'ste':
      assert found[3] == 0
    else:
      dx = jnp.matmul(g, fake.through(w, weight_high, scheme, gradient).T, precision='highest')
      np.testing.assert_allclose(found[3], fake.pull_input(x, high, act, dx, gradient)[1], rtol=1e-3)

  @pytest.mark.parametrize('base', ['plain', 'int8:axis=channel'])
  def test_of_an_adapter_inside_the_quantizer(self, base: str):
    scheme = parse_scheme('int4:axis=channel')
    w: Any = draw(K, N, seed=1)
    w = w if base == 'plain' else quantize(w, base)
    x, g, a = draw(M, K), draw(M, N, seed=2), adapter()
    how = numerics(str(scheme))

    def plain(x: jax.Array, a: Adapter) -> jax.Array:
      wide = dequantize(w) if isinstance(w, QTensor) else w
      merged = fake.through(wide + a.delta(), None, scheme, 'ste')
      return jnp.sum(g * jnp.matmul(x, merged, precision='highest'))

    mine = lambda x, a: jnp.sum(g * ops.dot(x, w, how, a, path=PATH))
    found = jax.jit(jax.grad(mine, argnums=(0, 1)))(x, a)
    wanted = jax.grad(plain, argnums=(0, 1))(x, a)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()), found, wanted
    )

  def test_under_scan_remat_vmap_and_half_precision(self):
    how = numerics('int4:axis=channel', 'int8:axis=token', 'bfloat16')
    stack, x = jnp.stack([draw(K, K, seed=seed) for seed in range(3)]), draw(M, K)

    def scanned(stack: jax.Array, x: jax.Array) -> jax.Array:
      layer = jax.checkpoint(lambda x, w: ops.dot(x, w, how, path=PATH) * jnp.bfloat16(0.1))
      last, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x.astype('bfloat16'), stack)
      return jnp.sum(last.astype(float))

    def unrolled(stack: jax.Array, x: jax.Array) -> jax.Array:
      x = x.astype('bfloat16')
      for w in stack:
        x = ops.dot(x, w, how, path=PATH) * jnp.bfloat16(0.1)
      return jnp.sum(x.astype(float))

    found, wanted = jax.jit(jax.grad(scanned))(stack, x), jax.jit(jax.grad(unrolled))(stack, x)
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())
    each = jax.vmap(lambda x: jax.grad(scanned)(stack, x))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(each[0], found, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())

  def test_float16_with_a_loss_scale(self):
    how = numerics('int4:axis=channel', compute='float16')
    x, w, g = draw(M, K), draw(K, N, seed=1), draw(M, N, seed=2)
    grad = jax.grad(lambda w, s: jnp.sum(s * g * ops.dot(x, w, how, path=PATH).astype(jnp.float32)))
    one, scaled = grad(w, 1.0), grad(w, 256.0) / 256
    np.testing.assert_allclose(scaled, one, rtol=2e-3, atol=2e-3 * np.abs(one).max())

  def test_no_gradient_is_formed_for_a_frozen_base(self):
    how, w = numerics('int4:axis=channel'), draw(K, N, seed=1)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(ops.dot(x, w, how, path=PATH))))(draw(M, K))
    assert f'f32[{K},{N}] = dot_general' not in str(jaxpr)


class TestStochasticRounding:
  @pytest.mark.parametrize('weights', ['int4:axis=channel', 'int4:block=32,asym', 'int2:block=32'])
  def test_weights_are_right_on_average_and_in_evaluation_nearest(self, weights: str):
    how = numerics(weights, weight_rounding='stochastic')
    w, x = draw(K, N, seed=1), jnp.eye(K)
    nearest = ops.dot(x, w, how, path=PATH)
    np.testing.assert_array_equal(nearest, ops.dot(x, w, numerics(weights), path=PATH))
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.jit(jax.vmap(lambda key: ops.dot(x, w, how, path=PATH, rounding_key=key)))(keys)
    q = quantize(w, weights)
    step = np.asarray(spread(q.scales, q.scheme, K, N))
    assert np.all(np.abs(drawn - w) <= step * 1.0001)
    # Errors have a standard deviation of at most half a step; five of the mean's are met once in 900 runs.
    assert np.all(np.abs(np.mean(drawn, axis=0) - w) <= 5 * step / 2 / np.sqrt(len(keys)) + 1e-6)
    assert np.any(drawn[0] != nearest)

  def test_the_gradient_sees_the_same_weights(self):
    how, key = numerics('int4:axis=channel', weight_rounding='stochastic'), jax.random.key(3)
    w, g = draw(K, N, seed=1), draw(M, N, seed=2)
    w_hat = ops.dot(jnp.eye(K), w, how, path=PATH, rounding_key=key)
    dx = jax.grad(lambda x: jnp.sum(g * ops.dot(x, w, how, path=PATH, rounding_key=key)))(draw(M, K))
    np.testing.assert_allclose(dx, jnp.matmul(g, w_hat.T, precision='highest'), rtol=1e-4, atol=1e-4)


class TestIntegerBackward:
  """Both products against the float ones: the error is that of rounding gradients to 127 levels."""

  def setup(self, **more: Any) -> tuple[Any, ...]:
    how = numerics('int8:axis=channel', 'int8:axis=token', backward=Backward('int8', 'int8', **more))
    x, w, g = draw(M, K), draw(K, N, seed=1), draw(M, N, seed=2)

    def grads(how: Numerics, key: jax.Array | None) -> Any:
      loss = lambda x, w: jnp.sum(g * ops.dot(x, w, how, path=PATH, rounding_key=key))
      return jax.grad(loss, argnums=(0, 1))(x, w)

    plain = grads(dataclasses.replace(how, backward=Backward()), None)
    return grads, how, plain, (x, w, g)

  def test_nearest_is_within_half_a_level_a_term(self):
    grads, how, plain, (x, w, g) = self.setup(rounding='nearest')
    dx, dw = grads(how, None)
    q = quantize(w, 'int8:axis=channel')
    folded = np.abs(np.asarray(g * q.scales))
    bound = folded.max(axis=1, keepdims=True) / 127 / 2 * np.abs(np.asarray(q.codes, np.float64)).sum(axis=1)
    assert np.all(np.abs(dx - plain[0]) <= bound * 1.01 + 1e-5)
    assert np.abs(dx - plain[0]).max() > 0
    codes, scale = fake.activations.encode(x, how.scheme_of(PATH))
    folded = np.abs(np.asarray(g * scale))
    limit = np.abs(np.asarray(codes, np.float64)).sum(axis=0)[:, None] * folded.max(axis=0) / 127 / 2
    assert np.all(np.abs(dw - plain[1]) <= limit * 1.01 + 1e-5)

  def test_stochastic_rounding_is_right_on_average(self):
    grads, how, plain, _ = self.setup()
    keys = jax.random.split(jax.random.key(0), 600)
    dx, dw = jax.jit(jax.vmap(lambda key: grads(how, key)))(keys)
    for found, wanted in ((dx, plain[0]), (dw, plain[1])):
      error, spread = np.mean(found, axis=0) - wanted, np.std(found, axis=0) / np.sqrt(len(keys))
      assert np.all(spread > 0)
      # 67 · 13 and 67 · 29 means of nearly normal errors: five deviations are met by chance once in 900 runs.
      assert np.all(np.abs(error) < 5 * spread + 1e-5)

  def test_products_are_of_integers(self):
    grads, how, _, _ = self.setup()
    text = str(jax.make_jaxpr(lambda key: grads(how, key))(jax.random.key(0)))
    assert text.count('preferred_element_type=int32') == 3

  def test_a_nan_shows(self):
    how = numerics('int8:axis=channel', 'int8:axis=token', backward=Backward('int8', 'int8'))
    x, w = draw(M, K), draw(K, N, seed=1)
    g = draw(M, N, seed=2).at[3, 4].set(np.nan)
    key = jax.random.key(0)
    loss = lambda x, w: jnp.sum(g * ops.dot(x, w, how, path=PATH, rounding_key=key))
    dx, dw = jax.grad(loss, argnums=(0, 1))(x, w)
    assert np.isnan(dx[3]).all() and np.isnan(dw[:, 4]).all()

  @pytest.mark.parametrize(
    'weights,inputs,backward,says',
    [
      ('nf4:block=32', 'int8:axis=token', Backward(dx='int8'), 'no integers'),
      ('int4:block=32', 'int8:axis=token', Backward(dx='int8'), 'several scales'),
      ('int8:axis=channel', 'none', Backward(dw='int8'), 'not quantized'),
    ],
  )
  def test_what_cannot_be_integers_is_refused(self, weights: str, inputs: str, backward: Backward, says: str):
    with pytest.raises(UserError, match=says):
      ops.dot(draw(M, K), draw(K, N), numerics(weights, inputs, backward=backward), path=PATH)


@pytest.mark.parametrize(
  'fields,says',
  [
    (dict(weights=(('.*', 'int5'),)), 'int5'),
    (dict(weights=(('.*', 'int4:block=32,asym'),), weight_gradient='lsq'), 'without asym'),
    (dict(weight_gradient='lqs'), "mean 'lsq'"),
    (dict(weight_rounding='random'), 'weight_rounding'),
    (dict(weights=(('.*', 'nf4'),), weight_rounding='stochastic'), 'only integers'),
    (dict(activation_gradient='pakt'), "mean 'pact'"),
  ],
)
def test_misspelt_numerics_are_refused(fields: dict[str, Any], says: str):
  with pytest.raises(UserError, match=says):
    Numerics(policy(), **fields)
