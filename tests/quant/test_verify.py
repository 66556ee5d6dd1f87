"""The proof finds what it must: statistics against slow NumPy, and planted damage by its exact place."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import trees
from qjax.errors import UserError
from qjax.quant import verdict, verify
from qjax.quant.qtensor import QTensor, dequantize, quantize
from qjax.quant.verdict import Thresholds, judge
from qjax.quant.verify import compare, weight_sqnr

VOCAB = 37


def _random(*shape, seed=0, scale=1.0):
  return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def _softmax64(logits):
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# ---- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('noise', [1e-4, 1e-2, 0.3, 3.0, 60.0])
def test_kl_is_right_however_close_or_far_the_two_are(noise):
  reference = _random(5, 7, 501, scale=4.0)
  candidate = reference + _random(5, 7, 501, seed=1, scale=noise) + np.float32(5)  # a shift changes nothing
  logp, logq = _softmax64(reference), _softmax64(candidate)
  expected = np.sum(np.exp(logp) * (logp - logq), -1)
  found = np.asarray(jax.jit(verify.kl_divergence)(reference, candidate))
  # d carries some 8 roundings of the largest logit. An error ε of d moves Σ p·d²/2 by sqrt(2·KL)·ε: relative
  # 1.4·ε/sqrt(KL).
  epsilon = 8 * np.abs(candidate).max() * 2.0**-24
  np.testing.assert_allclose(found, expected, rtol=1e-5 + 1.5 * epsilon / np.sqrt(expected.min()))
  assert found.min() > 0


def test_kl_of_excluded_words_is_no_nan():
  reference = jnp.asarray([[0.0, 0.0, -jnp.inf, -jnp.inf]])
  candidate = jnp.asarray([[0.0, 0.0, 0.0, -jnp.inf]])
  np.testing.assert_allclose(verify.kl_divergence(reference, candidate), [math.log(1.5)], rtol=1e-6)
  assert verify.kl_divergence(candidate, reference)[0] == jnp.inf
  assert verify.kl_divergence(candidate, candidate)[0] == 0


def _batches(count=3, rows=2, length=19, seed=0):
  """Rows of up to three documents and padding at the end; prompts have weight 0."""
  random = np.random.default_rng(seed)
  for _ in range(count):
    segments = np.sort(random.integers(0, 4, (rows, length)), axis=-1)[:, ::-1]
    yield {
      'tokens': random.integers(0, VOCAB, (rows, length)).astype(np.int32),
      'targets': random.integers(0, VOCAB, (rows, length)).astype(np.int32),
      # Weights at padding must not count either.
      'weights': random.integers(0, 2, (rows, length)).astype(np.float32),
      'segments': segments.astype(np.int32),
      'positions': np.zeros((rows, length), np.int32),
    }


def _model(noise=0.0):
  table = _random(VOCAB, VOCAB, scale=2.0) + _random(VOCAB, VOCAB, seed=9, scale=noise)
  return lambda batch: jnp.asarray(table)[batch['tokens']]


def test_comparison_equals_slow_arithmetic():
  reference, candidate = _model(), _model(0.3)
  found = compare(reference, candidate, _batches())
  kl, old, new, same, document = [], [], [], [], []
  for index, batch in enumerate(_batches()):
    logp, logq = _softmax64(reference(batch)), _softmax64(candidate(batch))
    for row in range(2):
      for t in range(19):
        if batch['weights'][row, t] > 0 and batch['segments'][row, t] > 0:
          p, q, target = logp[row, t], logq[row, t], batch['targets'][row, t]
          kl.append(np.sum(np.exp(p) * (p - q)))
          old.append(-p[target])
          new.append(-q[target])
          same.append(np.argmax(p) == np.argmax(q))
          document.append((index, row, int(batch['segments'][row, t])))
  kl, old, new = np.array(kl), np.array(old), np.array(new)
  groups = sorted(set(document))
  sums = np.array(
    [sum(d for d, g in zip(new - old, document, strict=True) if g == group) for group in groups]
  )
  sizes = np.array([document.count(group) for group in groups])
  mean = np.mean(new - old)
  error = math.sqrt(len(groups) / (len(groups) - 1) * np.sum((sums - mean * sizes) ** 2)) / len(kl)
  expected = {
    'tokens': len(kl),
    'documents': len(groups),
    'nll_reference': old.mean(),
    'nll_candidate': new.mean(),
    'nll_difference': mean,
    'nll_error': error,
    'kl_mean': kl.mean(),
    'kl_p50': np.quantile(kl, 0.5),
    'kl_p99': np.quantile(kl, 0.99),
    'kl_max': kl.max(),
    'top1': np.mean(same),
    'perplexity_reference': math.exp(old.mean()),
    'perplexity_candidate': math.exp(new.mean()),
  }
  assert 5 < len(groups) < 18 and 0 < expected['top1'] < 1  # the data can tell the cases apart
  for name, value in expected.items():
    # float32 NLL of logits below 10: some 4 roundings of 10·2⁻²⁴.
    np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, atol=3e-6, err_msg=name)
  np.testing.assert_allclose(found.token_kl, kl, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found.token_nll_reference, old, atol=3e-6)
  np.testing.assert_allclose(found.token_nll_candidate, new, atol=3e-6)
  low, high = found.nll_interval
  np.testing.assert_allclose((low + high) / 2, mean, atol=3e-6)
  # Student's t at 97.5 % for 15 degrees of freedom, from a table, with neighbours.
  table = {10: 2.2281, 11: 2.2010, 12: 2.1788, 13: 2.1604, 14: 2.1448, 15: 2.1314, 16: 2.1199, 17: 2.1098}
  np.testing.assert_allclose((high - low) / 2, table[len(groups) - 1] * error, rtol=1e-4)


@pytest.mark.parametrize(
  ('freedom', 'value'),
  [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (30, 2.04227), (10**6, 1.95997)],
)
def test_students_t(freedom, value):
  np.testing.assert_allclose(verify._t_quantile(freedom), value, rtol=2e-3 if freedom > 2 else 1e-5)


def test_documents_are_the_unit_of_the_error():
  """Tokens that repeat a document's one number are no more evidence than that number."""
  per_document = _random(40).astype(np.float64)
  once = verify.clustered_error(per_document, np.ones(40))
  np.testing.assert_allclose(once, per_document.std(ddof=1) / math.sqrt(40))
  np.testing.assert_allclose(verify.clustered_error(100 * per_document, np.full(40, 100)), once)
  assert verify.clustered_error(np.ones(1), np.ones(1)) == math.inf


