"""HQQ (Badri & Shaji 2023): offsets that minimize a sparse norm of the error, without any data."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from qjax.errors import UserError
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, assemble, decode, encode, ranges, read_scales


@dataclasses.dataclass(frozen=True)
class HQQ:
  """Half-quadratic splitting on ‖W − Q(W)‖_p, p < 1, over the offset of every block.

  Attributes:
    rounds: iterations.
    p: of the norm; below 1 it forgives few large errors.
  """

  rounds: int = 20
  p: float = 0.7
  needs: ClassVar[frozenset[str]] = frozenset()

  def __post_init__(self) -> None:
    if self.rounds < 1 or not 0 < self.p < 1:
      raise UserError(f'hqq: rounds={self.rounds} must be at least 1 and p={self.p} between 0 and 1')

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[QTensor, None]:
    del gram, absmax
    if not scheme.asymmetric or scheme.granularity in ('tensor', 'tile'):
      raise UserError(f'hqq moves the offsets of blocks or channels; {scheme} has none: add asym')
    return _hqq(w, scheme, self.rounds, self.p), None


@partial(jax.jit, static_argnums=(1, 2, 3))
def _hqq(w: jax.Array, scheme: Scheme, rounds: int, p: float) -> QTensor:
  k = w.shape[0]
  block = scheme.block_of(k)
  blocks = -(-k // block)
  stored, start = ranges(w, scheme)
  scale = read_scales(stored)
  assert start is not None
  member = jnp.repeat(jnp.arange(blocks), block, total_repeat_length=blocks * block)[:k]
  unit = jnp.where(scale == 0, 1, scale)[member]  # errors are counted in steps
  counts = jnp.bincount(member, length=blocks)[:, None].astype(jnp.float32)

  def values(offset: jax.Array) -> jax.Array:
    return decode(encode(w, scheme, scale, offset), scheme, scale, offset)

  def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    offset, best, least = carry
    beta = 10.0 * 1.01**i
    found = values(offset)
    gap = (w - found) / unit
    size = jnp.abs(gap)
    sparse = unit * jnp.sign(gap) * jnp.maximum(size - jnp.maximum(size, 1e-8) ** (p - 1) / beta, 0)
    # Where the error is taken for sparse, the offset need not pay for it.
    shift = jax.ops.segment_sum(w - sparse - found, member, blocks) / counts
    moved = offset + shift
    error = jax.ops.segment_sum(jnp.abs(w - values(moved)), member, blocks)
    is_better = error < least
    return moved, jnp.where(is_better, moved, best), jnp.where(is_better, error, least)

  first = jax.ops.segment_sum(jnp.abs(w - values(start)), member, blocks)
  _, offset, _ = jax.lax.fori_loop(0, rounds, step, (start, start, first))
  return assemble(encode(w, scheme, scale, offset), stored, offset, scheme)
