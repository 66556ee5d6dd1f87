"""Times of what a CPU makes of weights in few bits: no kernel of ours, but XLA's products and decoding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_times import bound, draw, in_turn
from qjax import ops
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar
from qjax.quant import formats
from qjax.quant.formats import NF4_LEVELS
from qjax.quant.qtensor import quantize

SHAPES = ((1024, 576, 1536), (1024, 1536, 576), (1024, 1024, 4096))
# Rows of decoding.
FEW = (1, 2, 4, 8)
Program = Callable[[], Any]


def measure(repeats: int, is_quick: bool) -> dict[str, Any]:
  """Products with nf4 beside dense ones, decoding in int8 beside float32, and the ways to decode nf4."""
  shapes = SHAPES[:1] if is_quick else SHAPES
  few = FEW[::3] if is_quick else FEW
  rows = []
  with Bar('timing', len(shapes) * (2 + len(few))) as bar:
    for m, k, n in shapes:
      w = draw((k, n), 'float32')
      rows.append({'what': 'nf4 product', 'shape': [m, k, n], 'milliseconds': _ms(_products(m, w, repeats))})
      bar.advance(len(rows))
      for count in few:
        seconds = in_turn(_decoding(count, w), repeats)
        rows.append({'what': 'few rows', 'shape': [count, k, n], 'milliseconds': _ms(seconds)})
        bar.advance(len(rows))
      programs, errors = _ways(w)
      seconds = in_turn(programs, repeats)
      rows.append(
        {'what': 'nf4 decoding', 'shape': [k, n], 'milliseconds': _ms(seconds), 'errors': errors}
      )
      bar.advance(len(rows))
  return {'device': 'CPU', 'rows': rows}


def _products(m: int, w: jax.Array, repeats: int) -> dict[str, float]:
  """Seconds of x · w with w at rest in nf4 and dense, in bfloat16 and in float32."""
  q, accum = quantize(w, 'nf4:block=64'), jnp.dtype('float32')
  programs = {}
  for dtype in ('bfloat16', 'float32'):
    how = policy(compute=dtype)
    x, dense = draw((m, w.shape[0]), dtype, 1), w.astype(dtype)
    programs[f'nf4 {dtype}'] = bound(lambda x, q, how=how: ops.matmul(x, q, how), x, q)
    programs[f'dense {dtype}'] = bound(lambda x, w: ops.contract(x, w, ((1,), (0,)), accum), x, dense)
  return in_turn(programs, repeats)


def _decoding(rows: int, w: jax.Array) -> dict[str, Program]:
  """A few rows times a weight in int8, the rows quantized on the way, and times the dense weight."""
  x, q = draw((rows, w.shape[0]), 'float32', 1), quantize(w, 'int8:axis=channel')
  how = Numerics(policy(), activations=(('.*', 'int8:axis=token'),))
  return {
    'int8': bound(lambda x, q: ops.dot(x, q, how, path='kernel'), x, q),
    'dense float32': bound(lambda x, w: ops.dot(x, w, Numerics(policy()), path='kernel'), x, w),
  }


def _arithmetic(codes: jax.Array) -> jax.Array:
  """The polynomial through the 16 levels, which is not exact in float32."""
  places = (np.arange(16) - 7.5) / 7.5
  powers = np.polynomial.chebyshev.chebfit(places, np.asarray(NF4_LEVELS), 15)
  t = (codes.astype(jnp.float32) - 7.5) / 7.5
  last, before = jnp.zeros_like(t), jnp.zeros_like(t)
  for power in powers[:0:-1]:
    last, before = np.float32(power) + 2 * t * last - before, last
  return np.float32(powers[0]) + t * last - before


def _ways(w: jax.Array) -> tuple[dict[str, Program], dict[str, float]]:
  """Programs that decode the bytes of an nf4 weight to bfloat16, scales aside, and their largest errors."""
  q = quantize(w, 'nf4:block=64')
  k, n = w.shape
  pairs = jnp.asarray([[NF4_LEVELS[byte & 15], NF4_LEVELS[byte >> 4]] for byte in range(256)], jnp.float32)

  def by_code(way: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda packed: way(formats.unpack(packed.reshape(-1, 32, n), 4, 64)).reshape(k, n)

  def by_byte(packed: jax.Array) -> jax.Array:
    both = jnp.take(pairs, packed.reshape(-1, 32, n).astype(jnp.int32), axis=0, mode='clip')
    return both.transpose(0, 3, 1, 2).reshape(k, n)

  table = jnp.asarray(NF4_LEVELS, jnp.float32)
  ways = {
    'lookup': by_code(lambda codes: jnp.take(table, codes.astype(jnp.int32), mode='clip')),
    'select tree': by_code(lambda codes: formats._select_tree(codes, NF4_LEVELS)),
    'arithmetic': by_code(_arithmetic),
    'byte table': by_byte,
  }
  exact = np.asarray(NF4_LEVELS)[np.asarray(q.unpacked())]
  errors = {name: float(np.max(np.abs(np.asarray(way(q.codes)) - exact))) for name, way in ways.items()}
  programs = {
    name: bound(lambda packed, way=way: way(packed).astype(jnp.bfloat16), q.codes)
    for name, way in ways.items()
  }
  return programs, errors


def _ms(seconds: dict[str, float]) -> dict[str, float]:
  return {name: 1e3 * each for name, each in seconds.items()}


def table(found: dict[str, Any]) -> str:
  """One line a row: milliseconds, and what stands beside what."""
  lines = [f'on {found["device"]}, medians of calls taken in turn']
  for row in found['rows']:
    times = row['milliseconds']
    parts = [f'{key} {value:.3f} ms' for key, value in times.items()]
    parts += [
      f'{times[f"nf4 {dtype}"] / times[f"dense {dtype}"]:.2f} x in {dtype}'
      for dtype in ('bfloat16', 'float32') if f'nf4 {dtype}' in times
    ]  # fmt: skip
    if 'int8' in times:
      parts.append(f'{times["int8"] / times["dense float32"]:.2f} x')
    if 'errors' in row:
      fastest = min(times, key=times.__getitem__)
      parts.append(f'fastest: {fastest}; error of arithmetic {row["errors"]["arithmetic"]:.0e}')
    lines.append(f'{row["what"]:<14} {"x".join(map(str, row["shape"])):<16} ' + '; '.join(parts))
  return '\n'.join(lines)
