"""GGUF files: what is read back, what is refused, and that the embedded model speaks."""

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from qjax.errors import UserError
from qjax.io import gguf as gguf_reader
from qjax.io.source import Source, load_source, params
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes
from tests import oracle
from tests.io import model_files
from tests.io.model_files import CONFIG


def _write(path, config=CONFIG, seed=0, **options):
  weights = model_files.random_params(config, seed)
  return weights, model_files.write_gguf(path, config, model_files.hf_tensors(config, weights), **options)


def _leaves(tree, prefix=''):
  for name, value in tree.items():
    if isinstance(value, dict):
      yield from _leaves(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def _assert_equal(actual, expected):
  actual, expected = dict(_leaves(actual)), dict(_leaves(expected))
  assert actual.keys() == expected.keys()
  for path, array in expected.items():
    assert actual[path].dtype == np.float32
    np.testing.assert_array_equal(actual[path], array, err_msg=path)


# ---- weights and configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'arch, changes',
  [
    ('llama', dict()),
    ('llama', dict(tie_embeddings=True, sliding_window=7)),
    ('llama', dict(qkv_bias=True)),
    ('qwen2', dict(qkv_bias=True)),
    ('qwen3', dict(qk_norm=True)),
    ('gemma', dict(tie_embeddings=True, embed_scale=32**0.5, activation='gelu_tanh')),
  ],
)
def test_a_written_model_is_read_back(tmp_path, arch, changes):
  config = dataclasses.replace(CONFIG, **changes)
  metadata = {f'{arch}.attention.sliding_window': config.sliding_window}
  weights, path = _write(tmp_path / 'tiny.gguf', config, arch=arch, metadata=metadata)
  source = load_source(path)
  assert source.config == config
  assert source.name == 'tiny'
  assert {path: source.read(path).shape for path in source.paths} == parameter_shapes(config)
  _assert_equal(params(source), weights)


def test_what_metadata_may_leave_out(tmp_path):
  config = dataclasses.replace(CONFIG, d_model=96, num_kv_heads=12, rope_theta=10_000.0)
  absent = ('head_count_kv', 'key_length', 'value_length')
  metadata = {f'llama.attention.{key}': None for key in absent} | {'llama.rope.freq_base': None}
  _, path = _write(tmp_path / 'tiny.gguf', config, metadata=metadata)
  assert load_source(path).config == config


@pytest.mark.parametrize('kind', [GGMLQuantizationType.BF16, GGMLQuantizationType.F16])
def test_half_widths_are_exact(tmp_path, kind):
  """The random weights fit both; the large one fits bfloat16 only and must not pass through float16."""
  weights = model_files.random_params(CONFIG)
  large = 1e5 if kind == GGMLQuantizationType.BF16 else 6e4
  weights['layers']['mlp']['up']['kernel'][1, 3, 5] = large
  path = model_files.write_gguf(
    tmp_path / 'tiny.gguf', CONFIG, model_files.hf_tensors(CONFIG, weights), kind=kind
  )
  read = params(load_source(path))
  assert abs(read['layers']['mlp']['up']['kernel'][1, 3, 5] / large - 1) <= 2**-9
  weights['layers']['mlp']['up']['kernel'][1, 3, 5] = read['layers']['mlp']['up']['kernel'][1, 3, 5]
  _assert_equal(read, weights)


def test_blocks_are_decoded_along_their_rows(tmp_path):
  """Q8_0 has one step for 32 neighbours of a row; more than half a step away is another row's step."""
  weights, path = _write(tmp_path / 'tiny.gguf', kind=GGMLQuantizationType.Q8_0)
  for name, array in _leaves(params(load_source(path))):
    *parents, leaf = name.split('/')
    node = weights
    for parent in parents:
      node = node[parent]
    rows = node[leaf].swapaxes(-1, -2) if leaf == 'kernel' else node[leaf]
    read = array.swapaxes(-1, -2) if leaf == 'kernel' else array
    if leaf == 'scale':
      np.testing.assert_array_equal(read, rows)
      continue
    blocks, error = rows.reshape(-1, 32), (read - rows).reshape(-1, 32)
    # The step itself is a float16, 2**-11 off at most, and multiplies codes of up to 127.
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    assert (np.abs(error) <= step * (0.5 + 127 * 2.0**-11)).all(), name


def test_layers_are_read_one_at_a_time_and_belong_to_the_caller(tmp_path):
  weights, path = _write(tmp_path / 'tiny.gguf')
  source = load_source(path)
  layer = source.read('layers/attn/k/kernel', 1)
  np.testing.assert_array_equal(layer, weights['layers']['attn']['k']['kernel'][1])
  layer[:] = 0
  scale = source.read('final_norm/scale')
  scale[:] = 0
  _assert_equal(params(source), weights)
  with pytest.raises(UserError, match="'layers/attn/k/kernels'; did you mean 'layers/attn/k/kernel'"):
    source.read('layers/attn/k/kernels')
  for index in (-1, 2):
    with pytest.raises(UserError, match='has layers 0 to 1'):
      source.read('layers/attn/k/kernel', index)
  with pytest.raises(UserError, match='belongs to no layer'):
    source.read('final_norm/scale', 0)


