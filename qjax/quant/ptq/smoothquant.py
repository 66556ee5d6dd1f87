"""SmoothQuant (Xiao et al. 2022): outliers of activations move into the weights, where they do less harm."""

import dataclasses

import jax.numpy as jnp

from qjax.errors import UserError
from qjax.quant.ptq.base import FOLDS, LayerData, SchemeOf, fold, shared_over_heads

# Scales stay within this factor of 1; an input that is always zero gets no scale.
LEAST = 1e-5


@dataclasses.dataclass(frozen=True)
class SmoothQuant:
  """s_k = max|x_k|^α / max|w_k|^(1−α) for each input k of a projection.

  Attributes:
    alpha: how much of an outlier goes into the weights, from 0 to 1.
  """

  alpha: float = 0.5
  needs = frozenset({'absmax'})

  def __post_init__(self) -> None:
    if not 0 <= self.alpha <= 1:
      raise UserError(f'smoothquant: alpha={self.alpha} must lie between 0 and 1')

  def __call__(self, layer: LayerData, scheme_of: SchemeOf) -> LayerData:
    del scheme_of
    for consumers, producer in FOLDS:
      x = layer.absmax[consumers[0]]
      w = jnp.max(jnp.stack([jnp.max(jnp.abs(layer.weights[name]), axis=1) for name in consumers]), axis=0)
      is_used = (x > 0) & (w > 0)
      s = jnp.maximum(x, LEAST) ** self.alpha / jnp.maximum(w, LEAST) ** (1 - self.alpha)
      s = jnp.where(is_used, jnp.clip(s, LEAST, 1 / LEAST), 1)
      layer = fold(layer, consumers, producer, shared_over_heads(layer, s) if producer == 'v' else s)
    return layer
