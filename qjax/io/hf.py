"""Reads Hugging Face directories of the Llama family: config.json, safetensors, tokenizer.json. No pickle."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors returns)
import numpy as np
import safetensors
import tokenizers

from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError
from qjax.io.source import Source, check_tensors, fingerprint, is_number
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes

NAMES = {
  'embed/embedding': 'model.embed_tokens.weight',
  'layers/attn_norm/scale': 'model.layers.{}.input_layernorm.weight',
  'layers/attn/q/kernel': 'model.layers.{}.self_attn.q_proj.weight',
  'layers/attn/k/kernel': 'model.layers.{}.self_attn.k_proj.weight',
  'layers/attn/v/kernel': 'model.layers.{}.self_attn.v_proj.weight',
  'layers/attn/q/bias': 'model.layers.{}.self_attn.q_proj.bias',
  'layers/attn/k/bias': 'model.layers.{}.self_attn.k_proj.bias',
  'layers/attn/v/bias': 'model.layers.{}.self_attn.v_proj.bias',
  'layers/attn/q_norm/scale': 'model.layers.{}.self_attn.q_norm.weight',
  'layers/attn/k_norm/scale': 'model.layers.{}.self_attn.k_norm.weight',
  'layers/attn/o/kernel': 'model.layers.{}.self_attn.o_proj.weight',
  'layers/mlp_norm/scale': 'model.layers.{}.post_attention_layernorm.weight',
  'layers/mlp/gate/kernel': 'model.layers.{}.mlp.gate_proj.weight',
  'layers/mlp/up/kernel': 'model.layers.{}.mlp.up_proj.weight',
  'layers/mlp/down/kernel': 'model.layers.{}.mlp.down_proj.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
}
_Activation = Literal['silu', 'gelu_tanh']
_ACTIVATIONS: Mapping[str, _Activation] = {'silu': 'silu', 'swish': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}
_DTYPES = {'F32', 'F16', 'BF16'}


@dataclasses.dataclass(frozen=True)
class _Family:
  """What transformers assumes of a model_type where its config.json is silent."""

  num_kv_heads: int | None = None  # None: as many as query heads
  head_dim: int | None = None  # None: hidden_size / heads
  context_length: int = 32768
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False


_FAMILIES: Mapping[str, _Family] = {
  'llama': _Family(context_length=2048),
  'mistral': _Family(num_kv_heads=8, context_length=131072),
  'qwen2': _Family(num_kv_heads=32, qkv_bias=True),
  'qwen3': _Family(num_kv_heads=32, head_dim=128, qk_norm=True),
  'gemma': _Family(num_kv_heads=16, head_dim=256, context_length=8192, tie_embeddings=True),
}


def load(directory: str | Path) -> Source:
  """The model in a Hugging Face directory; weights stay in their safetensors files until they are read.

  Raises `UserError` for an architecture, activation or RoPE scaling that is not supported, for pickled,
  quantized or torn weights, and for tensors that are missing, left over, misshapen or of another dtype than
  float32, float16 or bfloat16. A directory without a usable tokenizer gives a source without one, with the
  reason in `Source.tokenizer_problem`.
  """
  directory = Path(directory)
  described = _read_json(directory / 'config.json')
  config = read_config(directory)
  names = {path: NAMES[path] for path in parameter_shapes(config)}
  files = _tensor_files(directory)
  shapes: dict[str, tuple[int, ...]] = {}
  for name, file in files.items():
    view = file.get_slice(name)
    if view.get_dtype() not in _DTYPES:
      raise UserError(f'{directory}: tensor {name} is {view.get_dtype()}; F32, F16 and BF16 are read')
    shapes[name] = tuple(view.get_shape())
  # transformers ignores both as well: old checkpoints stored their frequencies, some a head that is tied.
  ignored = r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq'
  ignored += r'|lm_head\.weight' if config.tie_embeddings else ''
  check_tensors(config, names, shapes, str(directory), ignored)
  try:
    tokenizer, problem = _tokenizer(directory, described, config.vocab_size), None
  except UserError as error:
    tokenizer, problem = None, str(error)

  def read(path: str, layer: int | None) -> np.ndarray:
    name = NAMES[path].format(layer)
    array = files[name].get_tensor(name).astype(np.float32)
    return array.T if path.endswith('kernel') else array

  mark = fingerprint([json.dumps(described, sort_keys=True).encode()], _weight_paths(directory))
  return Source(directory.resolve().name, config, tokenizer, tuple(names), mark, read, problem)


# ---- configuration ----------------------------------------------------------------------------------------


def read_config(directory: Path) -> ModelConfig:
  """The `ModelConfig` of a directory's config.json, as `config_from_hf`."""
  path = directory / 'config.json'
  return config_from_hf(_read_json(path), str(path))


