"""Hugging Face directories: what is read, what is refused, and that GGUF files of the same model agree."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from qjax.errors import UserError
from qjax.io.hf import config_from_hf
from qjax.io.source import load_source, params
from qjax.models.config import RopeScaling
from tests import oracle
from tests.io import model_files
from tests.io.model_files import CONFIG

IDS = np.arange(3, 3 + 24) * 7 % CONFIG.vocab_size


def _write(directory, config=CONFIG, model_type='llama', changes=None, **options):
  weights = model_files.random_params(config)
  described = model_files.hf_config(config, model_type, **(changes or {}))
  model_files.write_hf(directory, described, model_files.hf_tensors(config, weights), **options)
  return weights, directory


def _assert_equal(actual, expected, path=''):
  assert actual.keys() == expected.keys(), path
  for name, value in expected.items():
    if isinstance(value, dict):
      _assert_equal(actual[name], value, f'{path}{name}/')
    else:
      assert actual[name].dtype == np.float32
      np.testing.assert_array_equal(actual[name], value, err_msg=path + name)


# ---- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('shards', [1, 3])
@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_written_model_is_read_back(tmp_path, dtype, shards):
  weights, directory = _write(tmp_path / 'tiny', dtype=dtype, shards=shards)
  source = load_source(directory)
  assert source.config == CONFIG
  assert source.name == 'tiny'
  _assert_equal(params(source), weights)
  layer = source.read('layers/mlp/down/kernel', 1)
  np.testing.assert_array_equal(layer, weights['layers']['mlp']['down']['kernel'][1])
  layer[:] = 0
  _assert_equal(params(source), weights)


def test_bfloat16_beyond_float16_is_exact(tmp_path):
  """1e5 and 1e-30 are infinite and zero in float16."""
  weights = model_files.random_params(CONFIG)
  values = np.array([1e5, -1e-30], ml_dtypes.bfloat16)
  weights['layers']['attn']['v']['kernel'][0, :2, 0] = values
  tensors = model_files.hf_tensors(CONFIG, weights)
  model_files.write_hf(tmp_path, model_files.hf_config(CONFIG), tensors, dtype=ml_dtypes.bfloat16)
  read = load_source(tmp_path).read('layers/attn/v/kernel', 0)
  np.testing.assert_array_equal(read[:2, 0], values.astype(np.float32))


def test_the_fingerprint_follows_weights_and_configuration(tmp_path):
  _, first = _write(tmp_path / 'first')
  _, same = _write(tmp_path / 'same')
  _, longer = _write(tmp_path / 'longer', changes=dict(max_position_embeddings=512))
  weights = model_files.random_params(CONFIG, seed=1)
  other = model_files.write_hf(
    tmp_path / 'other', model_files.hf_config(CONFIG), model_files.hf_tensors(CONFIG, weights)
  )
  marks = [load_source(directory).fingerprint for directory in (first, same, longer, other)]
  assert marks[0] == marks[1]
  assert len(set(marks)) == 3


def test_what_transformers_ignores_is_ignored(tmp_path):
  config = dataclasses.replace(CONFIG, tie_embeddings=True)
  weights = model_files.random_params(config)
  tensors = model_files.hf_tensors(config, weights)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  tensors['model.layers.1.self_attn.rotary_emb.inv_freq'] = np.ones(4)
  model_files.write_hf(tmp_path, model_files.hf_config(config), tensors)
  _assert_equal(params(load_source(tmp_path)), weights)


@pytest.mark.parametrize(
  'model_type, changes, offset',
  [
    ('llama', dict(), 0),
    ('qwen2', dict(qkv_bias=True), 0),
    ('qwen3', dict(qk_norm=True), 0),
    ('gemma', dict(tie_embeddings=True, embed_scale=32**0.5, activation='gelu_tanh', norm_offset=1.0), 1),
  ],
)
def test_gguf_and_hugging_face_files_of_a_model_agree(tmp_path, model_type, changes, offset):
  """Rows of q and k in another order, biases too, and Gemma's +1: none of it is lost or done twice."""
  config = dataclasses.replace(CONFIG, **changes)
  described = dict(hidden_act='gelu_pytorch_tanh') if model_type == 'gemma' else {}
  weights, directory = _write(tmp_path / 'hf', config, model_type, described)
  tensors = model_files.hf_tensors(config, weights)
  shifted = {name: array + np.float32(offset) if 'norm' in name else array for name, array in tensors.items()}
  path = model_files.write_gguf(tmp_path / 'tiny.gguf', config, shifted, arch=model_type)
  hf, gguf = load_source(directory), load_source(path)
  assert hf.config == config
  assert gguf.config == dataclasses.replace(config, norm_offset=0.0)
  if not offset:
    _assert_equal(params(gguf), params(hf))
  # Exact but for the one rounding of the weight that holds the +1.
  np.testing.assert_allclose(
    oracle.forward(gguf.config, params(gguf), IDS), oracle.forward(config, weights, IDS), rtol=1e-5, atol=1e-5
  )
  np.testing.assert_array_equal(
    oracle.forward(hf.config, params(hf), IDS), oracle.forward(config, weights, IDS)
  )


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda t: t.pop('model.layers.1.mlp.up_proj.weight'), r'1 tensors are missing: model\.layers\.1'),
    (lambda t: t.pop('lm_head.weight'), r'1 tensors are missing: lm_head\.weight'),
    (lambda t: t.update({'model.extra': np.ones(3)}), 'not part of this kind of model: model.extra'),
    (lambda t: t.update({'model.norm.weight': np.ones(31)}), r'model\.norm\.weight has shape \(31,\)'),
  ],
)
def test_other_tensors_are_refused(tmp_path, change, message):
  tensors = model_files.hf_tensors(CONFIG, model_files.random_params(CONFIG))
  change(tensors)
  model_files.write_hf(tmp_path, model_files.hf_config(CONFIG), tensors)
  with pytest.raises(UserError, match=message):
    load_source(tmp_path)


