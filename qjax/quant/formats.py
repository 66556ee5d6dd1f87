"""Number formats of few bits: their levels, how codes are packed into bytes, and how a scheme is spelled.

A scheme says in which format a weight rests and what shares a scale. It has one spelling, the same in
configs and in the API:

  nf4:block=64,dq             NormalFloat4, one scale for 64 inputs of one output, scales themselves in 8 bits
  int4:block=32,asym          levels q·scale + offset instead of q·scale
  int8:axis=channel           one scale for each output
  int8:axis=tensor            one scale for the whole matrix
  int8:tile=128x64            one scale for 128 inputs by 64 outputs
  nf4:block=64,scale=bfloat16
  fp4:block=32,scale=e8m0     MXFP4: scales are powers of two
  fp4:block=16,scale=e4m3     NVFP4: scales are float8 numbers over one float32 scale a matrix
  bfloat16                    the weight itself, rounded
"""

import dataclasses
import statistics
from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError, nearest

# NormalFloat4 (Dettmers et al. 2023, "QLoRA", §3 and appendix E): quantiles of N(0, 1) scaled to [-1, 1].
# fmt: off
NF4_LEVELS = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
  -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
  0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


# The probability at which NormalFloat's outermost level lies, that of four bits for all of them.
_NF_OFFSET = 1 - (1 / 32 + 1 / 30) / 2


def _normal_float(bits: int) -> tuple[float, ...]:
  """Quantiles of N(0, 1) in [-1, 1]: 2^(bits-1) positive ones, zero, and one fewer negative ones."""

  def quantiles(count: int) -> list[float]:
    points = np.linspace(_NF_OFFSET, 0.5, count + 1)[:-1]
    return [statistics.NormalDist().inv_cdf(float(point)) for point in points]

  half = 2 ** (bits - 1)
  levels = sorted([-x for x in quantiles(half - 1)] + [0.0] + quantiles(half))
  return tuple(level / levels[-1] for level in levels)


