"""From a model file to a quantized one and a verdict, on a tiny model."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from qjax import quantize, storage, trees, verification
from qjax.adapters import Adapter
from qjax.data import plain
from qjax.errors import UserError
from qjax.io import native
from qjax.io.source import Source, load_source
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant import verdict, verify
from qjax.quant.calibrate import Range
from qjax.quant.calibration import Calibration
from qjax.quant.qtensor import QTensor, dequantize
from qjax.quant.qtensor import quantize as pack
from qjax.walk import PATHS, PROJECTIONS, Walk
from tests import small

TEXTS = [(f'document {i}', ''.join(chr(97 + (i * 7 + j * j) % 26) for j in range(60 + i))) for i in range(6)]
STATIC = (('.*', 'int8:axis=tensor,static'),)


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
  return load_source(small.write_model(tmp_path_factory.mktemp('model')))


@pytest.fixture(scope='module')
def rows(source: Source) -> plain.Rows:
  return plain.rows(TEXTS, source.require_tokenizer(), 16)


def recipe(method: str = 'rtn', scheme: str = 'int8:axis=channel', **more: Any) -> quantize.Recipe:
  return quantize.Recipe(method, storage.rules(scheme, 'float32'), batch_size=4, **more)


def made(source: Source, rows: plain.Rows, chosen: quantize.Recipe) -> native.QuantizedModel:
  variables = quantize.quantize(source.config, source.read, chosen, rows)
  origin = {'name': source.name, 'fingerprint': source.fingerprint}
  return native.QuantizedModel(source.config, variables, chosen.activations, source.tokenizer, origin)


def test_rounding_to_nearest_is_quantize_of_every_layer(source: Source, rows: plain.Rows) -> None:
  variables = quantize.quantize(source.config, source.read, recipe(scheme='int4:block=32'), rows)
  for name in PROJECTIONS:
    path = f'layers/{PATHS[name]}'
    found = trees.flatten(variables['params'], native.is_weight)[path]
    assert str(found.scheme) == 'int4:block=32' and found.shape == source.read(path).shape
    for layer in range(source.config.num_layers):
      wanted = jax.jit(pack, static_argnums=1)(source.read(path, layer), 'int4:block=32')
      np.testing.assert_array_equal(found[layer].codes, wanted.codes)
  np.testing.assert_array_equal(variables['params']['embed']['embedding'], source.read('embed/embedding'))


def captured(source: Source, rows: plain.Rows) -> dict[str, np.ndarray]:
  """The inputs of the first layer's projections for all tokens, by one batch of all rows."""
  walk = Walk(source.config, Numerics(policy()), source.read, list(rows.batches(len(rows))))
  layer = next(iter(walk.layers()))
  ((inputs, valid),) = walk.inputs({'params': layer.params})
  return {name: np.asarray(x)[np.asarray(valid)] for name, x in inputs.items()}


@pytest.mark.parametrize('batch_size', [1, 4, 5])
def test_moments_are_those_of_all_tokens_whatever_the_batches(
  batch_size: int, source: Source, rows: plain.Rows
) -> None:
  walk = Walk(source.config, Numerics(policy()), source.read, list(rows.batches(batch_size)))
  layer = next(iter(walk.layers()))
  moments, wanted = walk.observe(layer.params), captured(source, rows)
  assert set(moments) == set(PROJECTIONS)
  for name, x in wanted.items():
    assert int(moments[name].tokens) == len(x) == rows.num_tokens
    np.testing.assert_allclose(moments[name].absmax, np.abs(x).max(0), rtol=1e-5, atol=1e-6)
    gram = np.float64(x).T @ np.float64(x)
    np.testing.assert_allclose(moments[name].gram, gram, rtol=0, atol=1e-5 * np.abs(gram).max())


def test_the_walk_ends_where_the_model_does(source: Source, rows: plain.Rows) -> None:
  batch = next(rows.batches(4))
  walk = Walk(source.config, Numerics(policy()), source.read, [batch])
  for layer in walk.layers():
    walk.apply({'params': layer.params})
  shapes = {path: source.read(path) for path in source.paths}
  model = Transformer(source.config, Numerics(policy()), 'none')
  hidden = model.apply({'params': trees.nest(shapes)}, batch['tokens'], batch['segments'], batch['positions'])
  x = walk._stream[0]
  x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + source.config.rms_eps)
  np.testing.assert_allclose(x * shapes['final_norm/scale'], hidden, rtol=0, atol=1e-4)


