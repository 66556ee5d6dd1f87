"""The parts of a decoder layer: norm, rotary embedding, projection, attention, gated MLP.

Shape legend: B rows, T tokens, D model width, H query heads, K key/value heads, C head width, F MLP width.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.adapters import Adapter
from qjax.models.attention import AttentionKernel, attend
from qjax.models.config import ModelConfig, RopeScaling
from qjax.ops import Numerics
from qjax.quant.fake import Patched, Slices
from qjax.quant.qtensor import QTensor
from qjax.remat import PROJECTION_OUT, named
from qjax.sharding import BATCH_AXES, constrain, fetch


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float) -> jax.Array:
  """x / rms(x) · (scale + offset) over the last axis, computed in float32, in the dtype of x."""
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
  """Radians per position of each pair, float32 [head_dim / 2]."""
  frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is None:
    pass
  elif scaling.kind == 'linear':
    frequencies = frequencies / scaling.factor
  else:
    # Rotations that a frequency makes within the original context decide how far it is stretched.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
  return frequencies.astype(np.float32)


def rotary_table(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """cos and sin, float32 [B, T, 1, head_dim / 2]; the same for every layer, so computed once a step."""
  frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
  angles = positions.astype(jnp.float32)[..., None, None] * frequencies
  return jnp.cos(angles), jnp.sin(angles)


@jax.custom_vjp
def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotary position embedding of x [B, T, heads, C], pairs (i, i + C/2), in float32, in the dtype of x."""
  cos, sin = (jnp.concatenate([part, part], axis=-1) for part in table)
  half = x.shape[-1] // 2
  # (first, second) becomes (-second, first) by a product, whose sums have one term: shifted slices of x would
  # have XLA's CPU backend compute x again for each of them, without vector instructions.
  turn = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
  turn[np.arange(half) + half, np.arange(half)] = -1
  turn[np.arange(half), np.arange(half) + half] = 1
  turned = ops.contract(x, jnp.asarray(turn, x.dtype), ((x.ndim - 1,), (0,)), jnp.dtype('float32'))
  return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


