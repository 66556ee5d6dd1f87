"""`ops.dot` and its gradient rule, against float64 NumPy with bounds from the roundings that happen."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from qjax import integers, ops, precision, trees
from qjax.adapters import Adapter
from qjax.errors import UserError
from qjax.models import transformer
from qjax.models.attention import AttentionKernel, attention_mask
from qjax.models.config import ModelConfig
from qjax.models.layers import rms_norm, rotary_table
from qjax.quant import activations, formats
from qjax.quant.qtensor import QTensor, dequantize, quantize

K, N, R = 13, 7, 2
SCHEMES = ['nf4:block=4,dq', 'int4:block=5,asym', 'int8:axis=channel', 'bfloat16']
COMPUTE = ['float32', 'bfloat16', 'float16']
NUMERICS = {compute: ops.Numerics(precision.policy(compute=compute)) for compute in COMPUTE}
# Half the distance between neighbours at 1: what one rounding may do to a number, relatively.
ROUNDING = {'float32': 2.0**-24, 'bfloat16': 2.0**-8, 'float16': 2.0**-11}

_quantize = jax.jit(quantize, static_argnums=1)


def _normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _arguments(compute, lead=(2, 3), storage=None, seed=0):
  """x and the cotangent in `compute`, everything that may be trained in float32."""
  x, g = _normal(seed, *lead, K).astype(compute), _normal(seed + 1, *lead, N).astype(compute)
  w, bias = _normal(seed + 2, K, N), _normal(seed + 3, N)
  adapter = Adapter(_normal(seed + 4, R, K), _normal(seed + 5, R, N), 1.5)
  return x, g, _quantize(w, storage) if storage else w, adapter, bias


def _wide(x, compute):
  """The numbers that enter a product, in float64."""
  return np.asarray(jnp.asarray(x).astype(compute), np.float64)


def _reference(compute, x, g, w, adapter, bias):
  """Values and largest errors of y and of every gradient, as {name: (value, bound)}.

  Every product is exact in float64. Its bound counts half a step of `compute` for each number that the
  library rounds to it, and a float32 rounding for each term of a sum.
  """
  u, s = ROUNDING[compute], adapter.scale
  weight = dequantize(w) if isinstance(w, QTensor) else w
  w, a, b, bias = (_wide(leaf, compute) for leaf in (weight, adapter.a, adapter.b, bias))
  shape, lead = x.shape, x.shape[:-1]
  x, g = _wide(x, compute).reshape(-1, K), _wide(g, compute).reshape(-1, N)
  gamma = (max(K, N, len(x)) + 8) * 2.0**-24

  def bounded(value, size, rounded):
    """`size`: the same sums over magnitudes. `rounded`: what gets rounded to `compute` on the way."""
    return value, 1.01 * (u * rounded + gamma * size) + 1e-7

  mag = np.abs
  low, low_size = x @ a.T, mag(x) @ mag(a).T
  y = x @ w + s * low @ b + bias
  y_size = mag(x) @ mag(w) + s * low_size @ mag(b) + mag(bias)
  d_low, d_low_size = s * g @ b.T, s * mag(g) @ mag(b).T
  base = g @ w.T
  dx = base + d_low @ a
  dx_size = mag(g) @ mag(w).T + d_low_size @ mag(a)
  exact = {
    'y': bounded(y, y_size, mag(y) + s * low_size @ mag(b)),
    'x': bounded(dx, dx_size, mag(dx) + mag(base) + mag(d_low @ a) + d_low_size @ mag(a)),
    'w': bounded(x.T @ g, mag(x).T @ mag(g), 0),
    'a': bounded(d_low.T @ x, d_low_size.T @ mag(x), d_low_size.T @ mag(x)),
    'b': bounded(s * low.T @ g, s * low_size.T @ mag(g), s * low_size.T @ mag(g)),
    'bias': bounded(g.sum(0), mag(g).sum(0), 0),
  }
  exact['y'] = tuple(part.reshape(*lead, N) for part in exact['y'])
  exact['x'] = tuple(part.reshape(shape) for part in exact['x'])
  return exact


def _assert_close(actual, expected, names):
  for name, found in zip(names, actual, strict=True):
    value, bound = expected[name]
    assert found.shape == value.shape, name
    error = np.abs(np.asarray(found, np.float64) - value)
    assert (error <= bound).all(), f'{name}: {(error / bound).max():.2f} of the bound'


def _with_gradients(compute, x, g, w, adapter, bias):
  """y and all gradients that exist: of x, w if dense, a, b and bias."""
  is_dense = not isinstance(w, QTensor)

  def f(x, w_trained, a, b, bias):
    weight = w_trained if is_dense else w
    return ops.dot(x, weight, NUMERICS[compute], dataclasses.replace(adapter, a=a, b=b), bias)

  y, vjp = jax.vjp(f, x, w if is_dense else None, adapter.a, adapter.b, bias)
  dx, dw, *rest = vjp(g)
  return (y, dx, dw, *rest) if is_dense else (y, dx, *rest)


_step = jax.jit(_with_gradients, static_argnums=0)
DENSE, FROZEN = ('y', 'x', 'w', 'a', 'b', 'bias'), ('y', 'x', 'a', 'b', 'bias')


# ---- values and gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'compute, lead',
  [*(('float32', lead) for lead in [(), (2, 1, 4), (0, 3)]), *((compute, (2, 3)) for compute in COMPUTE)],
)
def test_a_dense_product_and_all_its_gradients(compute, lead):
  arguments = _arguments(compute, lead)
  _assert_close(_step(compute, *arguments), _reference(compute, *arguments), DENSE)


@pytest.mark.parametrize(
  'compute, storage',
  [*(('float32', scheme) for scheme in SCHEMES), ('bfloat16', SCHEMES[0]), ('float16', SCHEMES[2])],
)
def test_a_product_with_a_quantized_weight_and_its_gradients(compute, storage):
  arguments = _arguments(compute, storage=storage)
  _assert_close(_step(compute, *arguments), _reference(compute, *arguments), FROZEN)


@pytest.mark.parametrize('storage', [None, 'nf4:block=4,dq'])
@pytest.mark.parametrize('compute', COMPUTE)
def test_dtypes_are_those_of_the_policy_and_of_what_is_trained(compute, storage):
  arguments = _arguments(compute, storage=storage)
  y, dx, *trained = jax.eval_shape(lambda *rest: _with_gradients(compute, *rest), *arguments)
  assert y.dtype == dx.dtype == jnp.dtype(compute)
  assert all(leaf.dtype == jnp.float32 for leaf in trained)


@pytest.mark.parametrize('compute', ['bfloat16', 'float16'])
def test_float32_gradients_are_not_rounded_through_the_compute_dtype(compute):
  _, _, *gradients = _step(compute, *_arguments(compute))
  for name, gradient in zip(DENSE[2:], gradients, strict=True):
    is_rounded = np.asarray(gradient) == np.asarray(gradient.astype(compute), np.float32)
    # A float32 sum has 13 bits and more that the narrow dtype lacks; few end in zeros by chance.
    assert is_rounded.mean() < 0.2, name


def test_a_wide_input_is_cast_and_its_gradient_is_wide():
  x, g, w, *_ = _arguments('float32')
  numerics = NUMERICS['bfloat16']
  y, vjp = jax.vjp(lambda x: ops.dot(x, w, numerics), x)
  dx = vjp(g.astype(jnp.bfloat16))[0]
  np.testing.assert_array_equal(y, ops.dot(x.astype(jnp.bfloat16), w, numerics))
  expected = _wide(g, 'bfloat16') @ _wide(w, 'bfloat16').T
  assert dx.dtype == jnp.float32
  np.testing.assert_allclose(dx, expected, atol=1e-5)


@pytest.mark.parametrize('compute', COMPUTE)
def test_a_transposed_product_is_the_product_with_the_transpose(compute):
  policy = NUMERICS[compute].policy
  x, _, w, *_ = _arguments(compute)
  g = _normal(9, *x.shape[:-1], N)

  @jax.jit
  def both(x, w, g):
    plain, vjp = jax.vjp(lambda x, w: ops.matmul(x, w, policy), x, w)
    turned, vjp_t = jax.vjp(lambda x, w: ops.matmul(x, w, policy, transposed=True), x, w.T)
    return (plain, *vjp(g)), (turned, *vjp_t(g))

  (y, dx, dw), (y_t, dx_t, dw_t) = both(x, w, g)
  assert y.dtype == y_t.dtype == jnp.float32 and dw_t.dtype == jnp.float32
  np.testing.assert_allclose(y_t, y, atol=1e-5)
  np.testing.assert_allclose(dw_t.T, dw, atol=1e-5)
  one_step = 2 * ROUNDING[compute]
  np.testing.assert_allclose(
    np.asarray(dx_t, np.float32), np.asarray(dx, np.float32), rtol=one_step, atol=1e-5
  )


# ---- what the backward pass forms and keeps ----------------------------------------------------------------


def _equations(jaxpr):
  """Every equation of a jaxpr and of what it calls; of the branches for platforms, the first alone."""
  for equation in jaxpr.eqns:
    yield equation
    if equation.primitive.name in ('cond', 'platform_dependent'):
      branches = equation.params['branches'][:1]
    else:
      branches = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
    for branch in branches:
      if _is_jaxpr(branch):
        yield from _equations(getattr(branch, 'jaxpr', branch))


def _is_jaxpr(value):
  return hasattr(value, 'eqns') or hasattr(value, 'jaxpr')


def _products(fn, *arguments):
  """Shapes of the results of all matrix products in fn, after dead ones are gone."""
  jaxpr = jax.make_jaxpr(jax.jit(fn))(*arguments)
  return [e.outvars[0].aval.shape for e in _equations(jaxpr.jaxpr) if e.primitive.name == 'dot_general']


def _loss(x, w, adapter=None):
  y = ops.dot(x, w, NUMERICS['float32'], adapter)
  return jnp.sum(y * y)


@pytest.mark.parametrize('storage', [None, *SCHEMES])
def test_no_gradient_of_a_frozen_weight_is_formed(storage):
  x, _, w, adapter, _ = _arguments('float32', (5,), storage)
  # Forward [5, N], then dx [5, K], and nothing of the weight's shape.
  found = _products(jax.grad(_loss), x, w)
  assert sorted(shape for shape in found if shape[0] == 5) == [(5, N), (5, K)]
  assert (K, N) not in found and (N, K) not in found
  trained = _products(jax.grad(_loss, argnums=(0, 2)), x, w, adapter)
  assert (5, K) in trained and (R, K) in trained and (R, N) in trained
  assert (K, N) not in trained and (N, K) not in trained


def test_a_trained_weight_has_one_more_product_and_an_input_that_rests_one_less():
  x, _, w, *_ = _arguments('float32', (5,))
  assert sorted(_products(jax.grad(_loss, argnums=(0, 1)), x, w)) == [(5, N), (5, K), (K, N)]
  assert sorted(_products(jax.grad(_loss, argnums=1), x, w)) == [(5, N), (K, N)]


def _residuals(fn, *arguments):
  """Shape and dtype of every array that waits for the backward pass of a jitted fn."""
  return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(jax.vjp(fn, *arguments)[1])]


@pytest.mark.parametrize('is_jitted', [False, True])
@pytest.mark.parametrize('storage', SCHEMES)
def test_only_packed_bytes_wait_for_the_backward_pass(storage, is_jitted):
  x, _, w, *_ = _arguments('bfloat16', (5,), storage)
  fn = lambda x: ops.dot(x, w, NUMERICS['bfloat16'])
  kept = _residuals(jax.jit(fn) if is_jitted else fn, x)
  assert sorted(kept) == sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(w))
  floats = [shape for shape, dtype in kept if 'float' in dtype]
  assert all(np.prod(shape) < K * N for shape in floats)
  assert x.shape not in [shape for shape, _ in kept], 'a frozen weight needs no input'


def test_a_frozen_dense_weight_keeps_itself_and_not_its_input():
  x, _, w, *_ = _arguments('bfloat16', (5,))
  assert _residuals(lambda x: ops.dot(x, w, NUMERICS['bfloat16']), x) == [((K, N), 'float32')]
  kept = _residuals(lambda x, w: ops.dot(x, w, NUMERICS['bfloat16']), x, w)
  assert sorted(kept) == sorted([((K, N), 'float32'), ((5, K), 'bfloat16')])


def test_a_weight_without_influence_gets_zeros():
  x, _, w, *_ = _arguments('float32', (5,))

  def loss(x, w):
    return jnp.sum(x) + 0 * jax.lax.stop_gradient(jnp.sum(ops.dot(x, w, NUMERICS['float32'])))

  dx, dw = jax.grad(loss, argnums=(0, 1))(x, w)
  np.testing.assert_array_equal(dx, np.ones_like(x))
  np.testing.assert_array_equal(dw, np.zeros_like(w))


# ---- transformations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('compute, storage', [('bfloat16', None), ('float16', 'nf4:block=4,dq')])
def test_remat_changes_nothing(compute, storage):
  x, g, w, adapter, bias = _arguments(compute, storage=storage)

  @jax.jit
  def remat(x, g, adapter, bias):
    def f(x, a, b, bias):
      return ops.dot(x, w, NUMERICS[compute], dataclasses.replace(adapter, a=a, b=b), bias)

    y, vjp = jax.vjp(jax.checkpoint(f), x, adapter.a, adapter.b, bias)
    return y, *vjp(g)

  _assert_close(remat(x, g, adapter, bias), _reference(compute, x, g, w, adapter, bias), FROZEN)


@pytest.mark.parametrize(
  'compute, storage', [('bfloat16', None), ('bfloat16', 'int8:axis=channel'), ('float16', 'nf4:block=4,dq')]
)
def test_vmap_and_scan_over_a_stack_equal_its_layers(compute, storage):
  each = [_arguments(compute, (4,), storage, seed=10 * i) for i in range(3)]
  x, g, w, adapter, bias = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
  names = DENSE if storage is None else FROZEN

  def layer(x, g, w, adapter, bias):
    return _with_gradients(compute, x, g, w, adapter, bias)

  mapped = jax.jit(jax.vmap(layer))(x, g, w, adapter, bias)
  scanned = jax.jit(lambda *stack: jax.lax.scan(lambda _, one: (None, layer(*one)), None, stack)[1])(
    x, g, w, adapter, bias
  )
  for index, arguments in enumerate(each):
    expected = _reference(compute, *arguments)
    for out in (mapped, scanned):
      _assert_close([leaf[index] for leaf in out], expected, names)


@pytest.mark.parametrize('storage', [None, 'int4:block=5,asym'])
def test_the_gradient_through_a_scan_of_layers(storage):
  layers, width = 3, 6
  w = _normal(0, layers, width, width) / 2
  weights = _quantize(w, storage) if storage else w
  adapters = Adapter(_normal(1, layers, R, width), _normal(2, layers, R, width), 0.5)
  x = _normal(3, 4, width)

  def loss(adapters, x):
    def body(x, layer):
      weight, adapter = layer
      return jnp.tanh(ops.dot(x, weight, NUMERICS['float32'], adapter)), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, (weights, adapters))[0])

  def plain(adapters, x):
    wide = dequantize(weights) if storage else w
    for i in range(layers):
      x = jnp.tanh(x @ (wide[i] + adapters.scale * adapters.a[i].T @ adapters.b[i]))
    return jnp.sum(x)

  found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(adapters, x) for f in (loss, plain))
  for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


# ---- dropout -----------------------------------------------------------------------------------------------


def _dropping(p=0.4):
  x, _, w, adapter, _ = _arguments('float32', (4,))
  return x, w, dataclasses.replace(adapter, dropout=p)


def test_dropout_acts_only_with_a_key_and_a_probability():
  x, w, adapter = _dropping()
  none = dataclasses.replace(adapter, dropout=0.0)

  @jax.jit
  def y(adapter=None, key=None):
    return ops.dot(x, w, NUMERICS['float32'], adapter, dropout_key=key)

  key, plain = jax.random.key(0), y(none)
  np.testing.assert_array_equal(y(adapter), plain)
  np.testing.assert_array_equal(y(none, key), plain)
  np.testing.assert_array_equal(y(None, key), y())
  assert 'random' in str(jax.make_jaxpr(y)(adapter, key))
  assert 'random' not in str(jax.make_jaxpr(y)(none, key)), 'a draw that nothing needs'
  dropped = np.asarray(y(adapter, key))
  np.testing.assert_array_equal(y(adapter, key), dropped)
  assert (dropped != plain).all(-1).any()
  assert (np.asarray(y(adapter, jax.random.key(1))) != dropped).any()


def test_dropout_keeps_the_mean_and_has_the_variance_of_its_coin():
  x, w, adapter = _dropping(p := 0.4)
  draws = 2000
  keys = jax.random.split(jax.random.key(3), draws)
  many = jax.jit(jax.vmap(lambda key: ops.dot(x, w, NUMERICS['float32'], adapter, dropout_key=key)))(keys)
  many = np.asarray(many, np.float64)
  delta = np.asarray(adapter.delta(), np.float64)
  expected = x @ (w + delta)
  # Each input of A is 0 or x / (1 - p): its variance is x² p / (1 - p).
  variance = x.astype(np.float64) ** 2 @ delta**2 * p / (1 - p)
  assert (np.abs(many.mean(0) - expected) <= 5 * np.sqrt(variance / draws)).all()
  np.testing.assert_allclose(many.var(0), variance, rtol=0.25)


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
  x, w, adapter = _dropping()
  key = jax.random.key(4)

  @jax.jit
  def f(x, a, b):
    return ops.dot(x, w, NUMERICS['float32'], dataclasses.replace(adapter, a=a, b=b), dropout_key=key)

  # With the key fixed f is linear in x, in A and in B, so the gradient must be the slope, exactly.
  point = (x, adapter.a, adapter.b)
  y, vjp = jax.vjp(f, *point)
  g = _normal(20, *y.shape)
  for index, gradient in enumerate(vjp(g)):
    direction = _normal(21 + index, *point[index].shape)
    moved = list(point)
    moved[index] = point[index] + direction
    slope = np.sum((np.asarray(f(*moved), np.float64) - np.asarray(y)) * g)
    assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(slope, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
def test_adapters_that_read_one_input_share_its_product(compute):
  x, _, w, adapter, _ = _arguments(compute, (3, 5))
  other = dataclasses.replace(adapter, a=_normal(31, 2, K), b=_normal(32, 2, N))  # of another rank
  g = _normal(33, 2, 3, 5, N)

  def apart(x, factors):
    both = [dataclasses.replace(one, a=a, b=b) for one, (a, b) in zip((adapter, other), factors, strict=True)]
    return jnp.stack([ops.dot(x, w, NUMERICS[compute], one) for one in both])

  def together(x, factors):
    both = [dataclasses.replace(one, a=a, b=b) for one, (a, b) in zip((adapter, other), factors, strict=True)]
    lows = ops.lower(x, tuple(one.a for one in both), NUMERICS[compute].policy)
    dots = (ops.dot(x, w, NUMERICS[compute], one, low=low) for one, low in zip(both, lows, strict=True))
    return jnp.stack(list(dots))

  factors = [(adapter.a, adapter.b), (other.a, other.b)]
  found, expected = (
    (y, *jax.tree.leaves(vjp(jnp.asarray(g, y.dtype))))
    for y, vjp in (jax.vjp(jax.jit(f), x, factors) for f in (together, apart))
  )
  # dx is rounded to the dtype of x once, not once for each adapter.
  eps = float(jnp.finfo(compute).eps)
  for left, right in zip(found, expected, strict=True):
    assert left.dtype == right.dtype
    left, right = (np.asarray(a, np.float64) for a in (left, right))
    np.testing.assert_allclose(left, right, rtol=2 * eps, atol=4 * eps * np.abs(right).max())


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('storage', [None, 'nf4:block=4'])
def test_shapes_that_do_not_contract_are_refused(storage):
  x, _, w, *_ = _arguments('float32', storage=storage)
  with pytest.raises(ValueError, match=r'x \(2, 3, 12\) and w \(13, 7\)'):
    ops.dot(x[..., :-1], w, NUMERICS['float32'])
  stack = jax.tree.map(lambda leaf: leaf[None], w)
  with pytest.raises(ValueError, match=r'w \(1, 13, 7\)'):
    ops.dot(x, stack, NUMERICS['float32'])


def test_an_adapter_or_bias_of_another_shape_is_refused():
  x, _, w, adapter, bias = _arguments('float32')
  with pytest.raises((TypeError, ValueError)):
    ops.dot(x, w, NUMERICS['float32'], dataclasses.replace(adapter, a=adapter.a[:, :-1]))
  with pytest.raises((TypeError, ValueError)):
    ops.dot(x, w, NUMERICS['float32'], dataclasses.replace(adapter, b=adapter.b[:, :-1]))
  with pytest.raises((TypeError, ValueError)):
    ops.dot(x, w, NUMERICS['float32'], bias=bias[:-1])


def test_a_transposed_product_wants_a_plain_weight_of_fitting_inputs():
  x, _, w, *_ = _arguments('float32')
  policy = NUMERICS['float32'].policy
  with pytest.raises(ValueError, match='transposed do not contract'):
    ops.matmul(x, w, policy, transposed=True)
  with pytest.raises(NotImplementedError, match='keep it plain'):
    ops.matmul(x, _quantize(w.T.copy(), 'int8'), policy, transposed=True)


def test_an_implementation_is_one_of_those_that_exist():
  policy = precision.policy()
  for name in ('auto', *dispatch.KERNELS):
    assert ops.Numerics(policy, name).kernels == name
  with pytest.raises(UserError, match="kernels = 'palas' is not available; did you mean 'pallas'"):
    ops.Numerics(policy, 'palas')


# ---- quantized inputs --------------------------------------------------------------------------------------

TOKEN, TENSOR, STATIC = 'int8:axis=token', 'int8:axis=tensor', 'int8:axis=tensor,static'
PATH = 'layers/mlp/up/kernel'
INTEGERS = [
  'int8:axis=channel',
  'int8:axis=tensor',
  'int4:block=5',
  'int8:block=4,dq',
  'int8:tile=7x3',
  'int3:block=7',
  'int2:axis=channel',
]
LEADS = [(), (2, 3), (3, 4), (0, 2)]


def _quantizing(spelling, integer='auto', compute='float32'):
  rules = (('.*/up/kernel', spelling),)
  return ops.Numerics(precision.policy(compute=compute), activations=rules, integer=integer)


def _dot(spelling, integer='auto', compute='float32'):
  numerics = _quantizing(spelling, integer, compute)
  return jax.jit(lambda x, w, high=None: ops.dot(x, w, numerics, path=PATH, high=high))


def _x_codes(x, largest):
  """Codes and scales of one scale a token, in NumPy."""
  top = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
  inverse = np.float32(largest) / top
  return np.rint(x * inverse).astype(np.int64), top * np.float32(1 / largest)


@pytest.mark.parametrize('storage', ['int8:axis=channel', 'int8:axis=tensor', 'int4:axis=channel'])
@pytest.mark.parametrize('spelling', [TOKEN, 'int4:axis=token'])
@pytest.mark.parametrize('lead', [(3,), (3, 4)])
def test_an_integer_product_is_numpys_bit_for_bit(lead, spelling, storage):
  x, w = _normal(0, *lead, K), _quantize(_normal(2, K, N), storage)
  x.reshape(-1, K)[1] = 0
  codes, scale = _x_codes(x, 127 if spelling == TOKEN else 7)
  w_codes = np.asarray(w.codes)
  if storage.startswith('int4'):
    w_codes = np.asarray(formats.unpack(w_codes, 4, K)).astype(np.int64) - 8
  sums = codes @ w_codes.astype(np.int64)
  expected = sums.astype(np.float32) * np.asarray(w.scale)[0] * scale
  found = _dot(spelling, 'always')(x, w)
  np.testing.assert_array_equal(found, expected)
  assert not np.asarray(found).reshape(-1, N)[1].any()


@pytest.mark.parametrize('storage', INTEGERS)
@pytest.mark.parametrize('spelling', [TOKEN, TENSOR, STATIC])
@pytest.mark.parametrize('lead', LEADS)
def test_integers_and_floats_compute_the_same(lead, spelling, storage):
  x, w, high = _normal(0, *lead, K), _quantize(_normal(2, K, N), storage), jnp.float32(1.2)
  whole, floats = (np.asarray(_dot(spelling, integer)(x, w, high)) for integer in ('always', 'never'))
  assert whole.shape == floats.shape == (*lead, N)
  read = np.asarray(activations.fake(jnp.asarray(x), activations.parse_activations(spelling), high))
  # Sums of integers are exact. Floats round each factor and each of the K terms; a few more are for scales.
  bound = (K + 8) * 2.0**-24 * np.abs(read) @ np.abs(np.asarray(dequantize(w))) + 1e-30
  assert (np.abs(whole - floats) <= bound).all()
  exact = read.astype(np.float64) @ np.asarray(dequantize(w), np.float64)
  assert (np.abs(whole - exact) <= bound).all()


@pytest.mark.parametrize('storage', [None, 'nf4:block=4,dq', 'int4:block=5,asym', 'bfloat16'])
@pytest.mark.parametrize('compute', COMPUTE)
def test_any_other_weight_meets_the_levels_of_x_as_a_float(compute, storage):
  x, w = _normal(0, 2, 3, K).astype(compute), _normal(2, K, N)
  w = _quantize(w, storage) if storage else w
  read = activations.fake(jnp.asarray(x), activations.parse_activations(TOKEN))
  expected = ops.dot(read.astype(compute), w, NUMERICS[compute])
  found = _dot(TOKEN, 'auto', compute)(x, w)
  one_step = 2 * ROUNDING[compute]
  np.testing.assert_allclose(
    np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=one_step, atol=1e-5
  )
  assert (np.asarray(found) != np.asarray(ops.dot(x, w, NUMERICS[compute]))).any()


def test_the_largest_sum_that_an_int32_holds_is_exact_and_a_longer_one_is_no_sum_of_integers():
  k = integers.SAFE_TERMS
  assert k == 133144
  ones = np.ones((k, 1), np.float32)
  found = _dot(TOKEN, 'always')(np.ones((1, k), np.float32), _quantize(ones, 'int8'))
  np.testing.assert_allclose(found, k, rtol=1e-6)  # 127² · k is just below 2³¹: one more term would wrap
  longer = _quantize(np.ones((k + 1, 1), np.float32), 'int8')
  with pytest.raises(UserError, match='133145 products of codes may exceed an int32'):
    _dot(TOKEN, 'always')(np.ones((1, k + 1), np.float32), longer)
  assert ops.explain((9, k + 1), longer, _quantizing(TOKEN), PATH).startswith('fake')
  np.testing.assert_allclose(_dot(TOKEN)(np.ones((1, k + 1), np.float32), longer), k + 1, rtol=1e-4)


@pytest.mark.parametrize(
  'x_axis, w_axis, decibels', [('token', 'channel', 38.20), ('tensor', 'tensor', 36.08)]
)
def test_the_noise_of_eight_bits(x_axis, w_axis, decibels):
  rng = np.random.default_rng(5)
  x, w = rng.standard_normal((512, 4096)), rng.standard_normal((4096, 512))
  q = _quantize(w.astype(np.float32), f'int8:axis={w_axis}')
  found = np.asarray(_dot(f'int8:axis={x_axis}')(x.astype(np.float32), q), np.float64)
  signal = x @ w
  assert 10 * np.log10((signal**2).sum() / ((found - signal) ** 2).sum()) == pytest.approx(decibels, abs=0.05)


@pytest.mark.parametrize('integer', ['always', 'never'])
@pytest.mark.parametrize('spelling', [TOKEN, TENSOR, STATIC])
def test_gradients_pass_the_rounding_and_stop_outside_a_static_range(spelling, integer):
  x, g, w, adapter, _ = _arguments('float32', (3, 4), 'int8:axis=channel')
  high, numerics = np.float32(1.1), _quantizing(spelling, integer)
  scheme = activations.parse_activations(spelling)

  def f(x, a, b):
    return ops.dot(x, w, numerics, dataclasses.replace(adapter, a=a, b=b), path=PATH, high=jnp.asarray(high))

  def plain(x, a, b):
    kept = jnp.where(jnp.abs(x) <= high, x, 0) if scheme.is_static else x
    straight = kept + jax.lax.stop_gradient(activations.fake(x, scheme, high) - kept)
    return straight @ dequantize(w) + adapter.scale * (x @ a.T) @ b

  found = jax.jit(lambda *p: [*jax.vjp(f, *p)[1](g), f(*p)])(x, adapter.a, adapter.b)
  expected = jax.jit(lambda *p: [*jax.vjp(plain, *p)[1](g), plain(*p)])(x, adapter.a, adapter.b)
  assert (np.abs(x) > high).any()
  for left, right in zip(found, expected, strict=True):
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=2e-5)


def test_an_input_on_the_edge_of_a_static_range_is_inside():
  w, high = _quantize(_normal(2, 3, N), 'int8'), jnp.float32(2)
  numerics = _quantizing(STATIC)
  dx = jax.grad(lambda x: ops.dot(x, w, numerics, path=PATH, high=high).sum())(jnp.asarray([2.0, -2.0, 2.01]))
  np.testing.assert_allclose(dx[:2], np.asarray(dequantize(w)).sum(-1)[:2], rtol=1e-5)
  assert dx[2] == 0


@pytest.mark.parametrize('spelling', [TOKEN, STATIC])
def test_a_trained_weight_sees_the_levels_of_x(spelling):
  x, g, w, *_ = _arguments('float32', (3, 4))
  high, numerics = jnp.float32(1.1), _quantizing(spelling)
  dw = jax.jit(jax.vjp(lambda w: ops.dot(x, w, numerics, path=PATH, high=high), w)[1])(g)[0]
  read = activations.fake(jnp.asarray(x), activations.parse_activations(spelling), high)
  np.testing.assert_allclose(dw, np.asarray(read).reshape(-1, K).T @ g.reshape(-1, N), rtol=1e-5, atol=1e-5)


def test_packed_bytes_and_a_mask_wait_for_the_backward_pass():
  x, _, w, *_ = _arguments('bfloat16', (5,), 'int8:axis=channel')
  packed = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(w)]
  high = jnp.float32(1)
  for spelling, more in ((TOKEN, []), (STATIC, [((5, K), 'bool')])):
    numerics = _quantizing(spelling, compute='bfloat16')
    kept = _residuals(lambda x, n=numerics: ops.dot(x, w, n, path=PATH, high=high), x)
    assert sorted(kept) == sorted(packed + more)


@pytest.mark.parametrize('spelling', [TOKEN, STATIC])
@pytest.mark.parametrize('storage', ['int8:axis=channel', 'int4:axis=channel', 'nf4:block=4'])
def test_a_scan_and_a_map_over_a_stack_quantize_each_layers_inputs(storage, spelling):
  x, high = _normal(0, 3, 4, K), np.float32([0.5, 1, 2])
  w = _quantize(_normal(2, 3, K, N), storage)
  numerics = _quantizing(spelling)
  layer = lambda x, w, high: ops.dot(x, w, numerics, path=PATH, high=high)
  expected = np.stack([_dot(spelling)(x[i], w[i], high[i]) for i in range(3)])
  scanned = jax.jit(lambda *stack: jax.lax.scan(lambda _, one: (None, layer(*one)), None, stack)[1])(
    x, w, high
  )
  np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(jax.jit(jax.vmap(layer))(x, w, high), expected, rtol=1e-5, atol=1e-5)


def test_projections_of_one_input_share_its_codes_and_a_loop_keeps_a_stack_in_bytes():
  numerics = _quantizing(TOKEN, compute='bfloat16')
  x = jnp.asarray(_normal(0, 4, 32, 64), jnp.bfloat16)
  w = [_quantize(_normal(i, 64, 48), 'int8') for i in range(3)]
  share = jax.jit(lambda x, w: [ops.dot(x, one, numerics, path=PATH) for one in w])
  text = share.lower(x, w).compile().as_text()
  assert len(re.findall(r'= s32\[128,48\]\S* dot\(', text)) == 3
  assert len(re.findall(r'= s8\[4,32,64\]\S* convert\(', text)) == 1
  stack = _quantize(_normal(9, 5, 64, 64), 'int8')
  loop = jax.jit(
    lambda x, w: jax.lax.scan(lambda x, one: (ops.dot(x, one, numerics, path=PATH), None), x, w)[0]
  )
  text = loop.lower(x, stack).compile().as_text()
  assert 's8[5,64,64]' in text and not re.search(r'(s16|s32|f32|bf16)\[5,64,64\]', text)


# ---- outlying inputs apart ---------------------------------------------------------------------------------


@pytest.mark.parametrize('spelling', [TOKEN, STATIC])
@pytest.mark.parametrize('integer', ['always', 'never'])
def test_outlying_inputs_multiply_rows_in_sixteen_bits(integer, spelling):
  x, w, rows = _normal(0, 3, 4, K), _normal(2, K, N), np.array([2, 9, K], np.int32)
  x[..., [2, 9]] *= 100
  high = jnp.float32(4)
  d = jax.jit(activations.decompose)(w, rows)
  ordinary = np.where(np.isin(np.arange(K), rows), 0, x)
  kept = np.asarray(jnp.asarray(w[[2, 9]], jnp.bfloat16), np.float32)
  expected = np.asarray(_dot(spelling, integer)(ordinary, d.rest, high)) + x[..., [2, 9]] @ kept
  found = np.asarray(_dot(spelling, integer)(x, d, high))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
  whole = np.asarray(_dot(spelling, integer)(x, _quantize(w, 'int8'), high))
  assert np.abs(found - x @ w).max() < np.abs(whole - x @ w).max() / 4  # what it is for
  np.testing.assert_allclose(
    jax.jit(lambda x, d: ops.dot(x, d, NUMERICS['float32']))(x, d),
    x @ np.asarray(d.dequantize('float32')),
    rtol=1e-5,
    atol=1e-4,
  )


@pytest.mark.parametrize('spelling', ['none', TOKEN, STATIC])
def test_the_gradient_of_outlying_inputs_is_never_cut_off(spelling):
  x, w, rows = _normal(0, 5, K), _normal(2, K, N), np.array([2, 9], np.int32)
  x[..., [2, 9]] *= 100
  high, numerics = np.float32(1), _quantizing(spelling)
  d, g = activations.decompose(w, rows), _normal(3, 5, N)
  dx = jax.jit(jax.vjp(lambda x: ops.dot(x, d, numerics, path=PATH, high=jnp.asarray(high)), x)[1])(g)[0]
  passes = (np.abs(x) <= high) | np.isin(np.arange(K), rows) | (spelling != STATIC)
  np.testing.assert_allclose(
    dx, np.where(passes, g @ np.asarray(d.dequantize('float32')).T, 0), rtol=1e-5, atol=1e-5
  )


def test_a_stack_of_decomposed_weights_is_scanned():
  x, w, rows = _normal(0, 3, 4, K), _normal(2, 3, K, N), np.array([[0, 4], [3, K], [7, 1]], np.int32)
  d = activations.decompose(w, rows)
  numerics = _quantizing(TOKEN)
  layer = lambda _, one: (None, ops.dot(*one, numerics, path=PATH))
  scanned = jax.jit(lambda *stack: jax.lax.scan(layer, None, stack)[1])(x, d)
  for i in range(3):
    one = activations.decompose(w[i], rows[i])
    np.testing.assert_allclose(scanned[i], _dot(TOKEN)(x[i], one), rtol=1e-5, atol=1e-5)


# ---- which way a product takes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'storage, spelling, integer, expected',
  [
    ('int8', 'none', 'auto', 'plain: no rule'),
    ('int8', TOKEN, 'auto', 'integer: codes of x as int8:axis=token'),
    ('int8', TOKEN, 'never', "fake: .*integer = 'never'"),
    ('int4:axis=channel', 'int4:axis=token', 'auto', 'integer'),
    ('int4:block=7', TOKEN, 'auto', 'integer'),
    ('int4:block=4', TOKEN, 'auto', 'fake: .*4 blocks of a weight are slower'),
    ('int4:block=4', TOKEN, 'always', 'integer'),
    ('nf4:block=4', TOKEN, 'auto', 'fake: .*codes of nf4:block=4 are no integers'),
    ('int8:axis=channel,asym', TOKEN, 'auto', 'fake: .*has offsets'),
    ('bfloat16', TOKEN, 'auto', 'fake: .*bfloat16 are no integers'),
    (None, TOKEN, 'auto', 'fake: .*weight is not quantized'),
  ],
)
def test_the_way_is_told_and_taken(storage, spelling, integer, expected):
  x, w, numerics = _normal(0, 9, K), _normal(2, K, N), _quantizing(spelling, integer)
  w = _quantize(w, storage) if storage else w
  told = ops.explain(x.shape, w, numerics, PATH)
  assert re.match(expected, told), told
  jaxpr = jax.make_jaxpr(lambda x: ops.dot(x, w, numerics, path=PATH))(x)
  products = [e for e in _equations(jaxpr.jaxpr) if e.primitive.name == 'dot_general']
  is_integer = [e.outvars[0].aval.dtype == jnp.int32 for e in products]
  assert all(is_integer) if told.startswith('integer') else not any(is_integer)


@pytest.mark.parametrize('rows', [1, 7, 8])
def test_few_rows_are_filled_up_on_cpu(rows):
  numerics, w = _quantizing(TOKEN), _quantize(_normal(2, K, N), 'int8')
  x = _normal(0, rows, K)
  compiled = jax.jit(lambda x: ops.dot(x, w, numerics, path=PATH)).lower(x).compile().as_text()
  assert re.findall(r'= s32\[(\d+),7\]\S* dot\(', compiled) == ['8']
  assert ('filled up to 8' in ops.explain(x.shape, w, numerics, PATH)) == (rows < 8)


def test_integers_that_are_demanded_run_or_raise():
  for storage, reason in (
    (None, 'not quantized'),
    ('nf4', 'no integers'),
    ('int8:axis=channel,asym', 'offsets'),
  ):
    w = _quantize(_normal(2, K, N), storage) if storage else _normal(2, K, N)
    with pytest.raises(UserError, match=f"integer = 'always', but .*{reason}"):
      _dot(TOKEN, 'always')(_normal(0, 2, K), w)
  with pytest.raises(UserError, match="integer = 'allways'.*did you mean 'always'"):
    _quantizing(TOKEN, 'allways')
  with pytest.raises(UserError, match='int9'):
    _quantizing('int9:axis=token')


def test_a_static_scheme_without_a_range_is_refused_with_its_path():
  w = _quantize(_normal(2, K, N), 'int8')
  with pytest.raises(UserError, match=f"'{PATH}'.*no range.*calibrate first, or use int8:axis=tensor"):
    _dot(STATIC)(_normal(0, 2, K), w)


# ---- the same within a model -------------------------------------------------------------------------------


CONFIG = ModelConfig(
  vocab_size=10, num_layers=2, d_model=8, d_ff=12, num_heads=2, num_kv_heads=1, head_dim=4, context_length=16
)


def _model(spelling, remat='none'):
  numerics = ops.Numerics(precision.policy(), activations=(('.*/down/kernel', 'none'), ('.*', spelling)))
  return transformer.Transformer(CONFIG, numerics, remat)


def _tokens():
  tokens = jnp.arange(10).reshape(2, 5) % CONFIG.vocab_size
  return tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(5), (2, 5))


def _context():
  _, segments, positions = _tokens()
  return rotary_table(CONFIG, positions), attention_mask(segments, None)


def test_each_layer_of_a_model_takes_its_own_ranges():
  params = transformer.init_params(CONFIG, jax.random.key(0))
  names = [
    path for path in trees.flatten(params['layers']) if path.endswith('/kernel') and 'down' not in path
  ]
  act = trees.nest({path: np.float32([0.5, 2]) for path in names})
  found = jax.jit(_model(STATIC, 'full').apply)({'params': params, 'act': {'layers': act}}, *_tokens())
  block = transformer.Block(CONFIG, _model(STATIC).numerics, AttentionKernel(), 'none')
  x = params['embed']['embedding'][_tokens()[0]]
  for index in range(CONFIG.num_layers):
    layer, ranges = jax.tree.map(lambda leaf, i=index: leaf[i], (params['layers'], act))
    x, _ = jax.jit(block.apply)({'params': layer, 'act': ranges}, x, *_context())
  x = rms_norm(x, params['final_norm']['scale'], CONFIG.rms_eps, CONFIG.norm_offset)
  np.testing.assert_allclose(found, x, atol=1e-4)
  with pytest.raises(UserError, match="'layers/attn/q/kernel'.*no range"):
    jax.eval_shape(_model(STATIC).apply, {'params': params}, *_tokens())


@pytest.mark.parametrize('spelling, remat', [('none', 'full'), (STATIC, 'none')])
def test_one_layer_by_itself_shows_what_its_projections_read(spelling, remat):
  numerics = _model(spelling).numerics
  params = transformer.init_params(CONFIG, jax.random.key(0))
  layer = jax.tree.map(lambda leaf: leaf[0], params['layers'])
  x, context = jnp.asarray(_normal(0, 2, 5, CONFIG.d_model)), _context()
  block = transformer.Block(CONFIG, numerics, AttentionKernel(), remat)
  _, seen = block.apply({'params': layer}, x, *context, mutable=['inputs'])
  seen = trees.flatten(seen['inputs'], lambda leaf: isinstance(leaf, tuple))
  assert set(seen) == {path for path in trees.flatten(layer) if path.endswith('/kernel')}
  assert all(len(calls) == 1 for calls in seen.values())
  first = rms_norm(x, layer['attn_norm']['scale'], CONFIG.rms_eps, CONFIG.norm_offset)
  for name in 'qkv':
    np.testing.assert_array_equal(seen[f'attn/{name}/kernel'][0], first)
  assert seen['mlp/down/kernel'][0].shape == (2, 5, CONFIG.d_ff)
  if spelling == STATIC:
    with pytest.raises(UserError, match="'layers/attn/q/kernel'.*no range"):
      block.apply({'params': layer}, x, *context)


# ---- rows and slices of a table ---------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_rows_are_the_tables_and_their_gradient_adds_up(dtype):
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(7, 5)), dtype)
  rows = jnp.asarray([[3, 0, 3], [6, 3, 1]])
  g = rng.normal(size=(2, 3, 5)).astype(np.float32)
  found, gradient = jax.jit(
    lambda table: jax.value_and_grad(lambda t: (ops.take_rows(t, rows).astype(jnp.float32) * g).sum())(table)
  )(table)
  np.testing.assert_array_equal(ops.take_rows(table, rows), np.asarray(table)[np.asarray(rows)])
  np.testing.assert_allclose(found, (np.asarray(table, np.float32)[np.asarray(rows)] * g).sum(), rtol=1e-2)
  wanted = np.zeros((7, 5), np.float32)
  np.add.at(wanted, np.asarray(rows), np.asarray(jnp.asarray(g, dtype), np.float32))
  assert gradient.dtype == table.dtype
  # The sum of at most three numbers in float32, rounded once.
  wide = np.asarray(gradient, np.float32)
  np.testing.assert_allclose(wide, wanted, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
  if dtype != 'float32':
    np.testing.assert_array_equal(ops.take_rows(quantize(table, dtype), rows), ops.take_rows(table, rows))


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'packed bfloat16'])
def test_a_slice_is_the_weights(kind, axis):
  w = jnp.asarray(np.random.default_rng(0).normal(size=(6, 9)), kind.split()[-1])
  found = jax.jit(lambda w, start: ops.slice_of(w, start, 4, axis))(
    quantize(w, 'bfloat16') if ' ' in kind else w, jnp.asarray(2)
  )
  found = dequantize(found, w.dtype) if ' ' in kind else found
  np.testing.assert_array_equal(found, w[2:6] if axis == 0 else w[:, 2:6])


def test_a_packed_weight_is_not_sliced():
  with pytest.raises(NotImplementedError, match='blocks may straddle'):
    ops.slice_of(quantize(jnp.ones((8, 4)), 'int8'), jnp.asarray(0), 2, 0)
