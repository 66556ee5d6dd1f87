"""`ops.dot` and its gradient rule, against float64 NumPy with bounds from the roundings that happen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import ops, precision
from qjax.adapters import Adapter
from qjax.errors import UserError
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
  assert ops.Numerics(policy).used in ops.IMPLEMENTATIONS
  for name in ops.IMPLEMENTATIONS:
    assert ops.Numerics(policy, name).used == name
  with pytest.raises(UserError, match="kernels = 'pallas_moon'.*auto, xla"):
    ops.Numerics(policy, 'pallas_moon')


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