def test_interval_covers_the_truth_at_its_rate():
  """Correlated documents of random length: 95 % intervals cover; taking tokens for independent would not."""
  random, covered, naive = np.random.default_rng(3), 0, 0
  for _ in range(400):
    sizes = random.integers(1, 30, 40)
    values = [random.standard_normal() + 0.3 * random.standard_normal(size) for size in sizes]
    sums, tokens = np.array([v.sum() for v in values]), np.concatenate(values)
    mean = tokens.mean()
    covered += abs(mean) < verify._t_quantile(39) * verify.clustered_error(sums, sizes)
    naive += abs(mean) < 1.96 * tokens.std() / math.sqrt(len(tokens))
  # The binomial standard deviation is 1.1 %; ratio estimators cover a little less than they say.
  assert 0.90 < covered / 400 < 0.98
  assert naive / 400 < 0.6


def test_same_model_differs_in_nothing():
  found = compare(_model(), _model(), _batches())
  assert (found.kl_max, found.nll_difference, found.nll_error, found.top1) == (0, 0, 0, 1)
  assert judge(Thresholds(), found).passed


def test_kept_tokens_are_bounded_and_sums_cover_all():
  whole = compare(_model(), _model(0.3), _batches(12))
  part = compare(_model(), _model(0.3), _batches(12), keep=50)
  assert len(whole.token_kl) == whole.tokens > 100
  assert len(part.token_kl) == len(part.token_nll_reference) == 50
  assert set(part.token_kl) <= set(whole.token_kl)
  order = [list(whole.token_nll_reference).index(v) for v in part.token_nll_reference]
  assert order[-1] > whole.tokens / 2 > order[0]  # from the whole stream
  for name in ('tokens', 'kl_mean', 'kl_max', 'nll_difference', 'nll_error', 'top1'):
    assert getattr(whole, name) == getattr(part, name)