def test_tensors_of_another_dtype_are_refused(tmp_path):
  _, directory = _write(tmp_path, dtype=np.int8)
  with pytest.raises(UserError, match='is I8; F32, F16 and BF16 are read'):
    load_source(directory)


def test_torn_and_missing_files_are_refused(tmp_path):
  _, directory = _write(tmp_path, shards=3)
  shard = directory / 'model-00002-of-00003.safetensors'
  whole = shard.read_bytes()
  for length in (0, 4, 100, len(whole) - 1):
    shard.write_bytes(whole[:length])
    with pytest.raises(UserError, match='model-00002-of-00003.safetensors is cut short or damaged'):
      load_source(directory)
  shard.unlink()
  with pytest.raises(UserError, match='1 of 3 shards are missing: model-00002-of-00003.safetensors'):
    load_source(directory)
  index = directory / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {'lm_head.weight': '../elsewhere.safetensors'}}))
  with pytest.raises(UserError, match='must lie beside it'):
    load_source(directory)
  index.unlink()
  with pytest.raises(UserError, match='has neither model.safetensors nor'):
    load_source(directory)
  (directory / 'pytorch_model.bin').write_bytes(b'\x80')
  with pytest.raises(UserError, match=r'pickled weights only.*convert them to model\.safetensors'):
    load_source(directory)
  with pytest.raises(UserError, match='give its directory'):
    load_source(directory / 'model-00001-of-00003.safetensors')


def test_one_tensor_in_two_shards_is_refused(tmp_path):
  _, directory = _write(tmp_path, shards=2)
  save_file({'lm_head.weight': np.ones((2, 2))}, directory / 'third.safetensors')
  index = directory / 'model.safetensors.index.json'
  described = json.loads(index.read_text())
  described['weight_map']['other'] = 'third.safetensors'
  index.write_text(json.dumps(described))
  with pytest.raises(UserError, match=r'lm_head\.weight is in two shards'):
    load_source(directory)


