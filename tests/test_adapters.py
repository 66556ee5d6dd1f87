"""Low-rank adapters: nothing at the start, the right scale, stable draws, and targets that are meant."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import adapters, ops, precision, trees
from qjax.adapters import Adapter, LoraSpec, is_adapter
from qjax.errors import UserError

SHAPES = {
  'embed/embedding': (11, 6),
  'layers/attn/q/kernel': (12, 6, 8),
  'layers/attn/q/bias': (12, 8),
  'layers/attn/o/kernel': (12, 8, 6),
  'layers/mlp/up/kernel': (12, 6, 8),
  'head/kernel': (6, 11),
}
FLOAT32 = ops.Numerics(precision.policy())


def _init(spec, seed=0):
  return trees.flatten(adapters.init(spec, SHAPES, jax.random.key(seed)), is_adapter)


@pytest.mark.parametrize(
  'rule, rank, alpha, scale',
  [
    ('standard', 16, 16, 1.0),
    ('rslora', 16, 16, 4.0),
    ('standard', 8, 16, 2.0),
    ('rslora', 2, 3, 3 / math.sqrt(2)),
  ],
)
def test_the_scale_follows_its_rule_into_every_adapter(rule, rank, alpha, scale):
  spec = LoraSpec(rank, alpha, rule, dropout=0.25)
  assert spec.scale == pytest.approx(scale, rel=1e-15)
  spec = dataclasses.replace(spec, rank=2)
  made = jax.eval_shape(lambda: adapters.init(spec, SHAPES, jax.random.key(0)))
  assert {(a.scale, a.dropout) for a in trees.flatten(made, is_adapter).values()} == {(spec.scale, 0.25)}


def test_a_fresh_adapter_changes_no_bit():
  x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
  w = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
  stack = _init(LoraSpec(2, 4))['layers/attn/q/kernel']
  fresh = jax.tree.map(lambda leaf: leaf[3], stack)
  assert (np.asarray(fresh.a) != 0).all() and not np.asarray(fresh.b).any()
  assert not np.asarray(fresh.delta()).any()
  np.testing.assert_array_equal(ops.dot(x, w, FLOAT32, fresh), ops.dot(x, w, FLOAT32))


def test_adapters_mirror_the_shapes_of_their_weights():
  found = jax.eval_shape(
    lambda: adapters.init(LoraSpec(3, 4), SHAPES, jax.random.key(0), jnp.dtype('bfloat16'))
  )
  found = trees.flatten(found, is_adapter)
  assert list(found) == ['layers/attn/o/kernel', 'layers/attn/q/kernel', 'layers/mlp/up/kernel']
  for path, adapter in found.items():
    lead, k, n = SHAPES[path]
    assert adapter.a.shape == (lead, 3, k) and adapter.b.shape == (lead, 3, n)
    assert adapter.a.dtype == adapter.b.dtype == jnp.bfloat16
    assert jax.eval_shape(Adapter.delta, adapter).shape == SHAPES[path]


def test_a_is_uniform_within_one_over_the_root_of_its_inputs():
  a = adapters.init(LoraSpec(8, 8), {'x/q/kernel': (2, 400, 50)}, jax.random.key(0))['x']['q']['kernel'].a
  bound = 1 / math.sqrt(400)
  assert np.abs(a).max() <= bound
  # Over 6,400 draws the mean deviates by 0.7 % of the bound, the variance by 1.1 % of itself.
  assert np.mean(a) == pytest.approx(0, abs=5 * bound / math.sqrt(3 * a.size))
  assert np.var(a) == pytest.approx(bound**2 / 3, rel=0.06)


def test_delta_is_what_dot_adds():
  rng = np.random.default_rng(2)
  a, b = rng.standard_normal((3, 6)), rng.standard_normal((3, 8))
  adapter = Adapter(a.astype(np.float32), b.astype(np.float32), 1.7)
  expected = 1.7 * a.T @ b
  np.testing.assert_allclose(adapter.delta(), expected, atol=1e-5)
  x = rng.standard_normal((5, 6)).astype(np.float32)
  added = ops.dot(x, np.zeros((6, 8), np.float32), FLOAT32, adapter)
  np.testing.assert_allclose(added, x @ expected, atol=1e-4)
  stack = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), adapter)
  np.testing.assert_allclose(stack.delta(), np.stack([expected, 4 * expected]), atol=1e-4)


def test_delta_of_narrow_factors_is_computed_in_float32():
  rng = np.random.default_rng(3)
  a, b = (rng.standard_normal((3, n)).astype(jnp.bfloat16) for n in (6, 8))
  delta = Adapter(a, b, 0.5).delta()
  assert delta.dtype == jnp.float32
  np.testing.assert_allclose(delta, 0.5 * a.astype(np.float64).T @ b.astype(np.float64), rtol=1e-5, atol=1e-6)


def test_another_target_changes_no_other_adapter():
  few = _init(LoraSpec(2, 4, targets='.*/up/kernel'))
  many = _init(LoraSpec(2, 4, targets='.*/kernel'))
  assert len(few) == 1 and len(many) == 4
  for path, adapter in few.items():
    np.testing.assert_array_equal(adapter.a, many[path].a)
  assert len({np.asarray(adapter.a).ravel()[0] for adapter in many.values()}) == len(many), (
    'one key for two paths'
  )
  other = _init(LoraSpec(2, 4, targets='.*/up/kernel'), seed=1)
  assert (np.asarray(other['layers/mlp/up/kernel'].a) != few['layers/mlp/up/kernel'].a).any()


def test_draws_are_the_same_on_every_machine():
  # If this moves, old runs no longer repeat: keep the draw, or say so in the changelog and renew the numbers.
  a = _init(LoraSpec(2, 4, targets='head/kernel'))['head/kernel'].a
  np.testing.assert_allclose(a[0, :3], [-0.14365493, 0.3477974, -0.16768727], rtol=1e-6)


def test_targets_are_listed_exactly():
  assert adapters.targets(LoraSpec(2, 4, targets='.*/(q|up)/kernel'), SHAPES) == [
    'layers/attn/q/kernel',
    'layers/mlp/up/kernel',
  ]


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(rank=0, alpha=1), 'lora.rank = 0'),
    (dict(rank=-1, alpha=1), 'lora.rank = -1'),
    (dict(rank=1, alpha=0), 'lora.alpha = 0'),
    (dict(rank=1, alpha=math.nan), 'lora.alpha = nan'),
    (dict(rank=1, alpha=1, dropout=1.0), 'lora.dropout = 1.0'),
    (dict(rank=1, alpha=1, dropout=-0.1), 'lora.dropout = -0.1'),
    (dict(rank=1, alpha=1, scale_rule='rs'), "lora.scale_rule = 'rs'"),
  ],
)
def test_a_spec_that_cannot_work_is_refused(arguments, message):
  with pytest.raises(UserError, match=message):
    LoraSpec(**arguments)


@pytest.mark.parametrize(
  'rank, pattern, message',
  [
    (2, '.*/gate/kernel', 'lora.targets.*matches none'),
    (2, 'q/kernel', 'lora.targets.*matches none'),
    (2, '(', 'not a regular expression'),
    (2, '.*/q/.*', 'also matches layers/attn/q/bias'),
    (2, '.*', 'also matches embed/embedding, layers/attn/q/bias'),
    (7, '.*/up/kernel', r'lora.rank = 7 exceeds the rank 6 of layers/mlp/up/kernel \[6, 8\]'),
  ],
)
def test_targets_that_cannot_be_meant_are_refused(rank, pattern, message):
  with pytest.raises(UserError, match=message) as caught:
    adapters.init(LoraSpec(rank, 4, targets=pattern), SHAPES, jax.random.key(0))
  if 'none' in message:
    assert all(path in str(caught.value) for path in SHAPES)


def test_an_adapter_survives_flattening_with_every_field():
  adapter = Adapter(np.ones((1, 2)), np.ones((1, 3)), 0.5, 0.1)
  again = jax.tree.unflatten(jax.tree.structure(adapter), jax.tree.leaves(adapter))
  assert (again.scale, again.dropout) == (0.5, 0.1)
  assert len(jax.tree.leaves(adapter)) == 2