def test_nan_is_placed_and_fails():
  def broken(batch):
    logits = np.array(_model()(batch))
    if batch['tokens'][0, 0] == last:
      row, position = np.argwhere((batch['weights'] > 0) & (batch['segments'] > 0))[3]
      places.append((int(row), int(position)))
      logits[row, position, 5] = np.nan
    return jnp.asarray(logits)

  places: list[tuple[int, int]] = []
  last = [batch['tokens'][0, 0] for batch in _batches()][-1]
  found = compare(_model(), broken, _batches())
  ((row, position),) = places
  result = judge(Thresholds(), found)
  assert not result.passed
  assert (
    f'not finite: nll_candidate: nan at batch 2, row {row}, position {position}, 1 tokens in all'
    in result.failures
  )
  assert any(line.startswith('kl_mean: nan') for line in result.failures)
  assert any(line.startswith('nll_difference: nan') for line in result.failures)


def test_nan_at_padding_counts_for_nothing():
  def padded(batch):
    logits = np.array(_model()(batch))
    logits[batch['segments'] == 0] = np.nan
    return jnp.asarray(logits)

  assert compare(_model(), padded, _batches()).nonfinite == ()


def test_misfits_are_refused():
  with pytest.raises(ValueError, match='no trained token'):
    compare(_model(), _model(), [])
  with pytest.raises(ValueError, match='do not fit'):
    compare(_model(), lambda batch: _model()(batch)[..., :-1], _batches())


# ---- channels ----------------------------------------------------------------------------------------------


def _params(layers=5, k=96, n=40):
  """A stack whose channels differ in size, as trained ones do, and some of which hold a large weight."""
  random = np.random.default_rng(7)
  down = random.standard_normal((layers, k, n)) * np.exp(random.standard_normal((layers, 1, n)))
  down[:, 3, ::5] *= 12
  return {
    'embed': {'embedding': jnp.asarray(random.standard_normal((VOCAB, n)), jnp.float32)},
    'layers': {
      'mlp': {
        'down': {'kernel': jnp.asarray(down, jnp.float32)},
        'up': {'kernel': jnp.asarray(random.standard_normal((layers, n, k)), jnp.float32)},
      },
      'norm': {'scale': jnp.asarray(random.uniform(0.5, 2, (layers, n)), jnp.float32)},
    },
  }


def _quantized(params, scheme):
  return trees.map_with_path(lambda path, w: quantize(w, scheme) if path.endswith('kernel') else w, params)


def test_weight_sqnr_equals_slow_arithmetic():
  params = _params()
  candidate = _quantized(params, 'int4:block=32')
  found = {(error.path, error.layer): error for error in weight_sqnr(params, candidate)}
  assert len(found) == 1 + 5 * 3
  for path in ('layers/mlp/down/kernel', 'layers/mlp/up/kernel'):
    w = np.asarray(trees.flatten(params)[path], np.float64)
    q = np.asarray(dequantize(trees.flatten(candidate, verify.is_qtensor)[path]), np.float64)
    for layer in range(5):
      error = found[path, layer]
      signal, noise = np.sum(w[layer] ** 2, 0), np.sum((q[layer] - w[layer]) ** 2, 0)
      channels = 10 * np.log10(signal / noise)
      # Sums of at most 96 float32 squares: 96·2⁻²⁴·4.34 dB = 2.5e-5 dB, and the rounding of the errors.
      np.testing.assert_allclose(error.channel_sqnr, channels, atol=1e-3)
      np.testing.assert_allclose(error.sqnr, 10 * math.log10(signal.sum() / noise.sum()), atol=1e-3)
      assert error.worst_channel == np.argmin(channels)
      np.testing.assert_allclose(error.worst_sqnr, channels.min(), atol=1e-3)
      # Rounded to nearest: exactly what the scheme gives.
      np.testing.assert_allclose(error.expected, error.sqnr, atol=1e-3)
      np.testing.assert_allclose(error.channel_drop, 0, atol=1e-3)
  assert found['embed/embedding', None].sqnr == verify.EXACT_DB
  assert found['layers/norm/scale', 2].sqnr == verify.EXACT_DB


