"""Rounding to nearest, with a clip of each channel or block searched before, if wanted."""

import dataclasses

import jax
import jax.numpy as jnp

from qjax.errors import UserError, nearest
from qjax.quant import clipping
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, quantize

LEARNED = 'learned'
_round = jax.jit(quantize, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Nearest:
  """Each weight to the nearest level.

  Attributes:
    clip: an objective of `quant.clipping`, 'learned', or 'none'.
  """

  clip: str = 'none'

  def __post_init__(self) -> None:
    known = (*clipping.OBJECTIVES, LEARNED)
    if self.clip not in known:
      raise UserError(f'rtn: clip={self.clip} is not known{nearest(self.clip, known)}')

  @property
  def needs(self) -> frozenset[str]:
    return frozenset() if self.clip in ('none', 'weight_mse') else frozenset({'gram'})

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[QTensor, None]:
    del absmax
    if self.clip == 'none':
      return _round(w, scheme), None
    if self.clip == LEARNED:
      assert gram is not None
      return _round(w, scheme, clipping.learned(w, scheme, gram)), None
    stats = gram
    if self.clip == 'activation_weighted':
      assert gram is not None
      stats = jnp.diagonal(gram)
    elif self.clip == 'weight_mse':
      stats = None
    return _round(w, scheme, clipping.search(w, scheme, self.clip, stats)), None
