"""A weight at rest in few bits: one pytree, one equation each way.

  w ≈ scale[block of k, n] · level(code[k, n])                 tables, 8-bit floats and symmetric integers
  w ≈ scale[block of k, n] · code[k, n] + offset[block of k, n]    asymmetric integers
  w ≈ the float16 or bfloat16 whose bits the code is

With tiles, [block of k, block of n]. All arithmetic is float32 whatever the dtype of the weight, because
scales computed in bfloat16 double the error. A block of zeros gives zeros, exactly.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError
from qjax.quant import formats
from qjax.quant.formats import FORMATS, Format, Scheme, parse_scheme

# Scales that share one scale of their own (Dettmers et al. 2023, "QLoRA", §3, "double quantization").
DQ_GROUP = 256

_E4M3 = FORMATS['fp8_e4m3']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DoubleQuantized:
  """Non-negative scales [..., blocks, N] in 8 bits.

  scale = code · step[blocks, group of 256 consecutive n] + offset. The groups lie along N so that a tile of
  a weight needs a tile of its scales and nothing else.

  Attributes:
    codes: int8 [..., blocks, N].
    step: float32 [..., blocks, ceil(N / 256)].
    offset: float32 [...], the mean of the scales.
  """

  codes: jax.Array
  step: jax.Array
  offset: jax.Array

  @classmethod
  def quantize(cls, scale: jax.Array) -> Self:
    *lead, blocks, n = scale.shape
    groups = -(-n // DQ_GROUP)
    offset = jnp.mean(scale, axis=(-2, -1))
    centred = scale - offset[..., None, None]
    padded = jnp.pad(centred, [(0, 0)] * (scale.ndim - 1) + [(0, groups * DQ_GROUP - n)])
    step = jnp.max(jnp.abs(padded.reshape(*lead, blocks, groups, DQ_GROUP)), axis=-1)
    step = _over(step, 127)
    wide = cls._widen(step, n)
    codes = jnp.round(centred / jnp.where(wide == 0, 1, wide)).astype(jnp.int8)
    return cls(codes, step, offset)

  @staticmethod
  def _widen(step: jax.Array, n: int) -> jax.Array:
    """Each step over its group, [..., blocks, N].

    On CPU by a product with zeros and ones, whose sums have one term: XLA would fuse a repetition into the
    decoding of every weight, and its index arithmetic takes as long as all the rest.
    """
    groups = step.shape[-1]

    def repeated(step: jax.Array) -> jax.Array:
      return jnp.repeat(step, DQ_GROUP, axis=-1, total_repeat_length=groups * DQ_GROUP)[..., :n]

    def multiplied(step: jax.Array) -> jax.Array:
      member = jnp.arange(n) // DQ_GROUP == jnp.arange(groups)[:, None]
      return jnp.matmul(step, member.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    return jax.lax.platform_dependent(step, cpu=multiplied, default=repeated)

  def dequantize(self) -> jax.Array:
    wide = self._widen(self.step, self.codes.shape[-1])
    return self.codes.astype(jnp.float32) * wide + self.offset[..., None, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PowersOfTwo:
  """Scales unit · 2^(exponent - 127): E8M0 of the OCP Microscaling Formats specification 1.0.

  The exponent is that of §6.3: of the largest magnitude of the block, less that of the largest level. What
  then lies beyond the largest level gets it. Zero and all below 2^-126 become 2^-126.

  Attributes:
    exponents: uint8 [..., blocks, N].
    unit: `Format.scale_unit`.
  """

  exponents: jax.Array
  unit: float = dataclasses.field(metadata={'static': True})

  @classmethod
  def quantize(cls, scale: jax.Array, numbers: Format) -> Self:
    largest = np.float32(numbers.largest) * scale
    exponent = jax.lax.bitcast_convert_type(largest, jnp.uint32) >> np.uint32(23)
    exponent = exponent.astype(jnp.int32) - math.floor(math.log2(numbers.unit))
    return cls(jnp.clip(exponent, 1, 254).astype(jnp.uint8), numbers.scale_unit)

  def dequantize(self) -> jax.Array:
    bits = self.exponents.astype(jnp.uint32) << np.uint32(23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) * np.float32(self.unit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8Scales:
  """Scales unit · step · code: E4M3 numbers over one float32 for the matrix, as in NVFP4.

  Attributes:
    codes: uint8 [..., blocks, N], bit patterns of float8_e4m3fn.
    step: float32 [...]; the largest scale is 448 of it.
    unit: `Format.scale_unit`.
  """

  codes: jax.Array
  step: jax.Array
  unit: float = dataclasses.field(metadata={'static': True})

  @classmethod
  def quantize(cls, scale: jax.Array, numbers: Format) -> Self:
    scale = _over(scale, numbers.scale_unit)
    step = _over(jnp.max(scale, axis=(-2, -1)), _E4M3.largest)
    share = scale * (1 / jnp.where(step == 0, 1, step))[..., None, None]
    return cls(_E4M3.encode(share), step, numbers.scale_unit)

  def dequantize(self) -> jax.Array:
    return _E4M3.decode(self.codes) * self.step[..., None, None] * np.float32(self.unit)


Scales = jax.Array | DoubleQuantized | PowersOfTwo | Float8Scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
  """A quantized weight [..., K, N] whose inputs k share scales in blocks.

  `scheme` and `inputs` are static. Leading axes may be sliced, scanned or mapped away from every array at
  once, so a stack of layers is one QTensor.

  Attributes:
    codes: int8 [..., K, N] for 8 bits (uint8 if asymmetric or float), uint16 for 16-bit
      floats; below, uint8 bytes [..., rows, N] as `formats.pack` lays them out,
      block by block (an odd block ends in a filled byte, a ragged last block is packed by itself).
      Floats rest as integers because XLA's CPU backend widens a bfloat16 stack to float32, whole, before
      a loop that slices it; a bitcast costs nothing anywhere.
    scale: `Scales` [..., blocks, N] ([..., blocks, tiles] for tiles, [..., 1, 1] for one scale a tensor): an
      array in float32 or bfloat16, or a pytree of codes; None for 16-bit floats.
    offset: float32 [..., blocks, N] for asymmetric integers, else None.
    scheme: what the codes mean.
    inputs: K.
  """

  codes: jax.Array
  scale: Scales | None
  offset: jax.Array | None
  scheme: Scheme = dataclasses.field(metadata={'static': True})
  inputs: int = dataclasses.field(metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.codes.shape[:-2], self.inputs, self.codes.shape[-1])

  @property
  def ndim(self) -> int:
    return self.codes.ndim

  @property
  def size(self) -> int:
    return int(np.prod(self.shape))

  @property
  def nbytes(self) -> int:
    """Bytes of the arrays that hold it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

  @property
  def bits_per_weight(self) -> float:
    """Bits at rest, scales included, divided by the number of weights."""
    return 8 * self.nbytes / self.size

  @property
  def scales(self) -> jax.Array:
    """The scales in the float32 numbers that they stand for."""
    assert self.scale is not None
    return read_scales(self.scale)

  def unpacked(self) -> jax.Array:
    """The codes [..., K, N] as `encode` gives them: int8 for symmetric integers, uint8 for all else."""
    numbers, scheme = self.scheme.numbers, self.scheme
    if numbers.bits >= 8:
      return self.codes
    codes = _unpack_blocks(self.codes, numbers.bits, scheme.block_of(self.inputs), self.inputs)
    return codes if scheme.asymmetric or not numbers.bias else codes.astype(jnp.int8) - np.int8(numbers.bias)

  def __getitem__(self, index: Any) -> 'QTensor':
    """A slice over leading axes only (of a stack of layers)."""
    return jax.tree.map(lambda leaf: leaf[index], self)


