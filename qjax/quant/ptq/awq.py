"""AWQ (Lin et al. 2023): inputs that carry much get finer steps, by a scale searched on the outputs."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError
from qjax.quant.formats import Scheme
from qjax.quant.ptq.base import FOLDS, LayerData, SchemeOf, fold, shared_over_heads
from qjax.quant.qtensor import dequantize, quantize


@dataclasses.dataclass(frozen=True)
class AWQ:
  """s_k = E[x_k²]^(α/2), α from a grid over [0, 1] by the least error of the outputs; α = 0 changes nothing.

  Attributes:
    grid: how many steps of α.
  """

  grid: int = 20
  needs = frozenset({'gram'})

  def __post_init__(self) -> None:
    if self.grid < 1:
      raise UserError(f'awq: grid={self.grid} must be at least 1')

  def __call__(self, layer: LayerData, scheme_of: SchemeOf) -> LayerData:
    for consumers, producer in FOLDS:
      schemes = {name: scheme_of(name) for name in consumers}
      coded = [name for name, scheme in schemes.items() if scheme is not None and not scheme.numbers.is_float]
      if not coded:
        continue
      size = jnp.sqrt(jnp.diagonal(layer.gram[consumers[0]]))
      alphas = np.linspace(0, 1, self.grid + 1)
      candidates = jnp.stack([_scales(size, alpha) for alpha in alphas])
      if producer == 'v':
        candidates = jax.vmap(partial(shared_over_heads, layer))(candidates)
      error = sum(
        _output_errors(layer.weights[name], layer.gram[name], candidates, schemes[name]) for name in coded
      )
      layer = fold(layer, consumers, producer, candidates[jnp.argmin(error)])
    return layer


def _scales(size: jax.Array, alpha: float) -> jax.Array:
  # An input that is nearly always zero must not stretch the range of the others.
  s = jnp.maximum(size, jnp.maximum(1e-4 * jnp.max(size), 1e-8)) ** alpha
  s = s / jnp.sqrt(jnp.max(s) * jnp.min(s))
  return jnp.clip(s, 1e-4, 1e4)


@partial(jax.jit, static_argnums=3)
def _output_errors(w: jax.Array, gram: jax.Array, candidates: jax.Array, scheme: Scheme) -> jax.Array:
  """E‖x·W − (x/s)·Q(s·W)‖² for each of the candidates [S, K], one after the other."""

  def error(s: jax.Array) -> jax.Array:
    e = w - dequantize(quantize(w * s[:, None], scheme)) / s[:, None]
    return jnp.sum(e * jax.lax.dot(gram, e, precision=jax.lax.Precision.HIGHEST))

  return jax.lax.map(error, candidates)
