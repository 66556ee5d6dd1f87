"""A weight at rest in few bits: one pytree, one equation each way.

  w ≈ scale[block of k, n] · level(code[k, n])                 table and symmetric integer formats
  w ≈ scale[block of k, n] · code[k, n] + offset[block of k, n]    asymmetric integers
  w ≈ the float16 or bfloat16 whose bits the code is

All arithmetic is float32 whatever the dtype of the weight, because scales computed in bfloat16 double the
error. A block of zeros gives zeros, exactly.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError
from qjax.quant import formats
from qjax.quant.formats import Scheme, parse_scheme

# Scales that share one scale of their own (Dettmers et al. 2023, "QLoRA", §3, "double quantization").
DQ_GROUP = 256


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
    step = jnp.max(jnp.abs(padded.reshape(*lead, blocks, groups, DQ_GROUP)), axis=-1) / 127
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
class QTensor:
  """A quantized weight [..., K, N] whose inputs k share scales in blocks.

  `scheme` and `inputs` are static. Leading axes may be sliced, scanned or mapped away from every array at
  once, so a stack of layers is one QTensor.

  Attributes:
    codes: int8 [..., K, N] for 8 bits (uint8 if asymmetric), uint16 for 16-bit
      floats; below, uint8 bytes [..., rows, N] as `formats.pack` lays them out,
      block by block (an odd block ends in a filled byte, a ragged last block is packed by itself).
      Floats rest as integers because XLA's CPU backend widens a bfloat16 stack to float32, whole, before
      a loop that slices it; a bitcast costs nothing anywhere.
    scale: [..., blocks, N] float32 or bfloat16, [..., 1, 1] for one scale a tensor, or `DoubleQuantized`;
      None for floats.
    offset: float32 [..., blocks, N] for asymmetric integers, else None.
    scheme: what the codes mean.
    inputs: K.
  """

  codes: jax.Array
  scale: jax.Array | DoubleQuantized | None
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

  def __getitem__(self, index: Any) -> 'QTensor':
    """A slice over leading axes only (of a stack of layers)."""
    return jax.tree.map(lambda leaf: leaf[index], self)


def is_qtensor(value: Any) -> bool:
  return isinstance(value, QTensor)


def _blocks(w: jax.Array, block: int, fill: float = 0.0) -> jax.Array:
  """[..., K, N] as [..., ceil(K / block), block, N], a short last block filled up."""
  *lead, k, n = w.shape
  count = -(-k // block)
  if count * block != k:
    w = jnp.pad(w, [(0, 0)] * len(lead) + [(0, count * block - k), (0, 0)], constant_values=fill)
  return w.reshape(*lead, count, block, n)


def _absmax(w: jax.Array, scheme: Scheme) -> jax.Array:
  """The largest magnitude of each block [..., blocks, N] ([..., 1, 1] per tensor)."""
  largest = jnp.max(jnp.abs(_blocks(w, scheme.block_of(w.shape[-2]))), axis=-2)
  return jnp.max(largest, axis=-1, keepdims=True) if scheme.granularity == 'tensor' else largest


def _range(w: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
  """Least and largest value of each block [..., blocks, N]; a filled tail never counts."""
  block = scheme.block_of(w.shape[-2])
  low = jnp.min(_blocks(w, block, np.inf), axis=-2)
  high = jnp.max(_blocks(w, block, -np.inf), axis=-2)
  if scheme.granularity == 'tensor':
    low, high = jnp.min(low, axis=-1, keepdims=True), jnp.max(high, axis=-1, keepdims=True)
  return low, high


def _spread(per_block: jax.Array, block: int, rows: int) -> jax.Array:
  """[..., blocks, N] repeated over the rows [..., rows, N] of its blocks."""
  wide = jnp.broadcast_to(per_block[..., None, :], (*per_block.shape[:-1], block, per_block.shape[-1]))
  return wide.reshape(*per_block.shape[:-2], -1, per_block.shape[-1])[..., :rows, :]


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


def quantize(w: jax.Array, scheme: str | Scheme, clip: jax.Array | None = None) -> QTensor:
  """The weight [..., K, N] (any floating dtype) at rest in a scheme.

  Values must be finite; `Method.prepare` refuses a NaN or an infinity with its path before it comes here.

  Args:
    w: the weight.
    scheme: a spelling, or parsed.
    clip: float32 in (0, 1], broadcastable to the scales [..., blocks, N]: the share of each block's range
      that is kept; values beyond saturate. None keeps all.

  Raises:
    UserError: the scheme is misspelt (with the grammar), or w has fewer than two axes.
  """
  scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
  if w.ndim < 2:
    raise UserError(f'a weight of shape {w.shape} has no [inputs, outputs] to quantize')
  if scheme.numbers.is_float:
    codes = jax.lax.bitcast_convert_type(w.astype(scheme.format), jnp.uint16)
    return QTensor(codes, None, None, scheme, w.shape[-2])
  stored, offset = _stored_ranges(w.astype(jnp.float32), scheme, clip)
  # Codes are chosen for the scale as it will be read back, not as it was computed.
  codes = encode(w, scheme, _read(stored), offset)
  return QTensor(_packed(codes, scheme), stored, offset, scheme, w.shape[-2])


def _stored_ranges(
  w: jax.Array, scheme: Scheme, clip: jax.Array | None
) -> tuple[jax.Array | DoubleQuantized, jax.Array | None]:
  """Scales and offsets of a float32 weight, as they rest."""
  numbers = scheme.numbers
  offset: jax.Array | None = None
  if scheme.asymmetric:
    low, high = _range(w, scheme)
    if clip is not None:
      low, high = low * clip, high * clip
    scale = (high - low) / (2**numbers.bits - 1)
    offset = low  # in float32 whatever the scales: rounded to bfloat16 it could err by more than a step
  else:
    largest = _absmax(w, scheme)
    scale = (largest if clip is None else largest * clip) / (1 if numbers.levels else numbers.largest)
  return _scales_at_rest(scale, scheme), offset


def _scales_at_rest(scale: jax.Array, scheme: Scheme) -> jax.Array | DoubleQuantized:
  return DoubleQuantized.quantize(scale) if scheme.double_quantized else _at_rest(scale, scheme.scale)


def ranges(
  w: jax.Array, scheme: Scheme, clip: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
  """Scales and, of an asymmetric scheme, offsets, float32 [..., blocks, N], as they will be read back."""
  stored, offset = _stored_ranges(w.astype(jnp.float32), scheme, clip)
  return _read(stored), offset


def encode(w: jax.Array, scheme: Scheme, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
  """The nearest codes of w [..., K, N] for given float32 scales and offsets [..., blocks, N], not packed.

  Returns:
    [..., K, N]: int8 for symmetric integers, uint8 for tables and asymmetric integers.
  """
  numbers, k = scheme.numbers, w.shape[-2]
  block = scheme.block_of(k)
  step = _spread(scale, block, k)
  safe = jnp.where(step == 0, 1, step)
  w = w.astype(jnp.float32)
  if offset is not None:
    zero = _spread(offset, block, k)
    return jnp.clip(jnp.round((w - zero) / safe), 0, 2**numbers.bits - 1).astype(jnp.uint8)
  if numbers.levels is not None:
    return formats.nearest_code(w / safe, numbers.levels)
  return jnp.clip(jnp.round(w / safe), -numbers.largest, numbers.largest).astype(jnp.int8)


def decode(codes: jax.Array, scheme: Scheme, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
  """The float32 values [..., K, N] of codes as `encode` gives them."""
  k = codes.shape[-2]
  block = scheme.block_of(k)
  levels = scheme.numbers.levels
  value = codes.astype(jnp.float32) if levels is None else formats.level_of(codes, levels)
  value = value * _spread(scale, block, k)
  return value if offset is None else value + _spread(offset, block, k)


def assemble(codes: jax.Array, scale: jax.Array, offset: jax.Array | None, scheme: Scheme) -> QTensor:
  """A weight of codes [..., K, N] as `encode` gives them, and scales, stored as the scheme says."""
  return QTensor(_packed(codes, scheme), _scales_at_rest(scale, scheme), offset, scheme, codes.shape[-2])


def _packed(codes: jax.Array, scheme: Scheme) -> jax.Array:
  bits = scheme.numbers.bits
  if bits == 8:
    return codes
  if codes.dtype == jnp.int8:
    codes = (codes + 2 ** (bits - 1)).astype(jnp.uint8)
  return _pack_blocks(codes, bits, scheme.block_of(codes.shape[-2]))


def _at_rest(scale: jax.Array, dtype: str) -> jax.Array:
  """float32 scales in the dtype in which they rest.

  Under jit XLA drops a cast to bfloat16 that is undone at once, and codes would be chosen for a scale that is
  never stored. It keeps `reduce_precision`.
  """
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(scale, info.nexp, info.nmant).astype(dtype)


def _read(scale: jax.Array | DoubleQuantized) -> jax.Array:
  return scale.dequantize() if isinstance(scale, DoubleQuantized) else scale.astype(jnp.float32)


def dequantize(q: QTensor, dtype: jnp.dtype = jnp.dtype('float32')) -> jax.Array:
  """The weight [..., K, N] that the codes stand for: float32 arithmetic, rounded once to `dtype`."""
  numbers = q.scheme.numbers
  if q.scale is None:
    return jax.lax.bitcast_convert_type(q.codes, jnp.dtype(numbers.name)).astype(dtype)
  codes = q.codes
  if numbers.bits < 8:
    codes = _unpack_blocks(codes, numbers.bits, q.scheme.block_of(q.inputs), q.inputs)
    if numbers.levels is None and not q.scheme.asymmetric:
      codes = codes.astype(jnp.int8) - np.int8(2 ** (numbers.bits - 1))
  return decode(codes, q.scheme, _read(q.scale), q.offset).astype(dtype)


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
  scales = 1 if scheme.granularity == 'tensor' else blocks * n
  if scheme.double_quantized:
    scale_bytes = blocks * n + 4 * blocks * -(-n // DQ_GROUP) + 4
  else:
    scale_bytes = scales * ({'float32': 4, 'bfloat16': 2}[scheme.scale] + 4 * scheme.asymmetric)
  return int(np.prod(lead, dtype=np.int64)) * (rows * n + scale_bytes)