def config_from_hf(described: Mapping[str, Any], where: str = 'config.json') -> ModelConfig:
  """The `ModelConfig` of a parsed config.json; `UserError`, naming `where`, for what is not supported."""
  kind = str(described.get('model_type'))
  if kind not in _FAMILIES:
    raise UserError(f'{where}: model_type {kind!r} is not supported; {", ".join(sorted(_FAMILIES))} are')
  family = _FAMILIES[kind]
  if described.get('quantization_config') is not None:
    raise UserError(f'{where}: quantized checkpoints are not supported yet; give the original one')
  for key in ('attention_bias', 'mlp_bias'):
    if described.get(key):
      raise UserError(f'{where}: {key} is not supported (biases are only read for qwen2: q, k and v)')
  if described.get('use_bidirectional_attention'):
    raise UserError(f'{where}: use_bidirectional_attention is not supported; causal attention is')

  def number(key: str, default: float | None = None) -> float:
    value = described.get(key)
    value = default if value is None else value
    if not is_number(value):
      raise UserError(f'{where}: {key} = {value!r} should be a number')
    return value

  def integer(key: str, default: int | None = None) -> int:
    value = number(key, default)
    if not isinstance(value, int):
      raise UserError(f'{where}: {key} = {value!r} should be a whole number')
    return value

  d_model, num_heads, depth = map(integer, ('hidden_size', 'num_attention_heads', 'num_hidden_layers'))
  context = integer('max_position_embeddings', family.context_length)
  theta, scaling = _rope(described, where)
  tied = described.get('tie_word_embeddings')
  # A family's own number is for files without the key; a null in it means as many as query heads.
  fallback = None if 'num_key_value_heads' in described else family.num_kv_heads
  num_kv_heads = integer('num_key_value_heads', fallback or num_heads)
  head_dim = integer('head_dim', family.head_dim or d_model // max(num_heads, 1))
  try:
    config = ModelConfig(
      vocab_size=integer('vocab_size'), num_layers=depth, d_model=d_model,
      d_ff=integer('intermediate_size'), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
      rope_theta=theta, rope_scaling=scaling, rms_eps=number('rms_norm_eps', 1e-6), context_length=context,
      tie_embeddings=family.tie_embeddings if tied is None else bool(tied),
      qkv_bias=family.qkv_bias, qk_norm=family.qk_norm,
      sliding_window=_sliding_window(described, where, kind, depth),
      activation=_activation(described, where, kind),
    )
  except UserError:
    raise
  except ValueError as error:
    raise UserError(f'{where}: {error}') from error
  if kind == 'gemma':
    return dataclasses.replace(config, norm_offset=1.0, embed_scale=math.sqrt(d_model))
  return config


def _activation(described: Mapping[str, Any], where: str, kind: str) -> _Activation:
  name = described.get('hidden_act', 'gelu_pytorch_tanh' if kind == 'gemma' else 'silu')
  if kind == 'gemma':
    # The first Gemma files say 'gelu' and mean its tanh form; a later key overrides them.
    name = described.get('hidden_activation') or ('gelu_pytorch_tanh' if name == 'gelu' else name)
  if str(name) not in _ACTIVATIONS:
    raise UserError(f'{where}: hidden_act {name!r} is not supported; {", ".join(sorted(_ACTIVATIONS))} are')
  return _ACTIVATIONS[name]


def _rope(described: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
  """Theta and scaling, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling`."""
  key = 'rope_parameters' if described.get('rope_parameters') else 'rope_scaling'
  given = described.get(key) or {}
  if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
    raise UserError(f'{where}: {key} = {given!r} is not supported; one set of values for all layers is')

  def number(name: str, default: float | None = None) -> float:
    value = given.get(name, default)
    if not is_number(value):
      raise UserError(f'{where}: {key}.{name} = {value!r} should be a number')
    return value

  for owner in (described, given):
    if (share := owner.get('partial_rotary_factor')) not in (None, 1):
      raise UserError(f'{where}: partial_rotary_factor = {share!r} is not supported; 1 is')
  theta = float(number('rope_theta', described.get('rope_theta') or 10_000.0))
  kind = given.get('rope_type', given.get('type', 'default'))
  if kind == 'default':
    return theta, None
  try:
    if kind == 'linear':
      return theta, RopeScaling('linear', float(number('factor')))
    if kind == 'llama3':
      low, high = float(number('low_freq_factor')), float(number('high_freq_factor'))
      original = int(number('original_max_position_embeddings'))
      return theta, RopeScaling('llama3', float(number('factor')), low, high, original)
  except UserError:
    raise
  except ValueError as error:
    raise UserError(f'{where}: {error}') from error
  raise UserError(f'{where}: RoPE scaling {kind!r} is not supported; default, linear and llama3 are')


def _sliding_window(described: Mapping[str, Any], where: str, kind: str, depth: int) -> int | None:
  """The window of all layers; transformers has 4096 where a family that uses one does not say."""
  has_window = kind == 'mistral' or (kind in ('qwen2', 'qwen3') and described.get('use_sliding_window'))
  window = described.get('sliding_window', 4096) if has_window else None
  if window is None:
    return None
  layers = described.get('layer_types')
  if not layers:
    full = described.get('max_window_layers', 28) if kind != 'mistral' else 0
    layers = ['full_attention' if layer < full else 'sliding_attention' for layer in range(depth)]
  layers = {str(layer) for layer in layers}
  if layers == {'full_attention'}:
    return None
  if layers != {'sliding_attention'} or not isinstance(window, int):
    raise UserError(
      f'{where}: sliding_window = {window!r} over layers of {", ".join(sorted(layers))} is not supported; '
      'a whole number for all layers, or for none, is'
    )
  return window


# ---- weights ----------------------------------------------------------------------------------------------


def _weight_paths(directory: Path) -> list[Path]:
  """The safetensors files that together hold the weights, all of them present."""
  single, index = directory / 'model.safetensors', directory / 'model.safetensors.index.json'
  if single.is_file():
    return [single]
  if not index.is_file():
    if any(directory.glob('*.bin')) or any(directory.glob('*.pth')):
      raise UserError(
        f'{directory} holds pickled weights only, which can run code when they are read; '
        'convert them to model.safetensors (transformers: save_pretrained(…, safe_serialization=True))'
      )
    raise UserError(f'{directory} has neither {single.name} nor {index.name}')
  shards = sorted(set(_weight_map(index).values()))
  if strange := [shard for shard in shards if Path(shard).name != shard]:
    raise UserError(f'{index}: shards must lie beside it, not at {", ".join(strange)}')
  if absent := [shard for shard in shards if not (directory / shard).is_file()]:
    raise UserError(f'{directory}: {len(absent)} of {len(shards)} shards are missing: {", ".join(absent)}')
  return [directory / shard for shard in shards]


def _weight_map(index: Path) -> dict[str, str]:
  weight_map = _read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
    raise UserError(f'{index}: weight_map should give a file name for every tensor')
  return weight_map


def _tensor_files(directory: Path) -> dict[str, Any]:
  """Tensor name → the open safetensors file that holds it."""
  files: dict[str, Any] = {}
  for path in _weight_paths(directory):
    try:
      file = safetensors.safe_open(path, framework='numpy')
    except Exception as error:  # SafetensorError derives from Exception directly.
      raise UserError(f'{path} is cut short or damaged: {error}') from error
    for name in file.keys():  # noqa: SIM118  (not a dict)
      if name in files:
        raise UserError(f'{directory}: tensor {name} is in two shards')
      files[name] = file
  return files


# ---- tokenizer --------------------------------------------------------------------------------------------


def _tokenizer(directory: Path, described: Mapping[str, Any], vocab_size: int) -> Tokenizer:
  path = directory / 'tokenizer.json'
  if not path.is_file():
    raise UserError(f'{directory} has no tokenizer.json')
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The tokenizers package raises nothing narrower.
    raise UserError(f'{path} cannot be read: {error}') from error
  # A saved tokenizer may cut, pad, and trim spaces off the spans of tokens; here a text keeps all it has.
  backend.no_truncation()
  backend.no_padding()
  backend.post_processor = None
  settings = _read_json(directory / 'tokenizer_config.json', optional=True)
  generation = _read_json(directory / 'generation_config.json', optional=True)
  size = max(backend.get_vocab().values(), default=-1) + 1
  if size > vocab_size:
    raise UserError(f'{path} has token ids up to {size - 1} for an embedding of {vocab_size} rows')

  def token_id(role: str) -> int | None:
    spelling = settings.get(f'{role}_token')
    spelling = spelling.get('content') if isinstance(spelling, dict) else spelling
    if isinstance(spelling, str):
      found = backend.token_to_id(spelling)
      if found is None:
        raise UserError(f'tokenizer_config.json names the {role} token {spelling!r}, which {path} lacks')
      return found
    for owner in (generation, described):
      value = owner.get(f'{role}_token_id')
      value = value[0] if isinstance(value, list) and value else value
      if isinstance(value, int) and 0 <= value < size:
        return value
    return None

  eos, pad = token_id('eos'), token_id('pad')
  if eos is None:
    raise UserError(f'{directory}: no configuration file names an end-of-text token (eos_token)')
  template = _chat_template(directory, settings)
  return Tokenizer(backend, eos, eos if pad is None else pad, token_id('bos'), template)


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
  beside = directory / 'chat_template.jinja'
  if beside.is_file():
    return beside.read_text(encoding='utf-8')
  template = settings.get('chat_template')
  if isinstance(template, list):  # Several named ones.
    template = {entry.get('name'): entry.get('template') for entry in template}.get('default')
  return template if isinstance(template, str) else None


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
  if optional and not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise UserError(f'{path} cannot be read: {error}') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} should hold one JSON object')
  return value
