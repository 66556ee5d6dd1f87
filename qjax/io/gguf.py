"""Reads GGUF files of the Llama family: header, configuration, tokenizer, and weights as float32.

The header is walked here, every length held against the file's size, because the `gguf` package takes the
lengths of a torn file on trust (and ten seconds over a large vocabulary); it does decode the blocks.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType
from tokenizers import decoders, models, normalizers, pre_tokenizers

from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError
from qjax.io.source import Source, check_tensors, fingerprint, is_number
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes

_NAMES = {
  'embed/embedding': 'token_embd.weight',
  'layers/attn_norm/scale': 'blk.{}.attn_norm.weight',
  'layers/attn/q/kernel': 'blk.{}.attn_q.weight',
  'layers/attn/k/kernel': 'blk.{}.attn_k.weight',
  'layers/attn/v/kernel': 'blk.{}.attn_v.weight',
  'layers/attn/q/bias': 'blk.{}.attn_q.bias',
  'layers/attn/k/bias': 'blk.{}.attn_k.bias',
  'layers/attn/v/bias': 'blk.{}.attn_v.bias',
  'layers/attn/q_norm/scale': 'blk.{}.attn_q_norm.weight',
  'layers/attn/k_norm/scale': 'blk.{}.attn_k_norm.weight',
  'layers/attn/o/kernel': 'blk.{}.attn_output.weight',
  'layers/mlp_norm/scale': 'blk.{}.ffn_norm.weight',
  'layers/mlp/gate/kernel': 'blk.{}.ffn_gate.weight',
  'layers/mlp/up/kernel': 'blk.{}.ffn_up.weight',
  'layers/mlp/down/kernel': 'blk.{}.ffn_down.weight',
  'final_norm/scale': 'output_norm.weight',
  'head/kernel': 'output.weight',
}
_ROPE_FACTORS = 'rope_freqs.weight'
_ARCHITECTURES = ('gemma', 'llama', 'qwen2', 'qwen3')

# Splits text before the merges. Both regular expressions are those that the models were trained with.
_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r'\p{N}{1,3}', r'\p{N}')
_CONTROL, _USER_DEFINED = 3, 4


def load(path: str | Path) -> Source:
  """The model in the GGUF file at `path`; weights stay in the file until they are read.

  Raises `UserError` for a torn or foreign file, an architecture or a RoPE scaling that is not supported,
  and for tensors that are missing, left over, misshapen or of an undecodable type. A tokenizer that we
  cannot build exactly is left out, with the reason in `Source.tokenizer_problem`.
  """
  path = Path(path)
  header = _read_header(path)
  config = _config(header)
  names = {name: _NAMES[name] for name in parameter_shapes(config)}
  shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
  check_tensors(config, names, shapes, str(path), ignored=_ROPE_FACTORS.replace('.', r'\.'))
  try:
    tokenizer, problem = _tokenizer(header.metadata, config.vocab_size), None
  except UserError as error:
    tokenizer, problem = None, str(error)
  is_interleaved = header.architecture == 'llama'

  def read(path: str, layer: int | None) -> np.ndarray:
    array = header.read(_NAMES[path].format(layer))
    if is_interleaved and path.startswith(('layers/attn/q/', 'layers/attn/k/')):
      array = _rotate_half_order(array, config.num_heads if '/q/' in path else config.num_kv_heads)
    return array.T if path.endswith('kernel') else array

  mark = fingerprint([header.raw], [path])
  return Source(path.stem, config, tokenizer, tuple(names), mark, read, problem)


def _rotate_half_order(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows [heads * head_dim, …] with rotary pairs half a head apart; llama.cpp stores them side by side."""
  pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


# ---- configuration ----------------------------------------------------------------------------------------