@pytest.mark.parametrize('scheme', ['int8:axis=channel', 'nf4:block=32,dq', 'int4:block=32,asym', 'bfloat16'])
def test_sound_weights_pass(scheme):
  """Hard channels are no alarm: a large weight costs its channel 15 dB in every integer scheme."""
  params = _params()
  errors = list(weight_sqnr(params, _quantized(params, scheme)))
  result = judge(Thresholds(), weights=errors, required=('weights',))
  assert result.passed, result.failures
  if scheme == 'int8:axis=channel':
    down = [error for error in errors if error.path == 'layers/mlp/down/kernel']
    assert min(error.channel_sqnr.min() - np.median(error.channel_sqnr) for error in down) < -6


def _damage(q: QTensor, layer: int, channel: int, factor: float) -> QTensor:
  assert q.scale is not None
  return dataclasses.replace(q, scale=q.scale.at[layer, :, channel].multiply(factor))


@pytest.mark.parametrize('factor', [1.5, 0.0, 0.9, -1.0])
def test_one_planted_channel_is_named(factor):
  """One channel of one layer, in a model whose mean numbers do not show it."""
  params = _params()
  candidate = _quantized(params, 'int8:axis=channel')
  whole = {}
  sound = [error.sqnr for error in weight_sqnr(params, candidate)]
  down = candidate['layers']['mlp']['down']
  smallest = int(np.argmin(np.sum(np.asarray(params['layers']['mlp']['down']['kernel'][3]) ** 2, 0)))
  for channel in (17, smallest):
    down['kernel'] = _damage(quantize(params['layers']['mlp']['down']['kernel'], 'int8'), 3, channel, factor)
    errors = list(weight_sqnr(params, candidate))
    result = judge(Thresholds(weight_matrix_drop_db=100.0), weights=errors, required=())
    assert not result.passed
    assert len(result.failures) == 1
    assert f'at layers/mlp/down/kernel layer 3 channel {channel}:' in result.failures[0]
    (row,) = [check for check in result.checks if check.name == 'weight_channel_drop_db']
    assert (row.status, row.where) == ('failed', f'layers/mlp/down/kernel layer 3 channel {channel}')
    whole[channel] = np.mean([error.sqnr for error in errors])
  assert np.mean(sound) - whole[smallest] < 2  # dB: the mean over the model hides it


def test_planted_channel_hides_from_token_means():
  """The logits of a model with a dead channel pass every token limit; only the channel check fails."""
  w = _random(VOCAB, 64, 64) / 8
  head = _random(64, VOCAB, seed=2) / 8
  head[17] = 1e-3  # the channel matters little on this data
  params = {'down': {'kernel': jnp.asarray(w[:4])}}
  sound = quantize(params['down']['kernel'], 'int8')
  bad = {'down': {'kernel': _damage(sound, 3, 17, 0.0)}}

  def model(kernel):
    def logits(batch):
      x = jax.nn.one_hot(batch['tokens'], 64)
      for layer in range(4):
        x = x + x @ kernel[layer]
      return x @ jnp.asarray(head)

    return logits

  found = compare(
    model(params['down']['kernel']), model(dequantize(bad['down']['kernel'])), _batches(6, 4, 40)
  )
  assert judge(Thresholds(), found).passed
  result = judge(Thresholds(), found, weight_sqnr(params, bad))
  assert any('down/kernel layer 3 channel 17:' in line for line in result.failures)
  assert not any(line.startswith(('kl', 'nll', 'top1')) for line in result.failures)


def test_a_damaged_vector_and_a_damaged_layer_are_named():
  params = _params()
  candidate = _quantized(params, 'nf4:block=32')
  candidate['layers']['norm']['scale'] = candidate['layers']['norm']['scale'].at[2].multiply(1.5)
  up = candidate['layers']['mlp']['up']
  up['kernel'] = dataclasses.replace(up['kernel'], scale=up['kernel'].scale.at[1].multiply(2))
  failures = judge(Thresholds(), weights=weight_sqnr(params, candidate), required=()).failures
  assert [line.split(':')[0] for line in failures] == [  # the worst first
    'weight_matrix_drop_db at layers/norm/scale layer 2',
    'weight_matrix_drop_db at layers/mlp/up/kernel layer 1',
  ]