def test_static_ranges_are_the_largest_inputs(source: Source, rows: plain.Rows) -> None:
  model = made(source, rows, recipe(activations=STATIC))
  act = trees.flatten(model.variables['act'])
  assert set(act) == {f'layers/{PATHS[name]}' for name in PROJECTIONS}
  # The quantized layer sees what the first layer's float weights make of the embeddings, up to its own error.
  wanted = np.abs(captured(source, rows)['q']).max()
  assert float(act['layers/attn/q/kernel'][0]) == pytest.approx(float(wanted), rel=1e-5)
  pair = verification.Pair.of(source, model, policy())
  logits = pair.candidate.logits(next(rows.batches(2)))
  assert np.isfinite(np.asarray(logits)).all()


def test_ranges_on_both_sides_become_the_larger_magnitude(source: Source, rows: plain.Rows) -> None:
  found = [made(source, rows, recipe(activations=STATIC, observer=name)) for name in ('minmax', 'absmax')]
  jax.tree.map(np.testing.assert_array_equal, *(model.variables['act'] for model in found))


def test_saved_ranges_are_taken_as_they_are(source: Source, rows: plain.Rows, tmp_path: Path) -> None:
  highs = np.arange(1, source.config.num_layers + 1, dtype=np.float32)
  ranges = {f'layers/{path}': Range(-2 * highs, highs) for path in PATHS.values()}
  Calibration(ranges, 'absmax', {}, 8, 1, 'a').save(tmp_path / 'calibration.json')
  saved = Calibration.load(tmp_path / 'calibration.json', 'a')
  model = quantize.quantize(source.config, source.read, recipe(activations=STATIC, ranges=saved), None)
  for high in trees.flatten(model['act']).values():
    np.testing.assert_array_equal(high, 2 * highs)
  for broken, message in (
    (dataclasses.replace(saved, bits=4), 'for 4 bits'),
    (dataclasses.replace(saved, ranges={}), 'no range for layers/attn/q/kernel'),
    (dataclasses.replace(saved, ranges=dict.fromkeys(ranges, Range(-highs[:1], highs[:1]))), 'for layer 1'),
  ):
    with pytest.raises(UserError, match=message):
      quantize.quantize(source.config, source.read, recipe(activations=STATIC, ranges=broken), None)


@pytest.mark.parametrize(
  ('method', 'scheme', 'activations'),
  [
    ('rtn', 'nf4:block=32,dq', ()),
    (
      'smoothquant+gptq:act_order',
      'int4:block=32,asym',
      (('.*/down/kernel', 'none'), ('.*', 'int8:axis=token')),
    ),
    ('decompose:share=0.05', 'int8:axis=channel', ()),
    ('loftq:rank=4,rounds=2', 'nf3:block=32', ()),
    ('rtn', 'int8:axis=channel', STATIC),
    ('gptq', 'fp4:block=16,scale=e4m3', ()),
  ],
)
def test_saved_and_loaded_logits_are_bit_identical(
  method: str, scheme: str, activations: Any, source: Source, rows: plain.Rows, tmp_path: Path
) -> None:
  model = made(source, rows, recipe(method, scheme, activations=activations))
  assert native.save(model, tmp_path / 'model') == trees.nbytes(model.variables)
  again = native.load(tmp_path / 'model')
  assert jax.tree.structure(again.variables) == jax.tree.structure(model.variables)
  assert again.config == model.config and again.activations == model.activations
  assert again.tokenizer is not None
  assert again.tokenizer.encode('abc') == source.require_tokenizer().encode('abc')
  batch = next(rows.batches(3))
  one, two = (verification.Pair.of(source, m, policy()).candidate.logits(batch) for m in (model, again))
  np.testing.assert_array_equal(one, two)