def _config(header: '_Header') -> ModelConfig:
  arch = header.architecture
  if arch not in _ARCHITECTURES:
    raise UserError(f'{header.path}: architecture {arch!r} is not supported; {", ".join(_ARCHITECTURES)} are')
  if header.integer('expert_count', 0):
    raise UserError(f'{header.path}: mixtures of experts are not supported')
  d_model, num_heads = header.integer('embedding_length'), header.integer('attention.head_count')
  head_dim = header.integer('attention.key_length', d_model // max(num_heads, 1))
  for key in ('attention.value_length', 'rope.dimension_count'):
    if (width := header.integer(key, head_dim)) != head_dim:
      raise UserError(f'{header.path}: {arch}.{key} = {width} differs from the key length {head_dim}')
  embedding = header.tensors.get(_NAMES['embed/embedding'])
  if embedding is None or len(embedding.shape) != 2:
    raise UserError(f'{header.path}: tensor {_NAMES["embed/embedding"]} [vocabulary, {d_model}] is missing')
  theta = header.number('rope.freq_base', 10_000.0)
  fields: dict[str, Any] = dict(
    vocab_size=embedding.shape[0], num_layers=header.integer('block_count'), d_model=d_model,
    d_ff=header.integer('feed_forward_length'), num_heads=num_heads,
    num_kv_heads=header.integer('attention.head_count_kv', num_heads), head_dim=head_dim, rope_theta=theta,
    rope_scaling=_rope_scaling(header, theta, head_dim),
    rms_eps=_shortest(header.number('attention.layer_norm_rms_epsilon')),
    context_length=header.integer('context_length'),
    tie_embeddings=_NAMES['head/kernel'] not in header.tensors,
    qkv_bias=any(_NAMES[f'layers/attn/{name}/bias'].format(0) in header.tensors for name in 'qkv'),
    qk_norm=arch == 'qwen3',
    sliding_window=header.integer('attention.sliding_window', 0) or None,
  )
  if arch == 'gemma':  # Gemma's published norms lack the +1 that every GGUF converter has added.
    fields |= dict(embed_scale=math.sqrt(d_model), activation='gelu_tanh')
  try:
    return ModelConfig(**fields)
  except ValueError as error:
    raise UserError(f'{header.path}: {error}') from error


def _rope_scaling(header: '_Header', theta: float, head_dim: int) -> RopeScaling | None:
  kind = header.get('rope.scaling.type', 'linear')
  if kind not in ('none', 'linear'):
    raise UserError(f'{header.path}: RoPE scaling {kind!r} is not supported; none, linear and llama3 are')
  factor = header.number('rope.scaling.factor', header.number('rope.scale_linear', 0.0)) or 1.0
  if factor < 1:
    raise UserError(f'{header.path}: a RoPE scaling factor of {factor} is not supported; 1 and above are')
  is_linear = kind == 'linear' and factor != 1
  if _ROPE_FACTORS not in header.tensors:
    return RopeScaling('linear', factor) if is_linear else None
  # Llama 3.1 and later: what each frequency was divided by is stored, the rule behind it is not.
  divisors = header.read(_ROPE_FACTORS)
  if divisors.shape != (head_dim // 2,) or is_linear:
    raise UserError(
      f'{header.path}: {_ROPE_FACTORS} {divisors.shape} needs {head_dim // 2} factors and no linear scaling'
    )
  if np.allclose(divisors, 1):
    return None
  wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  factor = round(float(divisors.max()), 3)
  if factor > 1:
    for original in {header.integer('rope.scaling.original_context_length', 8192), 8192}:
      scaling = RopeScaling('llama3', factor, original_context=original)
      low, high = scaling.low_freq_factor, scaling.high_freq_factor
      blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)
      if np.allclose(divisors, 1 / ((1 - blend) / factor + blend), rtol=1e-4):
        return scaling
  raise UserError(
    f'{header.path}: {_ROPE_FACTORS} is not the llama3 scaling with low and high frequency factors 1 and 4 '
    'and an original context of 8192 (nor of the one in the metadata); other scalings are not supported'
  )


def _shortest(value: float) -> float:
  """The shortest decimal that is the same float32: 1e-5 where the file's float32 reads 9.99999974e-06."""
  return float(str(np.float32(value)))


# ---- tokenizer --------------------------------------------------------------------------------------------


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior='isolated')
  return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# `tokenizer.ggml.pre` → how to split. Add one only with the regular expression of the original tokenizer.
_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
  'gpt-2': _gpt2,
  'smollm': _smollm,
  'llama-bpe': lambda: _split(_LLAMA3_SPLIT),
  'qwen2': lambda: _split(_QWEN2_SPLIT),
}