def is_qtensor(value: Any) -> bool:
  return isinstance(value, QTensor)


def is_at_rest(value: Any) -> bool:
  """Whether it is a weight in few bits, not one that merely rests in 16."""
  return isinstance(value, QTensor) and not value.scheme.numbers.is_float


def _blocks(w: jax.Array, block: int, fill: float = 0.0) -> jax.Array:
  """[..., K, N] as [..., ceil(K / block), block, N], a short last block filled up."""
  *lead, k, n = w.shape
  count = -(-k // block)
  if count * block != k:
    w = jnp.pad(w, [(0, 0)] * len(lead) + [(0, count * block - k), (0, 0)], constant_values=fill)
  return w.reshape(*lead, count, block, n)


def over_outputs(per_column: jax.Array, scheme: Scheme, reduce: Any, fill: float) -> jax.Array:
  """[..., blocks, N] reduced over the outputs that share a scale."""
  *lead, blocks, n = per_column.shape
  width = scheme.width_of(n)
  if width == 1:
    return per_column
  filled = -n % width
  if filled:
    per_column = jnp.pad(
      per_column, [(0, 0)] * len(lead) + [(0, 0), (0, filled)], constant_values=fill
    )
  return reduce(per_column.reshape(*lead, blocks, -1, width), axis=-1)


def absmax(w: jax.Array, scheme: Scheme) -> jax.Array:
  """The largest magnitude of what shares a scale, in the shape of the scales."""
  largest = jnp.max(jnp.abs(_blocks(w, scheme.block_of(w.shape[-2]))), axis=-2)
  return over_outputs(largest, scheme, jnp.max, 0.0)


def sum_over(per_weight: jax.Array, scheme: Scheme) -> jax.Array:
  """[..., K, N] summed over what shares a scale, in the shape of the scales."""
  per_column = jnp.sum(_blocks(per_weight, scheme.block_of(per_weight.shape[-2])), axis=-2)
  return over_outputs(per_column, scheme, jnp.sum, 0.0)


def _range(w: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
  """Least and largest value of what shares a scale; a filled tail never counts."""
  block = scheme.block_of(w.shape[-2])
  low = jnp.min(_blocks(w, block, np.inf), axis=-2)
  high = jnp.max(_blocks(w, block, -np.inf), axis=-2)
  return (over_outputs(low, scheme, jnp.min, np.inf), over_outputs(high, scheme, jnp.max, -np.inf))


def per_column(per_scale: jax.Array, scheme: Scheme, outputs: int) -> jax.Array:
  """What belongs to each scale for each output that shares it, [..., blocks, N], or 1 for N if all do."""
  width = scheme.width_of(outputs)
  if width in (1, outputs):
    return per_scale
  wide = jnp.broadcast_to(per_scale[..., None], (*per_scale.shape, width))
  return wide.reshape(*per_scale.shape[:-1], -1)[..., :outputs]


def spread(per_scale: jax.Array, scheme: Scheme, inputs: int, outputs: int) -> jax.Array:
  """What belongs to each scale, repeated over the weights [..., K, N] that share it.

  Outputs that all share one scale are left as an axis of one, which broadcasts.
  """
  per_scale = per_column(per_scale, scheme, outputs)
  block, columns = scheme.block_of(inputs), per_scale.shape[-1]
  tall = jnp.broadcast_to(per_scale[..., None, :], (*per_scale.shape[:-1], block, columns))
  return tall.reshape(*per_scale.shape[:-2], -1, columns)[..., :inputs, :]


def _pack_blocks(codes: jax.Array, bits: int, block: int) -> jax.Array:
  *lead, k, n = codes.shape
  full = k // block * block
  parts = []
  if full:
    packed = formats.pack(codes[..., :full, :].reshape(*lead, full // block, block, n), bits)
    parts.append(packed.reshape(*lead, -1, n))
  if full < k:
    parts.append(formats.pack(codes[..., full:, :], bits))
  return jnp.concatenate(parts, axis=-2) if len(parts) > 1 else parts[0]


def _unpack_blocks(packed: jax.Array, bits: int, block: int, k: int) -> jax.Array:
  *lead, _, n = packed.shape
  full = k // block
  per_block = formats.packed_rows(block, bits)
  body = packed[..., : full * per_block, :].reshape(*lead, full, per_block, n)
  codes = formats.unpack(body, bits, block).reshape(*lead, full * block, n)
  if full * block == k:
    return codes
  tail = formats.unpack(packed[..., full * per_block :, :], bits, k - full * block)
  return jnp.concatenate([codes, tail], axis=-2)


def quantize(
  w: jax.Array, scheme: str | Scheme, clip: jax.Array | None = None, high: jax.Array | None = None
) -> QTensor:
  """The weight [..., K, N] (any floating dtype) at rest in a scheme.

  Values must be finite; `Method.prepare` refuses a NaN or an infinity with its path before it comes here.

  Args:
    w: the weight.
    scheme: a spelling, or parsed.
    clip: float32 in (0, 1], broadcastable to the scales [..., blocks, N]: the share of each block's range
      that is kept; values beyond saturate. None keeps all.
    high: float32 in the shape of the scales: the largest magnitude that each block represents, whatever it
      holds; for schemes without offsets, and without `clip`.

  Raises:
    UserError: the scheme is misspelt (with the grammar), or w has fewer than two axes.
  """
  scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
  if w.ndim < 2:
    raise UserError(f'a weight of shape {w.shape} has no [inputs, outputs] to quantize')
  if scheme.numbers.is_float:
    return QTensor(scheme.numbers.encode(w), None, None, scheme, w.shape[-2])
  stored, offset = ranges(w, scheme, clip) if high is None else (scales_for(high, scheme), None)
  # Codes are chosen for the scale as it will be read back, not as it was computed.
  codes = encode(w, scheme, read_scales(stored), offset)
  return assemble(codes, stored, offset, scheme)


def ranges(
  w: jax.Array, scheme: Scheme, clip: jax.Array | None = None
) -> tuple[Scales, jax.Array | None]:
  """Scales as they rest and, of an asymmetric scheme, float32 offsets, in the shape of the scales."""
  w = w.astype(jnp.float32)
  numbers = scheme.numbers
  offset: jax.Array | None = None
  if scheme.asymmetric:
    low, high = _range(w, scheme)
    if clip is not None:
      low, high = low * clip, high * clip
    scale = _over(high - low, 2**numbers.bits - 1)
    offset = low  # in float32 whatever the scales: rounded to bfloat16 it could err by more than a step
  else:
    largest = absmax(w, scheme)
    scale = _over(largest if clip is None else largest * clip, numbers.largest)
  return _scales_at_rest(scale, scheme), offset


def scales_for(high: jax.Array, scheme: Scheme) -> Scales:
  """Scales as they rest for the largest magnitudes float32 [..., blocks, N] that they are to represent."""
  assert not scheme.asymmetric, 'an offset needs two bounds'
  return _scales_at_rest(_over(high, scheme.numbers.largest), scheme)


def _over(x: jax.Array, number: float) -> jax.Array:
  """x · (1 / number), which rounds alike in every program.

  XLA divides by one number for many in some programs, and multiplies by its inverse in others: between them
  a scale differs by an ulp, and weights that lie halfway between two codes by a step.
  """
  return x * np.float32(1 / number)


def _scales_at_rest(scale: jax.Array, scheme: Scheme) -> Scales:
  if scheme.double_quantized:
    return DoubleQuantized.quantize(scale)
  match scheme.scale:
    case 'e8m0':
      return PowersOfTwo.quantize(scale, scheme.numbers)
    case 'e4m3':
      return Float8Scales.quantize(scale, scheme.numbers)
  return _at_rest(scale, scheme.scale)


def encode(w: jax.Array, scheme: Scheme, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
  """The nearest codes of w [..., K, N] for given float32 scales and offsets [..., blocks, N], not packed.

  Returns:
    [..., K, N]: int8 for symmetric integers, uint8 for all else.
  """
  numbers, (k, n) = scheme.numbers, w.shape[-2:]
  safe = jnp.where(scale == 0, 1, scale)
  w = w.astype(jnp.float32)
  w = w if offset is None else w - spread(offset, scheme, k, n)
  # One step for all is a number that XLA may invert, or not; see `_over`.
  is_one = scale.shape[-2:] == (1, 1)
  share = w * spread(1 / safe, scheme, k, n) if is_one else w / spread(safe, scheme, k, n)
  if offset is not None:
    return jnp.clip(jnp.round(share), 0, 2**numbers.bits - 1).astype(jnp.uint8)
  return numbers.encode(share)


def decode(codes: jax.Array, scheme: Scheme, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
  """The float32 values [..., K, N] of codes as `encode` gives them."""
  k, n = codes.shape[-2:]
  value = scheme.numbers.decode(codes) * spread(scale, scheme, k, n)
  return value if offset is None else value + spread(offset, scheme, k, n)


def assemble(codes: jax.Array, scale: Scales, offset: jax.Array | None, scheme: Scheme) -> QTensor:
  """A weight of codes [..., K, N] as `encode` gives them, and scales and offsets as `ranges` does."""
  return QTensor(_packed(codes, scheme), scale, offset, scheme, codes.shape[-2])


def _packed(codes: jax.Array, scheme: Scheme) -> jax.Array:
  numbers = scheme.numbers
  if numbers.bits == 8:
    return codes
  if codes.dtype == jnp.int8:
    codes = (codes + numbers.bias).astype(jnp.uint8)
  return _pack_blocks(codes, numbers.bits, scheme.block_of(codes.shape[-2]))


def _at_rest(scale: jax.Array, dtype: str) -> jax.Array:
  """float32 scales in the dtype in which they rest.

  Under jit XLA drops a cast to bfloat16 that is undone at once, and codes would be chosen for a scale that is
  never stored. It keeps `reduce_precision`.
  """
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(scale, info.nexp, info.nmant).astype(dtype)


def read_scales(scale: Scales) -> jax.Array:
  """The float32 numbers that scales stand for."""
  return scale.astype(jnp.float32) if isinstance(scale, jax.Array) else scale.dequantize()


def dequantize(q: QTensor, dtype: jnp.dtype = jnp.dtype('float32')) -> jax.Array:
  """The weight [..., K, N] that the codes stand for: float32 arithmetic, rounded once to `dtype`."""
  numbers = q.scheme.numbers
  if q.scale is None:
    return numbers.decode(q.codes).astype(dtype)
  return decode(q.unpacked(), q.scheme, read_scales(q.scale), q.offset).astype(dtype)


def expected_nbytes(shape: tuple[int, ...], scheme: str | Scheme) -> int:
  """Bytes that a weight of this shape takes in a scheme, by arithmetic alone."""
  scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
  *lead, k, n = shape
  if scheme.numbers.is_float:
    return 2 * int(np.prod(shape, dtype=np.int64))
  block = scheme.block_of(k)
  full, tail = divmod(k, block)
  bits = scheme.numbers.bits
  rows = full * formats.packed_rows(block, bits) + formats.packed_rows(tail, bits)
  blocks = full + bool(tail)
  _, columns = scheme.grid(k, n)
  scales = blocks * columns
  if scheme.double_quantized:
    scale_bytes = scales + 4 * blocks * -(-columns // DQ_GROUP) + 4
  else:
    each, once = {'float32': (4, 0), 'bfloat16': (2, 0), 'e8m0': (1, 0), 'e4m3': (1, 4)}[scheme.scale]
    scale_bytes = scales * (each + 4 * scheme.asymmetric) + once
  return int(np.prod(lead, dtype=np.int64)) * (rows * n + scale_bytes)
