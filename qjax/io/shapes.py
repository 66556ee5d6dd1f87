"""Models as shapes alone: what can be planned and compiled for without a file of weights."""

from pathlib import Path
from typing import Any, NoReturn

from qjax.errors import UserError, nearest
from qjax.io import hf
from qjax.io.source import SHAPES, Source, fingerprint
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes


def _llama(layers: int, d_model: int, d_ff: int, heads: int, **more: Any) -> ModelConfig:
  """The first Llama families: 32,000 words, as many key as query heads of 128, an untied head."""
  shape = {
    'vocab_size': 32000, 'num_kv_heads': heads, 'head_dim': 128, 'tie_embeddings': False
  }  # fmt: skip
  return ModelConfig(num_layers=layers, d_model=d_model, d_ff=d_ff, num_heads=heads, **(shape | more))


def _llama3(layers: int, d_model: int, d_ff: int, heads: int, **more: Any) -> ModelConfig:
  shape = {'vocab_size': 128256, 'num_kv_heads': 8, 'rope_theta': 500000.0, 'context_length': 8192}
  return _llama(layers, d_model, d_ff, heads, **(shape | more))


def _qwen2(layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int, **more: Any) -> ModelConfig:
  shape = {'vocab_size': 151936, 'head_dim': d_model // heads, 'rope_theta': 1e6, 'rms_eps': 1e-6}
  return ModelConfig(
    num_layers=layers, d_model=d_model, d_ff=d_ff, num_heads=heads, num_kv_heads=kv_heads,
    context_length=32768, qkv_bias=True, **(shape | more),
  )  # fmt: skip


# The published config.json of each.
MODELS = {
  'smollm2_135m': ModelConfig(49152, 30, 576, 1536, 9, 3, 64, rope_theta=100000.0, context_length=8192),
  'smollm2_360m': ModelConfig(49152, 32, 960, 2560, 15, 5, 64, rope_theta=100000.0, context_length=8192),
  'smollm2_1_7b': ModelConfig(49152, 24, 2048, 8192, 32, 32, 64, rope_theta=130000.0, context_length=8192),
  'qwen2_0_5b': _qwen2(24, 896, 4864, 14, 2),
  'qwen2_1_5b': _qwen2(28, 1536, 8960, 12, 2),
  'qwen2_7b': _qwen2(28, 3584, 18944, 28, 4, vocab_size=152064, tie_embeddings=False),
  'tinyllama_1b': _llama(22, 2048, 5632, 32, num_kv_heads=4, head_dim=64),
  'llama3_1b': _llama3(
    16, 2048, 8192, 32, head_dim=64, tie_embeddings=True, context_length=131072,
    rope_scaling=RopeScaling('llama3', 32.0),
  ),
  'llama3_8b': _llama3(32, 4096, 14336, 32),
  'llama3_70b': _llama3(80, 8192, 28672, 64),
  'llama2_7b': _llama(32, 4096, 11008, 32, context_length=4096),
  'llama2_13b': _llama(40, 5120, 13824, 40, context_length=4096),
  'llama_13b': _llama(40, 5120, 13824, 40, rms_eps=1e-6),
  'llama_33b': _llama(60, 6656, 17920, 52, rms_eps=1e-6),
  'llama_65b': _llama(80, 8192, 22016, 64),
}  # fmt: skip


def load(path: str) -> Source:
  """The model that 'shapes:NAME' or 'shapes:DIRECTORY' describes; a directory needs its config.json alone.

  Reading a weight or asking for the tokenizer is a `UserError`, and so are an unknown name (with the nearest)
  and a config.json that is not supported.
  """
  name = path.removeprefix(SHAPES)
  if name in MODELS:
    config = MODELS[name]
  elif (directory := Path(name).expanduser()).is_dir():
    config = hf.read_config(directory)
  else:
    raise UserError(f'there is no shape {name!r}, and no directory of a config.json{nearest(name, MODELS)}')
  problem = f'{path} is a shape without weights: it can be planned (experiments.plan), not trained or read'

  def refuse(parameter: str, layer: int | None) -> NoReturn:
    raise UserError(problem)

  mark = fingerprint([repr(config).encode()], [])
  return Source(path, config, None, tuple(parameter_shapes(config)), mark, refuse, problem)
