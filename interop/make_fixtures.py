"""Tiny random models as transformers writes them, each with the logits that it computes.

  python interop/make_fixtures.py [folder]

writes tests/fixtures/ (or `folder`): for each model config.json, model.safetensors and expected.npz, and one
versions.json that says who computed them. Weights come from NumPy, so that a new torch changes none of them.
When a test against these files fails, it is the library that moved: mend it, and don't make the files anew.
When making them anew moves logits by more than 1e-4, learn why from transformers' changelog first.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parents[1] / 'tests' / 'fixtures'
LENGTH = 24

# A head is wider than hidden_size / heads, where the family's config has a field for it.
SIZES: dict[str, Any] = dict(
  vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-3,
)
LINEAR = dict(rope_type='linear', rope_theta=100.0, factor=4.0)
# Wavelengths are 2π · 10^(i/2), and 64 tokens the original context: the first frequency is kept, the two with
# wavelengths between 16 and 64 are blended, the other five divided.
LLAMA3 = dict(
  rope_type='llama3', rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=64,
)


def _config(kind: str, **changes: Any) -> Callable[..., transformers.PretrainedConfig]:
  fields = SIZES | changes
  return lambda **more: transformers.AutoConfig.for_model(kind, **(fields | more))


def _theta(theta: float) -> dict[str, Any]:
  return dict(rope_type='default', rope_theta=theta)


# What is not said here stays as transformers has it.
MODELS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
  'llama': _config('llama', head_dim=16, tie_word_embeddings=True),
  'llama_llama3': _config('llama', head_dim=16, rope_parameters=LLAMA3),
  'llama_linear': _config('llama', rope_parameters=LINEAR, tie_word_embeddings=True),
  'mistral': _config('mistral', head_dim=16, sliding_window=4),
  'qwen2': _config('qwen2', rope_parameters=_theta(1000.0), tie_word_embeddings=True),
  'qwen3': _config('qwen3', head_dim=16, rope_parameters=_theta(1000.0), tie_word_embeddings=True),
  'gemma': _config('gemma', head_dim=16, num_key_value_heads=1),
}


def make_model(config: transformers.PretrainedConfig, seed: int) -> transformers.PreTrainedModel:
  """A float32 model with every parameter drawn anew, norm scales and biases too, as numbers of bfloat16."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    model = transformers.AutoModelForCausalLM.from_config(
      config, dtype=torch.float32, attn_implementation='eager'
    )
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
      draw = torch.tensor(rng.standard_normal(parameter.shape), dtype=torch.float32)
      if 'norm' in name:
        draw = 0.3 * draw + (0.0 if config.model_type == 'gemma' else 1.0)
      elif name.endswith('bias') or 'embed' in name:
        draw = 0.5 * draw
      else:
        draw = 1.5 * draw / parameter.shape[-1] ** 0.5
      parameter.copy_(draw.bfloat16())
  return model.eval()


def make_ids(config: transformers.PretrainedConfig, seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def logits_of(model: transformers.PreTrainedModel, ids: np.ndarray) -> np.ndarray:
  """float32 [rows, tokens, vocab_size] of ids [rows, tokens]."""
  with torch.no_grad():
    return model(input_ids=torch.tensor(ids, dtype=torch.long), use_cache=False).logits.float().numpy()


def main(folder: Path) -> None:
  for seed, (name, config) in enumerate(MODELS.items()):
    model = make_model(config(), seed)
    ids = make_ids(model.config, seed, 1, LENGTH)
    logits = logits_of(model, ids)
    # Exact, since the numbers are bfloat16's already; most published files are in it, too.
    model.to(torch.bfloat16).save_pretrained(folder / name)
    (folder / name / 'generation_config.json').unlink(missing_ok=True)
    np.savez(folder / name / 'expected.npz', ids=ids, logits=logits)
  versions = dict(torch=torch.__version__, transformers=transformers.__version__)
  (folder / 'versions.json').write_text(json.dumps(versions, indent=2) + '\n')


if __name__ == '__main__':
  main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES)