# ---- configuration ----------------------------------------------------------------------------------------


def _config(model_type='llama', **changes):
  return config_from_hf(model_files.hf_config(CONFIG, model_type, **changes))


def test_defaults_are_those_of_transformers():
  described = model_files.hf_config(CONFIG, hidden_size=96)
  for key in ('num_key_value_heads', 'head_dim', 'rms_norm_eps', 'rope_theta', 'max_position_embeddings',
              'tie_word_embeddings', 'hidden_act'):
    del described[key]
  config = config_from_hf(described)
  assert (config.num_kv_heads, config.head_dim, config.rms_eps) == (12, 8, 1e-6)
  assert (config.rope_theta, config.context_length, config.tie_embeddings) == (10_000, 2048, False)
  assert config.activation == 'silu'
  gemma = config_from_hf(described | dict(model_type='gemma', num_key_value_heads=4))
  assert (gemma.head_dim, gemma.tie_embeddings, gemma.activation) == (256, True, 'gelu_tanh')
  assert (gemma.norm_offset, gemma.embed_scale) == (1.0, 96**0.5)
  assert _config('mistral', head_dim=None, hidden_size=96).head_dim == 8


@pytest.mark.parametrize(
  'model_type, changes, window',
  [
    ('llama', dict(sliding_window=5), None),
    ('mistral', dict(), 4096),
    ('mistral', dict(sliding_window=5), 5),
    ('mistral', dict(sliding_window=None), None),
    ('qwen2', dict(sliding_window=5, use_sliding_window=False), None),
    ('qwen2', dict(sliding_window=5, use_sliding_window=True, max_window_layers=0), 5),
    ('qwen2', dict(sliding_window=5, use_sliding_window=True, max_window_layers=2), None),
    ('qwen2', dict(sliding_window=5, use_sliding_window=True, layer_types=['sliding_attention'] * 2), 5),
  ],
)
def test_sliding_window_only_when_enabled(model_type, changes, window):
  assert _config(model_type, **changes).sliding_window == window


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@pytest.mark.parametrize(
  'changes, theta, scaling',
  [
    (dict(rope_scaling=None), 500_000, None),
    (dict(rope_scaling=dict(rope_type='default')), 500_000, None),
    (dict(rope_scaling=dict(type='linear', factor=2.0)), 500_000, RopeScaling('linear', 2.0)),
    (dict(rope_scaling=dict(rope_type='llama3', **LLAMA3)), 500_000, RopeScaling('llama3', 8.0)),
    (dict(rope_theta=None, rope_parameters=dict(rope_type='default', rope_theta=7e4)), 7e4, None),
    (dict(rope_parameters=dict(rope_type='llama3', rope_theta=7.0, **LLAMA3)), 7, RopeScaling('llama3', 8.0)),
  ],
)
def test_both_spellings_of_rope(changes, theta, scaling):
  config = _config(**changes)
  assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(model_type='mamba'), "'mamba' is not supported; gemma, llama, mistral, qwen2, qwen3 are"),
    (dict(model_type=None), 'model_type .*None.* is not supported'),
    (dict(hidden_act='relu2'), "hidden_act 'relu2' is not supported; gelu_pytorch_tanh, silu"),
    (dict(quantization_config=dict(bits=4)), 'quantized checkpoints are not supported yet'),
    (dict(attention_bias=True), 'attention_bias is not supported'),
    (dict(mlp_bias=True), 'mlp_bias is not supported'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor = 0.5'),
    (dict(rope_scaling=dict(rope_type='yarn', factor=4.0)), "'yarn' is not supported; default, linear"),
    (dict(rope_scaling=dict(rope_type='linear', factor=0.5)), 'must be at least 1'),
    (dict(rope_scaling=dict(rope_type='llama3', factor=8.0)), r'rope_scaling\.low_freq_factor = None'),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), 'one set of values for all layers'),
    (dict(hidden_size=None), 'hidden_size = None should be a number'),
    (dict(hidden_size='32'), "hidden_size = '32' should be a number"),
    (dict(intermediate_size=64.5), 'intermediate_size = 64.5 should be a whole number'),
    (dict(num_attention_heads=7), '7 query heads do not divide'),
    (
      dict(model_type='qwen2', use_sliding_window=True, sliding_window=5, max_window_layers=1),
      'over layers of full_attention, sliding_attention is not supported',
    ),
  ],
)
def test_another_configuration_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    _config(**changes)


