"""What the bytes of a resting weight mean, in raw arrays.

A weight [K, N] rests as codes of `bits` bits, 8 / bits to a byte, in blocks of `block` consecutive inputs.
The bytes of a block are m = ceil(block · bits / 8) rows [m, N]; plane p of them, bits p · bits and up, holds
the codes of inputs p · m to (p + 1) · m - 1 of the block. A last block that is shorter is packed by itself.

Nothing is moved in memory to undo that. A product splits its inputs into planes instead, [planes, M, rows]:

  y = Σ_p x_p · W_p        W_p [rows, N] is one plane, decoded, times the scales of its blocks
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static part of a weight.

  Attributes:
    inputs: K.
    block: inputs that share a scale; K or more is one scale an output.
    bits: of a code, 8, 4 or 2.
    levels: what codes stand for, or None for integers, code - bias.
    bias: 0 for 8 bits, whose codes are signed.
  """

  inputs: int
  block: int
  bits: int
  levels: tuple[float, ...] | None = None
  bias: int = 0

  @property
  def planes(self) -> int:
    """Codes a byte."""
    return 8 // self.bits

  @property
  def span(self) -> int:
    """Inputs of a whole block."""
    return min(self.block, self.inputs)

  @property
  def rows_of_block(self) -> int:
    """m: rows of bytes that a whole block takes."""
    return -(-self.span // self.planes)

  @property
  def blocks(self) -> int:
    """Whole blocks."""
    return self.inputs // self.span

  @property
  def rows(self) -> int:
    """Rows of bytes of all whole blocks."""
    return self.blocks * self.rows_of_block

  @property
  def tail(self) -> 'Layout | None':
    """The shorter last block as a weight of its own, if there is one."""
    left = self.inputs - self.blocks * self.span
    return dataclasses.replace(self, inputs=left, block=left) if left else None


def split(x: jax.Array, layout: Layout) -> jax.Array:
  """The inputs x [M, K] of whole blocks as planes [planes, M, rows]; zeros fill up an odd block."""
  m, planes = layout.rows_of_block, layout.planes
  whole = x[:, : layout.blocks * layout.span].reshape(-1, layout.blocks, layout.span)
  filled = jnp.pad(whole, ((0, 0), (0, 0), (0, planes * m - layout.span)))
  parts = filled.reshape(-1, layout.blocks, planes, m)
  return parts.transpose(2, 0, 1, 3).reshape(planes, -1, layout.rows)


def join(parts: jax.Array, layout: Layout) -> jax.Array:
  """What `split` took apart: planes [planes, M, rows] as [M, K of whole blocks]."""
  planes, count, _ = parts.shape
  m = layout.rows_of_block
  blocks = parts.reshape(planes, count, layout.blocks, m).transpose(1, 2, 0, 3)
  whole = blocks.reshape(count, layout.blocks, planes * m)[..., : layout.span]
  return whole.reshape(count, -1)


def level_of(codes: jax.Array, plane: int, layout: Layout) -> jax.Array:
  """float32 levels of one plane of bytes [rows, N]; levels are selected by a tree, which needs no gather."""
  if layout.bits == 8 and layout.levels is None:
    return codes.astype(jnp.float32)
  code = codes.astype(jnp.int32)
  if layout.bits < 8:
    code = (code >> (plane * layout.bits)) & (2**layout.bits - 1)
  if layout.levels is None:
    return (code - layout.bias).astype(jnp.float32)
  table = layout.levels + layout.levels[-1:] * (2**layout.bits - len(layout.levels))
  choices: list[Any] = [np.float32(level) for level in table]
  for bit in range(layout.bits):
    is_set = (code >> bit) & 1 != 0
    choices = [
      jnp.where(is_set, high, low) for low, high in zip(choices[::2], choices[1::2], strict=True)
    ]
  return jnp.asarray(choices[0], jnp.float32)
