"""The order in which programs of a GPU's grid take the tiles of a result, so that their reads are shared.

Programs start in the order of their numbers, as many at once as there are cores: a wave. Those of a wave walk
along the summed axis together, and what two of them read comes from memory once, through the second-level
cache. The next wave reads its operands again. So a wave that is a rectangle of tiles reads less than one that
is a long line of them: tiles are numbered in groups of some rows of tiles, down each column of a group first
(Tillet et al. 2019, "Triton", tutorial on matrix products). One row a group is the order of a matrix in
memory; as many rows as there are is that of its transpose.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Cores:
  """What of a GPU decides how reads are shared.

  Attributes:
    count: streaming multiprocessors.
    l2_bytes: second-level cache.
  """

  count: int
  l2_bytes: int


# An order is chosen before a program knows its GPU, so for these together: A100, RTX 4090 and H100.
GPUS = (Cores(108, 40 * 2**20), Cores(128, 72 * 2**20), Cores(132, 50 * 2**20))


def place(program: Any, down: int, across: int, group: int) -> tuple[Any, Any]:
  """The row and column of the tile that a program owns.

  Args:
    program: of 0…down·across - 1, an int32 that may be traced, or an array of NumPy.
    down: rows of tiles.
    across: columns of tiles.
    group: rows of a group; the last has fewer where they do not divide `down`.
  """
  # None is negative, so that rounding down and towards zero are one; arrays of NumPy stay with NumPy.
  div, rem, least = (
    (np.floor_divide, np.remainder, np.minimum) if isinstance(program, np.ndarray)
    else (jax.lax.div, jax.lax.rem, jnp.minimum)
  )  # fmt: skip
  if group >= down:
    return rem(program, down), div(program, down)
  first = div(program, group * across) * group
  within = rem(program, group * across)
  height = least(down - first, group)
  return first + rem(within, height), div(within, height)


def moved(places: np.ndarray, sizes: np.ndarray, nbytes: int, cores: Cores) -> int:
  """Bytes that programs read of an array: each part once a wave, or all once if it stays in the cache.

  Args:
    places: int [programs], the number of the part that each reads, in the order in which they start.
    sizes: int [programs], its bytes.
    nbytes: of the array; up to half of the cache stays there.
    cores: of the GPU.
  """
  if nbytes <= cores.l2_bytes / 2:
    return nbytes
  wave = np.arange(len(places)) // cores.count
  _, first = np.unique(wave * (int(np.max(places)) + 1) + places, return_index=True)
  return int(sizes[first].sum())


@functools.cache
def best_group(down: int, across: int, row_bytes: int, column_bytes: int) -> int:
  """Rows of a group with which `GPUS` together read the fewest bytes.

  Args:
    down: rows of tiles.
    across: columns of tiles.
    row_bytes: of the operand that all tiles of one row read.
    column_bytes: of the one that all tiles of one column read.
  """
  programs = np.arange(down * across)

  def cost(group: int) -> int:
    rows, columns = place(programs, down, across, group)
    return sum(
      moved(places, np.full(places.shape, size), count * size, cores)
      for cores in GPUS
      for places, size, count in ((rows, row_bytes, down), (columns, column_bytes, across))
    )

  powers = (2**power for power in range(down.bit_length()))
  return min(dict.fromkeys((*(each for each in powers if each < down), down)), key=cost)