def damaged(directory: Path, change: str) -> None:
  file = directory / native.ARRAYS
  arrays = safetensors.numpy.load_file(file)
  if change == 'missing':
    del arrays['params/layers/attn/q/kernel/scale']
  elif change == 'extra':
    arrays['params/layers/attn/q/kernel/zero'] = np.zeros(1, np.float32)
  elif change == 'shape':
    arrays['params/layers/attn/q/kernel/codes'] = arrays['params/layers/attn/q/kernel/codes'][:, 1:]
  elif change == 'nan':
    arrays['params/layers/attn/q/kernel/scale'][0, 0, 0] = np.nan
  safetensors.numpy.save_file(arrays, file)
  meaning = directory / native.MEANING
  text = meaning.read_text()
  if change == 'scheme':
    meaning.write_text(text.replace('int8:axis=channel', 'int8:axis=tensor', 1))
  elif change == 'version':
    meaning.write_text(text.replace('"version": 1', '"version": 2'))
  elif change == 'torn':
    meaning.write_text(text[:100])
  elif change == 'cut':
    file.write_bytes(file.read_bytes()[:-8])
  elif change == 'depth':
    meaning.write_text(text.replace('"num_layers": 2', '"num_layers": 3'))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ('missing', 'params/layers/attn/q/kernel/scale is missing'),
    ('extra', 'kernel/zero belongs to no weight'),
    ('shape', 'kernel/codes is int8 .* its scheme asks for int8'),
    ('nan', 'kernel/scale holds a NaN'),
    ('scheme', 'scale is float32 .* its scheme asks for'),
    ('version', 'is of version 2; this program reads version 1'),
    ('torn', 'is damaged'),
    ('cut', 'cannot be read'),
    ('depth', 'its model asks for'),
  ],
)
def test_a_damaged_model_is_refused_by_name(
  change: str, message: str, source: Source, rows: plain.Rows, tmp_path: Path
) -> None:
  native.save(made(source, rows, recipe()), tmp_path / 'model')
  damaged(tmp_path / 'model', change)
  with pytest.raises(UserError, match=message):
    native.load(tmp_path / 'model')


def test_an_existing_directory_and_a_stranger_are_refused(
  source: Source, rows: plain.Rows, tmp_path: Path
) -> None:
  with pytest.raises(UserError, match='exists; have the model written elsewhere'):
    native.save(made(source, rows, recipe()), tmp_path)
  with pytest.raises(UserError, match=r'holds no model\.json'):
    native.load(tmp_path)


@pytest.mark.parametrize(
  ('chosen', 'message'),
  [
    (recipe(scheme='int9'), "'int9' is not a format"),
    (recipe('rtx'), "'rtx' is no quantizer"),
    (recipe(activations=(('.*', 'int8:axis=row'),)), 'activation scheme'),
    (recipe(activations=(('.*/dawn/kernel', 'int8:axis=token'),)), 'activations: .*/dawn.* matches none'),
    (recipe(activations=(('.*', 'int8:axis=token'), ('.*/down/kernel', 'none'))), 'is never used'),
    (recipe('gptq:damp=inf'), 'above 0 and finite'),
    (recipe(observer='absmin'), 'absmin'),
    (quantize.Recipe('rtn', storage.rules('int8', 'int8')), 'is no projection .* and cannot rest as'),
    (quantize.Recipe('rtn', (('layers/attn/x/kernel', 'int8'), ('.*', 'float32'))), 'matches none'),
  ],
)
def test_a_recipe_that_cannot_work_is_refused(chosen: quantize.Recipe, message: str, source: Source) -> None:
  with pytest.raises(UserError, match=message):
    chosen.check(source.config)


def test_a_weight_that_is_not_finite_is_refused_by_path(source: Source, rows: plain.Rows) -> None:
  def read(path: str, layer: int | None) -> np.ndarray:
    w = source.read(path, layer)
    if path == 'layers/mlp/up/kernel' and layer == 1:
      w[3, 4] = np.inf
    return w

  with pytest.raises(UserError, match='layers/mlp/up/kernel, layer 1 holds inf at'):
    quantize.quantize(source.config, read, recipe(), rows)


def test_a_weight_beyond_float16_is_refused_by_path(source: Source, rows: plain.Rows) -> None:
  def read(path: str, layer: int | None) -> np.ndarray:
    w = source.read(path, layer)
    if path == 'embed/embedding':
      w[3, 4] = 7e4
    return w

  chosen = quantize.Recipe('rtn', storage.rules('int8:axis=channel', 'float16'))
  with pytest.raises(UserError, match='embed/embedding holds .* beyond the largest float16'):
    quantize.quantize(source.config, read, chosen, rows)


# ---- the verdict -------------------------------------------------------------------------------------------


def judged(source: Source, model: native.QuantizedModel, rows: plain.Rows) -> verdict.Verdict:
  pair = verification.Pair.of(source, model, policy())
  batches = list(rows.batches(4))
  comparison = verify.compare(pair.reference.logits, pair.candidate.logits, batches)
  return verdict.judge(
    verdict.Thresholds(), comparison, list(pair.weight_errors()), list(pair.output_errors(batches[:1])),
    required=('comparison', 'weights', 'outputs'),
  )  # fmt: skip


