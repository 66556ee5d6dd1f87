"""Times of kernels and of what they stand beside, in turn, as medians, on the machine that is here."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_cases
from pallas_kernels import dispatch
from pallas_kernels.int8_matmul import reference as int8_reference
from qjax import kernels, ops
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar
from qjax.quant import formats
from qjax.quant.formats import NF4_LEVELS
from qjax.quant.qtensor import dequantize, quantize

Program = Callable[[], Any]
# Calls in a row of which one time is taken on an accelerator, so that starting them is hidden.
TOGETHER = 10
# Rows of a product whose errors are taken, and rows of decoding on CPU.
CHECKED, FEW = 64, (1, 2, 4, 8)
# By kernel that is timed, the largest error over the root mean square of a result: a few times that of a
# weight rounded to bfloat16, and that of three roundings to float32 of the largest of many sums.
LIMITS = {**dict.fromkeys(kernel_cases.LOW_BIT, 2.0**-6), 'int8_matmul': 2.0**-19}
CPU_SHAPES = ((1024, 576, 1536), (1024, 1536, 576), (1024, 1024, 4096))


def in_turn(programs: Mapping[str, Program], repeats: int, together: int = 1) -> dict[str, float]:
  """Median seconds of a call of each, taken one after the other so that a busy machine slows all alike."""
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  for turn in range(repeats + 1):
    for name, program in programs.items():
      start = time.perf_counter()
      for _ in range(together):
        result = program()
      jax.block_until_ready(result)
      if turn:  # the first warms up
        seconds[name].append((time.perf_counter() - start) / together)
  return {name: statistics.median(each) for name, each in seconds.items()}


def bound(function: Callable[..., Any], *arguments: Any) -> Program:
  """A compiled call; arguments are passed to it, not built into it."""
  compiled = jax.jit(function).lower(*arguments).compile()
  return lambda: compiled(*arguments)


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def ceilings(repeats: int) -> dict[str, float]:
  """Bytes a second of a copy of 256 MiB, and operations a second of a large product in bfloat16."""
  x, a = jnp.zeros((2**26,), jnp.float32), draw((8192, 8192), 'bfloat16')
  programs = {
    'copy': bound(lambda x: x + 1, x),
    'product': bound(lambda a: ops.contract(a, a, ((1,), (0,)), jnp.dtype('float32')), a),
  }
  seconds = in_turn(programs, repeats, TOGETHER)
  return {'bytes': 2 * x.nbytes / seconds['copy'], 'flops': 2 * 8192**3 / seconds['product']}


def on_accelerator(repeats: int, is_quick: bool, names: list[str]) -> dict[str, Any]:
  """Kernel, XLA with the dequantized weight, and dense bfloat16, with errors, for every weight format.

  Args:
    repeats: timed calls of each program.
    is_quick: one shape a kernel.
    names: of kernels in `LIMITS`; all of them if empty.
  """
  platform = dispatch.target_platform()
  top = ceilings(repeats)
  shapes = kernel_cases.SHAPES[:1] if is_quick else kernel_cases.SHAPES[:4]
  todo = [
    (shape, kernel, each) for shape in shapes for kernel in LIMITS if not names or kernel in names
    for each in (('nn',) if kernel == 'int8_matmul' else kernel_cases.WEIGHTS)
  ]  # fmt: skip
  rows = []
  with Bar('timing', len(todo)) as bar:
    for index, (shape, kernel, each) in enumerate(todo):
      bar.advance(index, f'{kernel} {each}')
      found = _integer(shape, platform) if kernel == 'int8_matmul' else _low_bit(shape, kernel, each)
      programs, error, nbytes = found
      seconds = in_turn(programs, repeats, TOGETHER)
      operations = 2 * int(np.prod(shape))
      rows.append(
        {
          'kernel': kernel, 'format': each, 'shape': list(shape), 'milliseconds': _ms(seconds),
          'error': error, 'is_right': error <= LIMITS[kernel],
          'share_of_bandwidth': nbytes / seconds['kernel'] / top['bytes'],
          'share_of_bfloat16_flops': operations / seconds['kernel'] / top['flops'],
        }
      )  # fmt: skip
    bar.advance(len(todo))
  return {'device': jax.devices()[0].device_kind, 'ceilings': top, 'rows': rows}


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
  return {name: 1e3 * each for name, each in seconds.items()}


def _worst(found: jax.Array, exact: np.ndarray) -> float:
  """The largest error over the root mean square of the exact result."""
  worst = np.max(np.abs(np.asarray(found, np.float64) - exact))
  return float(worst / np.sqrt(np.mean(exact**2)))


def _low_bit(shape: tuple[int, int, int], kernel: str, scheme: str) -> tuple[dict[str, Program], float, int]:
  """Programs, the kernel's error and the least bytes of one product with a weight in few bits."""
  m, k, n = shape
  is_transposed = kernel != kernel_cases.LOW_BIT[0]
  w = jax.jit(lambda w: quantize(w, scheme))(draw((k, n), 'float32'))
  x, dense = draw((m, n if is_transposed else k), 'bfloat16', 1), dequantize(w, jnp.dtype('bfloat16'))
  axes = ((1,), (1 if is_transposed else 0,))
  layout, choice = kernels.layout_of(w), kernels.explain(w, 'bfloat16', 'pallas')
  assert not isinstance(choice, str), choice
  product = choice.product(kernel.removeprefix('low_bit_'))
  accum, arrays = jnp.dtype('float32'), kernels.arrays_of(w)[:2]
  programs = {
    'kernel': bound(lambda x, codes, scale: product(x, codes, scale, None, layout), x, *arrays),
    'xla': bound(lambda x, w: ops.contract(x, dequantize(w, x.dtype), axes, accum), x, w),
    'dense': bound(lambda x, w: ops.contract(x, w, axes, accum), x, dense),
  }
  wide = np.asarray(dequantize(w), np.float64)
  exact = np.asarray(x[:CHECKED], np.float64) @ (wide.T if is_transposed else wide)
  result = programs['kernel']()
  return programs, _worst(result[:CHECKED], exact), x.nbytes + w.nbytes + result.nbytes