def test_the_fingerprint_follows_the_weights(tmp_path):
  paths = [_write(tmp_path / f'{index}.gguf', seed=seed)[1] for index, seed in enumerate((0, 0, 1))]
  first, same, other = (load_source(path).fingerprint for path in paths)
  assert first == same != other


# ---- RoPE scaling -----------------------------------------------------------------------------------------


def _divisors(scaling: RopeScaling) -> np.ndarray:
  scaled = oracle.rope_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))
  return (oracle.rope_frequencies(CONFIG) / scaled).astype(np.float32)


def test_linear_rope_scaling(tmp_path):
  metadata = {'llama.rope.scaling.type': 'linear', 'llama.rope.scaling.factor': 4.0}
  _, path = _write(tmp_path / 'tiny.gguf', metadata=metadata)
  assert load_source(path).config.rope_scaling == RopeScaling('linear', 4.0)


@pytest.mark.parametrize('factor, original', [(8.0, 8192), (32.0, 8192), (4.0, 512)])
def test_llama3_rope_scaling_is_recognised_from_its_factors(tmp_path, factor, original):
  scaling = RopeScaling('llama3', factor, original_context=original)
  divisors = _divisors(scaling)
  metadata = {'llama.rope.scaling.original_context_length': original}
  _, path = _write(tmp_path / 'tiny.gguf', extra={'rope_freqs.weight': divisors}, metadata=metadata)
  assert load_source(path).config.rope_scaling == scaling


def test_factors_of_one_are_no_scaling(tmp_path):
  _, path = _write(tmp_path / 'tiny.gguf', extra={'rope_freqs.weight': np.ones(4, np.float32)})
  assert load_source(path).config.rope_scaling is None


@pytest.mark.parametrize(
  'divisors, metadata, message',
  [
    (np.float32([1, 1.5, 3, 8]), {}, 'is not the llama3 scaling'),
    (_divisors(RopeScaling('llama3', 8.0, 1.0, 16.0)), {}, 'is not the llama3 scaling'),
    (np.ones(5, np.float32), {}, 'needs 4 factors'),
    (None, {'llama.rope.scaling.type': 'yarn'}, "'yarn' is not supported; none, linear and llama3 are"),
  ],
)
def test_another_rope_scaling_is_refused(tmp_path, divisors, metadata, message):
  extra = {} if divisors is None else {'rope_freqs.weight': divisors}
  _, path = _write(tmp_path / 'tiny.gguf', extra=extra, metadata=metadata)
  with pytest.raises(UserError, match=message):
    load_source(path)


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'metadata, message',
  [
    ({'llama.block_count': None}, 'metadata llama.block_count is missing'),
    ({'llama.block_count': 2**31}, 'layers cannot lie in'),
    ({'llama.block_count': 1}, r'9 tensors are not part of this kind of model: blk\.1\.'),
    ({'llama.block_count': 3}, r'9 tensors are missing: blk\.2\.'),
    ({'llama.feed_forward_length': 96}, r'blk\.0\.ffn_gate\.weight has shape \(64, 32\), .*\(96, 32\)'),
    ({'llama.attention.head_count': [12, 6]}, 'should be a whole number'),
    ({'llama.attention.head_count': 7}, '7 query heads do not divide'),
    ({'llama.attention.value_length': 16}, 'differs from the key length'),
    ({'llama.rope.dimension_count': 4}, 'differs from the key length'),
    ({'llama.expert_count': 8}, 'mixtures of experts'),
    ({'general.architecture': 'mamba'}, "'mamba' is not supported; gemma, llama, qwen2, qwen3 are"),
  ],
)
def test_another_configuration_is_refused(tmp_path, metadata, message):
  arch = metadata.pop('general.architecture', 'llama')
  _, path = _write(tmp_path / 'tiny.gguf', arch=arch, metadata=metadata)
  with pytest.raises(UserError, match=message):
    load_source(path)


def test_a_tensor_of_another_type_is_refused(tmp_path):
  weights = model_files.random_params(CONFIG)
  tensors = model_files.hf_tensors(CONFIG, weights)
  scale = tensors.pop('model.norm.weight')
  extra = {'output_norm.weight': scale.astype(np.float64)}
  path = model_files.write_gguf(tmp_path / 'tiny.gguf', CONFIG, tensors, extra=extra)
  with pytest.raises(UserError, match='output_norm.weight is stored as F64'):
    load_source(path).read('final_norm/scale')


