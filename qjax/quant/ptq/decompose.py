"""LLM.int8() (Dettmers et al. 2022): a few outlying inputs stay in 16 bits beside the quantized weight."""

import dataclasses

import jax
import jax.numpy as jnp

from qjax.errors import UserError
from qjax.quant.activations import Decomposed
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import quantize


@dataclasses.dataclass(frozen=True)
class Decompose:
  """The inputs with the largest magnitudes, as many in every layer, multiply rows that stay in bfloat16.

  Attributes:
    share: of the inputs, at least one.
  """

  share: float = 0.01
  needs = frozenset({'absmax'})

  def __post_init__(self) -> None:
    if not 0 < self.share < 1:
      raise UserError(f'decompose: share={self.share} must lie between 0 and 1')

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[Decomposed, None]:
    del gram
    assert absmax is not None
    count = max(1, round(self.share * len(w)))
    rows = jnp.sort(jax.lax.top_k(absmax, count)[1]).astype(jnp.int32)
    rest = quantize(w.at[rows].set(0), scheme)
    return Decomposed(rest=rest, rows=rows, kept=quantize(w[rows], 'bfloat16')), None
