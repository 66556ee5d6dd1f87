"""The optimizer, in float32 whatever the weights are in; decay, clipping, schedule, rounding alone."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import optim, trees
from qjax.errors import UserError
from qjax.method import Update

PLAIN = Update(1e-2, schedule='constant', clip_norm=0.0)


def params(dtype: Any = jnp.float32) -> Any:
  key = jax.random.key(0)
  return {
    'kernel': jax.random.normal(key, (4, 8)).astype(dtype), 'norm': {'scale': jnp.ones((4,), dtype)},
    'q': {'bias': jnp.ones((8,), dtype)},
  }  # fmt: skip


def gradients(seed: int = 1) -> Any:
  return jax.tree.map(lambda x: jax.random.normal(jax.random.key(seed), x.shape), params())


def adamw(update: Update, w: np.ndarray, grads: list[np.ndarray], decays: bool) -> np.ndarray:
  """AdamW in float64, written out (Loshchilov and Hutter 2019, algorithm 2)."""
  w, m, v = w.astype(np.float64), 0.0, 0.0
  for t, g in enumerate(grads, 1):
    g = g.astype(np.float64)
    m, v = update.beta1 * m + (1 - update.beta1) * g, update.beta2 * v + (1 - update.beta2) * g * g
    step = m / (1 - update.beta1**t) / (np.sqrt(v / (1 - update.beta2**t)) + update.eps)
    w = w - update.learning_rate * (step + (update.weight_decay * w if decays else 0))
  return w


def test_ranges_move_by_shares_of_themselves():
  tx = optim.make(dataclasses.replace(PLAIN, range_rate=0.05, weight_decay=0.1), 10)
  now = {'act': {'w': jnp.asarray([1e-3, 50.0])}, 'ranges': {'w': jnp.ones(1)}, 'params': {'w': jnp.ones(1)}}
  updates, _ = tx.update(jax.tree.map(jnp.ones_like, now), tx.init(now), now)
  # Adam's first update is its rate, whatever the gradient; only the weight decays.
  np.testing.assert_allclose(updates['act']['w'], [-0.05 * 1e-3, -0.05 * 50], rtol=1e-5)
  np.testing.assert_allclose(updates['ranges']['w'], [-0.05], rtol=1e-5)
  np.testing.assert_allclose(updates['params']['w'], [-1e-2 - 1e-3], rtol=1e-5)


def test_updates_are_adamws_and_decay_spares_norms_and_biases():
  update = dataclasses.replace(PLAIN, weight_decay=0.1)
  tx, now = optim.make(update, 10), params()
  state = tx.init(now)
  for seed in range(3):
    updates, state = tx.update(gradients(seed), state, now)
    now = optim.apply(now, updates, 'nearest', jax.random.key(0))
  for path, leaf in trees.flatten(now).items():
    grads = [np.asarray(trees.flatten(gradients(seed))[path]) for seed in range(3)]
    wanted = adamw(update, np.asarray(trees.flatten(params())[path]), grads, decays=path == 'kernel')
    np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_moments_are_float32_whatever_the_weights_rest_in(dtype: Any):
  tx = optim.make(PLAIN, 10)
  state = tx.init(params(dtype))
  updates, after = tx.update(jax.tree.map(lambda g: g.astype(dtype), gradients()), state, params(dtype))
  for tree in (state, after, updates):
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree) if leaf.ndim)
  moved = optim.apply(params(dtype), updates, 'nearest', jax.random.key(0))
  assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(moved))


@pytest.mark.parametrize('clip', [0.0, 0.5, 1e6])
def test_clipping_is_by_the_norm_over_everything(clip: float):
  tx = optim.make(dataclasses.replace(PLAIN, clip_norm=clip, beta1=0.0), 10)
  _, state = tx.update(gradients(), tx.init(params()), params())
  seen = [leaf for path, leaf in trees.flatten(state).items() if '/mu/' in path]
  norm = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradients()))))
  wanted = min(norm, clip) if clip else norm
  assert float(np.sqrt(sum(np.sum(np.square(x)) for x in seen))) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(('kind', 'end'), [('constant', 1.0), ('linear', 1 / 8), ('cosine', 0.038)])
def test_schedules_rise_to_the_peak_and_fall_as_named(kind: str, end: float):
  rate = optim.schedule(Update(0.5, schedule=kind, warmup_steps=4), 12)
  rates = [float(rate(jnp.asarray(i))) / 0.5 for i in range(12)]
  assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])  # none is zero, and the peak is reached
  assert rates[-1] == pytest.approx(end, abs=1e-3)
  assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_the_count_is_of_applied_updates():
  tx = optim.make(PLAIN, 10)
  state = tx.init(params())
  assert int(optim.applied_steps(state)) == 0
  _, state = tx.update(gradients(), state, params())
  assert int(optim.applied_steps(state)) == 1


def test_stochastic_rounding_moves_bfloat16_weights_where_nearest_does_not():
  """A hundred updates of 6e-4 to weights of 1, whose lower neighbour in bfloat16 is 2**-8 away."""
  weights = {'kernel': jnp.ones((64, 64), jnp.bfloat16)}
  tx = optim.make(dataclasses.replace(PLAIN, learning_rate=6e-4), 100)
  grads = {'kernel': jnp.ones((64, 64))}

  def train(rounding: str, dtype: Any) -> np.ndarray:
    now = jax.tree.map(lambda x: x.astype(dtype), weights)

    def step(carry: Any, key: jax.Array) -> Any:
      now, state = carry
      updates, state = tx.update(grads, state, now)
      return (optim.apply(now, updates, rounding, key), state), None

    (now, _), _ = jax.lax.scan(step, (now, tx.init(now)), jax.random.split(jax.random.key(0), 100))
    return np.asarray(now['kernel'].astype(jnp.float32))

  wide = train('nearest', jnp.float32)
  assert wide == pytest.approx(0.94, abs=1e-4)
  assert (train('nearest', jnp.bfloat16) == 1).all()
  stochastic = train('stochastic', jnp.bfloat16)
  # 2**-8 units, 100 roundings, 4096 weights: the mean strays by 2**-8 · sqrt(100) / 2 / 64 at most.
  assert stochastic.mean() == pytest.approx(wide.mean(), abs=5 * 2**-8 * 10 / 2 / 64)
  assert stochastic.std() > 0


def test_leaves_round_by_keys_of_their_own():
  now = {'a': jnp.ones((256,), jnp.bfloat16), 'b': jnp.ones((256,), jnp.bfloat16)}
  updates = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9), now)
  moved = optim.apply(now, updates, 'stochastic', jax.random.key(0))
  assert not np.array_equal(moved['a'], moved['b'])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'learning_rate': 0.0}, 'optimizer.learning_rate'),
    ({'learning_rate': float('nan')}, 'optimizer.learning_rate'),
    ({'schedule': 'linar'}, "did you mean 'linear'"),
    ({'warmup_steps': 10}, 'below num_steps = 10'),
    ({'warmup_steps': -1}, 'optimizer.warmup_steps'),
    ({'beta1': 1.0}, 'optimizer.beta1'),
    ({'beta2': float('nan')}, 'optimizer.beta2'),
    ({'eps': 0.0}, 'optimizer.eps'),
    ({'weight_decay': -0.1}, 'optimizer.weight_decay'),
    ({'clip_norm': float('nan')}, 'optimizer.clip_norm'),
    ({'rounding': 'stochastc'}, "did you mean 'stochastic'"),
  ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message):
    optim.make(dataclasses.replace(PLAIN, **changes), 10)