def _tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> Tokenizer:
  """The byte-level BPE tokenizer of the file; `UserError` where it has another kind or a damaged one."""

  def get(key: str) -> Any:
    return metadata.get(f'tokenizer.ggml.{key}')

  kind, pre = get('model'), get('pre')
  if kind != 'gpt2':
    raise UserError(f'its tokenizer is of kind {kind!r}; only byte-level BPE (gpt2) is read from GGUF')
  if pre not in _PRE_TOKENIZERS:
    raise UserError(f'its pre-tokenizer {pre!r} is not known; {", ".join(sorted(_PRE_TOKENIZERS))} are')
  tokens, merges, types = get('tokens'), get('merges'), get('token_type')
  for key, value, item in (('tokens', tokens, str), ('merges', merges, str), ('token_type', types, int)):
    if not isinstance(value, list) or not all(isinstance(entry, item) for entry in value):
      raise UserError(f'tokenizer.ggml.{key} is missing or is not a list of {item.__name__}')
  if len(types) != len(tokens):
    raise UserError(f'tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens')
  if len(tokens) > vocab_size:
    raise UserError(f'tokenizer.ggml.tokens has {len(tokens)} entries for an embedding of {vocab_size} rows')
  vocab = {token: index for index, token in enumerate(tokens)}
  if len(vocab) != len(tokens):
    raise UserError('tokenizer.ggml.tokens names a token twice')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  try:
    if any(len(pair) != 2 for pair in pairs):
      raise ValueError('a merge is not a pair')
    # Llama 3 takes a whole word from the vocabulary before it tries merges.
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == 'llama-bpe'))
  except Exception as error:  # The tokenizers package raises nothing narrower.
    raise UserError(f'tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}') from error
  if pre == 'qwen2':
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  backend.decoder = decoders.ByteLevel()
  for add, kind_id in ((backend.add_special_tokens, _CONTROL), (backend.add_tokens, _USER_DEFINED)):
    chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ == kind_id and token]
    add([tokenizers.AddedToken(token, normalized=False, special=kind_id == _CONTROL) for token in chosen])

  def token_id(key: str) -> int | None:
    value = get(f'{key}_token_id')
    if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
      raise UserError(f'tokenizer.ggml.{key}_token_id = {value!r} is outside the vocabulary of {len(tokens)}')
    return value

  eos, pad = token_id('eos'), token_id('padding')
  if eos is None:
    raise UserError('tokenizer.ggml.eos_token_id is missing')
  template = metadata.get('tokenizer.chat_template')
  if template is not None and not isinstance(template, str):
    raise UserError('tokenizer.chat_template is not text')
  return Tokenizer(backend, eos, eos if pad is None else pad, token_id('bos'), template)


# ---- the container ----------------------------------------------------------------------------------------

_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_STRING, _ARRAY = 8, 9
_MAX_RANK = 4


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """Where a tensor lies: NumPy shape (slowest axis first), block type, first byte and length in the file."""

  shape: tuple[int, ...]
  kind: GGMLQuantizationType
  start: int
  num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Header:
  path: Path
  data: np.memmap
  raw: bytes
  metadata: Mapping[str, Any]
  tensors: Mapping[str, _Tensor]

  @property
  def architecture(self) -> str:
    return str(self.metadata.get('general.architecture'))

  def get(self, key: str, default: Any = None) -> Any:
    """The architecture's own `key`, or `default`; `UserError` when it is absent and there is no default."""
    key = f'{self.architecture}.{key}'
    value = self.metadata.get(key, default)
    if value is None:
      raise UserError(f'{self.path}: metadata {key} is missing')
    return value

  def number(self, key: str, default: float | None = None) -> float:
    value = self.get(key, default)
    if not is_number(value):
      raise UserError(f'{self.path}: metadata {self.architecture}.{key} = {value!r} should be a number')
    return float(value)

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
      raise UserError(f'{self.path}: metadata {self.architecture}.{key} = {value!r} should be a whole number')
    return value

  def read(self, name: str) -> np.ndarray:
    """The tensor decoded to float32 in its NumPy shape."""
    tensor = self.tensors[name]
    blocks = self.data[tensor.start : tensor.start + tensor.num_bytes]
    rows = math.prod(tensor.shape[:-1])
    try:
      array = gguf.dequantize(np.asarray(blocks).reshape(rows, -1), tensor.kind)
    except NotImplementedError as error:
      kind = tensor.kind.name
      raise UserError(f'{self.path}: tensor {name} is stored as {kind}, which is not decoded') from error
    return array.reshape(tensor.shape)


