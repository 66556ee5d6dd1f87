"""Times of kernels on the accelerator that is here, beside XLA and dense products, with their errors.

A model meets each weight once a step, when none of it is in a cache any more, and starts its kernels from
one program. So a program here is a kernel called with as many copies of its arguments as no cache holds.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_cases
from experiments.kernel_cases import ADAPTED, LOW_BIT, RANK, WEIGHTS, Case
from pallas_kernels import dispatch, target
from pallas_kernels.grouped_adapter import reference as grouped_reference
from pallas_kernels.int8_matmul import reference as int8_reference
from pallas_kernels.quantize import reference as quantize_reference
from qjax import kernels, ops
from qjax.errors import UserError
from qjax.progress import Bar
from qjax.quant import activations
from qjax.quant.qtensor import QTensor, dequantize, quantize

Function = Callable[..., Any]
Call = tuple[Function, tuple[Any, ...]]
# Bytes that no cache holds, the most calls of one program, and how many of it are started before one is
# waited for.
COLD, MOST_CALLS, TOGETHER = 2**28, 32, 4
# Rows of a result whose errors are taken.
CHECKED = 64
ACCUM = jnp.dtype('float32')

# What is timed: decoding by one row and by some, training and prefill of a 7B model.
ONE, SOME, MANY, LONG = (1, 4096, 4096), (16, 4096, 11008), (4096, 4096, 4096), (2048, 11008, 4096)
TWO = ('nf4:block=64', 'int8:axis=channel')
TIMED: tuple[tuple[str, tuple[str, ...], tuple[tuple[int, int, int], ...]], ...] = (
  (LOW_BIT[0], WEIGHTS, (ONE, MANY)),
  (LOW_BIT[0], TWO, (SOME, LONG)),
  (LOW_BIT[1], WEIGHTS, (MANY,)),
  (LOW_BIT[1], TWO, (LONG,)),
  (ADAPTED, ('nf4:block=64,dq', 'int8:axis=channel'), (ONE, MANY)),
  (dispatch.INT8, ('nn',), (ONE, MANY, LONG)),
  (dispatch.INT8, ('nt', 'tn'), (MANY,)),
  (dispatch.GROUPED_ADAPTER, ('8:16',), (SOME, MANY)),
  ('quantize_weight', ('nf4:block=64', 'int8:axis=channel'), (MANY,)),
  (dispatch.TOKENS, ('nearest',), (MANY,)),
  ('stochastic_round', ('bfloat16',), (MANY,)),
)


class Contest(NamedTuple):
  """A kernel and what it stands beside, each with its arguments.

  Attributes:
    programs: functions by name: 'kernel', 'xla', which does the same, and, of products, 'dense', that of
      weights in bfloat16.
    error: what is wrong with the kernel's result, as a number.
    limit: the most that may be.
  """

  programs: dict[str, Call]
  error: Callable[[Any], float]
  limit: float


def in_turn(programs: Mapping[str, Callable[[], Any]], repeats: int, together: int = 1) -> dict[str, float]:
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


def bound(function: Function, *arguments: Any) -> Callable[[], Any]:
  """A compiled call; arguments are passed to it, not built into it."""
  compiled = jax.jit(function).lower(*arguments).compile()
  return lambda: compiled(*arguments)


def nbytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def copied(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
  """As many copies of a call's arguments as no cache holds."""
  count = min(MOST_CALLS, math.ceil(COLD / nbytes(arguments)))
  return [jax.tree.map(jnp.copy, arguments) for _ in range(count)]


def cold(function: Function, copies: list[tuple[Any, ...]]) -> Callable[[], Any]:
  """A compiled program that calls a function with each of several arguments."""
  return bound(lambda copies: [function(*each) for each in copies], copies)


