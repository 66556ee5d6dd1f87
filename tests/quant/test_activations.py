"""Codes of activations against NumPy bit by bit, spellings and rules, and weights with outlying rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.errors import UserError
from qjax.quant import activations
from qjax.quant.activations import ActivationScheme, parse_activations
from qjax.quant.qtensor import dequantize

SPELLINGS = [
  f'{name}:axis={axis}' for name in ('int8', 'int4') for axis in ('token', 'tensor', 'tensor,static')
]

_encode = jax.jit(activations.encode, static_argnums=1)
_decompose = jax.jit(activations.decompose, static_argnums=(2, 3))


def _normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _codes(x, scheme, high=None):
  """The definition, in float32 NumPy."""
  x = np.asarray(x, np.float32)
  if scheme.is_static:
    top = np.full((*x.shape[:-1], 1), high, np.float32)
  else:
    top = np.abs(x).max(-1 if scheme.axis == 'token' else None, keepdims=True)
  top = np.maximum(top, np.float32(1e-30))
  inverse = np.float32(scheme.largest) / top
  codes = np.clip(np.rint(x * inverse), -scheme.largest, scheme.largest)
  return codes.astype(np.int8), top * np.float32(1 / scheme.largest)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('spelling', SPELLINGS)
def test_codes_and_scales_are_the_definitions(spelling, dtype):
  scheme = parse_activations(spelling)
  x = jnp.asarray(_normal(3, 2, 13), dtype).at[1, 1].set(0)
  high = jnp.float32(0.7) if scheme.is_static else None
  codes, scale = _encode(x, scheme, high)
  expected, expected_scale = _codes(x, scheme, high)
  assert codes.dtype == jnp.int8 and scale.dtype == jnp.float32
  np.testing.assert_array_equal(codes, expected)
  np.testing.assert_array_equal(scale, expected_scale)
  assert not codes[1, 1].any()
  assert np.abs(codes).max() == scheme.largest  # also where a static range cuts off
  eager = activations.encode(x, scheme, high)
  np.testing.assert_array_equal(eager[0], codes)
  np.testing.assert_array_equal(eager[1], scale)


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_what_lies_within_the_range_is_off_by_half_a_step_and_the_rest_saturates(spelling):
  scheme, x = parse_activations(spelling), _normal(5, 40)
  high = np.float32(1.5) if scheme.is_static else None
  _, scale = _encode(x, scheme, high)
  found = np.asarray(jax.jit(activations.fake, static_argnums=1)(x, scheme, high))
  inside = np.clip(x, -high, high) if scheme.is_static else x
  assert (np.abs(found - inside) <= np.asarray(scale) * (0.5 + 1e-4)).all()
  if scheme.is_static:
    beyond = np.abs(x) > high
    assert beyond.any()
    np.testing.assert_allclose(np.abs(found[beyond]), high, rtol=1e-6)


def test_a_range_of_zero_gives_zeros():
  for spelling in SPELLINGS:
    codes, scale = _encode(jnp.zeros((2, 3)), parse_activations(spelling), jnp.float32(0))
    assert not codes.any() and (scale > 0).all()
  cut = activations.fake(jnp.ones((2, 3)), parse_activations('int8:axis=tensor,static'), jnp.float32(0))
  np.testing.assert_allclose(cut, 1e-30, rtol=1e-6)


def test_no_rows_are_quantized_to_no_codes():
  for spelling in SPELLINGS[:2]:
    assert _encode(jnp.zeros((0, 3)), parse_activations(spelling))[0].shape == (0, 3)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(bad, dtype):
  x = jnp.asarray(_normal(3, 70), dtype).at[1, 5].set(bad)
  found = np.asarray(jax.jit(activations.fake, static_argnums=1)(x, parse_activations('int8:axis=token')))
  assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_a_nan_shows_under_a_static_range_too():
  x = jnp.asarray(_normal(3, 70)).at[1, 5].set(np.nan)
  scheme = parse_activations('int8:axis=tensor,static')
  found = np.asarray(jax.jit(activations.fake, static_argnums=1)(x, scheme, jnp.float32(2)))
  assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


# ---- spellings and rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize('spelling', [*SPELLINGS, 'none'])
def test_a_spelling_is_read_and_written_back(spelling):
  assert str(parse_activations(spelling)) == spelling


def test_a_spelling_means_what_it_says():
  scheme = parse_activations('int4:axis=tensor,static')
  assert scheme == ActivationScheme('int4', 'tensor', True) and scheme.largest == 7
  assert parse_activations('int8:axis=token').largest == 127
  assert parse_activations('none').is_none


@pytest.mark.parametrize(
  'spelling, reason',
  [
    ('int7:axis=token', "did you mean 'int[48]'"),
    ('nf4:axis=token', 'not a format'),
    ('int8', 'does not say what shares a scale'),
    ('int8:axis=channel', "'axis=channel' does not say"),
    ('int8:axis=tensor,dynamic', "'dynamic' is not the option static"),
    ('int8:axis=tensor,static,static', "'static,static'"),
    ('int8:axis=token,static', 'not known beforehand'),
    ('none:axis=token', 'not a format'),
    ('', 'not a format'),
  ],
)
def test_a_misspelt_scheme_is_refused_with_the_grammar(spelling, reason):
  with pytest.raises(UserError, match=f'{reason}.*FORMAT:axis=token'):
    parse_activations(spelling)


def test_the_first_rule_that_matches_a_whole_path_counts():
  scheme_of = activations.rules((('.*/down/kernel', 'none'), ('layers/mlp/.*', 'int8:axis=token')))
  assert scheme_of('layers/mlp/down/kernel').is_none
  assert str(scheme_of('layers/mlp/up/kernel')) == 'int8:axis=token'
  assert scheme_of('layers/attn/q/kernel').is_none
  assert scheme_of('more/layers/mlp/up/kernel').is_none
  assert activations.rules(())('layers/mlp/up/kernel').is_none


@pytest.mark.parametrize(
  'given, reason',
  [
    ('int8:axis=token', 'no rules'),
    ([('.*', 'none')], 'no rules'),
    (('.*', 'int8:axis=token'), 'is no rule'),
    ((('.*', 'none', 'none'),), 'is no rule'),
    ((('(', 'none'),), 'not a regular expression'),
    ((('.*', 'none'), ('.*', 'int9:axis=token')), 'int9'),
  ],
)
def test_what_is_no_rules_is_refused(given, reason):
  with pytest.raises(UserError, match=reason):
    activations.rules(given)


# ---- weights with outlying rows ----------------------------------------------------------------------------


@pytest.mark.parametrize('kept', ['bfloat16', 'float16'])
@pytest.mark.parametrize('scheme', ['int8:axis=channel', 'int4:block=4'])
def test_kept_rows_are_those_of_the_weight_and_cost_the_rest_no_range(scheme, kept):
  w, rows = _normal(13, 5), np.array([2, 11, 13], np.int32)  # the last only fills up
  w[2] *= 100
  d = _decompose(w, rows, scheme, kept)
  found = np.asarray(jax.jit(lambda d: d.dequantize(jnp.dtype('float32')))(d))
  np.testing.assert_array_equal(found[[2, 11]], np.asarray(jnp.asarray(w[[2, 11]], kept), np.float32))
  assert not np.asarray(dequantize(d.rest))[[2, 11]].any()
  others = np.delete(np.arange(13), [2, 11])
  largest = 127 if scheme.startswith('int8') else 7
  step = np.abs(w[others]).max() / largest
  assert (np.abs(found - w)[others] <= step * 0.501).all()
  np.testing.assert_array_equal(d.is_ordinary, ~np.isin(np.arange(13), [2, 11]))


def test_the_columns_of_rows_that_fill_up_are_zeros():
  d = _decompose(_normal(6, 5), np.array([4, 6, 90], np.int32), 'int8', 'bfloat16')
  x = _normal(2, 3, 6)
  np.testing.assert_array_equal(d.outliers(x), np.stack([x[..., 4], 0 * x[..., 4], 0 * x[..., 4]], -1))


def test_a_stack_of_layers_is_its_layers_and_knows_its_bytes():
  w, rows = _normal(3, 8, 5), np.array([[1, 4], [0, 8], [8, 9]], np.int32)
  stack = _decompose(w, rows, 'int8', 'bfloat16')
  assert stack.shape == (3, 8, 5) and stack.ndim == 3 and stack.size == 120
  assert stack.nbytes == 120 + 3 * 5 * 4 + 3 * 2 * 5 * 2 + 6 * 4
  for i in range(3):
    one = _decompose(w[i], rows[i], 'int8', 'bfloat16')
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf, i=i: leaf[i], stack), one)
  no_rows = _decompose(w, np.zeros((3, 0), np.int32), 'int8', 'bfloat16')
  assert no_rows.kept.shape == (3, 0, 5) and np.asarray(dequantize(no_rows.rest)).any()


def test_what_cannot_be_decomposed_is_refused():
  w, rows = _normal(8, 5), np.array([1])
  with pytest.raises(UserError, match="not in 'int8'"):
    activations.decompose(w, rows, kept='int8')
  with pytest.raises(UserError, match='not in .float32'):
    activations.decompose(w, rows, kept='float32')
  with pytest.raises(UserError, match='one stack'):
    activations.decompose(w, rows[None])