def test_gemma_means_the_tanh_form():
  assert _config('gemma', hidden_act='gelu').activation == 'gelu_tanh'
  assert _config('gemma', hidden_act='gelu', hidden_activation='silu').activation == 'silu'
  with pytest.raises(UserError, match="hidden_act 'gelu'"):
    _config('llama', hidden_act='gelu')


# ---- tokenizer --------------------------------------------------------------------------------------------


def _write_tokenizer(directory, **settings):
  """One that cuts, pads, trims spans and adds a first token, as saved tokenizers may."""
  described = model_files.gguf_tokenizer()
  vocab = {token: index for index, token in enumerate(described['tokenizer.ggml.tokens'])}
  backend = tokenizers.Tokenizer(models.BPE(vocab, [('t', 'h'), ('th', 'e'), ('Ġ', 'the')]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(model_files.SPECIAL))
  backend.post_processor = processors.Sequence([
    processors.ByteLevel(trim_offsets=True),
    processors.TemplateProcessing('<|start|> $A', special_tokens=[('<|start|>', 0)]),
  ])
  backend.enable_truncation(3)
  backend.enable_padding(length=64)
  backend.save(str(directory / 'tokenizer.json'))
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings))


def test_tokenizer_keeps_the_whole_text(tmp_path):
  _write(tmp_path)
  _write_tokenizer(tmp_path, eos_token='<|end|>', bos_token={'content': '<|start|>'}, chat_template='T')
  tokenizer = load_source(tmp_path).require_tokenizer()
  encoded = tokenizer.encode('a the\nb')
  assert [tokenizer.token(index) for index in encoded.ids] == ['a', 'Ġthe', 'Ċ', 'b']
  assert encoded.spans == [(0, 1), (1, 5), (5, 6), (6, 7)]
  assert tokenizer.decode(encoded.ids) == 'a the\nb'
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)
  assert tokenizer.chat_template == 'T'


def test_where_ids_and_template_come_from(tmp_path):
  _write(tmp_path, changes=dict(eos_token_id=7, bos_token_id=8))
  named = [dict(name='tool', template='U'), dict(name='default', template='T')]
  _write_tokenizer(tmp_path, chat_template=named)
  tokenizer = load_source(tmp_path).require_tokenizer()
  assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.chat_template) == (7, 8, 'T')
  (tmp_path / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=[5, 6], pad_token_id=4)))
  (tmp_path / 'chat_template.jinja').write_text('{{ "é" }}', encoding='utf-8')
  tokenizer = load_source(tmp_path).require_tokenizer()
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.chat_template) == (5, 4, '{{ "é" }}')


@pytest.mark.parametrize(
  'settings, changes, message',
  [
    (None, {}, 'has no tokenizer.json'),
    ({}, {}, 'names an end-of-text token'),
    (dict(eos_token='<eos>'), {}, "names the eos token '<eos>', which .* lacks"),
    (dict(eos_token='<|end|>'), dict(vocab_size=100), 'for an embedding of 100 rows'),
  ],
)
def test_weights_load_without_a_tokenizer_that_cannot_be_built(tmp_path, settings, changes, message):
  _write(tmp_path, dataclasses.replace(CONFIG, **changes))
  if settings is not None:
    _write_tokenizer(tmp_path, **settings)
  source = load_source(tmp_path)
  assert source.tokenizer is None
  with pytest.raises(UserError, match=message):
    source.require_tokenizer()
  assert source.read('final_norm/scale').shape == (32,)