def test_a_file_cut_anywhere_is_refused(tmp_path):
  _, path = _write(tmp_path / 'whole.gguf')
  whole = path.read_bytes()
  torn = tmp_path / 'torn.gguf'
  header = len(gguf_reader._read_header(path).raw)
  for length in [*range(0, header, 97), *range(header, len(whole), 4999)]:
    torn.write_bytes(whole[:length])
    with pytest.raises(UserError):
      load_source(torn)
  last = max(gguf_reader._read_header(path).tensors.items(), key=lambda item: item[1].start)
  torn.write_bytes(whole[: last[1].start + last[1].num_bytes - 1])
  with pytest.raises(UserError, match=f'tensor {last[0]} should lie at bytes'):
    load_source(torn)


def test_a_damaged_header_is_refused_or_harmless(tmp_path):
  """Whatever single bytes of the header say, nothing but a UserError comes out, and soon."""
  _, path = _write(tmp_path / 'whole.gguf')
  whole = bytearray(path.read_bytes())
  header = len(gguf_reader._read_header(path).raw)
  rng = np.random.default_rng(0)
  refused = 0
  for position, value in zip(rng.integers(0, header, 400), rng.integers(0, 256, 400), strict=True):
    damaged = bytearray(whole)
    damaged[position] = value
    path.write_bytes(damaged)
    try:
      params(load_source(path))
    except UserError:
      refused += 1
  assert refused > 40  # Most bytes are token text and types, where damage shows nowhere else.


def test_other_files_are_refused_by_what_is_accepted(tmp_path):
  accepted = r"accepted: a \.gguf file, a Hugging Face directory"
  with pytest.raises(UserError, match=f'there is no model at .*{accepted}'):
    load_source(tmp_path / 'absent')
  (tmp_path / 'notes.txt').write_text('not a model')
  with pytest.raises(UserError, match=accepted):
    load_source(tmp_path / 'notes.txt')
  _write(tmp_path / 'tiny.gguf')
  with pytest.raises(UserError, match=r'it holds tiny\.gguf; name the file'):
    load_source(tmp_path)
  (tmp_path / 'notes.gguf').write_text('not a model')
  with pytest.raises(UserError, match='is not a GGUF file'):
    load_source(tmp_path / 'notes.gguf')


# ---- tokenizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'pre, text, pieces',
  [
    ('smollm', ' the 12', ['Ġthe', 'Ġ', '1', '2']),
    ('gpt-2', ' the 12', ['Ġthe', 'Ġ', '12']),
    ('llama-bpe', ' the 12\n\n', ['Ġthe', 'Ġ', '12', 'Ċ', 'Ċ']),
    ('qwen2', ' the 12', ['Ġthe', 'Ġ', '1', '2']),
    ('qwen2', 'e\u0301', ['Ã', '©']),
    ('llama-bpe', 'e\u0301', ['e', 'Ì', 'ģ']),
  ],
)
def test_text_is_split_as_the_model_was_trained(tmp_path, pre, text, pieces):
  _, path = _write(tmp_path / 'tiny.gguf', metadata=model_files.gguf_tokenizer(pre))
  tokenizer = load_source(path).require_tokenizer()
  assert [tokenizer.token(index) for index in tokenizer.encode(text).ids] == pieces


def test_special_tokens_and_template(tmp_path):
  _, path = _write(tmp_path / 'tiny.gguf')
  tokenizer = load_source(path).require_tokenizer()
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)
  assert tokenizer.chat_template == model_files.TEMPLATE
  text = '<|start|>the <tool>\x00<|end|>'
  encoded = tokenizer.encode(text)
  assert encoded.ids[0] == 0 and encoded.ids[-1] == 1 and encoded.ids.count(0) == 1
  assert encoded.spans[0] == (0, 9)
  assert tokenizer.decode(encoded.ids, skip_special=False) == text
  assert tokenizer.decode(encoded.ids) == 'the <tool>\x00'  # The user's token is text; control tokens aren't.
  _, path = _write(tmp_path / 'tiny.gguf', metadata={'tokenizer.ggml.padding_token_id': 5})
  assert load_source(path).require_tokenizer().pad_id == 5


