"""The answer: codes multiplied as integers, summed in int32, and scaled once.

  y[i, j] = (Σ_k a·b) · column_scale[j] · row_scale[i]

One product serves forward and backward; `FORMS` says which axes of the operands are summed:

  'nn'  x [M, K] · w [K, N]      the product
  'nt'  g [M, N] · wᵀ [N, K]     the gradient of x, whose codes hold the scales of w already
  'tn'  xᵀ [K, M] · g [M, N]     the gradient of w, whose codes hold the scales of x already

A scale lies along an axis of the result, never along the axis of the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tile import dot

# The axis of a and the axis of b that are summed.
FORMS = {'nn': (1, 0), 'nt': (1, 1), 'tn': (0, 0)}
# Products of two codes in -127…127 that an int32 holds the sum of, however they fall.
SAFE_TERMS = (2**31 - 1) // 127**2


def sizes(
  a: jax.Array, b: jax.Array, row_scale: jax.Array | None, column_scale: jax.Array | None, form: str,
  dtype: Any,
) -> tuple[int, int, int]:  # fmt: skip
  """Rows and columns of the result, and terms of a sum.

  Raises:
    ValueError: operands that are no codes or don't contract, an unknown form, sums that may exceed an int32,
      or scales of another shape, or of sums that are to stay integers.
  """
  if form not in FORMS:
    raise ValueError(f'form = {form!r} is not known; there are {", ".join(FORMS)}')
  first, second = FORMS[form]
  if a.ndim != 2 or b.ndim != 2 or a.shape[first] != b.shape[second]:
    shapes = f'a {a.shape} and b {b.shape}'
    raise ValueError(f'{shapes} do not contract as {form!r}, over axes {first} and {second}')
  if {a.dtype, b.dtype} != {jnp.dtype('int8')}:
    raise ValueError(f'a is {a.dtype} and b is {b.dtype}, where codes are int8')
  rows, columns, terms = a.shape[1 - first], b.shape[1 - second], a.shape[first]
  if terms > SAFE_TERMS:
    raise ValueError(f'a sum of {terms} products may exceed an int32, which holds {SAFE_TERMS}')
  for name, scale, wanted in (('row', row_scale, (rows, 1)), ('column', column_scale, (1, columns))):
    if scale is not None and scale.shape not in (wanted, (1, 1)):
      raise ValueError(f'{name}_scale is {list(scale.shape)}, not {list(wanted)} or [1, 1]')
    if scale is not None and dtype == jnp.int32:
      raise ValueError(f'int32 sums take no scales, and {name}_scale is given; ask for float32')
  return rows, columns, terms


def scaled(
  sums: jax.Array, row_scale: jax.Array | None, column_scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
  """int32 sums [rows, columns] times float32 scales [rows or 1, 1] and [1, columns or 1], in `dtype`.

  The order of the two products is part of the answer. Without scales int32 may be asked for, too.
  """
  if dtype == jnp.int32:
    return sums
  y = sums.astype(jnp.float32)
  for scale in (column_scale, row_scale):
    y = y if scale is None else y * scale
  return y.astype(dtype)


def matmul(
  a: jax.Array,
  b: jax.Array,
  row_scale: jax.Array | None = None,
  column_scale: jax.Array | None = None,
  form: str = 'nn',
  dtype: jnp.dtype = jnp.dtype('float32'),
) -> jax.Array:
  """The product in `dtype`, as above.

  Args:
    a: int8, in -127…127, two axes as the form says.
    b: the same.
    row_scale: float32 [rows, 1] or [1, 1], or None for none.
    column_scale: float32 [1, columns] or [1, 1], or None for none.
    form: a name in `FORMS`.
    dtype: float32 or bfloat16; int32 for the sums themselves, which takes no scales.

  Raises:
    ValueError: as `sizes`.
  """
  sizes(a, b, row_scale, column_scale, form, dtype)
  return scaled(dot(a, b, FORMS[form]), row_scale, column_scale, dtype)
