"""A decoder of the Llama family: one functional Linen module, layers scanned with selectable remat."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from qjax.errors import UserError, nearest
from qjax.models.attention import AttentionKernel, attention_mask
from qjax.models.config import ModelConfig
from qjax.models.layers import Attention, GatedMLP, Norm, rotary_table
from qjax.ops import Numerics, Weight, matmul, take_rows
from qjax.precision import policy
from qjax.remat import LAYER_IN, POLICIES, as_bits, from_bits
from qjax.sharding import BATCH_AXES, constrain

Tree = Any

class Block(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)): the body of the scan over layers."""

  config: ModelConfig
  numerics: Numerics
  kernel: AttentionKernel
  remat: str
  mlp_chunk: int = 0

  @nn.compact
  def __call__(
    self, x: jax.Array, table: tuple[jax.Array, jax.Array], mask: jax.Array
  ) -> tuple[jax.Array, None]:
    if self.remat == 'none':
      return _layer(self, None, x, table, mask), None
    layer = nn.remat(_layer, policy=POLICIES[self.remat], prevent_cse=False)
    return layer(self, as_bits(x), x, table, mask), None


def _layer(
  block: Block, bits: jax.Array | None, x: jax.Array, table: tuple[jax.Array, jax.Array], mask: jax.Array
) -> jax.Array:
  """What the block computes. With `bits` those are kept for the backward pass in the place of x."""
  c = block.config
  x = x if bits is None else from_bits(checkpoint_name(bits, LAYER_IN), x)
  y = Norm(c.rms_eps, c.norm_offset, name='attn_norm')(x)
  x = x + Attention(c, block.numerics, block.kernel, name='attn')(y, table, mask)
  y = Norm(c.rms_eps, c.norm_offset, name='mlp_norm')(x)
  x = x + GatedMLP(c, block.numerics, block.mlp_chunk, name='mlp')(y)
  return constrain(x, BATCH_AXES, None, None)


class Transformer(nn.Module):
  """Token ids to the hidden states before the head.

  `apply({'params': …, 'lora': …}, tokens, segments, positions)`; the 'lora' collection may be absent. Every
  leaf under 'layers' is a stack over layers. With a 'dropout' rng adapters drop inputs; without, they don't.

  Attributes:
    config: shape of the model.
    numerics: dtypes and kernels of matrix products.
    remat: a name in `POLICIES`.
    kernel: implementation of attention.
    mlp_chunk: tokens of a row that the MLP takes at a time; 0 is all.
  """

  config: ModelConfig
  numerics: Numerics
  remat: str = 'full'
  kernel: AttentionKernel = AttentionKernel()
  mlp_chunk: int = 0

  @nn.compact
  def __call__(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
    """Hidden states [B, T, D] in the compute dtype.

    Args:
      tokens: int [B, T].
      segments: int [B, T]; equal non-zero numbers are one document, 0 is padding.
      positions: int [B, T], counted from 0 in each document.
    """
    c = self.config
    x = embed(c, self.numerics, Embedding(c, name='embed')(), tokens)
    layers = nn.scan(
      Block,
      variable_axes={'params': 0, 'lora': 0, 'act': 0, 'ranges': 0, 'slots': 0, 'seen': 0},
      variable_broadcast='slices',
      split_rngs={'params': True, 'dropout': True, 'rounding': True},
      in_axes=(nn.broadcast, nn.broadcast),
      length=c.num_layers,
    )(c, self.numerics, self.kernel, self.remat, self.mlp_chunk, name='layers')
    x, _ = layers(x, rotary_table(c, positions), attention_mask(segments, c.sliding_window))
    x = Norm(c.rms_eps, c.norm_offset, name='final_norm')(x)
    if not c.tie_embeddings and self.is_initializing():
      Head(c, name='head')()
    return x

  def __post_init__(self) -> None:
    if self.remat not in POLICIES:
      raise UserError(f'model.remat = {self.remat!r} is not known{nearest(self.remat, POLICIES)}')
    super().__post_init__()


def embed(config: ModelConfig, numerics: Numerics, table: Weight, tokens: jax.Array) -> jax.Array:
  """The residual stream before the first layer, [B, T, D] in the compute dtype."""
  x = take_rows(table, tokens).astype(numerics.policy.compute)
  if config.embed_scale != 1:
    x = x * jnp.asarray(config.embed_scale, x.dtype)
  return constrain(x, BATCH_AXES, None, None)


class Embedding(nn.Module):
  """The table [vocab_size, d_model], plain or in 16-bit floats."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> Weight:
    if self.has_variable('params', 'embedding'):  # looked up, not declared, as in `Projection`
      return self.get_variable('params', 'embedding')
    shape = (self.config.vocab_size, self.config.d_model)
    return self.param('embedding', nn.initializers.normal(self.config.d_model**-0.5), shape, jnp.float32)


class Head(nn.Module):
  """Declares the untied output projection, which the loss multiplies chunk by chunk."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> None:
    shape = (self.config.d_model, self.config.vocab_size)
    self.param('kernel', nn.initializers.lecun_normal(), shape, jnp.float32)


def head_of(config: ModelConfig, params: Tree) -> tuple[Weight, bool]:
  """The output projection and whether it is stored transposed ([vocab, d_model], the tied embedding)."""
  return (params['embed']['embedding'], True) if config.tie_embeddings else (params['head']['kernel'], False)


def logits(
  model: Transformer, variables: Tree, tokens: jax.Array, segments: jax.Array, positions: jax.Array
) -> jax.Array:
  """All logits [B, T, vocab] in the output dtype. Training and evaluation use `loss.token_losses` instead."""
  hidden: Any = model.apply(variables, tokens, segments, positions)
  head, transposed = head_of(model.config, variables['params'])
  dtypes = model.numerics.policy
  return matmul(hidden, head, dtypes, transposed).astype(dtypes.output)


def init_params(config: ModelConfig, key: jax.Array) -> Tree:
  """Random float32 parameters with the paths that `ModelConfig` lists."""
  model = Transformer(config, Numerics(policy()), remat='none')
  one = jnp.zeros((1, 1), jnp.int32)
  return model.init(key, one, one + 1, one)['params']
