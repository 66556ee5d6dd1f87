"""Small random models, written the way other programs write them: GGUF files and Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from qjax.models.config import ModelConfig

# A key length unlike d_model / heads; query and KV heads differ, and neither number is 2, the length of a
# rotary pair, which would hide a wrong order; rows of 32 so that Q8_0 fits.
CONFIG = ModelConfig(
  vocab_size=288, num_layers=2, d_model=32, d_ff=64, num_heads=12, num_kv_heads=3, head_dim=8, rms_eps=1e-6,
  rope_theta=500_000.0, context_length=256, tie_embeddings=False,
)
SPECIAL = ('<|start|>', '<|end|>')
USER_DEFINED = '<tool>'
TEMPLATE = '{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}'


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
  """Nested float32 arrays that bfloat16 and float16 hold exactly, norms near their identity."""
  rng = np.random.default_rng(seed)
  qkv = {'q': config.num_heads, 'k': config.num_kv_heads, 'v': config.num_kv_heads}

  def normal(*shape: int) -> np.ndarray:
    array = rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 2 else 4)
    return (np.round(array * 64) / 64).astype(np.float32).clip(-1, 1)

  def scale(*shape: int) -> np.ndarray:
    return np.float32(1 - config.norm_offset) + normal(*shape)

  depth, d_model, h = config.num_layers, config.d_model, config.head_dim
  attn: dict[str, Any] = {}
  for name, heads in qkv.items():
    attn[name] = {'kernel': normal(depth, d_model, heads * h)}
    if config.qkv_bias:
      attn[name]['bias'] = normal(depth, heads * h)
  attn['o'] = {'kernel': normal(depth, config.num_heads * h, d_model)}
  if config.qk_norm:
    attn |= {'q_norm': {'scale': scale(depth, h)}, 'k_norm': {'scale': scale(depth, h)}}
  mlp = {name: {'kernel': normal(depth, d_model, config.d_ff)} for name in ('gate', 'up')}
  mlp['down'] = {'kernel': normal(depth, config.d_ff, d_model)}
  layers = {'attn_norm': {'scale': scale(depth, d_model)}, 'mlp_norm': {'scale': scale(depth, d_model)}}
  params: dict[str, Any] = {'embed': {'embedding': normal(config.vocab_size, d_model)}}
  params |= {'layers': layers | {'attn': attn, 'mlp': mlp}, 'final_norm': {'scale': scale(d_model)}}
  if not config.tie_embeddings:
    params['head'] = {'kernel': normal(d_model, config.vocab_size)}
  return params


def hf_tensors(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
  """The tensors under transformers' names, kernels [out, in]."""
  tensors = {'model.embed_tokens.weight': params['embed']['embedding']}
  tensors['model.norm.weight'] = params['final_norm']['scale']
  if not config.tie_embeddings:
    tensors['lm_head.weight'] = params['head']['kernel'].T
  layers = params['layers']
  for index in range(config.num_layers):
    prefix = f'model.layers.{index}.'
    tensors[prefix + 'input_layernorm.weight'] = layers['attn_norm']['scale'][index]
    tensors[prefix + 'post_attention_layernorm.weight'] = layers['mlp_norm']['scale'][index]
    for name, leaves in layers['attn'].items():
      if 'scale' in leaves:
        tensors[prefix + f'self_attn.{name}.weight'] = leaves['scale'][index]
      else:
        tensors[prefix + f'self_attn.{name}_proj.weight'] = leaves['kernel'][index].T
      if 'bias' in leaves:
        tensors[prefix + f'self_attn.{name}_proj.bias'] = leaves['bias'][index]
    for name, leaves in layers['mlp'].items():
      tensors[prefix + f'mlp.{name}_proj.weight'] = leaves['kernel'][index].T
  return tensors