class _Cursor:
  """Reads little-endian values from the front of a file, and says which one the file was too short for."""

  def __init__(self, path: Path, data: np.memmap):
    self.path, self.data, self.offset = path, data, 0

  def take(self, num_bytes: int, what: str) -> bytes:
    if num_bytes > self.data.size - self.offset:
      raise UserError(
        f'{self.path} is cut short or damaged: {what} would take {num_bytes} bytes at byte {self.offset} '
        f'of {self.data.size}'
      )
    taken = self.data[self.offset : self.offset + num_bytes].tobytes()
    self.offset += num_bytes
    return taken

  def unpack(self, code: str, what: str) -> Any:
    return struct.unpack('<' + code, self.take(struct.calcsize('<' + code), what))[0]

  def text(self, what: str) -> str:
    try:
      return self.take(self.unpack('Q', what), what).decode()
    except UnicodeDecodeError as error:
      raise UserError(f'{self.path} is damaged: {what} is not UTF-8') from error

  def value(self, kind: int, what: str) -> Any:
    if kind in _SCALARS:
      return self.unpack(_SCALARS[kind], what)
    if kind == _STRING:
      return self.text(what)
    if kind == _ARRAY:
      kind, count = self.unpack('I', what), self.unpack('Q', what)
      if kind in _SCALARS:
        size = struct.calcsize('<' + _SCALARS[kind])
        return list(struct.unpack(f'<{count}{_SCALARS[kind]}', self.take(count * size, what)))
      if kind == _STRING:
        return [self.text(what) for _ in range(count)]  # A false count ends at the end of the file.
    raise UserError(f'{self.path} is damaged: {what} has the unknown value type {kind}')


def _read_header(path: Path) -> _Header:
  if not path.is_file() or path.stat().st_size == 0:
    raise UserError(f'{path} is empty or not there')
  data = np.memmap(path, np.uint8, 'r')
  cursor = _Cursor(path, data)
  if cursor.take(4, 'the magic number') != b'GGUF':
    raise UserError(f'{path} is not a GGUF file')
  version = cursor.unpack('I', 'the version')
  if version not in (2, 3):
    raise UserError(f'{path} is GGUF version {version}; 2 and 3 (little-endian) are read')
  num_tensors, num_fields = cursor.unpack('Q', 'the tensor count'), cursor.unpack('Q', 'the metadata count')
  metadata: dict[str, Any] = {}
  for index in range(num_fields):
    key = cursor.text(f'the name of metadata entry {index}')
    metadata[key] = cursor.value(cursor.unpack('I', f'metadata {key}'), f'metadata {key}')
  described = [_describe(cursor, index) for index in range(num_tensors)]
  alignment = metadata.get('general.alignment', gguf.GGUF_DEFAULT_ALIGNMENT)
  if not isinstance(alignment, int) or alignment < 1:
    raise UserError(f'{path} is damaged: general.alignment = {alignment!r}')
  first = -(-cursor.offset // alignment) * alignment
  tensors: dict[str, _Tensor] = {}
  for name, tensor in described:
    tensor = dataclasses.replace(tensor, start=first + tensor.start)
    if name in tensors:
      raise UserError(f'{path} is damaged: it names tensor {name} twice')
    if tensor.start % alignment or tensor.start + tensor.num_bytes > data.size:
      raise UserError(
        f'{path} is cut short or damaged: tensor {name} should lie at bytes {tensor.start} to '
        f'{tensor.start + tensor.num_bytes}, the file has {data.size}'
      )
    tensors[name] = tensor
  return _Header(path, data, data[: cursor.offset].tobytes(), metadata, tensors)


def _describe(cursor: _Cursor, index: int) -> tuple[str, _Tensor]:
  """Name and place of the next tensor, its start still relative to the data section."""
  name = cursor.text(f'the name of tensor {index}')
  rank = cursor.unpack('I', f'tensor {name}')
  if not 1 <= rank <= _MAX_RANK:
    raise UserError(f'{cursor.path} is damaged: tensor {name} has {rank} axes')
  shape = tuple(cursor.unpack('Q', f'tensor {name}') for _ in range(rank))[::-1]
  kind, start = cursor.unpack('I', f'tensor {name}'), cursor.unpack('Q', f'tensor {name}')
  try:
    kind = GGMLQuantizationType(kind)
  except ValueError as error:
    raise UserError(f'{cursor.path}: tensor {name} has the unknown block type {kind}') from error
  block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  if shape[-1] % block or min(shape) < 1:
    raise UserError(f'{cursor.path} is damaged: tensor {name} {shape} needs rows of a multiple of {block}')
  return name, _Tensor(shape, kind, start, math.prod(shape) // block * block_bytes)