def draw(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def drawn(case: Case, arguments: list[Any]) -> list[Any]:
  """Numbers for arguments given by shape and dtype: any codes, normal floats, and the adapter of each row."""
  random = np.random.default_rng(0)

  def one(like: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.floating):
      return jnp.asarray(random.standard_normal(like.shape, np.float32)).astype(like.dtype)
    if like.dtype == jnp.int32:
      return jnp.asarray(case.of_row() if like.shape else 0)
    limits = jnp.iinfo(like.dtype)
    return jnp.asarray(random.integers(max(limits.min, -127), limits.max + 1, like.shape, like.dtype))

  found: list[Any] = jax.tree.map(one, arguments)
  return found


def ceilings(repeats: int) -> dict[str, float]:
  """Bytes a second of a copy of 256 MiB, and operations a second of a large product in bfloat16."""
  x, a = jnp.zeros((2**26,), jnp.float32), draw((8192, 8192), 'bfloat16')
  programs = {
    'copy': bound(lambda x: x + 1, x),
    'product': bound(lambda a: ops.contract(a, a, ((1,), (0,)), ACCUM), a),
  }
  seconds = in_turn(programs, repeats, TOGETHER)
  return {'bytes': 2 * x.nbytes / seconds['copy'], 'flops': 2 * 8192**3 / seconds['product']}


def cases(platform: str, is_quick: bool, names: list[str]) -> list[Case]:
  """What is timed on a 'tpu' or 'gpu'; `is_quick` is the first format and the last shape of each row."""
  found = [
    Case(kernel, each, shape, platform)
    for kernel, formats, shapes in TIMED if not names or kernel in names
    for shape in (shapes[-1:] if is_quick else shapes) for each in (formats[:1] if is_quick else formats)
  ]  # fmt: skip
  return list(dict.fromkeys(found))


def measure_all(repeats: int, is_quick: bool, names: list[str]) -> dict[str, Any]:
  """Rows of `measure`, the ceilings, and why kernels are refused, for what `cases` has.

  Raises:
    UserError: there is no TPU or NVIDIA GPU here.
  """
  platform = dispatch.target_platform()
  if platform not in ('tpu', 'gpu'):
    raise UserError(f'there is no TPU or NVIDIA GPU here, only a {platform}; --cpu times the CPU')
  todo = cases(platform, is_quick, names)
  top = ceilings(repeats)
  rows, refused = [], {}
  with Bar('timing', len(todo)) as bar:
    for index, case in enumerate(todo):
      bar.advance(index, f'{case.kernel} {case.format}')
      if reason := kernel_cases.why_not(case, target.device().device_kind):
        refused[f'{case.kernel} {case.format}'] = reason
      else:
        rows.append(measure(case, repeats, top))
    bar.advance(len(todo))
  return {'device': jax.devices()[0].device_kind, 'ceilings': top, 'rows': rows, 'refused': refused}


def measure(case: Case, repeats: int, top: Mapping[str, float], **how: Any) -> dict[str, Any]:
  """A row: milliseconds of a call of each program, the kernel's error, and its shares of the ceilings.

  Args:
    case: its chip 'tpu' or 'gpu'.
    repeats: timed calls of each program, in turn.
    top: of `ceilings`.
    how: passed on to the kernel.
  """
  found = contest(case, **how)
  programs, calls = {}, {}
  for name, (function, arguments) in found.programs.items():
    copies = copied(arguments)
    programs[name], calls[name] = cold(function, copies), len(copies)
  result = programs['kernel']()[0]
  error = found.error(result)
  seconds = {name: each / calls[name] for name, each in in_turn(programs, repeats, TOGETHER).items()}
  least = nbytes(found.programs['kernel'][1]) + nbytes(result)
  return {
    'kernel': case.kernel, 'format': case.format, 'shape': list(case.shape),
    'milliseconds': {name: 1e3 * each for name, each in seconds.items()},
    'error': error, 'is_right': error <= found.limit,
    'share_of_bandwidth': least / seconds['kernel'] / top['bytes'],
    'share_of_bfloat16_flops': case.operations / seconds['kernel'] / top['flops'],
  }  # fmt: skip


def _rows(count: int) -> np.ndarray:
  """Which rows of so many are checked: some all over the result, so that each adapter has a few."""
  return np.unique(np.linspace(0, count - 1, CHECKED).astype(np.int64))


def _wide(x: jax.Array) -> np.ndarray:
  return np.asarray(x, np.float64)


def _worst(found: jax.Array, exact: np.ndarray) -> float:
  """The largest error of the checked rows over the root mean square of the exact ones."""
  checked = _wide(np.asarray(found)[_rows(len(found))])
  return float(np.max(np.abs(checked - exact)) / np.sqrt(np.mean(exact**2)))


# Two to three times the error, over the root mean square, of weights or of x·A rounded to bfloat16.
ROUNDED = 2.0**-5


def _given(case: Case, **how: Any) -> Call:
  """The call of a kernel, and numbers for its arguments."""
  call, arguments = kernel_cases.program(case, **how)
  return call, tuple(drawn(case, arguments))


def _scaled(x: jax.Array, factor: float) -> jax.Array:
  """x so small that what an adapter adds is as large as what it is added to, and hides no error."""
  return (x.astype(jnp.float32) * np.float32(factor)).astype(x.dtype)


def _low_bit(case: Case, **how: Any) -> Contest:
  """A product with a weight in few bits, or with its transpose, or with an adapter."""
  m, k, n = case.shape
  is_transposed, is_adapted = case.kernel == LOW_BIT[1], case.kernel == ADAPTED
  call, _ = kernel_cases.program(case, **how)
  w = jax.jit(quantize, static_argnums=1)(draw((k, n), 'float32'), case.scheme)
  x = draw((m, n if is_transposed else k), case.dtype, 1)
  weight = tuple(each for each in kernels.arrays_of(w) if each is not None)
  factors: tuple[jax.Array, ...] = ()
  if is_adapted:
    b = _scaled(draw((RANK, n), x.dtype, 3), RANK**-0.5 / kernel_cases.ALPHA)
    factors = draw((RANK, k), x.dtype, 2), b
  axes = ((1,), (1 if is_transposed else 0,))

  def low(x: jax.Array, a: jax.Array) -> jax.Array:
    return ops.contract(x, a, ((1,), (1,)), ACCUM).astype(x.dtype)

  def by_kernel(x: jax.Array, weight: tuple[Any, ...], *factors: jax.Array) -> jax.Array:
    if factors:
      a, b = factors
      return call(x, *weight, low(x, a), b, a)
    return call(x, *weight)

  def plain(x: jax.Array, w: jax.Array | QTensor, *factors: jax.Array) -> jax.Array:
    w = dequantize(w, x.dtype) if isinstance(w, QTensor) else w
    y = ops.contract(x, w, axes, ACCUM)
    if factors:
      a, b = factors
      y = y + kernel_cases.ALPHA * ops.contract(low(x, a), b, ((1,), (0,)), ACCUM)
    return y

  def error(found: jax.Array) -> float:
    wide, given = _wide(dequantize(w)), _wide(x)[_rows(m)]
    exact = given @ (wide.T if is_transposed else wide)
    if factors:
      a, b = map(_wide, factors)
      exact = exact + kernel_cases.ALPHA * (given @ a.T) @ b
    return _worst(found, exact)

  programs: dict[str, Call] = {
    'kernel': (by_kernel, (x, weight, *factors)),
    'xla': (plain, (x, w, *factors)),
    'dense': (plain, (x, dequantize(w, x.dtype), *factors)),
  }
  return Contest(programs, error, ROUNDED)


def _integers(case: Case, **how: Any) -> Contest:
  call, arguments = _given(case, **how)
  first, second = int8_reference.FORMS[case.format]

  def by_xla(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
    return int8_reference.matmul(a, b, *kernel_cases.both_scales(case.format, scales), form=case.format)

  def dense(a: jax.Array, b: jax.Array) -> jax.Array:
    return ops.contract(a, b, ((first,), (second,)), ACCUM)

  def error(found: jax.Array) -> float:
    """Relative, of each number; one that should be zero must be."""
    a, b, *scales = map(_wide, arguments)
    a, rows = (a if first else a.T), _rows(len(found))
    exact = a[rows] @ (b.T if second else b)
    for scale in scales:
      exact = exact * (scale[rows] if scale.shape[1] == 1 else scale)
    difference = np.abs(_wide(np.asarray(found)[rows]) - exact)
    return float(np.max(np.where(difference == 0, 0, difference / np.maximum(np.abs(exact), 2.0**-126))))

  floats = tuple(each.astype(jnp.bfloat16) for each in arguments[:2])
  programs = {'kernel': (call, arguments), 'xla': (by_xla, arguments), 'dense': (dense, floats)}
  # Roundings to float32: of the sum, and of its products with two scales.
  return Contest(programs, error, 3.001 * 2.0**-24)


def _adapters(case: Case, **how: Any) -> Contest:
  call, (y, x, a, b, scale, of_row) = _given(case, **how)
  sizes = case.sizes()
  a, b = _scaled(a, sizes.inputs**-0.5), _scaled(b, sizes.rank**-0.5)
  arguments = y, x, a, b, scale, of_row

  def error(found: jax.Array) -> float:
    rows = _rows(len(found))
    own = np.asarray(of_row)[rows]
    low = np.einsum('mk,mrk->mr', _wide(x)[rows], _wide(a)[own])
    added = np.einsum('mr,mrn->mn', low, _wide(b)[own])
    return _worst(found, _wide(y)[rows] + _wide(scale)[own, None] * added)

  programs = {'kernel': (call, arguments), 'xla': (grouped_reference.add, arguments)}
  return Contest(programs, error, ROUNDED)


def _quantizer(case: Case, **how: Any) -> Contest:
  """What quantizes; codes and scales are compared with XLA's.

  Its error is the share of codes that differ, as one halfway between two may where a division errs in the
  last bit, or the largest relative difference of scales.
  """
  call, arguments = _given(case, **how)

  def by_xla(x: jax.Array) -> Any:
    if case.kernel == dispatch.TOKENS:
      return activations.encode(x, activations.parse_activations('int8:axis=token'))
    w = quantize(x, case.scheme)
    return w.codes, w.scales

  def error(found: Any) -> float:
    (codes, scale), (wanted, wanted_scale) = (map(np.asarray, each) for each in (found, by_xla(*arguments)))
    return max(float(np.mean(codes != wanted)), float(np.max(np.abs(scale / wanted_scale - 1))))

  return Contest({'kernel': (call, arguments), 'xla': (by_xla, arguments)}, error, 1e-4)


def _rounding(case: Case, **how: Any) -> Contest:
  """To bfloat16 at random, as many steps of which lie below each number as above it on average.

  In steps, the error is at most 1, 0 in the mean, and 1/6 in the mean of squares, as that of a number that
  lies anywhere between two is; nearest would have 1/12, and cutting off a mean of -1/2. Its share of the
  limit is what is told: for the means a 100th and a 20th of a step, which thousands of numbers keep.
  """
  call, arguments = _given(case, **how)

  def by_xla(x: jax.Array, seed: jax.Array) -> jax.Array:
    bits = jax.random.bits(jax.random.key(seed), x.shape, jnp.uint32)
    return quantize_reference.stochastic_round(x, bits)

  def error(found: jax.Array) -> float:
    x = _wide(arguments[0])
    steps = 2.0 ** (np.frexp(x)[1] - 8)
    errors = (np.abs(_wide(found)) - np.abs(x)) / steps
    means = 100 * abs(np.mean(errors)), 20 * abs(np.mean(errors**2) - 1 / 6)
    return float(np.max([np.max(np.abs(errors)), *means]))

  return Contest({'kernel': (call, arguments), 'xla': (by_xla, arguments)}, error, 1.0)


_CONTESTS: dict[str, Callable[..., Contest]] = {
  **dict.fromkeys((*LOW_BIT, ADAPTED), _low_bit),
  dispatch.INT8: _integers,
  dispatch.GROUPED_ADAPTER: _adapters,
  **dict.fromkeys(('quantize_weight', dispatch.TOKENS), _quantizer),
  'stochastic_round': _rounding,
}


def contest(case: Case, **how: Any) -> Contest:
  """A kernel and what it stands beside; `how` is passed on to the kernel."""
  return _CONTESTS[case.kernel](case, **how)


def table(found: dict[str, Any]) -> str:
  """One line a row: milliseconds, the ratios to what the kernel stands beside, its shares, and its error."""
  top = found['ceilings']
  lines = [
    f'on {found["device"]}, medians of calls taken in turn, with arguments that no cache holds',
    f'measured ceilings: {top["bytes"] / 1e9:.0f} GB/s, {top["flops"] / 1e12:.1f} TFLOP/s in bfloat16',
    f'{"kernel":<26} {"format":<18} {"M x K x N":<16} {"kernel us":>10} {"xla us":>10} {"dense us":>10} '
    f'{"x xla":>6} {"x dense":>7} {"bytes/s":>7} {"FLOP/s":>6} {"error":>8}',
  ]
  for row in found['rows']:
    times = row['milliseconds']
    dense = times.get('dense')
    shape = 'x'.join(map(str, row['shape']))
    lines.append(
      f'{row["kernel"]:<26} {row["format"]:<18} {shape:<16} {1e3 * times["kernel"]:>10.1f} '
      f'{1e3 * times["xla"]:>10.1f} {1e3 * dense if dense else math.nan:>10.1f} '
      f'{times["kernel"] / times["xla"]:>6.2f} {times["kernel"] / dense if dense else math.nan:>7.2f} '
      f'{row["share_of_bandwidth"]:>7.0%} {row["share_of_bfloat16_flops"]:>6.0%} {row["error"]:>8.1e}'
      f'{"" if row["is_right"] else "  WRONG"}'
    )
  lines += [f'{name} is not timed: {reason}' for name, reason in found['refused'].items()]
  return '\n'.join(lines)
