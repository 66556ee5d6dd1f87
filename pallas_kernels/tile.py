"""What kernels do with a tile: multiply it, and on a GPU read as much of it as there is.

A kernel for GPUs addresses memory by itself, so that its tiles may reach beyond an array. What lies there is
masked; where tiles divide an axis there is no condition, None, and nothing is compared.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
  """a · b over an axis of each, two axes each: float32, of int8 codes int32; no operand is rounded first."""
  is_integer = jnp.issubdtype(a.dtype, jnp.integer)
  return jax.lax.dot_general(
    a, b, (((axes[0],), (axes[1],)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    preferred_element_type=jnp.int32 if is_integer else jnp.float32,
  )  # fmt: skip


def covered(tile: Any, length: int, size: int) -> tuple[jax.Array, Any]:
  """The places int32 [length] of an axis that a tile covers, and which of them exist, None for all.

  Args:
    tile: its number along the axis.
    length: of a tile.
    size: of the axis.
  """
  places = tile * length + jnp.arange(length, dtype=jnp.int32)
  return places, None if size % length == 0 else places < size


def mask_of(down: Any, across: Any) -> Any:
  """Both conditions, on the rows [R] and on the columns [C] of a tile; each may be None, and None is none."""
  down = None if down is None else down[:, None]
  across = None if across is None else across[None, :]
  return down if across is None else across if down is None else down & across


def load(ref: Any, index: tuple[Any, ...], mask: Any) -> jax.Array:
  """ref[index] on a GPU, zero where it is masked."""
  if mask is None:
    return plt.load(ref.at[index])
  return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))
