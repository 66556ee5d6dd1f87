"""Number formats of few bits: their levels, how codes are packed into bytes, and how a scheme is spelled.

A scheme says in which format a weight rests and what shares a scale. It has one spelling, the same in
configs and in the API:

  nf4:block=64,dq        NormalFloat4, one scale for 64 inputs of one output, scales themselves in 8 bits
  int4:block=32,asym     levels q·scale + offset instead of q·scale
  int8:axis=channel      one scale for each output
  int8:axis=tensor       one scale for the whole matrix
  nf4:block=64,scale=bfloat16
  bfloat16               the weight itself, rounded
"""

import dataclasses
import statistics
from typing import Literal

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


@dataclasses.dataclass(frozen=True)
class Format:
  """A set of levels that `bits` bits can name.

  A 16-bit float is a format whose codes are its own bit patterns; it needs no scale. Integer formats have no
  table: code q stands for q. A table is ascending and spans [-1, 1], so that its scale is the largest
  magnitude of what it represents.
  """

  name: str
  bits: int
  levels: tuple[float, ...] | None = None

  @property
  def largest(self) -> int:
    """The largest symmetric integer code; the most negative code is never used."""
    return 2 ** (self.bits - 1) - 1

  @property
  def is_float(self) -> bool:
    return self.bits == 16



FORMATS = {
  f.name: f
  for f in (
    Format('bfloat16', 16),
    Format('float16', 16),
    Format('int8', 8),
    Format('int4', 4),
    Format('int3', 3),
    Format('int2', 2),
    Format('nf4', 4, NF4_LEVELS),
    Format('nf3', 3, _normal_float(3)),
    Format('nf2', 2, _normal_float(2)),
    # E2M1 of the OCP microscaling specification, and bitsandbytes' own four-bit float.
    Format('fp4', 4, _mirrored((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))),
    Format('bnb_fp4', 4, _mirrored((0.0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0))),
  )
}

GRAMMAR = (
  'a scheme is FORMAT[:OPTION,…] with FORMAT one of '
  + ', '.join(FORMATS)
  + ' and options block=N | axis=channel | axis=tensor, asym (integers), dq, scale=float32|bfloat16;'
  " for instance 'nf4:block=64,dq' or 'int8:axis=channel'"
)


@dataclasses.dataclass(frozen=True)
class Scheme:
  """A format with its granularity and the storage of its scales.

  Attributes:
    format: a name in `FORMATS`.
    granularity: what shares one scale: 'block' consecutive inputs of one output, one output 'channel', or
      the whole 'tensor'.
    block: inputs that share a scale, for granularity 'block'; the last block may be shorter.
    asymmetric: an offset beside each scale (integer formats only).
    scale: dtype in which scales rest; with `double_quantized`, 8-bit codes over groups of 256 scales.
  """

  format: str
  granularity: Literal['block', 'channel', 'tensor'] = 'channel'
  block: int = 0
  asymmetric: bool = False
  scale: Literal['float32', 'bfloat16'] = 'float32'
  double_quantized: bool = False

  @property
  def numbers(self) -> Format:
    return FORMATS[self.format]

  def block_of(self, inputs: int) -> int:
    """How many consecutive inputs share a scale in a matrix of `inputs` rows."""
    return min(self.block, inputs) if self.granularity == 'block' else inputs

  def __str__(self) -> str:
    if self.numbers.is_float:
      return self.format
    options = [f'block={self.block}' if self.granularity == 'block' else f'axis={self.granularity}']
    options += ['asym'] if self.asymmetric else []
    options += ['dq'] if self.double_quantized else []
    options += [f'scale={self.scale}'] if self.scale != 'float32' else []
    return f'{self.format}:{",".join(options)}'


def parse_scheme(spelling: str) -> Scheme:
  """The scheme of a spelling. Without options: int8 is per channel, 4-bit formats have blocks of 64.

  Raises:
    UserError: with the grammar.
  """

  def refuse(reason: str) -> UserError:
    return UserError(f'scheme {spelling!r}: {reason}. {GRAMMAR}')

  name, colon, tail = spelling.partition(':')
  if colon and not tail:
    raise refuse('no option follows the colon')
  if name not in FORMATS:
    raise refuse(f'{name!r} is not a format{nearest(name, FORMATS)}')
  if FORMATS[name].is_float and tail:
    raise refuse(f'{name} takes no options')
  fields: dict[str, object] = {}

  def put(field: str, value: object) -> None:
    if field in fields:
      raise refuse(f'{field} is given twice')
    fields[field] = value

  for option in tail.split(',') if tail else ():
    key, _, value = option.partition('=')
    if key == 'block':
      if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise refuse(f'block={value} is not a whole number of at least 1')
      put('granularity', 'block')
      fields['block'] = int(value)
    elif key == 'axis' and value in ('channel', 'tensor'):
      put('granularity', value)
    elif key == 'scale' and value in ('float32', 'bfloat16'):
      put('scale', value)
    elif option == 'asym':
      if FORMATS[name].levels is not None:
        raise refuse(f'{name} has a fixed table of levels and takes no offset')
      put('asymmetric', True)
    elif option == 'dq':
      put('double_quantized', True)
    else:
      raise refuse(f'option {option!r} is not known')
  if 'granularity' not in fields and FORMATS[name].bits < 8:
    fields |= {'granularity': 'block', 'block': 64}
  if fields.get('double_quantized') and fields.get('granularity') != 'block':
    raise refuse(
      'dq quantizes the scales of blocks; with one scale a channel or tensor there is nothing to gain'
    )
  if fields.get('double_quantized') and fields.get('asymmetric'):
    raise refuse('dq with asym is not supported: offsets have no zero to quantize around')
  if fields.get('double_quantized') and 'scale' in fields:
    raise refuse('dq already says how scales rest')
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
  choices = [jnp.float32(level) for level in levels]
  choices += choices[-1:] * (-len(choices) % 2 ** (len(choices) - 1).bit_length())
  bit = 0
  while len(choices) > 1:
    is_set = (codes >> np.uint8(bit)) & np.uint8(1) != 0
    choices = [jnp.where(is_set, high, low) for low, high in zip(choices[::2], choices[1::2], strict=True)]
    bit += 1
  return choices[0]


def level_of(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
  """The float32 level of each uint8 code.

  A gather is the fastest way on CPU and the slowest on TPU, where a tree of selects stays in registers;
  both give the same bits.
  """
  return jax.lax.platform_dependent(
    codes,
    cpu=lambda c: _lookup(c, levels),
    default=lambda c: _select_tree(c, levels),
  )
