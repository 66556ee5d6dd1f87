"""Clips of weights: against brute force, never worse than none, and which objective saves the output."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.errors import UserError
from qjax.quant.clipping import GRID, learned, search
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import dequantize, quantize

# [13, 5] below: short last blocks, and blocks longer than a matrix.
SCHEMES = [
  'int4:block=4',
  'nf4:block=5',
  'int4:axis=channel',
  'int4:block=4,asym',
  'nf4:block=64',
  'int8:block=4',
]
COUPLED = ['nf4:block=4,dq', 'int4:axis=tensor']


def _weight(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.laplace(size=shape).astype(np.float32)


def _gram(k, seed=1, hot=()):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((4 * k, k)) @ (np.eye(k) + 0.3 * rng.standard_normal((k, k)))
  x[:, list(hot)] *= 30
  return (x.T @ x / len(x)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
def _back(w, scheme, clip):
  return dequantize(quantize(w, scheme, clip))


def _error(w, scheme, clip):
  return np.asarray(w, np.float64) - np.asarray(_back(w, scheme, jnp.asarray(clip)), np.float64)


def _output_error(w, scheme, clip, gram):
  """e^T H e of each column."""
  e = _error(w, scheme, clip)
  return np.einsum('kn,kl,ln->n', e, gram.astype(np.float64), e)


def _as_gram(objective, gram):
  return {'weight_mse': np.eye(len(gram)), 'activation_weighted': np.diag(np.diag(gram))}.get(objective, gram)


def _stats(objective, gram):
  return {'weight_mse': None, 'activation_weighted': np.diag(gram)}.get(objective, gram)


OBJECTIVES = ['weight_mse', 'activation_weighted', 'layer_output']


@pytest.mark.parametrize('objective', OBJECTIVES)
@pytest.mark.parametrize('scheme', SCHEMES)
def test_search_by_brute_force(scheme, objective):
  k, n = 13, 5
  w, gram = _weight(k, n), _gram(k)
  grid, block = (0.6, 0.98, 0.93, 0.99, 0.9), parse_scheme(scheme).block_of(k)
  clip = np.asarray(search(jnp.asarray(w), scheme, objective, _stats(objective, gram), grid))
  assert clip.dtype == np.float32 and clip.shape == (-(-k // block), n)
  full = _as_gram(objective, gram).astype(np.float64)
  chosen = np.ones_like(clip)
  for b in range(len(clip)):
    rows = slice(b * block, min(k, (b + 1) * block))
    for column in range(n):
      costs = {}
      for ratio in (1.0, 0.99, 0.98, 0.93, 0.9, 0.6):
        e = _error(w, scheme, np.full_like(clip, ratio))[rows, column]
        costs[ratio] = e @ full[rows, rows] @ e
      chosen[b, column] = min(costs, key=costs.get)  # the first, thus the largest, of equals
  # A column that its blocks made worse goes back to no clipping.
  before = _output_error(w, scheme, np.ones_like(clip), full)
  chosen = np.where(_output_error(w, scheme, chosen, full) < before, chosen, np.float32(1))
  np.testing.assert_array_equal(clip, chosen)
  if not scheme.startswith('int8'):
    assert (clip < 1).any()


@pytest.mark.parametrize('objective', OBJECTIVES)
@pytest.mark.parametrize('scheme', SCHEMES + COUPLED)
def test_a_search_is_never_worse_than_no_clipping(scheme, objective):
  w, gram = _weight(13, 5, seed=3), _gram(13, seed=4, hot=[2, 7])
  clip = search(jnp.asarray(w), scheme, objective, _stats(objective, gram))
  full = _as_gram(objective, gram)
  before = _output_error(w, scheme, np.ones(clip.shape, np.float32), full)
  after = _output_error(w, scheme, clip, full)
  if scheme in COUPLED:
    before, after = before.sum(), after.sum()
  # The search compares sums of 13 · 13 products in float32.
  assert (after <= before * (1 + 300 * 2.0**-24)).all()


@pytest.mark.parametrize(
  'scheme', ['int4:block=4', 'nf4:block=64', 'int4:axis=channel', 'int4:block=4,asym', *COUPLED]
)
def test_learned_clips_are_never_worse_than_the_grid(scheme):
  w, gram = _weight(13, 5), _gram(13)
  start = search(jnp.asarray(w), scheme, 'layer_output', gram)
  clip = learned(jnp.asarray(w), scheme, gram, steps=60)
  assert clip.shape == start.shape and clip.dtype == jnp.float32
  assert ((clip > 0) & (clip <= 1)).all()
  before, after = _output_error(w, scheme, start, gram), _output_error(w, scheme, clip, gram)
  if scheme in COUPLED:
    before, after = before.sum(), after.sum()
  assert (after <= before * (1 + 300 * 2.0**-24)).all()
  assert after.sum() < 0.99 * before.sum() or scheme in COUPLED


def test_learning_descends_to_the_best_clip_of_a_column():
  # From no clipping at all, with one clip a column: brute force over a thousand clips knows the best.
  w, gram = _weight(64, 4, seed=2), np.eye(64, dtype=np.float32)
  scheme, ones = 'int4:axis=channel', np.ones((1, 4), np.float32)
  ratios = np.linspace(0.3, 1, 1000, dtype=np.float32)
  best = np.min([_output_error(w, scheme, ratio * ones, gram) for ratio in ratios], axis=0)
  before = _output_error(w, scheme, ones, gram)
  after = _output_error(w, scheme, learned(jnp.asarray(w), scheme, gram, steps=300, grid=(1.0,)), gram)
  # Straight-through gradients lead near the best, not to it: nine tenths of the way.
  assert (before - after > 0.9 * (before - best)).all()


def test_hot_inputs_need_the_objective_that_knows_them():
  # The largest weights sit on the hot inputs: plain error clips them for the sake of all the others.
  k, n = 512, 6
  rng = np.random.default_rng(0)
  w = rng.uniform(-1, 1, (k, n)).astype(np.float32)
  hot = [5, 40]
  w[hot] = 1.5 * np.sign(w[hot])
  gram = np.eye(k, dtype=np.float32)
  gram[hot, hot] = 400
  scheme = 'int4:axis=channel'
  output = {}
  clips = {}
  for objective in ('none', *OBJECTIVES):
    clips[objective] = search(jnp.asarray(w), scheme, objective, _stats(objective, gram))
    output[objective] = _output_error(w, scheme, clips[objective], gram)
  assert (clips['weight_mse'] < clips['activation_weighted']).all()
  assert (output['weight_mse'] > 2 * output['none']).all()
  assert (output['activation_weighted'] <= output['none'] * (1 + 2.0**-16)).all()
  # Inputs that do not correlate leave nothing that the Gram matrix knows beyond its diagonal.
  np.testing.assert_array_equal(clips['layer_output'], clips['activation_weighted'])


def test_correlated_inputs_need_the_gram_matrix():
  w, gram = _weight(32, 8, seed=5), _gram(32, seed=6) + 20
  output = {
    objective: _output_error(
      w,
      'int4:axis=channel',
      search(jnp.asarray(w), 'int4:axis=channel', objective, _stats(objective, gram)),
      gram,
    )
    for objective in OBJECTIVES
  }
  for other in ('weight_mse', 'activation_weighted'):
    assert (output['layer_output'] <= output[other] * (1 + 1e-4)).all()
    assert output['layer_output'].sum() < 0.9 * output[other].sum()


@pytest.mark.parametrize('scheme', SCHEMES[:4] + COUPLED)
def test_a_stack_is_searched_matrix_by_matrix(scheme):
  w = np.stack([_weight(13, 5), 100 * _weight(13, 5, seed=7)])
  grams = np.stack([_gram(13), _gram(13, seed=8, hot=[1])])
  for objective in OBJECTIVES:
    stats = {'weight_mse': None, 'activation_weighted': np.diagonal(grams, axis1=1, axis2=2)}.get(
      objective, grams
    )
    stacked = search(jnp.asarray(w), scheme, objective, stats)
    for i in range(2):
      alone = search(jnp.asarray(w[i]), scheme, objective, None if stats is None else stats[i])
      np.testing.assert_array_equal(stacked[i], alone)
  clips = learned(jnp.asarray(w), scheme, jnp.asarray(grams), steps=5)
  assert clips.shape[0] == 2
  for i in range(2):
    one = clips[i]
    start = search(jnp.asarray(w[i]), scheme, 'layer_output', grams[i])
    before, after = (_output_error(w[i], scheme, clip, grams[i]).sum() for clip in (start, one))
    assert after <= before * (1 + 300 * 2.0**-24)


def test_a_tie_is_no_clipping():
  zeros = np.zeros((7, 3), np.float32)
  for scheme in ('int4:block=4', 'nf4:block=4', 'int4:block=4,asym'):
    np.testing.assert_array_equal(search(zeros, scheme, 'weight_mse'), 1)
    np.testing.assert_array_equal(learned(zeros, scheme, _gram(7), steps=3), 1)
  # Inputs that are never seen have no say.
  np.testing.assert_array_equal(search(_weight(7, 3), 'int4:block=4', 'activation_weighted', np.zeros(7)), 1)
  np.testing.assert_array_equal(search(_weight(7, 3), 'int4:block=4', 'none'), np.ones((2, 3)))
  assert GRID[0] == 1 and GRID[-1] == 0.5 and len(GRID) == 20


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_weights_are_searched_in_float32(dtype):
  w = jnp.asarray(_weight(13, 5)).astype(dtype)
  wide = search(w.astype(jnp.float32), 'int4:block=4', 'layer_output', _gram(13))
  np.testing.assert_array_equal(search(w, 'int4:block=4', 'layer_output', _gram(13)), wide)


def test_what_cannot_be_searched_is_refused():
  w = jnp.ones((4, 3))
  for arguments, message in [
    (('int4', 'weight_mes'), "did you mean 'weight_mse'"),
    (('bfloat16', 'weight_mse'), 'no scale to clip'),
    (('int4', 'activation_weighted'), r'needs stats E\[x²\] of shape \(4,\).*nothing was given'),
    (('int4', 'layer_output', jnp.ones(4)), r'of shape \(4, 4\).*\(4,\) was given'),
    (('int4', 'weight_mse', None, (0.5, 1.5)), 'at most 1, not 1.5'),
    (('int4', 'weight_mse', None, (0.0,)), 'above 0 and at most 1, not 0.0'),
  ]:
    with pytest.raises(UserError, match=message):
      search(w, *arguments)
  with pytest.raises(UserError, match='E\\[x x\\^T\\]'):
    learned(w, 'int4', jnp.ones((3, 3)))