def _integer(shape: tuple[int, int, int], platform: str) -> tuple[dict[str, Program], float, int]:
  """The same of a product of integers; XLA's is the reference, and the error is of the sums."""
  m, k, n = shape
  matmul = (kernel_cases.int8_tpu if platform == 'tpu' else kernel_cases.int8_gpu).matmul
  draw = np.random.default_rng(0).integers
  a, b = (jnp.asarray(draw(-127, 128, size, np.int8)) for size in ((m, k), (k, n)))
  row, column = jnp.full((m, 1), 1e-2), jnp.full((1, n), 1e-2)
  programs = {
    'kernel': bound(matmul, a, b, row, column),
    'xla': bound(int8_reference.matmul, a, b, row, column),
    'dense': bound(
      lambda a, b: ops.contract(a, b, ((1,), (0,)), jnp.dtype('float32')),
      a.astype(jnp.bfloat16), b.astype(jnp.bfloat16),
    ),
  }  # fmt: skip
  exact = np.asarray(a[:CHECKED], np.float64) @ np.asarray(b, np.float64) * 1e-4
  result = programs['kernel']()
  return programs, _worst(result[:CHECKED], exact), a.nbytes + b.nbytes + result.nbytes


def on_cpu(repeats: int, is_quick: bool) -> dict[str, Any]:
  """Products with nf4 beside dense ones, decoding in int8 beside float32, and the ways to decode nf4."""
  shapes = CPU_SHAPES[:1] if is_quick else CPU_SHAPES
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
    how = Numerics(policy(compute=dtype), 'xla')
    x, dense = draw((m, w.shape[0]), dtype, 1), w.astype(dtype)
    programs[f'nf4 {dtype}'] = bound(lambda x, q, how=how: ops.matmul(x, q, how.policy), x, q)
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


def table(found: dict[str, Any]) -> str:
  """One line a row: milliseconds, and the ratio to the last program that it stands beside."""
  lines = [f'on {found["device"]}, medians of calls taken in turn']
  if top := found.get('ceilings'):
    bandwidth, flops = top['bytes'] / 1e9, top['flops'] / 1e12
    lines.append(f'measured ceilings: {bandwidth:.0f} GB/s, {flops:.1f} TFLOP/s in bfloat16')
  for row in found['rows']:
    name = row.get('what') or f'{row["kernel"]} {row["format"]}'
    parts = [f'{key} {value:.3f} ms' for key, value in row['milliseconds'].items()]
    times = row['milliseconds']
    if 'kernel' in times:
      parts += [f'{times["kernel"] / times[name]:.2f} x {name}' for name in ('xla', 'dense')]
      parts.append(
        f'{row["share_of_bandwidth"]:.0%} of bandwidth, {row["share_of_bfloat16_flops"]:.0%} of FLOP/s, '
        f'error {row["error"]:.1e}{"" if row["is_right"] else ", WRONG"}'
      )
    parts += [
      f'{times[f"nf4 {dtype}"] / times[f"dense {dtype}"]:.2f} x in {dtype}'
      for dtype in ('bfloat16', 'float32') if f'nf4 {dtype}' in times
    ]  # fmt: skip
    if 'int8' in times:
      parts.append(f'{times["int8"] / times["dense float32"]:.2f} x')
    if 'errors' in row:
      fastest = min(times, key=times.__getitem__)
      parts.append(f'fastest: {fastest}; error of arithmetic {row["errors"]["arithmetic"]:.0e}')
    lines.append(f'{name:<30} {"x".join(map(str, row["shape"])):<16} ' + '; '.join(parts))
  return '\n'.join(lines)
