"""Files that transformers wrote give the logits that transformers computed; no PyTorch is needed for it here.

tests/fixtures/ is the work of interop/make_fixtures.py, which says what to do when numbers move.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qjax.errors import UserError
from qjax.io.hf import config_from_hf
from qjax.io.source import load_source, params
from qjax.models import transformer
from qjax.models.config import ModelConfig, RopeScaling
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from tests import oracle

FIXTURES = Path(__file__).parents[1] / 'fixtures'
SHARED = ModelConfig(
  vocab_size=96, num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=16, rms_eps=1e-3,
  context_length=128,
)
LLAMA3 = RopeScaling('llama3', 8.0, 1.0, 4.0, 64)
# What each configuration says, and near misses: what another reader might take the same file to mean.
OWN: dict[str, dict[str, Any]] = {
  'llama': dict(),
  'llama_llama3': dict(tie_embeddings=False, rope_scaling=LLAMA3),
  'llama_linear': dict(rope_scaling=RopeScaling('linear', 4.0), rope_theta=100.0, head_dim=8),
  'mistral': dict(tie_embeddings=False, sliding_window=4),
  'qwen2': dict(qkv_bias=True, rope_theta=1000.0, head_dim=8),
  'qwen3': dict(qk_norm=True, rope_theta=1000.0),
  'gemma': dict(norm_offset=1.0, embed_scale=32**0.5, activation='gelu_tanh', num_kv_heads=1),
}
MISSES: dict[str, list[dict[str, Any]]] = {
  'llama': [dict(rms_eps=1e-6), dict(rope_theta=500_000.0)],
  'llama_llama3': [dict(rope_scaling=None), dict(rope_scaling=RopeScaling('llama3', 8.0, 1.0, 4.0, 128))],
  'llama_linear': [dict(rope_scaling=None), dict(rope_theta=10_000.0)],
  'mistral': [dict(sliding_window=3), dict(sliding_window=5)],
  'qwen2': [dict(rope_theta=10_000.0)],
  'qwen3': [dict(rope_theta=10_000.0)],
  'gemma': [dict(activation='silu'), dict(norm_offset=0.0), dict(embed_scale=1.0)],
}


@pytest.mark.parametrize('name', OWN)
def test_logits_are_those_of_transformers(name: str) -> None:
  source = load_source(FIXTURES / name)
  config, weights = source.config, params(source)
  assert config == dataclasses.replace(SHARED, **OWN[name])
  with np.load(FIXTURES / name / 'expected.npz') as expected:
    ids, logits = expected['ids'], expected['logits']

  slow = oracle.forward(config, weights, ids[0])
  # Three float32 programs that round in another order err about equally, some 1e-5 here; float64 tells how
  # far the oracle is off.
  error = np.abs(slow - oracle.forward(config, jax.tree.map(np.float64, weights), ids[0])).max()
  assert error < 5e-5
  np.testing.assert_allclose(slow, logits[0], rtol=0, atol=6 * error)

  model = Transformer(config, Numerics(policy()))
  positions = np.arange(ids.shape[1], dtype=np.int32)[None]
  forward = jax.jit(lambda *a: transformer.logits(model, *a))
  found = forward({'params': weights}, ids, np.ones_like(ids), positions)
  np.testing.assert_allclose(found, logits, rtol=0, atol=6 * error)

  for miss in MISSES[name]:
    other = oracle.forward(dataclasses.replace(config, **miss), weights, ids[0])
    assert np.abs(other - logits[0]).max() > 100 * error, miss


def test_the_fields_of_a_file_that_change_the_answer_are_read() -> None:
  described = json.loads((FIXTURES / 'gemma' / 'config.json').read_text())
  with pytest.raises(UserError, match='use_bidirectional_attention is not supported'):
    config_from_hf(described | dict(use_bidirectional_attention=True))
  described = json.loads((FIXTURES / 'qwen2' / 'config.json').read_text())
  assert config_from_hf(described | dict(num_key_value_heads=None)).num_kv_heads == 4
