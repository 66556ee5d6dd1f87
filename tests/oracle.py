"""The Llama family in plain float32 NumPy, one layer and head at a time: slow and easy to check.

Shares nothing with the library but `ModelConfig`. T tokens, D d_model, H query heads, h head_dim.
"""

from typing import Any

import numpy as np

from qjax.models.config import ModelConfig


def forward(config: ModelConfig, params: dict[str, Any], ids: np.ndarray) -> np.ndarray:
  """Logits [T, vocab_size] float32 for one sequence of ids [T], causal, from position 0."""
  embedding = params['embed']['embedding']
  x_TxD = embedding[ids] * np.float32(config.embed_scale)
  for index in range(config.num_layers):
    layer = _layer(params['layers'], index)
    x_TxD = x_TxD + attention(config, layer['attn'], rms_norm(config, x_TxD, layer['attn_norm']['scale']))
    x_TxD = x_TxD + mlp(config, layer['mlp'], rms_norm(config, x_TxD, layer['mlp_norm']['scale']))
  x_TxD = rms_norm(config, x_TxD, params['final_norm']['scale'])
  return x_TxD @ (embedding.T if config.tie_embeddings else params['head']['kernel'])


def rms_norm(config: ModelConfig, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """x / rms(x) * (scale + norm_offset), over the last axis."""
  mean_square = np.mean(x * x, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + np.float32(config.rms_eps)) * (scale + np.float32(config.norm_offset))


def attention(config: ModelConfig, weights: dict[str, Any], x_TxD: np.ndarray) -> np.ndarray:
  length, h = len(x_TxD), config.head_dim
  q = _project(x_TxD, weights['q']).reshape(length, config.num_heads, h)
  k = _project(x_TxD, weights['k']).reshape(length, config.num_kv_heads, h)
  v = _project(x_TxD, weights['v']).reshape(length, config.num_kv_heads, h)
  if config.qk_norm:
    q = rms_norm(config, q, weights['q_norm']['scale'])
    k = rms_norm(config, k, weights['k_norm']['scale'])
  q, k = rotate(config, q), rotate(config, k)
  is_seen_TxT = np.zeros((length, length), bool)
  for i in range(length):
    first = 0 if config.sliding_window is None else max(0, i - config.sliding_window + 1)
    is_seen_TxT[i, first : i + 1] = True
  out_TxHxh = np.empty_like(q)
  for head in range(config.num_heads):
    kv_head = head // (config.num_heads // config.num_kv_heads)
    scores_TxT = q[:, head] @ k[:, kv_head].T / np.float32(np.sqrt(h))
    scores_TxT = np.where(is_seen_TxT, scores_TxT, -np.inf)
    weight_TxT = np.exp(scores_TxT - scores_TxT.max(axis=-1, keepdims=True))
    out_TxHxh[:, head] = weight_TxT / weight_TxT.sum(axis=-1, keepdims=True) @ v[:, kv_head]
  return _project(out_TxHxh.reshape(length, -1), weights['o'])


def mlp(config: ModelConfig, weights: dict[str, Any], x_TxD: np.ndarray) -> np.ndarray:
  gate = _project(x_TxD, weights['gate'])
  if config.activation == 'silu':
    # The clip keeps exp finite in float32 where the sigmoid is 0 anyway.
    gate = gate / (1 + np.exp(np.minimum(-gate, 80)))
  else:
    gate = gate / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)))
  return _project(gate * _project(x_TxD, weights['up']), weights['down'])


def rotate(config: ModelConfig, x_TxHxh: np.ndarray) -> np.ndarray:
  """Turns the pair (i, i + h/2) of token t by the angle t * frequency[i]; angles in float64."""
  half = config.head_dim // 2
  angle_Txhalf = np.outer(np.arange(len(x_TxHxh)), rope_frequencies(config))
  cos, sin = (f(angle_Txhalf).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
  a, b = x_TxHxh[..., :half], x_TxHxh[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
  """Radians a token [head_dim / 2] float64."""
  frequencies = []
  for i in range(config.head_dim // 2):
    frequency = config.rope_theta ** (-2 * i / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == 'linear':
      frequency /= scaling.factor
    elif scaling is not None:
      wavelength = 2 * np.pi / frequency
      low, high = scaling.low_freq_factor, scaling.high_freq_factor
      if wavelength > scaling.original_context / low:
        frequency /= scaling.factor
      elif wavelength >= scaling.original_context / high:
        smooth = (scaling.original_context / wavelength - low) / (high - low)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    frequencies.append(frequency)
  return np.array(frequencies)


def _project(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
  y = x @ weights['kernel']
  return y + weights['bias'] if 'bias' in weights else y


def _layer(stacked: dict[str, Any], index: int) -> dict[str, Any]:
  return {k: _layer(v, index) if isinstance(v, dict) else v[index] for k, v in stacked.items()}
