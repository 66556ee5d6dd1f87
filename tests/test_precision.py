"""Dtype policies, loss scales as one family of values, and rounding whose mean is exact."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import precision
from qjax.errors import UserError

BF16 = jnp.dtype(jnp.bfloat16)
_stochastic = jax.jit(precision.stochastic_round, static_argnums=1)


def _bf16_bits(x):
  return np.asarray(x).view(np.uint16)


def _from_bits(bits):
  """float32 whose upper half is each of the bfloat16 patterns `bits`."""
  return (np.asarray(bits, np.uint32) << 16).view(np.float32)


# ---- policies ----------------------------------------------------------------------------------------------


def test_a_policy_holds_the_dtypes_that_were_named():
  names = dict(param='float32', compute='float16', accum='float32', output='bfloat16')
  assert dataclasses.asdict(precision.policy(**names)) == {field: jnp.dtype(n) for field, n in names.items()}


@pytest.mark.parametrize('field', ['param', 'compute', 'accum', 'output'])
def test_an_unknown_dtype_is_refused_with_its_field(field):
  with pytest.raises(UserError, match=f"precision.{field} = 'bfloat61'.*did you mean 'bfloat16'"):
    precision.policy(**{field: 'bfloat61'})


@pytest.mark.parametrize('accum', ['bfloat16', 'float16'])
def test_sums_are_never_narrower_than_products(accum):
  with pytest.raises(UserError, match='narrower'):
    precision.policy(compute='float32', accum=accum)
  precision.policy(compute=accum, accum=accum)


def test_casts_touch_floating_leaves_only():
  dtypes = dict(w='float32', ids='int32', mask='bool', h='float16')
  tree = {name: np.ones(2, dtype) for name, dtype in dtypes.items()}
  cast = precision.cast_floating(tree, jnp.dtype('bfloat16'))
  assert {name: x.dtype for name, x in cast.items()} == dtypes | dict(w='bfloat16', h='bfloat16')


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_is_found(bad):
  tree = {'a': jnp.ones((3, 2)), 'b': [jnp.zeros((5,), jnp.bfloat16), jnp.arange(3)]}
  assert precision.is_all_finite(tree)
  tree['b'][0] = tree['b'][0].at[4].set(bad)
  assert not precision.is_all_finite(tree)
  assert precision.is_all_finite({})


# ---- loss scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['none', 'static', 'dynamic'])
def test_unscale_undoes_scale_exactly(kind):
  state = precision.loss_scale(kind, initial=2.0**13)
  x = np.random.default_rng(0).standard_normal(17).astype(np.float32)

  def loss(x):
    return jnp.sum(jnp.sin(x))

  plain = jax.jit(jax.grad(loss))(x)
  scaled = jax.jit(jax.grad(lambda x: state.scale(loss(x))))(x)
  np.testing.assert_array_equal(scaled, plain * state.factor())
  np.testing.assert_array_equal(state.unscale({'x': scaled})['x'], plain)
  np.testing.assert_array_equal(state.scale(loss(x)), loss(x) * state.factor())


@pytest.mark.parametrize('kind', ['static', 'dynamic'])
def test_gradients_are_widened_before_they_are_divided(kind):
  tiny = jnp.asarray([2.0**-14, -3 * 2.0**-20], jnp.float16)
  out = precision.loss_scale(kind, initial=2.0**15).unscale(tiny)
  assert out.dtype == jnp.float32
  np.testing.assert_array_equal(out, [2.0**-29, -3 * 2.0**-35])


class _Reference:
  """The rules of the three scales in plain Python, one step at a time."""

  def __init__(self, kind, value, period):
    self.kind, self.value, self.period = kind, value, period
    self.good = self.skipped = self.consecutive = 0

  def step(self, is_finite):
    self.skipped += not is_finite
    self.consecutive = 0 if is_finite else self.consecutive + 1
    if self.kind == 'dynamic':
      if not is_finite:
        self.value, self.good = max(self.value / 2, 1.0), 0
      else:
        self.good += 1
        if self.good == self.period:
          self.good = 0
          if self.value < 2.0**24:
            self.value = min(self.value * 2, 2.0**24)
    return self.value, self.skipped, self.consecutive


@pytest.mark.parametrize(
  'kind, initial',
  [('none', 1), ('static', 128), *(('dynamic', x) for x in (1, 3, 2**15, 2**23 * 1.5, 2**24, 2**40))],
)
def test_a_scale_follows_its_rules_through_a_scan(kind, initial):
  rng = np.random.default_rng(1)
  # Long good runs first (growth up to the ceiling), long bad runs next (down to the floor), then a mixture.
  finite = np.concatenate([np.ones(12, bool), np.zeros(45, bool), rng.random(200) < 0.8])
  start = precision.loss_scale(kind, initial=initial, period=3)

  @jax.jit
  def run(state, finite):
    def body(state, is_finite):
      state = state.adjust(is_finite)
      return state, (state.factor(), state.skipped, state.consecutive)

    return jax.lax.scan(body, state, finite)

  end, trace = run(start, jnp.asarray(finite))
  reference = _Reference(kind, initial, 3)
  np.testing.assert_array_equal(np.stack(trace, -1), [reference.step(x) for x in finite])
  assert jax.tree.structure(end) == jax.tree.structure(start)
  assert [x.dtype for x in jax.tree.leaves(end)] == [x.dtype for x in jax.tree.leaves(start)]


def test_named_points_of_the_dynamic_scale():
  finite, overflow = jnp.asarray(True), jnp.asarray(False)

  def value_after(initial, steps):
    state = precision.loss_scale('dynamic', initial=initial, period=2)
    for step in steps:
      state = state.adjust(step)
    return float(state.value)

  assert value_after(1024.0, [overflow]) == 512.0
  assert value_after(1024.0, [finite]) == 1024.0
  assert value_after(1024.0, [finite, finite]) == 2048.0
  assert value_after(1024.0, [finite, overflow, finite]) == 512.0, 'an overflow starts the run again'
  assert value_after(1.0, [overflow] * 3) == 1.0
  assert value_after(2.0**24, [finite] * 4) == 2.0**24
  assert value_after(2.0**40, [finite] * 4) == 2.0**40, 'above the ceiling nothing grows'
  assert value_after(2.0**40, [overflow] * 3) == 2.0**37


def test_a_scale_survives_flattening_with_every_field():
  state = precision.loss_scale('dynamic', initial=8.0, period=7)
  leaves, structure = jax.tree.flatten(state)
  again = jax.jit(lambda s: s)(jax.tree.unflatten(structure, leaves))
  assert type(again) is precision.DynamicLossScale and again.period == 7
  assert (again.value, again.skipped, again.consecutive, again.good_steps) == (8.0, 0, 0, 0)
  assert len(leaves) == 4


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(kind='dynamik'), "did you mean 'dynamic'"),
    (dict(kind='static', initial=0.5), 'loss_scale_initial'),
    (dict(kind='dynamic', initial=math.nan), 'loss_scale_initial'),
    (dict(kind='dynamic', period=0), 'loss_scale_period'),
  ],
)
def test_a_scale_that_cannot_work_is_refused(arguments, message):
  with pytest.raises(UserError, match=message):
    precision.loss_scale(**arguments)


# ---- rounding ----------------------------------------------------------------------------------------------


def test_every_bfloat16_value_rounds_to_itself():
  bits = np.arange(2**16)
  out = _bf16_bits(_stochastic(_from_bits(bits), BF16, jax.random.key(0)))
  is_nan = ((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)
  np.testing.assert_array_equal(out[~is_nan], bits[~is_nan])
  assert np.isnan(out[is_nan].view(jnp.bfloat16).astype(np.float32)).all()


def test_a_nan_stays_a_nan_and_an_infinity_an_infinity():
  # The patterns beside them too: a NaN of all ones must not carry over into a finite number.
  bits = np.asarray([0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
  x = np.tile(bits.view(np.float32), (200, 1))
  out = np.asarray(_stochastic(x, BF16, jax.random.key(1)), np.float32)
  assert (out[:, 0] == np.inf).all() and (out[:, 1] == -np.inf).all() and np.isnan(out[:, 2:]).all()


def test_a_finite_value_never_becomes_infinite():
  largest = float(jnp.finfo(jnp.float32).max)
  x = np.tile(np.asarray([largest, -largest, largest * (1 - 2**-9), 3.395e38], np.float32), (500, 1))
  out = np.asarray(_stochastic(x, BF16, jax.random.key(2)), np.float32)
  assert np.isfinite(out).all()
  np.testing.assert_array_equal(np.sign(out), np.sign(x))


def test_the_mean_is_exact_and_each_draw_is_a_neighbour():
  draws = 4096
  rng = np.random.default_rng(3)
  spread = rng.standard_normal(60) * 10.0 ** rng.integers(-6, 6, 60)
  x = np.concatenate([spread, [1.00001, -1.00001, 255.9, -3e-30]]).astype(np.float32)
  out = np.asarray(_stochastic(np.tile(x, (draws, 1)), BF16, jax.random.key(4)), np.float64)
  low = (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)  # towards zero
  ulp = 2.0 ** (np.frexp(x)[1] - 8)
  high = low + np.sign(x) * ulp
  assert ((out == low) | (out == high)).all()
  # A coin with sides one ulp apart has a deviation of at most ulp / 2; six of those, over sqrt(draws).
  assert (np.abs(out.mean(0) - x) <= 6 * ulp / 2 / math.sqrt(draws)).all()


def test_rounding_noise_in_decibels():
  x = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)

  def sqnr_db(rounded):
    error = np.asarray(rounded, np.float64) - x
    return 10 * math.log10(np.mean(x.astype(np.float64) ** 2) / np.mean(error**2))

  nearest = sqnr_db(precision.ROUNDINGS['nearest'](jnp.asarray(x), BF16, jax.random.key(0)))
  stochastic = sqnr_db(_stochastic(x, BF16, jax.random.key(5)))
  # Errors uniform in ±1/2 against a coin between the neighbours: variances 1/12 and 1/6, 3.01 dB apart.
  assert nearest == pytest.approx(55.59, abs=0.03)
  assert nearest - stochastic == pytest.approx(10 * math.log10(2), abs=0.03)


def test_updates_below_half_a_step_move_in_the_mean_only_if_rounded_stochastically():
  update, steps, weights = 6e-4, 100, 4096

  def train(rounding):
    def body(w, key):
      return precision.ROUNDINGS[rounding](w.astype(jnp.float32) - update, BF16, key), None

    keys = jax.random.split(jax.random.key(6), steps)
    end, _ = jax.lax.scan(body, jnp.ones((weights,), BF16), keys)
    return np.asarray(end, np.float64)

  assert (train('nearest') == 1).all(), 'this test needs an update that nearest rounding loses'
  moved = train('stochastic')
  # Below one, neighbours are 2^-8 apart: each step adds a deviation of at most 2^-9.
  tolerance = 5 * 2**-9 * math.sqrt(steps / weights)
  assert moved.mean() == pytest.approx(1 - steps * update, abs=tolerance)
  assert tolerance < steps * update / 20


def test_rounding_depends_on_the_key_and_only_on_the_key():
  x = np.full((512,), 1.003, np.float32)
  same = [_bf16_bits(_stochastic(x, BF16, jax.random.key(seed))) for seed in (7, 7, 8)]
  np.testing.assert_array_equal(same[0], same[1])
  assert (same[0] != same[2]).any()


def test_other_dtypes_pass_or_are_refused():
  x = jnp.asarray([1.1, -2.7])
  assert precision.stochastic_round(x, jnp.dtype('float32'), jax.random.key(0)) is x
  with pytest.raises(NotImplementedError, match='float16'):
    precision.stochastic_round(x, jnp.dtype('float16'), jax.random.key(0))