def _rotate_fwd(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
  return rotate(x, table), table


def _rotate_bwd(table: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
  cos, sin = table
  return rotate(g, (cos, -sin)), None


rotate.defvjp(_rotate_fwd, _rotate_bwd)


class Projection(nn.Module):
  """x·W (+ bias), W [in, out] plain or quantized, with the adapter that the 'lora' collection may hold.

  The collection 'act' holds the range of x, a float32 scalar, where `numerics.activations` asks for a static
  one, and 'ranges' those of a weight whose ranges learn. Where 'slices' holds some matrices of the stack,
  'slots' says which of them takes the place of this layer's. A caller who runs a layer with the collection
  'inputs' mutable finds x in it; static ranges that are still missing are then no error, and x goes in as it
  is. With 'seen' mutable, the largest magnitude of x is found there.
  """

  features: int
  numerics: Numerics
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, low: jax.Array | None = None) -> jax.Array:
    # A quantized weight is no array of the shape that an initializer would promise, so an existing weight
    # is looked up, not declared.
    if self.has_variable('params', 'kernel'):
      kernel: ops.Projected = fetch(self.get_variable('params', 'kernel'))
    else:
      kernel = self.param('kernel', nn.initializers.lecun_normal(), (x.shape[-1], self.features), jnp.float32)
    adapter = self.get_variable('lora', 'kernel') if self.has_variable('lora', 'kernel') else None
    bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else None
    drops = isinstance(adapter, Adapter) and adapter.dropout > 0 and self.has_rng('dropout')
    key = self.make_rng('dropout') if drops else None
    high = self.get_variable('act', 'kernel') if self.has_variable('act', 'kernel') else None
    weight_high = self.get_variable('ranges', 'kernel') if self.has_variable('ranges', 'kernel') else None
    path: str | None = _path(self)
    rounds = self.numerics.draws and self.has_rng('rounding')
    rounding_key = self.make_rng('rounding') if rounds else None
    if self.is_mutable_collection('seen') and not self.is_initializing():
      self.sow('seen', 'kernel', jnp.max(jnp.abs(x)).astype(jnp.float32), lambda old, new: new, lambda: 0)
    if self.is_mutable_collection('inputs') and not self.is_initializing():
      self.sow('inputs', 'kernel', x)
      if high is None and self.numerics.scheme_of(path).is_static:
        path = None
    if self.has_variable('slices', 'kernel'):
      assert isinstance(kernel, QTensor)
      slices = Slices(**self.get_variable('slices', 'kernel'))
      kernel = Patched(
        kernel, slices, self.get_variable('slots', 'kernel'), self.numerics.weight_gradient
      )
    y = ops.dot(
      x, kernel, self.numerics, adapter, bias, key, path, high, low, weight_high, rounding_key
    )
    return named(y, PROJECTION_OUT)


def _path(module: nn.Module, *names: str) -> str:
  """The path of the kernel of a projection, also of one in a layer that runs by itself."""
  return 'layers/' + '/'.join((*module.path, *names, 'kernel')).removeprefix('layers/')


def lower_together(
  parent: nn.Module, names: Sequence[str], x: jax.Array, numerics: Numerics
) -> dict[str, jax.Array]:
  """x·A for the adapters of those projections of `parent` that read x; {} if each drops inputs of its own.

  An adapter inside a quantizer is no product of its own, and several in one batch are multiplied otherwise.
  """
  present = [name for name in names if parent.has_variable('lora', name)]
  held: dict[str, Any] = {name: parent.get_variable('lora', name)['kernel'] for name in present}
  adapters: dict[str, Adapter] = {
    name: adapter
    for name, adapter in held.items()
    if isinstance(adapter, Adapter)
    and numerics.trained_scheme_of(_path(parent, name), is_at_rest=False, has_adapter=True) is None
  }
  if not adapters or (parent.has_rng('dropout') and any(a.dropout > 0 for a in adapters.values())):
    return {}
  lows = ops.lower(x, tuple(adapter.a for adapter in adapters.values()), numerics.policy)
  return dict(zip(adapters, lows, strict=True))


class Norm(nn.Module):
  """RMSNorm with the family's eps and offset."""

  eps: float
  offset: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.initializers.constant(1.0 - self.offset)
    return rms_norm(x, self.param('scale', ones, (x.shape[-1],), jnp.float32), self.eps, self.offset)


class Attention(nn.Module):
  """Grouped-query self-attention with rotary positions over packed documents."""

  config: ModelConfig
  numerics: Numerics
  kernel: AttentionKernel

  @nn.compact
  def __call__(self, x: jax.Array, table: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    c = self.config

    lows = lower_together(self, 'qkv', x, self.numerics)

    def heads(name: str, count: int) -> jax.Array:
      y = Projection(count * c.head_dim, self.numerics, c.qkv_bias, name=name)(x, lows.get(name))
      y = y.reshape(*y.shape[:-1], count, c.head_dim)
      return constrain(y, BATCH_AXES, None, 'tensor', None)

    q, k, v = heads('q', c.num_heads), heads('k', c.num_kv_heads), heads('v', c.num_kv_heads)
    if c.qk_norm:
      q = Norm(c.rms_eps, c.norm_offset, name='q_norm')(q)
      k = Norm(c.rms_eps, c.norm_offset, name='k_norm')(k)
    q, k = rotate(q, table), rotate(k, table)
    out = attend(q, k, v, mask, self.kernel.resolve(q.dtype, c.head_dim))
    out = out.reshape(*out.shape[:-2], c.num_heads * c.head_dim)
    return Projection(c.d_model, self.numerics, name='o')(out)


class GatedMLP(nn.Module):
  """down(act(gate(x)) · up(x)).

  Tokens do not see each other here, so with `chunk` the MLP takes so many of each row at a time, and computes
  each chunk again when its gradient is due: [B, chunk, F] is there in the place of [B, T, F].
  """

  config: ModelConfig
  numerics: Numerics
  chunk: int = 0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    rows, tokens, width = x.shape
    if not self.chunk or tokens <= self.chunk:
      return _mlp(self, x)
    if tokens % self.chunk:
      raise ValueError(f'rows of {tokens} tokens do not divide into chunks of {self.chunk}')
    again = nn.remat(_mlp, prevent_cse=False)
    loop = nn.scan(
      lambda mlp, carry, x: (carry, again(mlp, x)),
      variable_broadcast=('params', 'lora', 'act', 'ranges', 'slices', 'slots'),
      split_rngs={'dropout': True, 'rounding': True},
      in_axes=1,
      out_axes=1,
    )
    _, y = loop(self, (), x.reshape(rows, tokens // self.chunk, self.chunk, width))
    return y.reshape(rows, tokens, -1)


def _mlp(mlp: GatedMLP, x: jax.Array) -> jax.Array:
  """What the MLP computes."""
  c, numerics = mlp.config, mlp.numerics
  lows = lower_together(mlp, ('gate', 'up'), x, numerics)
  gate = Projection(c.d_ff, numerics, name='gate')(x, lows.get('gate'))
  up = Projection(c.d_ff, numerics, name='up')(x, lows.get('up'))
  gate, up = (constrain(y, BATCH_AXES, None, 'tensor') for y in (gate, up))
  if c.activation == 'silu':
    hidden = silu_gate(gate, up)
  else:
    wide = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    hidden = wide.astype(x.dtype)
  return Projection(c.d_model, numerics, name='down')(hidden)


@jax.custom_vjp
def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gate · sigmoid(gate) · up, computed in float32, in the dtype of the two.

  The gradient reads both once, where autodiff of the float32 arithmetic writes its terms out in between.
  """
  wide = gate.astype(jnp.float32)
  return (wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32)).astype(gate.dtype)


def _silu_gate_fwd(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, Any]:
  return silu_gate(gate, up), (gate, up)


def _silu_gate_bwd(residual: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  gate, up, g = (x.astype(jnp.float32) for x in (*residual, g))
  sigmoid = jax.nn.sigmoid(gate)
  act = gate * sigmoid
  d_gate, d_up = g * up * sigmoid * (1 + gate - act), g * act
  return d_gate.astype(residual[0].dtype), d_up.astype(residual[1].dtype)


silu_gate.defvjp(_silu_gate_fwd, _silu_gate_bwd)
