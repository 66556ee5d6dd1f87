"""The optimizer, in float32 whatever the weights are in; decay, clipping, schedule, rounding alone."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qjax import optim, sharding, trees
from qjax.errors import UserError
from qjax.method import Update
from qjax.quant import formats, moments
from qjax.sharding import MeshSpec, make_mesh

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


# ---- other optimizers --------------------------------------------------------------------------------------

MATRIX = {'q': {'kernel': np.zeros((2, 64, 300), np.float32)}, 'scale': np.ones(5000, np.float32)}


def _follow(update: Update, grad: Any, start: Any, steps: int) -> Any:
  """The weights after each of some steps along `grad(weights)`."""
  tx = optim.make(update, steps)

  def step(carry: Any, key: jax.Array) -> Any:
    now, state = carry
    updates, state = tx.update(grad(now), state, now)
    now = optim.apply(now, updates, 'nearest', key)
    return (now, state), now

  keys = jax.random.split(jax.random.key(0), steps)
  return jax.jit(lambda start: jax.lax.scan(step, (start, tx.init(start)), keys))(start)


@pytest.mark.parametrize('signed', [True, False])
def test_codes_of_moments_are_the_nearest_levels(signed: bool):
  numbers = moments.DYNAMIC8 if signed else moments.DYNAMIC8_UNSIGNED
  levels = np.asarray(numbers.levels)
  assert len(set(levels.tolist())) == 256 and levels[-1] == 1 and (np.diff(levels) > 0).all()
  codes = np.asarray(numbers.encode(jnp.asarray(levels, jnp.float32)))
  np.testing.assert_array_equal(codes, np.arange(256))
  rng = np.random.default_rng(0)
  x = np.concatenate([rng.uniform(-1, 1, 4000), rng.choice([-1, 1], 4000) * 10 ** rng.uniform(-9, 0, 4000)])
  x = (x if signed else np.abs(x)).astype(np.float32)
  found = levels[np.asarray(numbers.encode(jnp.asarray(x)))]
  best = np.min(np.abs(x[:, None].astype(np.float64) - levels), axis=1)
  np.testing.assert_allclose(np.abs(x - found), best, rtol=1e-5, atol=1e-12)
  # What stands in for a gather on a TPU.
  picked = formats._level_in_runs(jnp.arange(256).astype(jnp.uint8), numbers.levels)
  np.testing.assert_allclose(picked, levels, rtol=1e-6)


@pytest.mark.parametrize('shape', [(3, 5, 300), (2, 256), (7,)])
def test_a_moment_that_was_encoded_encodes_to_itself_and_is_near(shape: tuple[int, ...]):
  x = jax.random.normal(jax.random.key(0), shape)
  x = x * jnp.exp(jax.random.normal(jax.random.key(1), (*shape[:-1], 1)))
  once = moments.encode(x)
  assert once.codes.dtype == jnp.uint8 and once.codes.shape == shape
  assert once.scale.shape == (*shape[:-1], -(-shape[-1] // 256))
  # Levels next to each other differ by 0.9 / 64 at most, those at the end by less.
  largest = np.repeat(np.asarray(once.scale), 256, axis=-1)[..., : shape[-1]]
  assert (np.abs(once.decode() - x) <= 0.51 * 0.9 / 64 * largest).all()
  assert not np.array_equal(once.decode(), x)
  zero = moments.zeros(shape)
  assert (np.asarray(zero.decode()) == 0).all()
  encoded = moments.encode(jnp.zeros(shape))
  for one, other in zip(jax.tree.leaves(zero), jax.tree.leaves(encoded), strict=True):
    np.testing.assert_array_equal(one, other)


def test_a_second_moment_above_zero_stays_above_zero():
  x = jnp.asarray([1.0, 1e-12, 0.0])
  kept = np.asarray(moments.encode(x, signed=False).decode())
  assert kept[0] == 1 and 0 < kept[1] < 1e-6 and kept[2] == 0
  assert np.asarray(moments.encode(x).decode())[1] == 0


def test_moments_in_8_bits_take_a_quarter_and_small_leaves_and_norms_stay_wide():
  tx = optim.make(dataclasses.replace(PLAIN, name='adamw8bit'), 10)
  state = trees.flatten(tx.init(MATRIX | {'small': np.zeros((4, 8), np.float32)}))
  dtypes = {path: leaf.dtype for path, leaf in state.items() if leaf.ndim}
  assert sum(dtype == jnp.uint8 for dtype in dtypes.values()) == 2
  assert all(dtypes[path] == jnp.float32 for path in dtypes if path.endswith(('u/scale', 'small')))
  assert any(path.endswith('mu/scale') for path in dtypes)
  narrow = sum(leaf.nbytes for path, leaf in state.items() if 'kernel' in path)
  # A byte an element, and two scales for 300 elements, of each of two moments.
  assert narrow == 2 * 2 * 64 * (300 + 2 * 4)


def test_adam_in_8_bits_ends_where_adam_does_on_a_quadratic():
  """Second moments of a block over four orders of magnitude, which evenly spaced levels would not hold."""
  target = jax.random.normal(jax.random.key(0), (2, 64, 300))
  curvature = 10 ** jax.random.uniform(jax.random.key(1), target.shape, minval=-1.0, maxval=1.0)
  start = {'kernel': jnp.zeros(target.shape)}
  grad = lambda now: {'kernel': curvature * (now['kernel'] - target)}
  off = {}
  for name in ('adamw', 'adamw8bit'):
    update = Update(0.1, schedule='linear', clip_norm=0.0, name=name)
    (end, _), path = _follow(update, grad, start, 150)
    off[name] = [float(jnp.mean(jnp.abs(x - target))) for x in (path['kernel'][75], end['kernel'])]
  assert off['adamw'][1] < 1e-3, 'this test wants a problem that Adam solves'
  assert off['adamw8bit'] == pytest.approx(off['adamw'], rel=0.2)


def test_lion_is_a_sign_and_sgd_the_gradient():
  """Written out: Chen et al. 2023, algorithm 2."""
  grads = [np.asarray(gradients(seed)['kernel']) for seed in range(3)]
  lion = dataclasses.replace(PLAIN, name='lion', beta2=0.99, weight_decay=0.1)
  sgd = dataclasses.replace(PLAIN, name='sgd')
  for update in (lion, sgd):
    tx, now = optim.make(update, 10), {'kernel': params()['kernel']}
    state, w, m = tx.init(now), np.asarray(now['kernel'], np.float64), 0.0
    for g in grads:
      updates, state = tx.update({'kernel': jnp.asarray(g)}, state, now)
      now = optim.apply(now, updates, 'nearest', jax.random.key(0))
      step = np.sign(0.9 * m + 0.1 * g) if update is lion else g
      w, m = w - 1e-2 * (step + update.weight_decay * w), 0.99 * m + 0.01 * g
    np.testing.assert_allclose(now['kernel'], w, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_a_row_and_a_column_and_finds_what_is_an_outer_product():
  tx = optim.make(dataclasses.replace(PLAIN, name='adafactor'), 10)
  now = {'kernel': jnp.zeros((3, 128, 256))}
  state = tx.init(now)
  assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 3 * (128 + 256) + 10
  rows, columns = jnp.arange(1.0, 129)[:, None], jnp.arange(1.0, 257)
  updates, _ = tx.update({'kernel': jnp.broadcast_to(rows * columns, (3, 128, 256))}, state, now)
  # Divided by the root of its own square, every element is one, and one is the learning rate.
  np.testing.assert_allclose(updates['kernel'], -1e-2, rtol=1e-4)


def test_a_direction_is_shortened_layer_by_layer():
  """A stack is how layers are scanned; each ends where it would alone."""
  tx = optim.make(dataclasses.replace(PLAIN, name='adafactor'), 10)
  small, large = (scale * jax.random.normal(jax.random.key(0), (128, 256)) for scale in (1e-3, 1.0))

  def second(first: Any, then: Any, path: str) -> Any:
    now = trees.nest({path: jnp.zeros(first.shape)})
    state = tx.init(now)
    for g in (first, then):
      updates, state = tx.update(trees.nest({path: g}), state, now)
    return trees.flatten(updates)[path]

  # The second gradient of one layer is far above its first, so that its direction is too long.
  stacks = jnp.stack([small, small]), jnp.stack([small, large])
  together = second(*stacks, 'params/layers/q/kernel')
  alone = [second(*(stack[i] for stack in stacks), 'q/kernel') for i in range(2)]
  np.testing.assert_allclose(together, alone, rtol=1e-5)
  rms = np.sqrt(np.mean(np.square(together), axis=(1, 2))) / 1e-2
  assert rms == pytest.approx([1, 1], rel=1e-3)
  assert not np.allclose(second(*stacks, 'q/kernel'), together, rtol=0.1), 'one norm for both layers'


def test_whether_moments_rest_in_8_bits_is_decided_by_a_layers_size():
  tx = optim.make(dataclasses.replace(PLAIN, name='adamw8bit'), 10)
  few, many = jnp.zeros((4, 16, 128)), jnp.zeros((4, 32, 128))  # 2,048 and 4,096 elements a layer
  state = tx.init({'layers': {'few': few, 'many': many}, 'whole': few})
  narrow = {path for path, leaf in trees.flatten(state).items() if leaf.dtype == jnp.uint8}
  assert {path.split('mu/')[1] for path in narrow if 'mu/' in path} == {'layers/many/codes', 'whole/codes'}


def test_ranges_move_by_the_gradient_of_their_logarithm_under_sgd():
  tx = optim.make(dataclasses.replace(PLAIN, name='sgd', range_rate=0.05), 10)
  high = jnp.asarray([1e-3, 50.0])
  loss = lambda now: jnp.sum(jnp.log(now['ranges']['w']) * jnp.asarray([1.0, -2.0]))
  now = {'ranges': {'w': high}}
  updates, _ = tx.update(jax.grad(loss)(now), tx.init(now), now)
  np.testing.assert_allclose(updates['ranges']['w'] / high, [-0.05, 0.1], rtol=1e-5)


@pytest.mark.parametrize('name', sorted(optim.OPTIMIZERS))
def test_every_optimizer_clips_decays_matrices_alone_and_counts(name: str):
  update = dataclasses.replace(PLAIN, name=name, weight_decay=0.5, clip_norm=1e-30)
  now = {'q': {'kernel': jnp.ones((64, 128)), 'bias': jnp.ones(5000)}, 'norm': {'scale': jnp.ones(4)}}
  now |= {'act': {'q': {'kernel': jnp.ones(3)}}}
  grads = jax.tree.map(jnp.ones_like, now)
  tx = optim.make(update, 10)
  updates, state = tx.update(grads, tx.init(now), now)
  assert int(optim.applied_steps(state)) == 1
  plain, _ = optim.make(dataclasses.replace(update, weight_decay=0.0), 10).update(grads, tx.init(now), now)
  for path, leaf in trees.flatten(updates).items():
    decay = leaf - trees.flatten(plain)[path]
    np.testing.assert_allclose(decay, -0.5e-2 if path == 'q/kernel' else 0, atol=1e-8, err_msg=path)
  if name == 'sgd':
    assert float(optax.tree.norm(plain)) == pytest.approx(1e-32, rel=1e-3)


def test_a_state_of_codes_is_laid_out_as_its_weights_are():
  mesh = make_mesh(MeshSpec(1, 4, 2))
  tx = optim.make(dataclasses.replace(PLAIN, name='adamw8bit'), 10)
  start = {'layers': {'q': {'kernel': jax.random.normal(jax.random.key(0), (2, 64, 512))}}}
  grads = jax.tree.map(lambda w: w * w, start)
  alone = jax.jit(tx.update)(grads, tx.init(start), start)
  split = [jax.device_put(tree, sharding.shardings(tree, mesh)) for tree in (grads, tx.init(start), start)]
  codes = split[1][0][0].mu['layers']['q']['kernel'].codes
  assert codes.sharding.spec == split[2]['layers']['q']['kernel'].sharding.spec
  assert len({str(shard.index) for shard in codes.addressable_shards}) == 8
  with jax.set_mesh(mesh):
    found = jax.jit(tx.update)(*split)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
    np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'name': 'adamw8bits'}, "did you mean 'adamw8bit'"),
    ({'kind': 'fusd'}, "did you mean 'fused'"),
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