def test_int8_passes_and_one_damaged_channel_is_named(source: Source, rows: plain.Rows) -> None:
  model = made(source, rows, recipe())
  assert judged(source, model, rows).failures == ()
  down = model.variables['params']['layers']['mlp']['down']['kernel']
  scale = down.scale.at[1, 0, 17].multiply(1.5)
  params = trees.flatten(model.variables['params'], native.is_weight)
  params['layers/mlp/down/kernel'] = dataclasses.replace(down, scale=scale)
  found = judged(source, dataclasses.replace(model, variables={'params': trees.nest(params)}), rows)
  assert not found.passed
  assert any('layers/mlp/down/kernel layer 1 channel 17' in failure for failure in found.failures)


@pytest.mark.parametrize(('scheme', 'size', 'least', 'most'), [
  ('int8:axis=channel', 0.1, 0.98, 1.02),
  ('int2:block=32', 1e-3, -0.2, 0.3),
  ('float32', 1e-3, 1 - 1e-4, 1 + 1e-4),
])  # fmt: skip
def test_what_survives_of_an_adapter_is_what_the_steps_can_hold(
  scheme: str, size: float, least: float, most: float, source: Source, rows: plain.Rows
) -> None:
  # The reference lies on the candidate's grid, as a model does that was quantized before.
  pair = verification.Pair.of(source, made(source, rows, recipe(scheme=scheme)), policy())
  held = {path: dequantize(leaf) if isinstance(leaf, QTensor) else leaf for path, leaf in trees.flatten(
    pair.candidate.variables['params'], native.is_weight).items()}  # fmt: skip
  pair = dataclasses.replace(pair, reference=pair.reference.with_variables({'params': trees.nest(held)}))
  k, n = held['layers/mlp/up/kernel'].shape[-2:]
  layers = source.config.num_layers
  a, b = (jax.random.normal(jax.random.key(i), (layers, 4, m)) for i, m in enumerate((k, n)))
  lora = trees.nest({'layers/mlp/up/kernel': Adapter(a * size, b * size, 1.0)})
  (shares,) = pair.adapter_survival(lora).values()
  assert shares.shape == (source.config.num_layers,)
  assert (shares > least).all() and (shares < most).all(), shares


def test_two_bits_fail_on_the_loss(source: Source, rows: plain.Rows) -> None:
  found = judged(source, made(source, rows, recipe(scheme='nf2:block=64')), rows)
  assert {check.name for check in found.checks if check.status == 'failed'} >= {'kl_mean', 'top1'}


def test_equal_models_differ_in_nothing_and_answer_alike(source: Source, rows: plain.Rows) -> None:
  model = made(source, rows, recipe(scheme='float32'))
  pair = verification.Pair.of(source, model, policy())
  comparison = verify.compare(pair.reference.logits, pair.candidate.logits, list(rows.batches(4)))
  assert comparison.kl_max == 0 and comparison.top1 == 1 and comparison.nll_difference == 0
  done: list[int] = []
  answers = pair.answers(['abc', 'a longer question'], source.require_tokenizer(), 5, done.append)
  assert answers.exact == 1 and answers.count == 2 and done[-1] == 4


def test_a_candidate_of_another_model_is_refused(source: Source, rows: plain.Rows) -> None:
  model = dataclasses.replace(made(source, rows, recipe()), origin={'name': 'other', 'fingerprint': '0'})
  with pytest.raises(UserError, match='was made from other'):
    verification.Pair.of(source, model, policy())


def test_dequantized_weights_give_the_same_function(source: Source, rows: plain.Rows) -> None:
  model = made(source, rows, recipe('smoothquant+rtn', 'int8:axis=channel'))
  batch = next(rows.batches(2))
  packed = verification.Pair.of(source, model, policy()).candidate
  flat = trees.flatten(model.variables['params'], native.is_weight)
  plain_weights = {
    path: dequantize(leaf) if isinstance(leaf, native.QTensor) else jnp.asarray(leaf)
    for path, leaf in flat.items()
  }
  wanted = packed.with_variables({'params': trees.nest(plain_weights)}).logits(batch)
  np.testing.assert_allclose(packed.logits(batch), wanted, rtol=0, atol=1e-5 * float(jnp.abs(wanted).max()))