def _mirrored(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
  """The magnitudes, zero first, in [-1, 1] with both signs; minus zero would be a second code for zero."""
  scaled = tuple(magnitude / magnitudes[-1] for magnitude in magnitudes)
  return tuple(-x for x in reversed(scaled[1:])) + scaled


ScaleDtype = Literal['float32', 'bfloat16', 'e8m0', 'e4m3']
Granularity = Literal['block', 'tile', 'channel', 'tensor']


@dataclasses.dataclass(frozen=True)
class Format:
  """A set of levels that `bits` bits can name.

  What it encodes are weights already divided by their scale. There are three kinds:

    integers   neither `levels` nor `dtype`; code q, signed, stands for q
    tables     `levels`, ascending, spanning [-1, 1]; code i stands for levels[i]. Both zeros of a float count
               as one, so that every code is the code of its own level; the last code is then unused
    floats     `dtype`; a code is the bit pattern of the number. Those of 16 bits take no scale

  Attributes:
    unit: the largest level in the numbers of the standard that defines the format (6 for E2M1, whose table
      here ends in 1), so that narrow scales are the standard's own; 1 where powers of two do not serve.
  """

  name: str
  bits: int
  levels: tuple[float, ...] | None = None
  dtype: str | None = None
  unit: float = 1

  @property
  def is_float(self) -> bool:
    """Whether it is a 16-bit float, which takes no scale."""
    return self.bits == 16

  @property
  def is_integer(self) -> bool:
    return self.levels is None and self.dtype is None

  @property
  def largest(self) -> float:
    """The largest magnitude that codes stand for: the largest magnitude of a block, divided by its scale.

    A symmetric integer never uses its most negative code.
    """
    if self.levels is not None:
      return 1
    return float(jnp.finfo(self.dtype).max) if self.dtype is not None else 2 ** (self.bits - 1) - 1

  @property
  def scale_unit(self) -> float:
    """What a scale here is divided by to be the standard's, which multiplies levels up to `unit`."""
    return self.unit / self.largest

  @property
  def bias(self) -> int:
    """What is added to a code before its bits are packed; 8-bit integers rest signed."""
    return 2 ** (self.bits - 1) if self.is_integer and self.bits < 8 else 0

  def encode(self, x: jax.Array) -> jax.Array:
    """The code of the level nearest to each float32 x: int8 for integers, uint8 or uint16 for all else.

    What lies beyond the largest level gets the largest; a 16-bit float keeps its infinities.
    """
    if self.levels is not None:
      return nearest_code(x, self.levels)
    if self.is_integer:
      return jnp.clip(jnp.round(x), -self.largest, self.largest).astype(jnp.int8)
    if not self.is_float:
      x = jnp.clip(x, -self.largest, self.largest)
    return jax.lax.bitcast_convert_type(x.astype(self.dtype), jnp.dtype(f'uint{self.bits}'))

  def decode(self, codes: jax.Array) -> jax.Array:
    """The float32 number each code stands for (of a 16-bit float, in its own dtype)."""
    if self.levels is not None:
      return level_of(codes, self.levels)
    if self.is_integer:
      return codes.astype(jnp.float32)
    value = jax.lax.bitcast_convert_type(codes, jnp.dtype(self.dtype))
    return value if self.is_float else value.astype(jnp.float32)


FORMATS = {
  f.name: f
  for f in (
    Format('bfloat16', 16, dtype='bfloat16'),
    Format('float16', 16, dtype='float16'),
    Format('int8', 8, unit=127),
    Format('int4', 4, unit=7),
    Format('int3', 3, unit=3),
    Format('int2', 2),
    Format('nf4', 4, NF4_LEVELS),
    Format('nf3', 3, _normal_float(3)),
    Format('nf2', 2, _normal_float(2)),
    # E2M1 of the OCP microscaling specification, and bitsandbytes' own four-bit float.
    Format('fp4', 4, _mirrored((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)), unit=6),
    Format('bnb_fp4', 4, _mirrored((0.0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)), unit=12),
    Format('fp8_e4m3', 8, dtype='float8_e4m3fn', unit=448),
    Format('fp8_e5m2', 8, dtype='float8_e5m2', unit=57344),
  )
}

GRAMMAR = (
  'a scheme is FORMAT[:OPTION,…] with FORMAT one of '
  + ', '.join(FORMATS)
  + ' and options block=N | tile=RxC | axis=channel | axis=tensor, asym (integers), dq (block, tile), scale='
  + '|'.join(get_args(ScaleDtype))
  + " (e8m0 not for nf and int2); for instance 'nf4:block=64,dq', 'int8:axis=channel', 'int8:tile=128x64' or"
  + " 'fp4:block=32,scale=e8m0' (MXFP4) and 'fp4:block=16,scale=e4m3' (NVFP4)"
)


@dataclasses.dataclass(frozen=True)
class Scheme:
  """A format with its granularity and the storage of its scales.

  Attributes:
    format: a name in `FORMATS`.
    granularity: what shares one scale: 'block' consecutive inputs of one output, a 'tile' of `block` inputs
      by `width` outputs, one output 'channel', or the whole 'tensor'.
    block: inputs that share a scale, for granularities 'block' and 'tile'; the last block may be shorter.
    asymmetric: an offset, always float32, beside each scale (integer formats only).
    scale: how scales rest: float32, bfloat16, e8m0 (powers of two), or e4m3 (float8 over one float32 a
      matrix); with `double_quantized`, 8-bit codes over groups of 256 scales.
    width: outputs that share a scale, for granularity 'tile'; the last tile may be narrower.
  """

  format: str
  granularity: Granularity = 'channel'
  block: int = 0
  asymmetric: bool = False
  scale: ScaleDtype = 'float32'
  double_quantized: bool = False
  width: int = 1

  @property
  def numbers(self) -> Format:
    return FORMATS[self.format]

  def block_of(self, inputs: int) -> int:
    """How many consecutive inputs share a scale in a matrix of `inputs` rows."""
    return min(self.block, inputs) if self.granularity in ('block', 'tile') else inputs

  def width_of(self, outputs: int) -> int:
    """How many consecutive outputs share a scale in a matrix of `outputs` columns."""
    return outputs if self.granularity == 'tensor' else min(self.width, outputs)

  def grid(self, inputs: int, outputs: int) -> tuple[int, int]:
    """How many scales a matrix has along its inputs and along its outputs."""
    return -(-inputs // self.block_of(inputs)), -(-outputs // self.width_of(outputs))

  def __str__(self) -> str:
    if self.numbers.is_float:
      return self.format
    shared = {'block': f'block={self.block}', 'tile': f'tile={self.block}x{self.width}'}
    options = [shared.get(self.granularity, f'axis={self.granularity}')]
    options += ['asym'] if self.asymmetric else []
    options += ['dq'] if self.double_quantized else []
    options += [f'scale={self.scale}'] if self.scale != 'float32' else []
    return f'{self.format}:{",".join(options)}'


def _whole(text: str) -> int | None:
  """The number of at least 1 that ASCII digits spell, else None."""
  return (int(text) or None) if text.isascii() and text.isdecimal() else None


def parse_scheme(spelling: str) -> Scheme:
  """The scheme of a spelling. Without options, formats of 8 bits are per channel, narrower have blocks of 64.

  Raises:
    UserError: with the grammar.
  """

  def refuse(reason: str) -> UserError:
    return UserError(f'scheme {spelling!r}: {reason}. {GRAMMAR}')

  name, colon, tail = spelling.partition(':')
  if name not in FORMATS:
    raise refuse(f'{name!r} is not a format{nearest(name, FORMATS)}')
  numbers = FORMATS[name]
  if numbers.is_float and colon:
    raise refuse(f'{name} takes no options')
  if colon and not tail:
    raise refuse(f'no option follows the colon; write {name!r} for the defaults')
  fields: dict[str, object] = {}

  def put(field: str, value: object) -> None:
    if field in fields:
      raise refuse(f'{field} is given twice')
    fields[field] = value

  for option in tail.split(',') if tail else ():
    key, _, value = option.partition('=')
    if key == 'block':
      if _whole(value) is None:
        raise refuse(f'block={value} is not a whole number of at least 1')
      put('granularity', 'block')
      fields['block'] = _whole(value)
    elif key == 'tile':
      rows, _, columns = value.partition('x')
      if _whole(rows) is None or _whole(columns) is None:
        raise refuse(f'tile={value} is not INPUTSxOUTPUTS, two whole numbers of at least 1')
      put('granularity', 'tile')
      fields |= {'block': _whole(rows), 'width': _whole(columns)}
    elif key == 'axis' and value in ('channel', 'tensor'):
      put('granularity', value)
    elif key == 'scale' and value in get_args(ScaleDtype):
      put('scale', value)
    elif option == 'asym':
      if not numbers.is_integer:
        raise refuse(f'{name} has a fixed table of levels and takes no offset')
      put('asymmetric', True)
    elif option == 'dq':
      put('double_quantized', True)
    else:
      raise refuse(f'option {option!r} is not known')
  if 'granularity' not in fields and numbers.bits < 8:
    fields |= {'granularity': 'block', 'block': 64}
  if fields.get('double_quantized'):
    if fields.get('granularity') not in ('block', 'tile'):
      raise refuse(
        'dq quantizes the scales of blocks; with one scale a channel or tensor there is nothing to gain'
      )
    if fields.get('asymmetric'):
      raise refuse('dq with asym is not supported: offsets have no zero to quantize around')
    if 'scale' in fields:
      raise refuse('dq already says how scales rest')
  narrow = cast(str, fields.get('scale', 'float32'))
  if narrow in ('e8m0', 'e4m3') and fields.get('asymmetric'):
    raise refuse(f'scale={narrow} with asym is too coarse: the far end would be off by many steps')
  if narrow == 'e8m0' and numbers.unit == 1:
    raise refuse(f'{name} would lose up to half its range to scale=e8m0; use scale=e4m3 or scale=bfloat16')
  return Scheme(format=name, **fields)  # type: ignore[arg-type]


def packed_rows(rows: int, bits: int) -> int:
  """Bytes that `rows` codes of one output take."""
  if bits == 3:
    return packed_rows(rows, 2) + packed_rows(rows, 1)
  return -(-rows * bits // 8)


def pack(codes: jax.Array, bits: int) -> jax.Array:
  """Unsigned codes [..., n, N] in bytes [..., packed_rows(n), N], c = 8 / bits codes a byte.

  Byte j of m holds the codes of rows j, j + m, …: the lowest bits row j. Unpacking therefore yields
  contiguous runs of rows, which is what a kernel's tile wants. A short tail is filled with code 0. Three bits
  are two planes, the lower two bits before the highest.
  """
  if bits == 3:
    return jnp.concatenate([pack(codes & np.uint8(3), 2), pack(codes >> np.uint8(2), 1)], axis=-2)
  per_byte = 8 // bits
  rows = codes.shape[-2]
  m = -(-rows // per_byte)
  pad = [(0, 0)] * (codes.ndim - 2) + [(0, m * per_byte - rows), (0, 0)]
  planes = jnp.pad(codes.astype(jnp.uint8), pad).reshape(*codes.shape[:-2], per_byte, m, codes.shape[-1])
  packed = planes[..., 0, :, :]
  for plane in range(1, per_byte):
    packed = packed | (planes[..., plane, :, :] << np.uint8(plane * bits))
  return packed


def unpack(packed: jax.Array, bits: int, rows: int) -> jax.Array:
  """The uint8 codes [..., rows, N] that `pack` put into bytes."""
  if bits == 3:
    low = packed_rows(rows, 2)
    high = unpack(packed[..., low:, :], 1, rows)
    return unpack(packed[..., :low, :], 2, rows) | (high << np.uint8(2))
  per_byte = 8 // bits
  shifts = (np.arange(per_byte, dtype=np.uint8) * bits).reshape(per_byte, 1, 1)
  planes = (packed[..., None, :, :] >> shifts) & np.uint8(2**bits - 1)
  return planes.reshape(*packed.shape[:-2], per_byte * packed.shape[-2], packed.shape[-1])[..., :rows, :]


def nearest_code(x: jax.Array, levels: tuple[float, ...]) -> jax.Array:
  """uint8 index of the level nearest to each x; a tie goes to the lower level."""
  table = np.asarray(levels, np.float32)
  midpoints = (table[1:] + table[:-1]) / 2
  # Counting the midpoints below x is `searchsorted` without its data-dependent loop.
  code = jnp.zeros(x.shape, jnp.uint8)
  for midpoint in midpoints:
    code = code + (x > midpoint).astype(jnp.uint8)
  return code


def _lookup(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
  return jnp.take(jnp.asarray(levels, jnp.float32), codes.astype(jnp.int32), mode='clip')


def _select_tree(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
  full = levels + levels[-1:] * (2 ** (len(levels) - 1).bit_length() - len(levels))
  choices = [jnp.float32(level) for level in full]
  bit = 0
  while len(choices) > 1:
    is_set = (codes >> np.uint8(bit)) & np.uint8(1) != 0
    choices = [jnp.where(is_set, high, low) for low, high in zip(choices[::2], choices[1::2], strict=True)]
    bit += 1
  return choices[0]


def level_of(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
  """The float32 level of each uint8 code.

  A gather is the fastest way on CPU and the slowest on TPU, where a tree of selects stays in registers;
  both give the same bits. On a GPU XLA would keep each level of the tree as a whole float32 array over a loop
  over layers, 6 GiB for a model of 7B; a gather takes nothing.
  """
  return jax.lax.platform_dependent(
    codes,
    cpu=lambda c: _lookup(c, levels),
    cuda=lambda c: _lookup(c, levels),
    default=lambda c: _select_tree(c, levels),
  )