def test_nan_weight_is_named():
  params = _params()
  candidate = _quantized(params, 'int8')
  down = candidate['layers']['mlp']['down']
  down['kernel'] = _damage(down['kernel'], 4, 39, np.nan)
  errors = list(weight_sqnr(params, candidate))
  failures = judge(Thresholds(), weights=errors, required=()).failures
  assert any('layers/mlp/down/kernel layer 4 channel 39: nan' in line for line in failures)
  assert [e.worst_channel for e in errors if (e.path, e.layer) == ('layers/mlp/down/kernel', 4)] == [39]


def test_trees_that_differ_are_refused():
  params = _params()
  with pytest.raises(UserError, match='layers/norm/scale .* missing in the candidate'):
    list(weight_sqnr(params, {**params, 'layers': {'mlp': params['layers']['mlp']}}))
  with pytest.raises(UserError, match=r'embed/embedding is \(37, 40\) in the reference and \(37, 39\)'):
    list(weight_sqnr(params, {**params, 'embed': {'embedding': params['embed']['embedding'][:, :-1]}}))


def test_output_sqnr_names_a_planted_channel():
  def layers():
    for layer in range(3):
      for name in ('attn/o', 'mlp/down'):
        y = _random(50, 33, seed=layer)
        z = y + _random(50, 33, seed=10 + layer, scale=0.02)
        if (layer, name) == (1, 'mlp/down'):
          z[:, 17] = 0
        yield layer, name, y, z

  rows = list(layers())
  stream = [[(name, y, z) for at, name, y, z in rows if at == layer] for layer in range(3)]
  errors = list(verify.output_sqnr(stream))
  for error, (layer, name, y, z) in zip(errors, rows, strict=True):
    assert (error.path, error.layer, error.expected) == (name, layer, None)
    noise = np.sum((z.astype(np.float64) - y) ** 2, 0)
    np.testing.assert_allclose(
      error.channel_sqnr, 10 * np.log10(np.sum(y.astype(np.float64) ** 2, 0) / noise), atol=1e-3
    )
  result = judge(Thresholds(), outputs=errors, required=())
  assert [line.split(':')[0] for line in result.failures] == [
    'output_channel_drop_db at mlp/down layer 1 channel 17'
  ]


# ---- answers, adapters, verdict ----------------------------------------------------------------------------


def test_answers_part_at_the_first_difference():
  found = verify.answers(['same', 'abcd', 'ab', 'xyz'], ['same', 'abXd', 'abc', 'Xyz'], ['p', 'q', 'r', 's'])
  assert (found.count, found.exact) == (4, 0.25)
  assert [(d.prompt, d.position) for d in found.disagreements] == [('s', 0), ('q', 2), ('r', 2)]
  assert len(verify.answers(['a'] * 9, ['b'] * 9, ['p'] * 9, shown=4).disagreements) == 4
  with pytest.raises(UserError, match='2 prompts have 1 reference and 2 candidate'):
    verify.answers(['a'], ['a', 'b'], ['p', 'q'])


@pytest.mark.parametrize(('ratio', 'share'), [(0.003, 0.015), (0.01, 0.016), (0.03, 0.04), (0.1, 0.84)])
def test_requantizing_a_merged_adapter_loses_most_of_it(ratio, share):
  """NF4 with blocks of 64: of a small Δ only the largest weight of each block, 1/64, follows."""
  base = dequantize(quantize(_random(2, 1024, 512, scale=0.02), 'nf4:block=64'))
  delta = _random(2, 1024, 512, seed=1)
  delta *= ratio * np.linalg.norm(base) / np.linalg.norm(delta)
  merged = quantize(base + delta, 'nf4:block=64')
  found = verify.adapter_survival({'down': base}, {'down': delta}, {'down': merged})['down']
  assert found.shape == (2,)
  np.testing.assert_allclose(found, share, atol=0.02)
  slow = np.sum(delta.astype(np.float64) * (np.asarray(dequantize(merged)) - base), (1, 2)) / np.sum(
    delta.astype(np.float64) ** 2, (1, 2)
  )
  np.testing.assert_allclose(found, slow, rtol=1e-3)
  result = judge(Thresholds(), survival={'down': found}, required=('survival',))
  assert not result.passed and f'adapter_survival at down layer {np.argmin(found)}' in result.failures[0]
  kept = verify.adapter_survival({'down': base}, {'down': delta}, {'down': base + delta})
  np.testing.assert_allclose(kept['down'], 1, atol=1e-3)
  assert judge(Thresholds(), survival=kept, required=('survival',)).passed