@pytest.mark.parametrize(
  'metadata, message',
  [
    ({'tokenizer.ggml.model': 'llama'}, r"of kind 'llama'; only byte-level BPE \(gpt2\)"),
    ({'tokenizer.ggml.pre': 'tekken'}, "'tekken' is not known; gpt-2, llama-bpe, qwen2, smollm are"),
    ({'tokenizer.ggml.pre': None}, 'None is not known'),
    ({'tokenizer.ggml.merges': ['t h', 'th q']}, 'merges does not fit'),
    ({'tokenizer.ggml.merges': ['t h e']}, 'a merge is not a pair'),
    ({'tokenizer.ggml.tokens': ['a', 'b']}, 'token_type has'),
    ({'tokenizer.ggml.eos_token_id': 4000}, 'outside the vocabulary'),
    ({'tokenizer.ggml.eos_token_id': None}, 'eos_token_id is missing'),
  ],
)
def test_weights_load_without_a_tokenizer_that_cannot_be_built(tmp_path, metadata, message):
  weights, path = _write(tmp_path / 'tiny.gguf', metadata=metadata)
  source = load_source(path)
  assert source.tokenizer is None
  with pytest.raises(UserError, match=f'tiny comes without a usable tokenizer: .*{message}'):
    source.require_tokenizer()
  np.testing.assert_array_equal(source.read('embed/embedding'), weights['embed']['embedding'])


# ---- the embedded model -----------------------------------------------------------------------------------

ENGLISH = (
  'The moon moves around the earth about once a month. It does not make its own light; we see it because it '
  'reflects the light of the sun. As the moon moves, we see different parts of its bright side, and so its '
  'shape seems to change from night to night. When the whole bright side faces us, we call it a full moon. '
  'The moon also pulls on the water in the oceans, and this causes the tides.'
)
CHAT = (
  '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'
  '<|im_start|>user\nWhat is the capital of Bangladesh?<|im_end|>\n<|im_start|>assistant\n'
)


@pytest.fixture(scope='module')
def embedded_params(embedded_source: Source):
  return params(embedded_source)


def test_embedded_configuration(embedded_source: Source):
  assert embedded_source.config == ModelConfig(
    vocab_size=49152, num_layers=30, d_model=576, d_ff=1536, num_heads=9, num_kv_heads=3, head_dim=64,
    rope_theta=100_000.0, rms_eps=1e-5, context_length=8192,
  )
  shapes = parameter_shapes(embedded_source.config).values()
  assert sum(int(np.prod(shape)) for shape in shapes) == 134_515_008
  tokenizer = embedded_source.require_tokenizer()
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
  assert '<|im_start|>' in tokenizer.chat_template


def test_embedded_model_finds_english_likely(embedded_source: Source, embedded_params):
  """Perplexity 12.8 as read; 41 with the rows of q and k left in llama.cpp's order."""
  ids = np.array(embedded_source.tokenizer.encode(ENGLISH).ids)
  logits = oracle.forward(embedded_source.config, embedded_params, ids)[:-1].astype(np.float64)
  log_total = np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1)) + logits.max(axis=-1)
  nll = log_total - logits[np.arange(len(ids) - 1), ids[1:]]
  assert np.exp(nll.mean()) < 15


def test_embedded_model_answers(embedded_source: Source, embedded_params):
  """Greedy decoding in one pass: given the answer so far, each of its tokens is the likeliest next one."""
  tokenizer = embedded_source.tokenizer
  prompt, answer = tokenizer.encode(CHAT).ids, tokenizer.encode('The capital of Bangladesh is Dhaka.').ids
  logits = oracle.forward(embedded_source.config, embedded_params, np.array(prompt + answer))
  assert logits[len(prompt) - 1 :].argmax(axis=-1).tolist() == [*answer, tokenizer.eos_id]


@pytest.mark.parametrize(
  'text',
  [
    ENGLISH, CHAT, '', ' ', '  two  spaces\tand\r\n\nlines ', "It's 1971, not 19.71!",
    'def f(x: int) -> str:\n\treturn f"{x!r:>8}"  # {}\n', 'বাংলাদেশের রাজধানী ঢাকা।', 'e\u0301 é 中文 العربية',
    '👩‍🚀🇧🇩 ok 😀',
  ],
)
def test_embedded_tokenizer_loses_nothing(embedded_source: Source, text):
  encoded = embedded_source.tokenizer.encode(text)
  assert embedded_source.tokenizer.decode(encoded.ids, skip_special=False) == text
  covered = {index for start, end in encoded.spans for index in range(start, end)}
  assert covered == set(range(len(text)))


def test_embedded_tokenizer_takes_digits_one_by_one(embedded_source: Source):
  tokenizer = embedded_source.tokenizer
  pieces = [tokenizer.token(index) for index in tokenizer.encode('In 1971').ids]
  assert pieces == ['In', 'Ġ', '1', '9', '7', '1']


def test_embedded_weights_lie_on_the_grid_of_their_blocks(embedded_source: Source):
  """Q4_1: at most 16 values in each 32 neighbours of a row, evenly spaced."""
  rows = embedded_source.read('layers/mlp/down/kernel', 7).T.reshape(-1, 32)[:500]
  assert max(len(np.unique(row)) for row in rows) <= 16
