"""Models of `native.save` as models to start from: what is read, and what is refused."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from qjax import trees
from qjax.adapters import Adapter
from qjax.errors import UserError
from qjax.io import native
from qjax.io.source import Source, load_source, params
from qjax.quant.activations import Decomposed, decompose
from qjax.quant.qtensor import QTensor, dequantize, quantize
from tests import small
from tests.io import model_files

CONFIG = dataclasses.replace(small.CONFIG, tie_embeddings=False, qkv_bias=True)
Q, DOWN, EMBEDDING = 'layers/attn/q/kernel', 'layers/mlp/down/kernel', 'embed/embedding'


@pytest.fixture(scope='module')
def original(tmp_path_factory: pytest.TempPathFactory) -> Source:
  return load_source(small.write_model(tmp_path_factory.mktemp('model'), small.CONFIG))


def saved(directory: Path, stored: dict[str, Any] | None = None, **more: Any) -> native.QuantizedModel:
  """A random model, written; `stored` replaces parameters by path, `more` what else the model has."""
  flat: dict[str, Any] = trees.flatten(model_files.random_params(CONFIG))
  for path, leaf in (stored or {}).items():
    flat[path] = leaf(jnp.asarray(flat[path])) if callable(leaf) else leaf
  variables = {'params': trees.nest(flat)} | more.pop('variables', {})
  fields = dict(activations=(), tokenizer=None, origin={'name': 'tiny', 'fingerprint': '0123'}) | more
  model = native.QuantizedModel(CONFIG, variables, **fields)
  native.save(model, directory)
  return model


def plain(leaf: Any) -> np.ndarray:
  """A whole leaf in float32."""
  if isinstance(leaf, QTensor):
    return np.asarray(dequantize(leaf))
  if isinstance(leaf, Decomposed):
    return np.stack([
      np.asarray(jax.tree.map(lambda x: x[i], leaf).dequantize(jnp.dtype('float32')))  # noqa: B023
      for i in range(leaf.shape[0])
    ])
  return np.asarray(leaf).astype(np.float32)


def packed(scheme: str) -> Callable[[jax.Array], QTensor]:
  return lambda w: quantize(w, scheme)


def outliers(w: jax.Array) -> Decomposed:
  rows = jnp.asarray([[3, 50], [7, w.shape[-2]]], jnp.int32)  # the second layer has one alone
  return decompose(w, rows, 'int8:axis=channel')


STORED = {
  'plain': {},
  'bfloat16': {EMBEDDING: lambda w: w.astype(jnp.bfloat16), Q: lambda w: w.astype(jnp.float16)},
  'codes of bfloat16': {EMBEDDING: packed('bfloat16')},
  'int8': {Q: packed('int8:axis=channel'), DOWN: packed('int4:block=32,asym')},
  'nf4': {Q: packed('nf4:block=32,dq'), DOWN: packed('fp4:block=16,scale=e4m3')},
  'decomposed': {Q: outliers, DOWN: packed('fp4:block=32,scale=e8m0')},
}


@pytest.mark.parametrize('stored', STORED)
def test_every_parameter_is_what_its_codes_stand_for(tmp_path: Path, stored: str) -> None:
  saved(tmp_path / 'tiny', STORED[stored])
  source = load_source(tmp_path / 'tiny')
  assert (source.name, source.config) == ('tiny', CONFIG)
  wanted = trees.flatten(native.load(tmp_path / 'tiny').variables['params'], native.is_weight)
  read = trees.flatten(params(source))
  assert read.keys() == wanted.keys() == set(source.paths)
  for path, leaf in wanted.items():
    assert read[path].dtype == np.float32
    np.testing.assert_array_equal(read[path], plain(leaf), err_msg=path)
  layer = source.read(Q, 1)
  np.testing.assert_array_equal(layer, plain(wanted[Q])[1])
  layer[:] = 0  # the caller owns it
  np.testing.assert_array_equal(source.read(Q, 1), read[Q][1])


def test_one_layer_at_a_time_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  saved(tmp_path / 'tiny', STORED['nf4'])
  source, shapes = load_source(tmp_path / 'tiny'), []

  def watched(q: QTensor, *dtype: Any) -> jax.Array:
    shapes.append(q.shape)
    return dequantize(q, *dtype)

  monkeypatch.setattr(native.qtensor, 'dequantize', watched)
  source.read(Q)
  assert shapes == [(CONFIG.d_model, CONFIG.num_heads * CONFIG.head_dim)] * CONFIG.num_layers


def test_it_reads_the_same_under_a_mesh(tmp_path: Path) -> None:
  saved(tmp_path / 'tiny', STORED['nf4'])
  source = load_source(tmp_path / 'tiny')
  alone = source.read(Q)
  with jax.set_mesh(jax.make_mesh((8,), ('data',))):
    np.testing.assert_array_equal(source.read(Q), alone)


def test_unknown_parameters_and_layers_are_refused(tmp_path: Path) -> None:
  saved(tmp_path / 'tiny', STORED['int8'])
  source = load_source(tmp_path / 'tiny')
  with pytest.raises(UserError, match="tiny has no parameter 'layers/attn/q/kernels'; did you mean"):
    source.read('layers/attn/q/kernels')
  with pytest.raises(UserError, match='tiny has layers 0 to 1'):
    source.read(Q, 2)
  with pytest.raises(UserError, match='belongs to no layer'):
    source.read(EMBEDDING, 0)


def test_the_tokenizer_is_there_or_its_absence_explained(tmp_path: Path, original: Source) -> None:
  saved(tmp_path / 'with', tokenizer=original.tokenizer)
  source = load_source(tmp_path / 'with')
  found, wanted = source.require_tokenizer(), original.require_tokenizer()
  assert found.encode('a bc') == wanted.encode('a bc')
  assert (found.eos_id, found.pad_id, found.bos_id) == (wanted.eos_id, wanted.pad_id, wanted.bos_id)
  assert found.chat_template == wanted.chat_template and source.tokenizer_problem is None
  saved(tmp_path / 'without')
  with pytest.raises(UserError, match='without comes without a usable tokenizer: .* was saved without one'):
    load_source(tmp_path / 'without').require_tokenizer()
  (tmp_path / 'with' / native.TOKENIZER).unlink()
  with pytest.raises(UserError, match=r'with comes without a usable tokenizer: .*tokenizer\.json cannot be'):
    load_source(tmp_path / 'with').require_tokenizer()


def test_the_fingerprint_follows_weights_and_description(tmp_path: Path) -> None:
  saved(tmp_path / 'first')
  saved(tmp_path / 'other', {Q: lambda w: w.at[1, 5, 7].add(2**-10)})
  saved(tmp_path / 'elsewhere', origin={'name': 'another'})
  shutil.copytree(tmp_path / 'first', tmp_path / 'same')
  shutil.copytree(tmp_path / 'first', tmp_path / 'flipped')
  file = tmp_path / 'flipped' / native.ARRAYS
  whole = bytearray(file.read_bytes())
  whole[-1000] ^= 1
  file.write_bytes(whole)
  names = ('first', 'same', 'other', 'elsewhere', 'flipped')
  marks = [load_source(tmp_path / name).fingerprint for name in names]
  assert marks[0] == marks[1]
  assert len(set(marks)) == 4


# ---- what is refused --------------------------------------------------------------------------------------

LORA = {'lora': trees.nest({Q: Adapter(jnp.ones((2, 4, 64)), jnp.ones((2, 4, 128)), 1.0)})}
ACT = {'act': trees.nest({Q: jnp.ones(2)})}
RULES = (('.*', 'int8:axis=token'),)
CODES = f'params/{Q}/codes'


@pytest.mark.parametrize(
  ('more', 'message'),
  [
    (dict(variables=LORA), r'its corrections \(lora\) would be lost .* it was made from, tiny$'),
    (dict(variables=ACT), 'its quantized activations would be lost'),
    (dict(activations=RULES), 'its quantized activations would be lost'),
    (
      dict(variables=LORA | ACT, activations=RULES, origin={'config': {'model': {'path': 'a/b.gguf'}}}),
      r'its corrections \(lora\) and quantized activations would be lost .* made from, a/b\.gguf$',
    ),
    (dict(activations=RULES, origin={}), 'give the model that it was made from$'),
  ],
)
def test_what_is_more_than_its_weights_is_refused(tmp_path: Path, more: Any, message: str) -> None:
  saved(tmp_path / 'tiny', **more)
  with pytest.raises(UserError, match=message):
    load_source(tmp_path / 'tiny')


def test_rules_that_quantize_nothing_are_no_loss(tmp_path: Path) -> None:
  saved(tmp_path / 'tiny', activations=(('.*', 'none'),))
  assert load_source(tmp_path / 'tiny').config == CONFIG


def test_torn_and_missing_files_are_refused(tmp_path: Path) -> None:
  saved(tmp_path / 'tiny', STORED['int8'])
  directory = tmp_path / 'tiny'
  arrays, meaning = directory / native.ARRAYS, directory / native.MEANING
  whole, described = arrays.read_bytes(), meaning.read_text()
  for length in (0, 4, 100, len(whole) - 1):
    arrays.write_bytes(whole[:length])
    with pytest.raises(UserError, match=r'model\.safetensors cannot be read'):
      load_source(directory)
  arrays.unlink()
  with pytest.raises(UserError, match=r'model\.safetensors cannot be read'):
    load_source(directory)
  arrays.write_bytes(whole)
  meaning.write_text(described[:100])
  with pytest.raises(UserError, match=r'model\.json is damaged'):
    load_source(directory)
  meaning.unlink()
  with pytest.raises(UserError, match='has no config.json'):
    load_source(directory)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda a: a.pop(f'params/{Q}/scale'), 'q/kernel/scale is missing'),
    (lambda a: a.update({'params/extra': np.zeros(1)}), 'params/extra belongs to no weight'),
    (lambda a: a.update({CODES: a[CODES].astype(np.int16)}), 'codes is int16 .* asks for int8'),
    (lambda a: a.update({CODES: a[CODES][:, 1:]}), r'codes is int8 \(2, 63, 128\)'),
  ],
)
def test_other_arrays_than_described_are_refused(tmp_path: Path, change: Any, message: str) -> None:
  saved(tmp_path / 'tiny', STORED['int8'])
  file = tmp_path / 'tiny' / native.ARRAYS
  arrays = safetensors.numpy.load_file(file)
  change(arrays)
  safetensors.numpy.save_file(arrays, file)
  with pytest.raises(UserError, match=message):
    load_source(tmp_path / 'tiny')


def test_a_nan_is_refused_where_it_is_read(tmp_path: Path) -> None:
  saved(tmp_path / 'tiny', {Q: lambda w: w.at[1, 0, 0].set(np.nan)})
  source = load_source(tmp_path / 'tiny')
  source.read(Q, 0)
  with pytest.raises(UserError, match='params/layers/attn/q/kernel holds a NaN'):
    source.read(Q, 1)


def test_a_directory_of_neither_kind_is_refused(tmp_path: Path) -> None:
  with pytest.raises(UserError, match=r'has no config\.json .*accepted: a \.gguf file, a Hugging Face'):
    load_source(tmp_path)
