"""What a method of post-training quantization is given of a layer, and what it gives back.

A method is a chain: reparametrizations, which change weights but not the float function (SmoothQuant, AWQ),
then one quantizer (rounding to nearest, GPTQ, HQQ, …). Each sees one layer at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from qjax.quant.formats import Scheme
from qjax.quant.qtensor import quantize

# None where a projection keeps its float32 weight.
SchemeOf = Callable[[str], Scheme | None]

STATISTICS = frozenset({'gram', 'absmax'})


@dataclasses.dataclass(frozen=True)
class LayerData:
  """One layer of the Llama family, by projection: 'q', 'k', 'v', 'o', 'gate', 'up', 'down'.

  Attributes:
    weights: float32 [K, N].
    norms: 'attn_norm' and 'mlp_norm', float32 [D] as stored; `norm_offset` is added where they act.
    norm_offset: 1 for Gemma, else 0.
    biases: float32 [N], of those projections that have one.
    gram: mean of x·xᵀ over tokens [K, K], float32; empty if the method needs none.
    absmax: largest |x_k| [K]; empty likewise.
    num_heads, num_kv_heads, head_dim: query head h reads key/value head h // (num_heads / num_kv_heads).
  """

  weights: Mapping[str, jax.Array]
  norms: Mapping[str, jax.Array]
  norm_offset: float
  biases: Mapping[str, jax.Array]
  gram: Mapping[str, jax.Array]
  absmax: Mapping[str, jax.Array]
  num_heads: int
  num_kv_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True)
class LayerResult:
  """A layer at rest.

  Attributes:
    weights: for each projection a `QTensor`, another packed weight, or the float32 weight.
    norms: as in `LayerData`.
    biases: likewise.
    adapters: a correction (Aᵀ [r, K], B [r, N], scale) for some projections.
  """

  weights: Mapping[str, Any]
  norms: Mapping[str, jax.Array]
  biases: Mapping[str, jax.Array]
  adapters: Mapping[str, tuple[jax.Array, jax.Array, float]] = dataclasses.field(default_factory=dict)


class Reparametrization(Protocol):
  """Changes weights and norms so that the float function stays the same and quantizes better."""

  needs: frozenset[str]

  def __call__(self, layer: LayerData, scheme_of: SchemeOf) -> LayerData: ...


class Quantizer(Protocol):
  """Puts one float32 weight [K, N] to rest; `adapter` is a correction, if the method has one."""

  needs: frozenset[str]

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[Any, tuple[jax.Array, jax.Array, float] | None]: ...


@dataclasses.dataclass(frozen=True)
class Method:
  """Reparametrizations in order, then a quantizer."""

  reparametrizations: tuple[Reparametrization, ...]
  quantizer: Quantizer

  @property
  def needs(self) -> frozenset[str]:
    """Which of `STATISTICS` a layer must come with."""
    return self.quantizer.needs.union(*(step.needs for step in self.reparametrizations))

  def __call__(self, layer: LayerData, scheme_of: SchemeOf) -> LayerResult:
    for step in self.reparametrizations:
      layer = step(layer, scheme_of)
    weights: dict[str, Any] = {}
    adapters = {}
    for name, w in layer.weights.items():
      scheme = scheme_of(name)
      if scheme is None:
        weights[name] = w
      elif scheme.numbers.is_float:
        weights[name] = quantize(w, scheme)
      else:
        weights[name], adapter = self.quantizer(w, scheme, layer.gram.get(name), layer.absmax.get(name))
        if adapter is not None:
          adapters[name] = adapter
    return LayerResult(weights, layer.norms, layer.biases, adapters)


# ---- folding scales ----------------------------------------------------------------------------------------

# Projections that read one input, and what that input comes out of.
FOLDS = (
  (('q', 'k', 'v'), 'attn_norm'),
  (('gate', 'up'), 'mlp_norm'),
  (('o',), 'v'),
  (('down',), 'up'),
)


def shared_over_heads(layer: LayerData, s: jax.Array) -> jax.Array:
  """Scales of the inputs of 'o' [H·C] made equal for the query heads that read one value head: their mean."""
  group = layer.num_heads // layer.num_kv_heads
  by_head = s.reshape(layer.num_kv_heads, group, layer.head_dim)
  return jnp.broadcast_to(jnp.mean(by_head, axis=1, keepdims=True), by_head.shape).reshape(-1)


def fold(layer: LayerData, consumers: tuple[str, ...], producer: str, s: jax.Array) -> LayerData:
  """The same function with the consumers' inputs divided by s [K] and their weights' rows multiplied by it.

  The division goes into what makes the inputs: a norm's scale, the value projection's outputs (whose heads
  must then have equal scales, `shared_over_heads`), or the up projection's, by which a gate is multiplied.
  """
  weights, norms, biases = dict(layer.weights), dict(layer.norms), dict(layer.biases)
  gram, absmax = dict(layer.gram), dict(layer.absmax)
  for name in consumers:
    weights[name] = weights[name] * s[:, None]
    if name in gram:
      gram[name] = gram[name] / (s[:, None] * s)
    if name in absmax:
      absmax[name] = absmax[name] / s
  if producer in norms:
    norms[producer] = (norms[producer] + layer.norm_offset) / s - layer.norm_offset
  else:
    columns = s
    if producer == 'v':
      group = layer.num_heads // layer.num_kv_heads
      columns = s.reshape(layer.num_kv_heads, group, layer.head_dim)[:, 0].reshape(-1)
    weights[producer] = weights[producer] / columns
    if producer in biases:
      biases[producer] = biases[producer] / columns
  return dataclasses.replace(layer, weights=weights, norms=norms, biases=biases, gram=gram, absmax=absmax)
