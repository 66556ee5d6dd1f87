"""A low-rank correction of what rounding lost: LoftQ's alternation (Li et al. 2023)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError
from qjax.quant import clipping
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, dequantize, quantize

# Shares of a block's range that `clip` tries; at two bits the best is often below half.
CLIPS = tuple(np.linspace(1.0, 0.3, 8).tolist())

# Above so many rows all eigenvectors take too long: few are found by iteration, and spare ones beside them.
LARGE, SPARE, ITERATIONS = 2048, 16, 6


@dataclasses.dataclass(frozen=True)
class LowRank:
  """W ≈ Q + A·B: rounds of Q = quantize(W − A·B) and A·B = the best rank r of W − Q; the best round is kept.

  Attributes:
    rank: r.
    rounds: of the alternation; 1 is a correction after rounding to nearest.
    weighted: errors weigh what the inputs' second moments say (as in Guo et al. 2023, "LQ-LoRA").
    clip: each round's Q keeps of the range of each block what has the least squared error. At 2 bits this
      saves more than the correction does.
  """

  rank: int = 16
  rounds: int = 5
  weighted: bool = False
  clip: bool = False

  def __post_init__(self) -> None:
    if self.rank < 1 or self.rounds < 1:
      raise UserError(f'loftq: rank={self.rank} and rounds={self.rounds} must be at least 1')

  @property
  def needs(self) -> frozenset[str]:
    return frozenset({'gram'} if self.weighted else ())

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[QTensor, tuple[jax.Array, jax.Array, float]]:
    del absmax
    if self.rank > min(w.shape):
      raise UserError(f'loftq: rank={self.rank} exceeds that of a weight {w.shape}')
    weigh = jnp.ones(w.shape[0])
    if self.weighted:
      assert gram is not None
      moments = jnp.diagonal(gram)
      weigh = jnp.sqrt(jnp.maximum(moments, jnp.maximum(1e-12 * jnp.max(moments), 1e-30)))
    q, a, b = _alternate(w, weigh, scheme, self.rank, self.rounds, self.clip)
    return q, (a, b, 1.0)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _alternate(
  w: jax.Array, weigh: jax.Array, scheme: Scheme, rank: int, rounds: int, clip: bool
) -> tuple[QTensor, jax.Array, jax.Array]:
  """The quantized weight, Aᵀ [r, K] and B [r, N]."""

  def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)

  def step(factors: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    a, b = factors
    rest = w - product(a, b)
    kept = clipping.search(rest, scheme, 'weight_mse', grid=CLIPS) if clip else None
    q = quantize(rest, scheme, kept)
    left = w - dequantize(q)
    u, v = _best(left * weigh[:, None], rank)
    a, b = (u / weigh[:, None]).T, v
    error = jnp.sum(jnp.square((left - product(a, b)) * weigh[:, None]))
    return (a, b), (error, q, a, b)

  k, n = w.shape
  _, (errors, *found) = jax.lax.scan(step, (jnp.zeros((rank, k)), jnp.zeros((rank, n))), length=rounds)
  best = jnp.argmin(errors)
  q, a, b = jax.tree.map(lambda x: x[best], found)
  return q, a, b


def _best(x: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
  """[K, r] and [r, N] of equal sizes, whose product is the best approximation of x [K, N] of that rank.

  The eigenvectors of the smaller Gram matrix take a hundredth of the time of a singular value decomposition.
  x is projected on them, so an inexact small eigenvector costs nothing.
  """
  if x.shape[0] > x.shape[1]:
    v, u = _best(x.T, rank)
    return u.T, v.T
  precise = jax.lax.Precision.HIGHEST
  narrow, basis = x, None
  if x.shape[0] > LARGE:
    basis = _leading(x, min(rank + SPARE, x.shape[0]))
    narrow = jnp.matmul(basis.T, x, precision=precise)
  _, vectors = jnp.linalg.eigh(jnp.matmul(narrow, narrow.T, precision=precise))
  u = vectors[:, ::-1][:, :rank]
  if basis is not None:
    u = jnp.matmul(basis, u, precision=precise)
  v = jnp.matmul(u.T, x, precision=precise)
  root = jnp.sqrt(jnp.maximum(jnp.linalg.norm(v, axis=1), jnp.finfo(jnp.float32).tiny))
  return u * root, v / root[:, None]


def _leading(x: jax.Array, count: int) -> jax.Array:
  """Orthonormal columns [K, count] that span nearly what the largest singular vectors of x [K, N] do.

  Subspace iteration from a random start (Halko et al. 2011, "Finding Structure with Randomness", algorithm
  4.4).
  """
  precise = jax.lax.Precision.HIGHEST

  def step(_: jax.Array, basis: jax.Array) -> jax.Array:
    back = jnp.matmul(x.T, basis, precision=precise)
    return jnp.linalg.qr(jnp.matmul(x, back, precision=precise))[0]

  start = jax.random.normal(jax.random.key(0), (x.shape[0], count), x.dtype)
  return jax.lax.fori_loop(0, ITERATIONS, step, start)
