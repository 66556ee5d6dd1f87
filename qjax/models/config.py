"""The shape of a decoder: everything that the Llama family varies, as one frozen record."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the context of pre-training.

  `linear` divides every frequency by `factor`. `llama3` leaves short wavelengths alone, divides long
  ones by `factor` and blends between (Llama 3.1's released code; the three further fields apply to it).
  """

  kind: Literal['linear', 'llama3']
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192

  def __post_init__(self) -> None:
    if self.kind not in ('linear', 'llama3'):
      raise ValueError(f'RoPE scaling {self.kind!r} is not known; linear and llama3 are')
    if self.factor < 1:
      raise ValueError(f'RoPE scaling factor {self.factor} must be at least 1')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder of the Llama family.

  The parameters it implies (`L` layers, all projections `[in, out]`, stacked over layers):

    embed/embedding            [vocab_size, d_model]
    layers/attn_norm/scale     [L, d_model]
    layers/attn/{q,k,v}/kernel [L, d_model, heads * head_dim]   (and bias [L, heads * head_dim])
    layers/attn/o/kernel       [L, num_heads * head_dim, d_model]
    layers/attn/{q,k}_norm/scale [L, head_dim]                  (with qk_norm)
    layers/mlp_norm/scale      [L, d_model]
    layers/mlp/{gate,up}/kernel [L, d_model, d_ff]
    layers/mlp/down/kernel     [L, d_ff, d_model]
    final_norm/scale           [d_model]
    head/kernel                [d_model, vocab_size]            (untied only)

  Rotary embeddings pair feature i with i + head_dim/2 ("rotate half"). `norm_offset` is added to every
  norm scale when it is applied (1 for Gemma weights as published; 0 where a file has it baked in).
  `sliding_window` = w lets a token see itself and the w - 1 tokens before it.
  """

  vocab_size: int
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  rms_eps: float = 1e-5
  context_length: int = 2048
  tie_embeddings: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  norm_offset: float = 0.0
  embed_scale: float = 1.0
  activation: Literal['silu', 'gelu_tanh'] = 'silu'

  @property
  def num_parameters(self) -> int:
    """Numbers in all parameters; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(self).values())

  def __post_init__(self) -> None:
    sizes = ('vocab_size', 'num_layers', 'd_model', 'd_ff', 'num_heads', 'num_kv_heads', 'head_dim')
    for name in sizes:
      if getattr(self, name) < 1:
        raise ValueError(f'{name} = {getattr(self, name)} must be at least 1')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f'{self.num_heads} query heads do not divide into {self.num_kv_heads} key/value heads')
    if self.head_dim % 2:
      raise ValueError(f'head_dim = {self.head_dim} must be even: rotary embeddings turn pairs')
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(
        f'sliding_window = {self.sliding_window} must be at least 1 (or None for full attention)'
      )
    if self.activation not in ('silu', 'gelu_tanh'):
      raise ValueError(f'activation {self.activation!r} is not known; silu and gelu_tanh are')


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Path → shape of every parameter that `config` implies, as `ModelConfig` lists them."""
  depth, d_model, d_ff = config.num_layers, config.d_model, config.d_ff
  out = {'q': config.num_heads * config.head_dim, 'k': config.num_kv_heads * config.head_dim}
  out['v'] = out['k']
  shapes: dict[str, tuple[int, ...]] = {'embed/embedding': (config.vocab_size, d_model)}
  shapes['layers/attn_norm/scale'] = (depth, d_model)
  for name, width in out.items():
    shapes[f'layers/attn/{name}/kernel'] = (depth, d_model, width)
    if config.qkv_bias:
      shapes[f'layers/attn/{name}/bias'] = (depth, width)
  if config.qk_norm:
    shapes['layers/attn/q_norm/scale'] = (depth, config.head_dim)
    shapes['layers/attn/k_norm/scale'] = (depth, config.head_dim)
  shapes['layers/attn/o/kernel'] = (depth, out['q'], d_model)
  shapes['layers/mlp_norm/scale'] = (depth, d_model)
  shapes['layers/mlp/gate/kernel'] = (depth, d_model, d_ff)
  shapes['layers/mlp/up/kernel'] = (depth, d_model, d_ff)
  shapes['layers/mlp/down/kernel'] = (depth, d_ff, d_model)
  shapes['final_norm/scale'] = (d_model,)
  if not config.tie_embeddings:
    shapes['head/kernel'] = (d_model, config.vocab_size)
  return shapes
