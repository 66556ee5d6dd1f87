"""Observers: against brute force and published clips, streaming and masks, files that are refused."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.errors import UserError
from qjax.quant.calibrate import (
  ACIQ,
  BINS,
  KL,
  MSE,
  OBSERVERS,
  AbsMax,
  Histogram,
  MinMax,
  MovingAverage,
  Percentile,
  _Counts,
  _sum,
  aciq_clip,
  observer,
)
from qjax.quant.calibration import Calibration, score

HISTOGRAMS = ['percentile', 'mse', 'kl', 'aciq', 'aciq_gauss', 'aciq_laplace']
UNORDERED = ['absmax', 'minmax', *HISTOGRAMS]


@functools.cache
def _update(watcher):
  return jax.jit(watcher.update)


def _observe(watcher, batches, masks=None):
  state = watcher.init()
  for x, mask in zip(batches, masks or [None] * len(batches), strict=True):
    state = _update(watcher)(state, jnp.asarray(x), None if mask is None else jnp.asarray(mask))
  return state


def _data(*shape, seed=0):
  """Heavy tails over some seven orders of magnitude."""
  rng = np.random.default_rng(seed)
  return (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))).astype(np.float32)


def _assert_same(actual, expected):
  for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert np.asarray(left).dtype == np.asarray(right).dtype
    np.testing.assert_array_equal(left, right)


def _assert_same_range(actual, expected):
  _assert_same((actual.low, actual.high), (expected.low, expected.high))


# ---- streaming and masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', UNORDERED)
def test_streaming_is_one_pass_bit_for_bit(name):
  watcher = observer(name)
  x = _data(60, 7)
  # From 1e-12 up to 1e9: bins are merged many times over on the way, or all at once.
  x *= 10.0 ** np.linspace(-12, 9, 60, dtype=np.float32)[:, None]
  whole = _observe(watcher, [x])
  backwards = [*x[::-1].reshape(12, 5, 7)]
  for pieces in ([*x.reshape(12, 5, 7)], backwards, [x[:20].reshape(4, 5, 7), x[20:].reshape(2, 20, 7)]):
    streamed = _observe(watcher, pieces)
    _assert_same(streamed, whole)
    _assert_same_range(watcher.range(streamed, 4), watcher.range(whole, 4))


@pytest.mark.parametrize('name', list(OBSERVERS))
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_padded_tokens_never_count(name, dtype):
  watcher, lengths = observer(name), (5, 1, 3)
  rows = [jnp.asarray(_data(n, 6, seed=n)).astype(dtype) for n in lengths]
  expected = watcher.range(_observe(watcher, [jnp.concatenate(rows)]), 8)
  for filler in (1e4, np.nan, -np.inf, 0.0):
    for side in ('left', 'right'):
      pads = [(8 - n, 0) if side == 'left' else (0, 8 - n) for n in lengths]
      batch = jnp.stack(
        [jnp.pad(r, [p, (0, 0)], constant_values=filler) for r, p in zip(rows, pads, strict=True)]
      )
      mask = np.stack([np.pad(np.ones(n, bool), p) for n, p in zip(lengths, pads, strict=True)])
      state = _observe(watcher, [batch, batch], [mask, np.zeros((3, 1), bool)])  # the second: nothing at all
      _assert_same_range(watcher.range(state, 8), expected)


def test_a_mask_is_broadcast_over_the_leading_axes():
  x, mask = _data(3, 4, 5), np.array([True, False, True, False])
  state = _observe(Percentile(50), [x], [mask])
  assert int(np.asarray(state.counts).sum()) == 3 * 2 * 5
  _assert_same(state, _observe(Percentile(50), [x[:, ::2]]))


@pytest.mark.parametrize('name', UNORDERED)
def test_a_stack_of_layers_gives_a_stack_of_ranges(name):
  watcher = observer(name)
  x = _data(2, 9, 5) * np.array([1, 1e5], np.float32)[:, None, None]
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), watcher.init())
  for half in (x[:, :4], x[:, 4:]):
    stacked = jax.jit(jax.vmap(watcher.update))(stacked, half)
  ranges = watcher.range(stacked, 5)
  for layer in range(2):
    alone = watcher.range(_observe(watcher, [x[layer]]), 5)
    _assert_same((ranges.low[layer], ranges.high[layer]), (alone.low, alone.high))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', list(OBSERVERS))
def test_what_is_not_finite_is_refused_with_its_path(name, bad):
  watcher, x = observer(name), _data(4, 5)
  x[2, 3] = bad
  state = _observe(watcher, [_data(4, 5), x, _data(4, 5)])
  fine = _observe(watcher, [_data(4, 5)])
  with pytest.raises(UserError, match='layers/attn/q/kernel: NaN or infinity.*bfloat16'):
    Calibration.of(watcher, {'a': fine, 'layers/attn/q/kernel': state}, 8, 4, 'ab')
  with pytest.raises(UserError, match='b: no token was observed'):
    Calibration.of(watcher, {'a': fine, 'b': watcher.init()}, 8, 4, 'ab')
  with pytest.raises(UserError, match='2 to 8 bits, not 9'):
    watcher.range(fine, 9)


@pytest.mark.parametrize('name', list(OBSERVERS))
@pytest.mark.parametrize('value', [0.0, 1.2e-38, 3e38])
def test_ends_of_float32(name, value):
  watcher = observer(name)
  found = watcher.range(_observe(watcher, [np.full((3, 2), value, np.float32)]), 8)
  assert np.isfinite(found.high) and 0 <= found.high <= np.float32(value)
  assert (found.high > 0) == (value > 0)
  assert found.low == (-found.high if name != 'minmax' else found.high)


# ---- largest values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('channels', [None, 5])
def test_largest_values_by_brute_force(channels):
  batches = [_data(3, 4, 5, seed=1) + 3, _data(7, 5, seed=2)]  # one channel or another is one-sided
  flat = np.concatenate([x.reshape(-1, 5) for x in batches])
  axis = None if channels is None else 0
  absmax = AbsMax(channels).range(_observe(AbsMax(channels), batches), 8)
  _assert_same((absmax.low, absmax.high), (-np.abs(flat).max(axis), np.abs(flat).max(axis)))
  minmax = MinMax(channels).range(_observe(MinMax(channels), batches), 8)
  _assert_same((minmax.low, minmax.high), (flat.min(axis), flat.max(axis)))
  average = MovingAverage(0.75, channels).range(_observe(MovingAverage(0.75, channels), batches), 8)
  first, second = (np.abs(x.reshape(-1, 5)).max(axis).astype(np.float64) for x in batches)
  # Two products and a sum in float32.
  np.testing.assert_allclose(average.high, 0.75 * first + 0.25 * second, rtol=3 * 2.0**-24)


# ---- histograms --------------------------------------------------------------------------------------------


def test_counts_by_brute_force():
  x = np.append(_data(201, 7), [[0, 1, 2, 4, 8, 16, 1024]]).astype(np.float32).reshape(-1, 7)
  state = _observe(MSE(), [x[:100], x[100:]])
  width = 2.0 ** int(state.exponent)
  assert BINS // 2 * width <= np.abs(x).max() < BINS * width
  expected = np.bincount(np.floor(np.abs(x.astype(np.float64)) / width).astype(int).ravel(), minlength=BINS)
  np.testing.assert_array_equal(state.counts[0], expected)
  assert not np.asarray(state.counts[1]).any()


def test_counts_go_beyond_32_bits():
  a = np.array([2**32 - 1, 5, 2**31, 2**40 + 7, 0], np.uint64)
  b = np.array([1, 6, 2**31, 2**33 - 7, 0], np.uint64)
  words = lambda v: jnp.asarray(np.stack([v & np.uint64(2**32 - 1), v >> np.uint64(32)]).astype(np.uint32))
  np.testing.assert_array_equal(jax.jit(_sum)(words(a), words(b)), words(a + b))
  # Three million tokens of 2048 zeros, as many ones: the median is in the first bin, and nothing wraps round.
  counts = np.zeros((2, BINS), np.uint32)
  counts[:, [0, BINS // 2]] = words(np.array([3_000_000 * 2048 + 1, 3_000_000 * 2048], np.uint64))
  state = Histogram(jnp.asarray(counts), jnp.int32(-15), jnp.float32(1))
  assert Percentile(50).range(state, 8).high == np.float32(2.0**-15)
  assert Percentile(50.1).range(state, 8).high == 1


@pytest.mark.parametrize('percentile', [50, 90.5, 99.9, 100])
def test_percentile_by_sorting(percentile):
  x = _data(1000, 3)
  found = float(Percentile(percentile).range(_observe(Percentile(percentile), [x]), 8).high)
  rank = math.ceil(3000 * round(percentile * 10) / 1000)
  exact = np.sort(np.abs(x).ravel())[rank - 1]
  assert exact <= found <= exact + np.abs(x).max() / (BINS // 2)


def _symmetric_error(x, clip, bits):
  """Mean squared error, plainly."""
  largest = 2 ** (bits - 1) - 1
  step = clip / largest
  return np.mean((np.clip(np.round(x / step), -largest, largest) * step - x) ** 2)


@pytest.mark.parametrize('bits', [2, 3, 4, 8])
def test_mse_finds_the_least_error_of_heavy_tails(bits):
  x = np.random.default_rng(bits).laplace(size=(2000, 3)).astype(np.float32)
  state = _observe(MSE(), [x])
  found = float(MSE().range(state, bits).high)
  clips = np.abs(x).max() * np.linspace(0.02, 1, 800)
  errors = np.array([_symmetric_error(x.astype(np.float64), clip, bits) for clip in clips])
  # Spreading a bin's values moves each by less than a bin: the root of the error by no more, for either clip.
  width = 2.0 ** int(state.exponent)
  assert _symmetric_error(x.astype(np.float64), found, bits) ** 0.5 <= errors.min() ** 0.5 + 2 * width
  np.testing.assert_allclose(
    _Counts(state).squared_errors(clips, bits) ** 0.5, errors**0.5, rtol=0, atol=width * (1 + 1e-9)
  )


@pytest.mark.parametrize(('bits', 'clip', 'error'), [
  (2, 1.224, 0.190174), (3, 1.952, 0.046860), (4, 2.474, 0.012889), (8, 3.921, 8.831e-5),
])  # fmt: skip
def test_mse_finds_the_best_clips_of_a_normal_distribution(bits, clip, error):
  # Quantiles of N(0, 1) at equal steps, a sample without noise whose largest is 4.9 σ.
  n = 2**20
  x = np.asarray(jax.scipy.special.ndtri((jnp.arange(n // 2, dtype=jnp.float32) + 0.5) / n))
  state = _observe(MSE(), [x.reshape(-1, 64)])
  found = float(MSE().range(state, bits).high)
  # Near its minimum the error is flat: clips whose error is within 2e-5 of the least differ by about
  # √(2e-5 · 2 error / error''), less than 1 %; sampling and bins change the error by no more.
  assert abs(found / clip - 1) < 0.01
  least = _Counts(state).squared_errors(np.array([found, clip]), bits)
  # The sample ends at 4.9 σ, and at 8 bits the tail beyond is 0.4 % of the error.
  np.testing.assert_allclose(least, error, rtol=5e-3)
  assert least[0] <= least[1] * (1 + 1e-6)


def _kl_plainly(x, bits, bins, width):
  """Migacz's pseudo-code, on `bins` bins of |x|, in loops: the best number of bins."""
  hist = np.bincount(np.floor(np.abs(x.astype(np.float64)) / width).astype(int).ravel(), minlength=bins)
  levels, best = 2 ** (bits - 1), (np.inf, 0)
  for n in range(128, bins + 1):
    p = [int(c) for c in hist[:n]]
    p[-1] += int(hist[n:].sum())
    q = [0.0] * n
    for level in range(levels):
      inside = [j for j in range(n) if j * levels // n == level]
      used = [j for j in inside if p[j] > 0]
      for j in used:
        q[j] = sum(int(hist[i]) for i in inside) / len(used)
    total_p, total_q, kl = sum(p), sum(q), 0.0
    for pj, qj in zip(p, q, strict=True):
      if pj:
        kl += math.inf if qj == 0 else pj / total_p * math.log(pj / total_p / (qj / total_q))
    if kl < best[0] or (kl == best[0] and n > best[1]):
      best = (kl, n)
  return best[1]


@pytest.mark.parametrize(('bits', 'seed'), [(4, 0), (5, 1), (8, 2)])
def test_kl_by_its_pseudo_code(bits, seed):
  rng = np.random.default_rng(seed)
  x = rng.laplace(size=(900, 5)).astype(np.float32)
  x[0, 0] = 40.0  # one outlier
  watcher = KL(bins=150)
  state = _observe(watcher, [x])
  fine = 2.0 ** int(state.exponent)
  merged = -(-(int(40.0 / fine) + 1) // 150)
  bins = -(-(int(40.0 / fine) + 1) // merged)
  n = _kl_plainly(x, bits, bins, merged * fine)
  assert float(watcher.range(state, bits).high) == min(np.float32(n * merged * fine), np.float32(40))


@pytest.mark.parametrize('make', [
  lambda rng: rng.standard_normal((500, 8)),
  lambda rng: np.append(rng.standard_normal((500, 8)), np.full((1, 8), 30.0), 0),
  lambda rng: np.full((5, 8), 2.0),
  lambda rng: rng.uniform(-1, 1, (500, 8)),
])  # fmt: skip
def test_no_clip_exceeds_the_largest_magnitude(make):
  x = make(np.random.default_rng(0)).astype(np.float32)
  for name in OBSERVERS:
    assert float(observer(name).range(_observe(observer(name), [x]), 8).high) <= np.abs(x).max()


def test_kl_clips_a_lone_outlier_and_leaves_a_uniform_range_alone():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((20000, 4)).astype(np.float32)
  x[0, 0] = 30.0
  assert float(KL().range(_observe(KL(), [x]), 8).high) < 10
  x = rng.uniform(-1, 1, (20000, 4)).astype(np.float32)
  assert float(KL().range(_observe(KL(), [x]), 8).high) > 0.95


PUBLISHED = {
  'gauss': [1.71064, 2.15159, 2.55914, 2.93620, 3.28691, 3.61511, 3.92403],
  'laplace': [2.83068, 3.89723, 5.02864, 6.20477, 7.41313, 8.64562, 9.89676],
}


@pytest.mark.parametrize('distribution', list(PUBLISHED))
def test_aciq_clips_are_the_published_ones(distribution):
  found = [aciq_clip(distribution, bits) for bits in range(2, 9)]
  np.testing.assert_allclose(found, PUBLISHED[distribution], rtol=0, atol=1e-5)  # five decimals, some cut off


def test_aciq_chooses_the_distribution_by_its_moments():
  rng = np.random.default_rng(0)
  for distribution, x in (('gauss', rng.normal(size=(4000, 5))), ('laplace', rng.laplace(size=(4000, 5)))):
    x = (3 * x).astype(np.float32)
    state = _observe(ACIQ(), [x])
    chosen = ACIQ().range(state, 4).high
    assert chosen == ACIQ(distribution).range(state, 4).high
    size = np.abs(x).mean() if distribution == 'laplace' else np.sqrt((x.astype(np.float64) ** 2).mean())
    # A value moves by less than a bin within its bin, and so does either moment's root.
    expected = aciq_clip(distribution, 4) * size
    assert abs(chosen - expected) < aciq_clip(distribution, 4) * 2.0 ** int(state.exponent)


# ---- names and files ---------------------------------------------------------------------------------------


def test_observers_by_name():
  assert {name: observer(name).name for name in OBSERVERS} == {name: name for name in OBSERVERS}
  assert observer('percentile', percentile=50) == Percentile(50)
  for given, message in [
    (dict(name='persentile'), "did you mean 'percentile'"),
    (dict(name='percentile', percent=5), "no option 'percent'; did you mean 'percentile'"),
    (dict(name='aciq_gauss', distribution='laplace'), "no option 'distribution'"),
    (dict(name='aciq', distribution='gaus'), "did you mean 'gauss'"),
    (dict(name='percentile', percentile=0), 'above 0 and at most 100'),
    (dict(name='moving_average', momentum=1.0), 'less than 1'),
    (dict(name='absmax', channels=0), 'channels = 0'),
    (dict(name='kl', bins=100), '128 ≤ least ≤ bins'),
  ]:
    with pytest.raises(UserError, match=message):
      observer(**given)


def _calibration():
  watcher = MinMax(3)
  states = {f'layers/{i}/kernel': _observe(watcher, [_data(4, 3, seed=i) / 3]) for i in range(3)}
  return Calibration.of(watcher, states, 8, 4, '0123456789abcdef')


def test_a_calibration_is_read_back_bit_for_bit(tmp_path):
  saved = _calibration()
  saved.save(tmp_path / 'deep' / 'c.json')
  saved.save(tmp_path / 'deep' / 'c.json')
  assert [path.name for path in (tmp_path / 'deep').iterdir()] == ['c.json']
  loaded = Calibration.load(tmp_path / 'deep' / 'c.json', '0123456789abcdef')
  assert dataclasses.replace(loaded, ranges={}) == dataclasses.replace(saved, ranges={})
  assert loaded.options == {'channels': 3}
  assert observer(loaded.observer, **loaded.options) == MinMax(3)
  assert list(loaded.ranges) == list(saved.ranges)
  for path, found in saved.ranges.items():
    _assert_same_range(loaded.ranges[path], found)


def test_a_failed_save_leaves_the_old_file(tmp_path):
  path = tmp_path / 'c.json'
  _calibration().save(path)
  before = path.read_text()
  broken = dataclasses.replace(_calibration(), options={'not': object()})
  with pytest.raises(TypeError):
    broken.save(path)
  assert path.read_text() == before


@pytest.mark.parametrize(('damage', 'message'), [
  (lambda text: text[: len(text) // 2], 'is torn or is not JSON.*calibrate again'),
  (lambda text: '', 'is torn or is not JSON.*calibrate again'),
  (lambda text: '[1]', 'not a calibration'),
  (lambda text: json.dumps(json.loads(text) | {'version': 2}), 'version 2; this qjax reads version 1'),
  (lambda text: json.dumps(json.loads(text) | {'bits': '8'}), 'is damaged'),
  (lambda text: text.replace('"tokens"', '"token"'), 'is damaged.*tokens.*calibrate again'),
  (lambda text: text.replace('"low"', '"lo"', 1), 'is damaged'),
  (lambda text: json.dumps(json.loads(text) | {'ranges': {'a': {'low': 1, 'high': -1}}}), 'is damaged'),
  (lambda text: json.dumps(json.loads(text) | {'ranges': {'a': {'low': 1, 'high': math.inf}}}), 'is damaged'),
  (lambda text: text.replace('0123456789abcdef', 'fedcba9876543210'), 'made with the model fedcba9876543210'),
])  # fmt: skip
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path, damage, message):
  path = tmp_path / 'c.json'
  _calibration().save(path)
  path.write_text(damage(path.read_text()))
  with pytest.raises(UserError, match=message):
    Calibration.load(path, '0123456789abcdef')
  with pytest.raises(UserError, match='no such file'):
    Calibration.load(tmp_path / 'd.json')


# ---- comparison --------------------------------------------------------------------------------------------


def test_score_by_brute_force():
  x = _data(40, 5)
  padded = np.concatenate([x, np.full((8, 5), 1e9, np.float32)])
  mask = np.arange(48) < 40
  rows = score(['absmax', 'mse', 'minmax'], [(padded[:24], mask[:24]), (padded[24:], mask[24:])], 4)
  assert [row['observer'] for row in rows] == ['absmax', 'mse', 'minmax']
  x = x.astype(np.float64)
  for row in rows[:2]:
    clip = row['threshold']
    assert row['clipped'] == np.mean(np.abs(x) > clip)
    expected = 10 * math.log10(np.mean(x**2) / _symmetric_error(x, clip, 4))
    assert abs(row['sqnr_db'] - expected) < 1e-6  # the same sums in another order, in float64
  assert rows[0]['threshold'] == np.abs(x).max() and rows[0]['clipped'] == 0
  assert rows[1]['sqnr_db'] >= rows[0]['sqnr_db']
  step = (x.max() - x.min()) / 15
  expected = 10 * math.log10(
    np.sum(x**2) / np.sum((np.round((x - x.min()) / step) * step + x.min() - x) ** 2)
  )
  assert abs(rows[2]['sqnr_db'] - expected) < 1e-6


def test_score_measures_what_the_levels_hide():
  # Sixteen values, one to a level: nothing is lost. 3 and 1 of them on two bins of one level: by hand.
  x = np.arange(-7, 8, dtype=np.float32)[:, None]
  (row,) = score(['absmax'], [x], 4)
  assert row['kl'] == 0 and row['sqnr_db'] == math.inf
  (row,) = score(['absmax'], [np.array([[7.0, 0.25, 0.25, 0.25, 0.0]], np.float32)], 4)
  assert abs(row['kl'] - (3 * math.log(3 / 2) + math.log(1 / 2)) / 5) < 1e-12
  (row,) = score(['absmax'], [np.zeros((2, 3), np.float32)], 8)
  assert row['threshold'] == 0 and row['clipped'] == 0 and row['kl'] == 0 and row['sqnr_db'] == math.inf


def test_score_takes_observers_of_ones_own():
  rows = score({'half': Percentile(50), 'by channel': AbsMax(5)}, [_data(41, 5)], 8)
  assert [row['observer'] for row in rows] == ['half', 'by channel']
  assert 0.49 < rows[0]['clipped'] <= 0.5 and rows[1]['clipped'] == 0
  with pytest.raises(UserError, match='NaN or infinity'):
    score(['kl'], [np.full((2, 2), np.nan, np.float32)], 8)
