"""What the bytes of a resting weight mean, in raw arrays.

A weight [K, N] rests as codes of `bits` bits, 8 / bits to a byte, in blocks of `block` consecutive inputs.
The bytes of a block are m = ceil(block · bits / 8) rows [m, N]; plane p of them, bits p · bits and up, holds
the codes of inputs p · m to (p + 1) · m - 1 of the block. A last block that is shorter is packed by itself.
Codes of three bits are two such runs of rows: the lower two bits of a block as above, then its highest bits,
eight to a byte, in h = ceil(block / 8) rows: bit q of row j belongs to input q · h + j.

A product undoes that in the tiles that it decodes, where rows of a plane are put back in their place.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

# Outputs whose scales share a step.
GROUP = 256


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static part of a weight.

  Attributes:
    inputs: K.
    block: inputs that share a scale; K or more is one scale an output.
    bits: of a code, 8, 4, 3 or 2.
    levels: what codes stand for, or None for integers, code - bias.
    bias: 0 for 8 bits, and with offsets.
    double_quantized: whether scales rest as `DoubleQuantized`, else they are float32.
    has_offsets: whether an offset is added to what a code and its scale stand for.
  """

  inputs: int
  block: int
  bits: int
  levels: tuple[float, ...] | None = None
  bias: int = 0
  double_quantized: bool = False
  has_offsets: bool = False

  @property
  def dtype(self) -> jnp.dtype:
    """Of the bytes: int8 for integers of 8 bits without offsets, which are signed, else uint8."""
    is_signed = self.bits == 8 and self.levels is None and not self.has_offsets
    return jnp.dtype('int8' if is_signed else 'uint8')

  @property
  def low_bits(self) -> int:
    """Bits of a code that lie in one byte: all, but for codes of three bits."""
    return 2 if self.bits == 3 else self.bits

  @property
  def planes(self) -> int:
    """Codes a byte."""
    return 8 // self.low_bits

  @property
  def span(self) -> int:
    """Inputs of a whole block."""
    return min(self.block, self.inputs)

  @property
  def rows_of_block(self) -> int:
    """m: rows that one plane of a whole block has."""
    return -(-self.span // self.planes)

  @property
  def high_rows_of_block(self) -> int:
    """h: rows of highest bits of a whole block of three-bit codes, else 0."""
    return -(-self.span // 8) if self.bits == 3 else 0

  @property
  def byte_rows_of_block(self) -> int:
    """Rows of bytes that a whole block takes."""
    return self.rows_of_block + self.high_rows_of_block

  @property
  def blocks(self) -> int:
    """Whole blocks."""
    return self.inputs // self.span

  @property
  def rows(self) -> int:
    """Rows that one plane of all whole blocks has."""
    return self.blocks * self.rows_of_block

  @property
  def byte_rows(self) -> int:
    """Rows of bytes of all whole blocks."""
    return self.blocks * self.byte_rows_of_block

  def nbytes(self, outputs: int) -> int:
    """Of codes and scales of all whole blocks of [K, N]."""
    return (self.byte_rows + (1 if self.double_quantized else 4) * self.blocks) * outputs

  @property
  def tail(self) -> 'Layout | None':
    """The shorter last block as a weight of its own, if there is one."""
    left = self.inputs - self.blocks * self.span
    return dataclasses.replace(self, inputs=left, block=left, double_quantized=False) if left else None


class DoubleQuantized(NamedTuple):
  """Scales [blocks, N] in 8 bits: code · step[block, n // GROUP] + offset.

  Attributes:
    codes: int8 [blocks, N].
    step: float32 [blocks, ceil(N / GROUP)].
    offset: float32 [1, 1].
  """

  codes: Any
  step: Any
  offset: Any

  def of_blocks(self, start: int) -> Self:
    """Those from a block on."""
    return type(self)(self.codes[start:], self.step[start:], self.offset)


# float32 [blocks, N or 1], or in 8 bits.
Scales = jax.Array | DoubleQuantized


def read_scales(scale: Scales) -> jax.Array:
  """The float32 numbers [blocks, N or 1] that scales stand for."""
  if not isinstance(scale, DoubleQuantized):
    return scale
  n = scale.codes.shape[1]
  wide = jnp.repeat(scale.step, GROUP, axis=1, total_repeat_length=scale.step.shape[1] * GROUP)[:, :n]
  return scale.codes.astype(jnp.float32) * wide + scale.offset


def join(parts: jax.Array, layout: Layout) -> jax.Array:
  """Inputs plane by plane, [planes, M, rows], as they lie in the weight, [M, K of whole blocks]."""
  planes, count, _ = parts.shape
  m = layout.rows_of_block
  blocks = parts.reshape(planes, count, layout.blocks, m).transpose(1, 2, 0, 3)
  whole = blocks.reshape(count, layout.blocks, planes * m)[..., : layout.span]
  return whole.reshape(count, -1)


def codes_of(packed: jax.Array, plane: int, layout: Layout) -> jax.Array:
  """Unsigned int32 codes [rows of the plane, N] of whole blocks of bytes [byte rows, N]."""
  wide = packed.astype(jnp.int32)
  if layout.bits == 8:
    return wide
  if layout.bits != 3:
    code = wide >> (plane * layout.bits)
    return code if plane == layout.planes - 1 else code & (2**layout.bits - 1)
  m, h = layout.rows_of_block, layout.high_rows_of_block
  blocks = wide.reshape(-1, m + h, wide.shape[-1])
  # The highest bits of one plane are runs of rows, each in one bit.
  runs = []
  for bit in range(8):
    start, end = max(plane * m, bit * h), min((plane + 1) * m, (bit + 1) * h)
    if start < end:
      rows = blocks[:, m + start - bit * h : m + end - bit * h]
      runs.append((rows >> bit) & 1)
  low = (blocks[:, :m] >> (2 * plane)) & 3
  return (low | (jnp.concatenate(runs, axis=1) << 2)).reshape(-1, wide.shape[-1])


def table_of(layout: Layout) -> tuple[float, ...]:
  """The level of every code that `bits` bits can spell; of an unused last code, the last level."""
  assert layout.levels is not None
  return layout.levels + layout.levels[-1:] * (2**layout.bits - len(layout.levels))


def level_of(code: jax.Array, layout: Layout) -> jax.Array:
  """The float32 level of int32 codes; levels of a table are selected by a tree, which needs no gather."""
  if layout.levels is None:
    return (code - layout.bias).astype(jnp.float32)
  choices: list[Any] = [np.float32(level) for level in table_of(layout)]
  for bit in range(layout.bits):
    is_set = (code >> bit) & 1 != 0
    choices = [
      jnp.where(is_set, high, low) for low, high in zip(choices[::2], choices[1::2], strict=True)
    ]
  return jnp.asarray(choices[0], jnp.float32)


def check(
  x: jax.Array, codes: jax.Array, scale: Scales, offset: jax.Array | None, layout: Layout, transposed: bool
) -> None:
  """Refuses operands that do not belong together: a kernel would read beside them.

  Args:
    x: [M, K], or [M, N] of a product with the transposed weight.
    codes: bytes [byte rows, N].
    scale: of each block.
    offset: likewise, or None.
    layout: what the bytes mean.
    transposed: whether the product is that with the transposed weight.

  Raises:
    ValueError: naming the operand, what it is and what it should be.
  """
  tail = layout.tail
  rows = layout.byte_rows + (tail.byte_rows if tail else 0)
  blocks, outputs = layout.blocks + (tail is not None), codes.shape[-1]

  def refuse(what: str, found: object, wanted: str) -> ValueError:
    return ValueError(f'{what} is {found}, not {wanted}, for a weight of {layout.inputs} inputs')

  if codes.shape != (rows, outputs) or codes.dtype != layout.dtype:
    wanted = f'{jnp.dtype(layout.dtype)} [{rows}, N]'
    raise refuse('the array of codes', f'{codes.dtype} {list(codes.shape)}', wanted)
  given = outputs if transposed else layout.inputs
  if x.ndim != 2 or x.shape[1] != given or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    wanted = f'[M, {given}] in float32, bfloat16 or float16'
    raise refuse('the left operand', f'{x.dtype} {list(x.shape)}', wanted)
  if isinstance(scale, DoubleQuantized) != layout.double_quantized:
    raise refuse('the scale', type(scale).__name__, 'in 8 bits' if layout.double_quantized else 'an array')
  wide = (blocks, outputs), (blocks, 1)
  if isinstance(scale, DoubleQuantized):
    shapes = tuple(each.shape for each in scale)
    if shapes != ((blocks, outputs), (blocks, -(-outputs // GROUP)), (1, 1)):
      raise refuse('the scale in 8 bits', shapes, f'codes, steps and an offset for {blocks} x {outputs}')
  elif scale.shape not in wide:
    raise refuse('the scale', list(scale.shape), f'[{blocks}, {outputs} or 1]')
  if (offset is not None) != layout.has_offsets:
    raise refuse('the offset', 'missing' if offset is None else 'there', 'as the layout says')
  if offset is not None and offset.shape not in wide:
    raise refuse('the offset', list(offset.shape), f'[{blocks}, {outputs} or 1]')