def hf_config(config: ModelConfig, model_type: str = 'llama', **changes: Any) -> dict[str, Any]:
  described = dict(
    model_type=model_type, vocab_size=config.vocab_size, num_hidden_layers=config.num_layers,
    hidden_size=config.d_model, intermediate_size=config.d_ff, num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_eps,
    rope_theta=config.rope_theta, max_position_embeddings=config.context_length,
    tie_word_embeddings=config.tie_embeddings, hidden_act='silu',
  )
  return described | changes


def write_hf(
  directory: Path,
  described: dict[str, Any],
  tensors: dict[str, np.ndarray],
  dtype: Any = np.float32,
  shards: int = 1,
) -> Path:
  """config.json and safetensors, in `shards` files with an index when there is more than one."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(described))
  stored = {name: np.ascontiguousarray(array.astype(dtype)) for name, array in tensors.items()}
  if shards == 1:
    save_file(stored, directory / 'model.safetensors')
    return directory
  weight_map = {}
  for shard in range(shards):
    file = f'model-{shard + 1:05}-of-{shards:05}.safetensors'
    names = sorted(stored)[shard::shards]
    save_file({name: stored[name] for name in names}, directory / file)
    weight_map |= dict.fromkeys(names, file)
  (directory / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  return directory


def gguf_name(hf_name: str) -> str:
  """llama.cpp's name of a tensor, by llama.cpp's own table."""
  table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)  # Llama's names, and the norms of q and k.
  found = table.get_name(hf_name, try_suffixes=('.weight', '.bias'))
  assert found is not None
  return found


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
  """What llama.cpp's converter does to the q and k of a Llama: rotary pairs side by side."""
  halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
  path: Path,
  config: ModelConfig,
  tensors: dict[str, np.ndarray],
  arch: str = 'llama',
  kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
  metadata: dict[str, Any] | None = None,
  extra: dict[str, np.ndarray] | None = None,
) -> Path:
  """A GGUF file of tensors given under transformers' names; matrices stored as `kind`.

  `metadata` adds or replaces entries (None leaves one out); `extra` adds tensors under their own names.
  """
  entries: dict[str, Any] = {
    f'{arch}.block_count': config.num_layers, f'{arch}.context_length': config.context_length,
    f'{arch}.embedding_length': config.d_model, f'{arch}.feed_forward_length': config.d_ff,
    f'{arch}.attention.head_count': config.num_heads, f'{arch}.attention.head_count_kv': config.num_kv_heads,
    f'{arch}.attention.key_length': config.head_dim, f'{arch}.attention.value_length': config.head_dim,
    f'{arch}.rope.dimension_count': config.head_dim, f'{arch}.rope.freq_base': config.rope_theta,
    f'{arch}.attention.layer_norm_rms_epsilon': config.rms_eps,
  }
  entries |= gguf_tokenizer() | (metadata or {})
  writer = gguf.GGUFWriter(path, arch)
  for key, value in entries.items():
    if isinstance(value, list):
      writer.add_array(key, value)
    elif value is not None:
      add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
      add[type(value)](key, value)
  for name, array in tensors.items():
    if arch == 'llama' and '.self_attn.q_proj' in name:
      array = interleave(array, config.num_heads)
    elif arch == 'llama' and '.self_attn.k_proj' in name:
      array = interleave(array, config.num_kv_heads)
    array = np.ascontiguousarray(array)
    if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
      writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(gguf_name(name), array)
  for name, array in (extra or {}).items():
    writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def gguf_tokenizer(pre: str = 'smollm') -> dict[str, Any]:
  """All 256 bytes, three merges, two control tokens and one that a user defined."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = [*SPECIAL, *letters, 'th', 'the', 'Ġthe', '12', USER_DEFINED]
  merges = ['t h', 'th e', 'Ġ the', '1 2']
  types = [4 if token == USER_DEFINED else 3 if token in SPECIAL else 1 for token in tokens]
  return {
    'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': pre, 'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.merges': merges, 'tokenizer.ggml.token_type': types, 'tokenizer.ggml.bos_token_id': 0,
    'tokenizer.ggml.eos_token_id': 1, 'tokenizer.chat_template': TEMPLATE,
  }