def test_nothing_measured_is_never_passed():
  empty = judge(Thresholds())
  assert not empty.passed and empty.failures == ('comparison: required, but not measured',)
  assert {check.status for check in empty.checks} == {'not measured'}
  assert judge(Thresholds(), required=()).failures == ('nothing was measured',)
  found = compare(_model(), _model(), _batches())
  partial = judge(Thresholds(), found, weights=[], answers=verify.answers([], [], []))
  assert partial.passed
  status = {check.name: check.status for check in partial.checks}
  assert status['kl_mean'] == 'passed'
  assert (
    status['weight_channel_drop_db'] == status['exact_match'] == status['adapter_survival'] == 'not measured'
  )
  strict = judge(Thresholds(), found, weights=[], required=('comparison', 'weights'))
  assert strict.failures == ('weights: required, but not measured',)
  with pytest.raises(UserError, match="did you mean 'weights'"):
    judge(Thresholds(), required=('weight',))


@pytest.mark.parametrize(
  ('name', 'change'),
  [
    ('nll_difference', {'nll_interval': (0.001, 0.0101)}),
    ('kl_mean', {'kl_mean': 0.021}),
    ('kl_p99', {'kl_p99': 0.21}),
    ('top1', {'top1': 0.9699}),
  ],
)
def test_each_limit_of_the_comparison_bites(name, change):
  good = dataclasses.replace(
    compare(_model(), _model(), _batches()), nll_interval=(-0.01, 0.01), kl_mean=0.02, kl_p99=0.2, top1=0.97
  )
  assert judge(Thresholds(), good).passed
  result = judge(Thresholds(), dataclasses.replace(good, **change))
  assert [line.split(':')[0] for line in result.failures] == [name]
  assert [check.name for check in result.checks if check.status == 'failed'] == [name]
  broken = {field: (math.nan, math.nan) if field == 'nll_interval' else math.nan for field in change}
  assert not judge(Thresholds(), dataclasses.replace(good, **broken)).passed


def test_answers_and_outputs_have_limits():
  result = judge(Thresholds(exact_match=0.8), answers=verify.answers('abcd', 'abcX', 'pqrs'), required=())
  assert result.failures == ('exact_match: 0.75 of 4 answers; limit: at least 0.8',)
  y = _random(20, 8)
  result = judge(
    Thresholds(), outputs=verify.output_sqnr([[('mlp', y, y + _random(20, 8, seed=1))]]), required=()
  )
  assert [line.split(':')[0] for line in result.failures] == ['output_sqnr_db at mlp layer 0']


def test_one_document_gives_no_interval():
  batch = next(_batches(1, 1))
  batch['segments'] = np.ones_like(batch['segments'])
  result = judge(Thresholds(), compare(_model(), _model(0.001), [batch]))
  assert [line.split(':')[0] for line in result.failures] == ['nll_difference']
  assert 'inf' in result.failures[0]


def test_long_lists_are_cut_and_counted():
  y = _random(20, 8)
  bad = [[('mlp', y, y + _random(20, 8, seed=1))]] * 25
  failures = judge(Thresholds(), outputs=verify.output_sqnr(bad), required=()).failures
  assert len(failures) == verdict.NAMED + 1
  assert failures[-1] == 'output_sqnr_db: 5 more places fail'


def test_limits_must_be_numbers():
  with pytest.raises(UserError, match=r'thresholds\.top1 = nan'):
    Thresholds(top1=math.nan)


def test_record_is_plain():
  params = _params()
  weights = list(weight_sqnr(params, _quantized(params, 'int8')))
  found = compare(_model(), _model(0.3), _batches())
  record = verdict.record(
    judge(Thresholds(), found, weights),
    found,
    weights,
    survival={'a': np.ones(2, np.float32)},
    model='tiny',
  )
  assert json.loads(json.dumps(record))['comparison']['tokens'] == found.tokens
  assert record['model'] == 'tiny' and len(record['weights']) == len(weights)
  assert len(found.as_dict(points=10)['token_kl']) == 10
