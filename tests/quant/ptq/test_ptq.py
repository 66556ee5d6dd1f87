"""Methods of post-training quantization: exact where they must be, better where they claim to be."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.errors import UserError
from qjax.quant import ptq
from qjax.quant.formats import parse_scheme
from qjax.quant.ptq import lowrank
from qjax.quant.ptq.base import LayerData
from qjax.quant.ptq.gptq import GPTQ
from qjax.quant.ptq.hqq import HQQ
from qjax.quant.ptq.lowrank import LowRank, _best
from qjax.quant.qtensor import QTensor, decode, dequantize, encode, quantize, ranges, read_scales

# Projections of two shapes: each is compiled for itself.
D, F, HEADS, KV, C = 24, 24, 6, 2, 4
SHAPES = {
  'q': (D, HEADS * C), 'k': (D, KV * C), 'v': (D, KV * C), 'o': (HEADS * C, D),
  'gate': (D, F), 'up': (D, F), 'down': (F, D),
}  # fmt: skip


def inputs(k: int, seed: int, rows: int = 512) -> np.ndarray:
  """Correlated inputs [rows, k] whose sizes differ by factors of ten."""
  rng = np.random.default_rng(seed)
  mix = rng.normal(size=(k, k)) / np.sqrt(k) + np.eye(k)
  return rng.normal(size=(rows, k)) @ mix * np.exp(rng.normal(size=k))


@functools.cache
def layer(norm_offset: float = 0.0) -> LayerData:
  rng = np.random.default_rng(0)
  weights = {name: jnp.asarray(rng.normal(size=shape) / 5, jnp.float32) for name, shape in SHAPES.items()}
  gram, absmax = {}, {}
  for seed, group in enumerate((('q', 'k', 'v'), ('o',), ('gate', 'up'), ('down',))):
    x = inputs(SHAPES[group[0]][0], seed)
    for name in group:
      gram[name] = jnp.asarray(x.T @ x / len(x), jnp.float32)
      absmax[name] = jnp.asarray(np.abs(x).max(0), jnp.float32)
  norms = {
    name: jnp.asarray(rng.uniform(0.5, 2, D) - norm_offset, jnp.float32) for name in ('attn_norm', 'mlp_norm')
  }
  biases = {'v': jnp.asarray(rng.normal(size=KV * C), jnp.float32)}
  return LayerData(weights, norms, norm_offset, biases, gram, absmax, HEADS, KV, C)


def function(data: LayerData, x: np.ndarray) -> list[np.ndarray]:
  """In float64: what q, k, o, and down return; attention is replaced by its linear part, an average."""
  w = {name: np.asarray(value, np.float64) for name, value in data.weights.items()}
  norm = {name: np.asarray(value, np.float64) + data.norm_offset for name, value in data.norms.items()}
  y = x * norm['attn_norm']
  v = (y @ w['v'] + np.asarray(data.biases['v'], np.float64)).reshape(len(x), KV, C)
  heads = np.repeat(v, HEADS // KV, axis=1)
  mixed = np.tril(np.ones((len(x), len(x)))) / np.arange(1, len(x) + 1)[:, None]
  attended = np.einsum('ts,shc->thc', mixed, heads).reshape(len(x), -1)
  z = x * norm['mlp_norm']
  gate = z @ w['gate']
  return [y @ w['q'], y @ w['k'], attended @ w['o'], (gate / (1 + np.exp(-gate)) * (z @ w['up'])) @ w['down']]


INT4 = parse_scheme('int4:block=8')


@pytest.mark.parametrize('norm_offset', [0.0, 1.0])
@pytest.mark.parametrize('spelling', ['smoothquant', 'smoothquant:alpha=0.8', 'awq:grid=5'])
def test_a_reparametrization_changes_no_output(spelling: str, norm_offset: float) -> None:
  (step,) = ptq.make(f'{spelling}+rtn').reparametrizations
  before, x = layer(norm_offset), np.random.default_rng(1).normal(size=(9, D))
  after = step(before, lambda name: INT4)
  assert any(not np.array_equal(after.weights[name], before.weights[name]) for name in SHAPES)
  for found, wanted in zip(function(after, x), function(before, x), strict=True):
    # Every scale is rounded to float32 twice, once in each of two factors of a product.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
  # The statistics are those of the inputs that the new weights see.
  scale = np.asarray(after.weights['down'] / before.weights['down'])[:, 0]
  np.testing.assert_allclose(after.absmax['down'] * scale, before.absmax['down'], rtol=1e-5)
  np.testing.assert_allclose(after.gram['down'] * np.outer(scale, scale), before.gram['down'], rtol=1e-4)


def output_error(data: LayerData, weights: dict[str, Any], adapters: dict[str, Any] | None = None) -> float:
  """Mean squared error of the outputs over that of the outputs themselves."""
  noise = signal = 0.0
  for name, w in data.weights.items():
    found = weights[name]
    found = dequantize(found) if isinstance(found, QTensor) else found.dequantize(jnp.dtype('float32'))
    if adapters and name in adapters:
      a, b, s = adapters[name]
      found = found + s * a.T @ b
    e, w64, gram = np.float64(w - found), np.float64(w), np.float64(data.gram[name])
    noise += np.sum(e * (gram @ e))
    signal += np.sum(w64 * (gram @ w64))
  return noise / signal


def error_of(spelling: str, scheme: str) -> float:
  method, parsed = ptq.make(spelling), parse_scheme(scheme)
  data = layer()
  for step in method.reparametrizations:
    data = step(data, lambda name: parsed)
  result = method(layer(), lambda name: parsed)
  return output_error(data, dict(result.weights), dict(result.adapters))


@pytest.mark.parametrize(
  ('spelling', 'scheme', 'gain'),
  [
    ('gptq', 'int4:block=8', 1.3),
    ('gptq:act_order', 'int4:block=8', 1.6),
    ('gptq:act_order', 'nf4:block=8', 1.6),
    ('gptq', 'int4:block=7,asym', 1.3),
    ('gptq', 'int3:axis=channel', 1.3),
    ('awq+rtn', 'int4:block=8', 1.1),
    ('awq+gptq', 'int4:block=8', 1.5),
    ('rtn:clip=layer_output', 'int3:axis=channel', 1.1),
    ('rtn:clip=activation_weighted', 'int3:axis=channel', 1.1),
    ('loftq:rank=4,rounds=3', 'int4:block=8', 1.2),
    ('loftq:rank=4,rounds=3,clip', 'nf2:block=16', 1.4),
    ('decompose:share=0.1', 'int4:block=8', 1.1),
  ],
)
def test_outputs_err_less_than_after_rounding_to_nearest(spelling: str, scheme: str, gain: float) -> None:
  assert error_of(spelling, scheme) * gain < error_of('rtn', scheme)


def test_few_vectors_of_a_large_matrix_are_as_good_as_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
  """On noise, whose singular values lie close together: nothing is left for a lucky guess."""
  x = jax.random.normal(jax.random.key(0), (96, 160))
  left = lambda a, b: float(jnp.linalg.norm(x - a @ b))
  best = left(*lowrank._best(x, 8))
  monkeypatch.setattr(lowrank, 'LARGE', 64)
  found = left(*lowrank._best(x, 8))
  none = float(jnp.linalg.norm(x))
  assert best - 1e-3 < found and none - found > 0.97 * (none - best)


def naive_gptq(w: np.ndarray, gram: np.ndarray, scheme: Any, order: np.ndarray, damp: float) -> np.ndarray:
  """One row at a time, the inverse Hessian recomputed for what is left: the definition, in float64."""
  k = len(w)
  stored, offset = ranges(jnp.asarray(w, jnp.float32), scheme)
  scale = read_scales(stored)
  one = dataclasses.replace(scheme, granularity='channel', block=0)
  rows = np.arange(k) // scheme.block_of(k)
  hessian = gram + damp * np.mean(np.diag(gram)) * np.eye(k)
  todo, found = w.astype(np.float64).copy(), np.zeros(w.shape)
  left = list(order)
  while left:
    inverse = np.linalg.inv(hessian[np.ix_(left, left)])
    row = left[0]
    s, o = scale[rows[row]][None], None if offset is None else offset[rows[row]][None]
    codes = encode(jnp.asarray(todo[row][None], jnp.float32), one, s, o)
    found[row] = np.asarray(decode(codes, one, s, o))[0]
    error = (todo[row] - found[row]) / inverse[0, 0]
    for position, other in enumerate(left[1:], 1):
      todo[other] -= inverse[position, 0] * error
    left = left[1:]
  return found


@pytest.mark.parametrize('act_order', [False, True])
@pytest.mark.parametrize(
  'scheme', ['int4:block=8', 'int4:block=5,asym', 'nf4:block=8,dq', 'fp4:block=8,scale=e4m3']
)
def test_gptq_is_its_definition(scheme: str, act_order: bool) -> None:
  parsed = parse_scheme(scheme)
  w = np.random.default_rng(3).normal(size=(19, 5)).astype(np.float32)
  x = inputs(19, 4)
  gram = (x.T @ x / len(x)).astype(np.float32)
  order = np.argsort(-np.diag(gram), kind='stable') if act_order else np.arange(19)
  q, _ = GPTQ(act_order=act_order)(jnp.asarray(w), parsed, jnp.asarray(gram), None)
  wanted = naive_gptq(w, gram.astype(np.float64), parsed, order, 0.01)
  found = np.asarray(dequantize(q))
  # float32 against float64: a weight that lies between two levels may fall to the other side.
  assert np.mean(np.abs(found - wanted) > 1e-5) <= 0.05


def test_gptq_without_correlations_rounds_to_nearest() -> None:
  w = jnp.asarray(np.random.default_rng(0).normal(size=(130, 7)), jnp.float32)
  q, _ = GPTQ()(w, INT4, 3 * jnp.eye(130), None)
  np.testing.assert_array_equal(q.codes, quantize(w, INT4).codes)


def test_gptq_rounds_inputs_that_calibration_never_saw_to_nearest() -> None:
  w = jnp.asarray(np.random.default_rng(0).normal(size=(24, 8)), jnp.float32)
  gram = layer().gram['q'].at[5].set(0).at[:, 5].set(0)
  q, _ = GPTQ()(w, INT4, gram, None)
  np.testing.assert_array_equal(dequantize(q)[5], dequantize(quantize(w, INT4))[5])
  assert np.isfinite(np.asarray(dequantize(q))).all()


def test_hqq_lowers_the_absolute_error_of_every_block() -> None:
  w = jnp.asarray(np.random.default_rng(0).standard_t(3, size=(37, 6)), jnp.float32)
  scheme = parse_scheme('int3:block=16,asym')
  q, _ = HQQ()(w, scheme, None, None)
  found, plain = (np.abs(np.asarray(dequantize(x) - w)) for x in (q, quantize(w, scheme)))
  for start in range(0, 37, 16):
    ours, theirs = (e[start : start + 16].sum(0) for e in (found, plain))
    assert (ours <= theirs * (1 + 1e-5)).all()
  assert found.sum() < 0.98 * plain.sum()
  # Sizes are counted in steps of the scale, so a weight and its quarter have the same codes.
  np.testing.assert_array_equal(HQQ()(w / 4, scheme, None, None)[0].codes, q.codes)
  with pytest.raises(UserError, match='add asym'):
    HQQ()(w, parse_scheme('int3:block=16'), None, None)


@pytest.mark.parametrize('weighted', [False, True])
def test_more_rounds_of_a_low_rank_correction_never_hurt(weighted: bool) -> None:
  w, gram = layer().weights['down'], layer().gram['down']
  weigh = np.sqrt(np.diag(gram))[:, None] if weighted else 1.0
  errors = []
  for rounds in (1, 2, 4):
    q, (a, b, s) = LowRank(4, rounds, weighted)(w, INT4, gram, None)
    errors.append(float(np.sum(np.square(np.asarray(w - dequantize(q) - s * a.T @ b) * weigh))))
  assert errors[0] >= errors[1] * (1 - 1e-5) >= errors[2] * (1 - 1e-4)
  rank_one = np.sum(np.square(np.asarray(w - dequantize(quantize(w, INT4))) * weigh))
  assert errors[0] < rank_one


@pytest.mark.parametrize('shape', [(19, 33), (33, 19), (7, 7)])
def test_the_best_of_a_rank_errs_by_the_singular_values_left_out(shape: tuple[int, int]) -> None:
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  left_out = np.linalg.svd(x.astype(np.float64), compute_uv=False)[4:]
  a, b = (np.asarray(part, np.float64) for part in _best(jnp.asarray(x), 4))
  np.testing.assert_allclose(np.sum((x - a @ b) ** 2), np.sum(left_out**2), rtol=1e-5)
  np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1), rtol=1e-4)


def test_a_low_rank_correction_of_unseen_inputs_is_finite() -> None:
  q, (a, b, _) = LowRank(4, 2, True)(layer().weights['q'], INT4, jnp.zeros((D, D)), None)
  assert all(np.isfinite(np.asarray(x)).all() for x in (dequantize(q), a, b))


def test_a_float_or_missing_scheme_leaves_the_weight() -> None:
  schemes = {'q': None, 'k': parse_scheme('bfloat16')}
  result = ptq.make('rtn')(layer(), lambda name: schemes.get(name, INT4))
  np.testing.assert_array_equal(result.weights['q'], layer().weights['q'])
  np.testing.assert_array_equal(
    dequantize(result.weights['k']), layer().weights['k'].astype(jnp.bfloat16).astype(jnp.float32)
  )


@pytest.mark.parametrize(
  ('spelling', 'message'),
  [
    ('rnt', "'rnt' is no quantizer.*rtn"),
    ('gptq+rtn', "'gptq' is no reparametrization"),
    ('smoothquant', "'smoothquant' is no quantizer"),
    ('gptq:', 'no option follows'),
    ('gptq:dmap=1', "no option 'dmap'; it has act_order, damp"),
    ('gptq:damp=x', 'damp=x is no float'),
    ('gptq:damp', 'damp= is no float'),
    ('gptq:damp=0', 'must be above 0'),
    ('gptq:act_order=maybe', 'act_order=maybe is no bool'),
    ('gptq:damp=1,damp=2', 'given twice'),
    ('awq:grid=0+rtn', 'grid=0 must be at least 1'),
    ('smoothquant:alpha=2+rtn', 'between 0 and 1'),
    ('rtn:clip=wieght_mse', 'clip=wieght_mse is not known.*weight_mse'),
    ('decompose:share=1', 'between 0 and 1'),
  ],
)
def test_a_wrong_spelling_is_refused(spelling: str, message: str) -> None:
  with pytest.raises(UserError, match=message):
    ptq.make(spelling)
