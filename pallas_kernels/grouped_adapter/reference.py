"""The answer: adapters added to a product, each row of x by the adapter that it belongs to.

  y[i] + scale[g] · (x[i] · A[g]) · B[g],  g = of_row[i]

A row with g = -1 belongs to none and keeps its y. x·A is rounded to the dtype of x, as where there is one
adapter. Rows may come in any order; the kernels are quick where neighbours have an adapter in common, as the
tokens of a prompt do (Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving"; Sheng et al. 2023, "S-LoRA").
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tile import dot


def sizes(
  y: tuple[int, ...], x: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], of_row: tuple[int, ...]
) -> tuple[int, int, int, int, int]:
  """Rows, inputs, outputs, adapters and rank.

  Raises:
    ValueError: shapes that don't belong together.
  """
  if [*map(len, (y, x, a, b, of_row))] != [2, 2, 3, 3, 1]:
    raise ValueError(f'y {y}, x {x}, a {a}, b {b}, of_row {of_row} must be [M, N], [M, K], [G, r, K], …, [M]')
  rows, inputs = x
  groups, rank, outputs = b
  if y != (rows, outputs) or a != (groups, rank, inputs) or of_row != (rows,):
    raise ValueError(
      f'y {y}, x {x}, a {a}, b {b} and of_row {of_row} do not belong together: for x [M, K] and b [G, r, N] '
      f'they are y {(rows, outputs)}, a {(groups, rank, inputs)} and of_row {(rows,)}'
    )
  return rows, inputs, outputs, groups, rank


def add(
  y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array, of_row: jax.Array
) -> jax.Array:
  """y [M, N] with the adapters' part added, float32, as above.

  All adapters are one factor of rank G·r, of which each row keeps its own r places: two plain products.
  `jax.lax.ragged_dot` needs the rows sorted, and takes 2.5 to 20 times as long on a CPU.

  Args:
    y: float32 [M, N].
    x: [M, K].
    a: Aᵀ [G, r, K] in the dtype of x.
    b: B [G, r, N] in the dtype of x.
    scale: float32 [G].
    of_row: int32 [M] in -1…G-1.

  Raises:
    ValueError: shapes that don't belong together.
  """
  _, inputs, outputs, groups, rank = sizes(y.shape, x.shape, a.shape, b.shape, of_row.shape)
  low = dot(x, a.reshape(groups * rank, inputs), (1, 1))
  place = jnp.arange(groups * rank, dtype=jnp.int32) // rank
  low = jnp.where(of_row[:, None] == place, low, 0).astype(x.dtype)
  own = jnp.where(of_row < 0, 0, jnp.take(scale, of_row, mode='clip'))
  return y + own[:, None] * dot(low, b.reshape(groups * rank, outputs))
