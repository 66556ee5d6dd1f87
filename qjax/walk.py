"""A model one layer at a time: what each projection sees, with one layer's weights and activations in memory.

Calibration of a deep model cannot hold every layer's inputs. Here the residual stream of all rows waits
between layers, [R, T, D], and a layer is read, observed, perhaps changed, and applied before the next one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qjax import trees
from qjax.models.attention import AttentionKernel, attention_mask
from qjax.models.config import ModelConfig, parameter_shapes
from qjax.models.layers import rotary_table
from qjax.models.transformer import Block
from qjax.ops import Numerics

Tree = Any
Batch = Mapping[str, jax.Array]

# Projections by the input they share; the first of each is the one that is observed.
SHARED_INPUTS = (('q', 'k', 'v'), ('o',), ('gate', 'up'), ('down',))
PROJECTIONS = tuple(name for group in SHARED_INPUTS for name in group)
PATHS = {name: f'{"attn" if name in "qkvo" else "mlp"}/{name}/kernel' for name in PROJECTIONS}


class Moments(NamedTuple):
  """What the inputs of one projection were, over all tokens that are no padding; float32.

  Attributes:
    gram: Σ x·xᵀ [K, K].
    absmax: largest |x_k| [K].
    tokens: how many.
  """

  gram: jax.Array
  absmax: jax.Array
  tokens: jax.Array

  @classmethod
  def zeros(cls, k: int) -> 'Moments':
    return cls(jnp.zeros((k, k)), jnp.zeros(k), jnp.zeros((), jnp.int32))

  def add(self, x: jax.Array, valid: jax.Array) -> 'Moments':
    """With the inputs x [tokens, K] where `valid`."""
    x = jnp.where(valid[:, None], x.astype(jnp.float32), 0)
    gram = self.gram + jax.lax.dot(x.T, x, precision=jax.lax.Precision.HIGHEST)
    absmax = jnp.maximum(self.absmax, jnp.max(jnp.abs(x), axis=0))
    return Moments(gram, absmax, self.tokens + jnp.sum(valid, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer on its way through the walk.

  Attributes:
    index: from 0.
    params: its float32 parameters, nested as in {'attn': {'q': {'kernel': …}}, …}.
  """

  index: int
  params: Tree


class Walk:
  """Goes through the layers of a model with the residual stream of all batches.

  Args:
    config: shape of the model.
    numerics: of the products; activations quantized or not.
    read: `read(path, layer)` as float32 arrays.
    batches: 'tokens', 'segments', 'positions' int32 and 'weights', [B, T] each, all of one shape. Padding is
      what has segment 0.
  """

  def __init__(
    self,
    config: ModelConfig,
    numerics: Numerics,
    read: Callable[[str, int | None], np.ndarray],
    batches: list[dict[str, np.ndarray]],
  ):
    self.config, self.read, self.batches = config, read, batches
    self.numerics = numerics
    kernel = AttentionKernel('xla')
    self._block = Block(config, numerics, kernel, 'none')
    # Ranges and moments are those of the inputs before they are quantized.
    self._plain = Block(config, dataclasses.replace(numerics, activations=()), kernel, 'none')
    self._apply = jax.jit(self._run)
    self._capture = jax.jit(self._run_and_capture, static_argnames='block')
    self._observe = jax.jit(self._run_and_observe)
    self._names = [
      path.removeprefix('layers/') for path in parameter_shapes(config) if path.startswith('layers/')
    ]
    self._stream: list[jax.Array] = []

  def start(self) -> None:
    """Embeds the tokens: the stream before the first layer."""
    table = self.read('embed/embedding', None)
    scale = np.float32(self.config.embed_scale)
    dtype = self.numerics.policy.compute
    self._stream = [jnp.asarray(table[batch['tokens']] * scale, dtype) for batch in self.batches]

  def layers(self) -> Iterator[Layer]:
    """Every layer, read when its turn comes. The caller applies it before it asks for the next."""
    self.start()
    for index in range(self.config.num_layers):
      flat = {name: jnp.asarray(self.read(f'layers/{name}', index)) for name in self._names}
      yield Layer(index, trees.nest(flat))

  def observe(self, params: Tree) -> dict[str, Moments]:
    """The inputs of each projection of a layer with these parameters, over all batches."""
    k = {'q': self.config.d_model, 'o': self.config.num_heads * self.config.head_dim}
    k |= {'gate': self.config.d_model, 'down': self.config.d_ff}
    moments = {name: Moments.zeros(width) for name, width in k.items()}
    for x, batch in zip(self._stream, self.batches, strict=True):
      moments = self._observe(params, x, batch, moments)
    return {name: moments[group[0]] for group in SHARED_INPUTS for name in group}

  def apply(self, variables: Tree) -> None:
    """Moves the stream past a layer computed with these {'params': …} (packed ones too), 'lora' and 'act'."""
    self._stream = [
      self._apply(variables, x, batch) for x, batch in zip(self._stream, self.batches, strict=True)
    ]

  def inputs(
    self, variables: Tree, is_plain: bool = True
  ) -> Iterator[tuple[dict[str, jax.Array], jax.Array]]:
    """For each batch: the input [B, T, K] of each distinct projection, and which tokens are no padding.

    `is_plain`: computed without quantizing activations.
    """
    block = self._plain if is_plain else self._block
    for x, batch in zip(self._stream, self.batches, strict=True):
      yield self._capture(variables, x, batch, block=block), jnp.asarray(batch['segments'] > 0)

  def _context(self, batch: Batch) -> tuple[Any, jax.Array]:
    table = rotary_table(self.config, batch['positions'])
    return table, attention_mask(batch['segments'], self.config.sliding_window)

  def _run(self, variables: Tree, x: jax.Array, batch: Batch) -> jax.Array:
    out: Any = self._block.apply(variables, x, *self._context(batch))
    return out[0]

  def _run_and_capture(
    self, variables: Tree, x: jax.Array, batch: Batch, block: Block
  ) -> dict[str, jax.Array]:
    _, seen = block.apply(variables, x, *self._context(batch), mutable=['inputs'])
    flat = trees.flatten(seen['inputs'], lambda leaf: isinstance(leaf, tuple))
    return {group[0]: flat[PATHS[group[0]]][0] for group in SHARED_INPUTS}

  def _run_and_observe(
    self, params: Tree, x: jax.Array, batch: Batch, moments: dict[str, Moments]
  ) -> dict[str, Moments]:
    valid = (batch['segments'] > 0).reshape(-1)
    seen = self._run_and_capture({'params': params}, x, batch, self._plain)
    return {
      name: moment.add(seen[name].reshape(-1, seen[name].shape[-1]), valid)
      for name, moment in moments.items()
    }
