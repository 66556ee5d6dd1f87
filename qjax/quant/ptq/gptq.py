"""GPTQ (Frantar et al. 2022): inputs are rounded one by one, and those to come make up for the error."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

from qjax.errors import UserError
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, assemble, decode, encode, per_column, ranges, read_scales

# Rows that are solved before the rest of the weight learns of their error.
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class GPTQ:
  """Second-order rounding of a weight to the levels of its scheme.

  Scales are those of rounding to nearest and stay with the inputs they belong to, whatever the order of the
  rows ("static groups"), so nothing but codes and scales needs to be stored.

  Attributes:
    act_order: the inputs with the largest second moment first.
    damp: share of the mean second moment that is added to the diagonal of the Hessian.
  """

  act_order: bool = False
  damp: float = 0.01
  needs = frozenset({'gram'})

  def __post_init__(self) -> None:
    if not 0 < self.damp < math.inf:
      raise UserError(f'gptq: damp={self.damp} must be above 0 and finite')

  def __call__(
    self, w: jax.Array, scheme: Scheme, gram: jax.Array | None, absmax: jax.Array | None
  ) -> tuple[QTensor, None]:
    del absmax
    assert gram is not None
    return _gptq(w, gram, scheme, self.act_order, self.damp), None


@partial(jax.jit, static_argnums=(2, 3, 4))
def _gptq(w: jax.Array, gram: jax.Array, scheme: Scheme, act_order: bool, damp: float) -> QTensor:
  k = w.shape[0]
  block = scheme.block_of(k)
  stored, offset = ranges(w, scheme)
  column_scale = per_column(read_scales(stored), scheme, w.shape[1])
  column_offset = None if offset is None else per_column(offset, scheme, w.shape[1])
  rows = jnp.arange(k) // block
  moments = jnp.diagonal(gram)
  order = jnp.argsort(-moments, stable=True) if act_order else jnp.arange(k)

  # The upper Cholesky factor of the inverse Hessian, in the order of the rows.
  # An input that calibration never saw is on its own and rounds to nearest.
  is_dead = moments <= 0
  hessian = gram + jnp.diag(jnp.where(is_dead, 1.0, damp * jnp.mean(moments)))
  hessian = hessian[order][:, order]
  identity = jnp.eye(k, dtype=jnp.float32)
  inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(hessian), True), identity)
  upper = jnp.linalg.cholesky((inverse + inverse.T) / 2).T

  # Padding rows are their own Hessian and are rounded to whatever they are.
  count = -(-k // BLOCK)
  pad = count * BLOCK - k
  is_padding = jnp.arange(count * BLOCK) >= k
  upper = jnp.pad(upper, ((0, pad), (0, pad))) + jnp.diag(is_padding.astype(jnp.float32))
  todo = jnp.pad(w[order], ((0, pad), (0, 0)))
  row_of = jnp.pad(rows[order], (0, pad))
  one_row = dataclasses.replace(scheme, granularity='channel', block=0, width=1)

  def solve_block(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    todo, codes = carry
    start = index * BLOCK
    part = jax.lax.dynamic_slice_in_dim(todo, start, BLOCK)
    factor = jax.lax.dynamic_slice(upper, (start, start), (BLOCK, BLOCK))

    def solve_row(i: jax.Array, inner: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
      part, errors, found = inner
      row = part[i][None]
      s = jnp.broadcast_to(column_scale[row_of[start + i]], (1, w.shape[1]))
      o = column_offset
      o = None if o is None else jnp.broadcast_to(o[row_of[start + i]], (1, w.shape[1]))
      code = encode(row, one_row, s, o)
      error = (row - decode(code, one_row, s, o)) / factor[i, i]
      # Rows before i are done: the factor is upper triangular, and its own row must not move twice.
      part = part - factor[i][:, None] * error
      return part, errors.at[i].set(error[0]), found.at[i].set(code[0])

    zeros = jnp.zeros_like(part)
    _, errors, found = jax.lax.fori_loop(0, BLOCK, solve_row, (part, zeros, zeros.astype(codes.dtype)))
    later = (jnp.arange(count * BLOCK) >= start + BLOCK)[None, :]
    push = jnp.where(later, jax.lax.dynamic_slice_in_dim(upper, start, BLOCK), 0)
    todo = todo - jax.lax.dot(push.T, errors, precision=jax.lax.Precision.HIGHEST)
    return todo, jax.lax.dynamic_update_slice_in_dim(codes, found, start, 0)

  is_signed = offset is None and scheme.numbers.is_integer
  dtype = jnp.int8 if is_signed else jnp.uint8
  _, codes = jax.lax.fori_loop(0, count, solve_block, (todo, jnp.zeros(todo.shape, dtype)))
  codes = jnp.zeros((k, w.shape[1]), dtype).at[order].set(codes[:k])
  return assemble(codes, stored, offset, scheme)
