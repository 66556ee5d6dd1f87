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
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.quantize import reference as quantize_reference
from qjax import kernels, ops
from qjax.progress import Bar
from qjax.quant import activations
from qjax.quant.qtensor import QTensor, dequantize, quantize

Function = Callable[..., Any]
Call = tuple[Function, tuple[Any, ...]]
# Bytes that no cache holds, the most calls of one program, and how many of it are started before one is
# waited for.
COLD, MOST_CALLS, TOGETHER = 2**28, 32, 4
# Rows of a product whose errors are taken.
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
  """Numbers for arguments given by shape and dtype: any codes, floats near 1, and the adapter of each row."""
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
  """Kernel, XLA with the dequantized weight, and dense bfloat16, with errors, for every kernel."""
  todo = cases(dispatch.target_platform(), is_quick, names)
  top = ceilings(repeats)
  rows = []
  with Bar('timing', len(todo)) as bar:
    for index, case in enumerate(todo):
      bar.advance(index, f'{case.kernel} {case.format}')
      if kernel_cases.why_not(case, target.device().device_kind) is None:
        rows.append(measure(case, repeats, top))
    bar.advance(len(todo))
  return {'device': jax.devices()[0].device_kind, 'ceilings': top, 'rows': rows}


def measure(case: Case, repeats: int, top: Mapping[str, float], **how: Any) -> dict[str, Any]:
  """A row: milliseconds of a call of each program, the kernel's error, and its shares of the ceilings.

  Args:
    case: its chip 'tpu' or 'gpu'.
    repeats: timed calls of each program, in turn.
    top: of `ceilings`.
    how: passed on to the kernel.
  """
  contest = _CONTESTS[case.kernel](case, **how)
  programs, calls = {}, {}
  for name, (function, arguments) in contest.programs.items():
    copies = copied(arguments)
    programs[name], calls[name] = cold(function, copies), len(copies)
  result = programs['kernel']()[0]
  error = contest.error(result)
  seconds = {name: each / calls[name] for name, each in in_turn(programs, repeats, TOGETHER).items()}
  least = nbytes(contest.programs['kernel'][1]) + nbytes(result)
  return {
    'kernel': case.kernel, 'format': case.format, 'shape': list(case.shape),
    'milliseconds': {name: 1e3 * each for name, each in seconds.items()},
    'error': error, 'is_right': error <= contest.limit,
    'share_of_bandwidth': least / seconds['kernel'] / top['bytes'],
    'share_of_bfloat16_flops': case.operations / seconds['kernel'] / top['flops'],
  }  # fmt: skip


def _worst(found: jax.Array, exact: np.ndarray) -> float:
  """The largest error over the root mean square of the exact result, which may be the first rows alone."""
  worst = np.max(np.abs(np.asarray(found[: len(exact)], np.float64) - exact))
  return float(worst / np.sqrt(np.mean(exact**2)))


def _wide(x: jax.Array) -> np.ndarray:
  return np.asarray(x, np.float64)


# A few times the error of a weight, or of x·A, that is rounded to bfloat16.
ROUNDED = 2.0**-6


def _low_bit(case: Case, **how: Any) -> Contest:
  """A product with a weight in few bits, or with its transpose, or with an adapter."""
  m, k, n = case.shape
  is_transposed, is_adapted = case.kernel == LOW_BIT[1], case.kernel == ADAPTED
  w = jax.jit(quantize, static_argnums=1)(draw((k, n), 'float32'), case.scheme)
  dense = dequantize(w, jnp.dtype('bfloat16'))
  codes, scale, offset = kernels.arrays_of(w)
  layout, axes = case.layout(), ((1,), (1 if is_transposed else 0,))
  product = kernel_cases.implementation(case).products['matmul_transposed' if is_transposed else 'matmul']
  x = draw((m, n if is_transposed else k), case.dtype, 1)
  factors = (draw((RANK, k), x.dtype, 2), draw((RANK, n), x.dtype, 3)) if is_adapted else ()

  def low(x: jax.Array, a: jax.Array) -> jax.Array:
    return ops.contract(x, a, ((1,), (1,)), ACCUM).astype(x.dtype)

  def by_kernel(x: jax.Array, codes: jax.Array, scale: Any, *factors: jax.Array) -> jax.Array:
    if factors:
      a, b = factors
      return product(x, codes, scale, offset, layout, adapter=LowRank(low(x, a), b, 2.0, a), **how)
    return product(x, codes, scale, offset, layout, **how)

  def plain(x: jax.Array, w: jax.Array | QTensor, *factors: jax.Array) -> jax.Array:
    w = dequantize(w, x.dtype) if isinstance(w, QTensor) else w
    y = ops.contract(x, w, axes, ACCUM)
    return y + 2 * ops.contract(low(x, factors[0]), factors[1], ((1,), (0,)), ACCUM) if factors else y

  def error(found: jax.Array) -> float:
    wide = _wide(dequantize(w))
    exact = _wide(x[:CHECKED]) @ (wide.T if is_transposed else wide)
    if factors:
      a, b = map(_wide, factors)
      exact = exact + 2 * (_wide(x[:CHECKED]) @ a.T) @ b
    return _worst(found, exact)

  programs: dict[str, Call] = {
    'kernel': (by_kernel, (x, codes, scale, *factors)),
    'xla': (plain, (x, w, *factors)),
    'dense': (plain, (x, dense.astype(x.dtype), *factors)),
  }
  return Contest(programs, error, ROUNDED)


def _given(case: Case, **how: Any) -> Call:
  """The call of a kernel, and numbers for its arguments."""
  call, arguments = kernel_cases.program(case, **how)
  return call, tuple(drawn(case, arguments))


def _integers(case: Case, **how: Any) -> Contest:
  call, arguments = _given(case, **how)
  first, second = int8_reference.FORMS[case.format]

  def by_xla(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
    row, column = {'nn': scales, 'nt': (*scales, None), 'tn': (None, *scales)}[case.format]
    return int8_reference.matmul(a, b, row, column, form=case.format)

  def dense(a: jax.Array, b: jax.Array) -> jax.Array:
    return ops.contract(a, b, ((first,), (second,)), ACCUM)

  def error(found: jax.Array) -> float:
    a, b, *scales = map(np.asarray, arguments)
    a, b = (a if first else a.T)[:CHECKED], b.T if second else b
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for scale in scales:
      exact = exact * (scale[:CHECKED] if scale.shape[1] == 1 else scale)
    return _worst(found, exact)

  floats = tuple(each.astype(jnp.bfloat16) for each in arguments[:2])
  programs = {'kernel': (call, arguments), 'xla': (by_xla, arguments), 'dense': (dense, floats)}
  # Three roundings to float32 of the largest of many sums.
  return Contest(programs, error, 2.0**-19)


def _adapters(case: Case, **how: Any) -> Contest:
  call, arguments = _given(case, **how)

  def error(found: jax.Array) -> float:
    y, x, a, b, scale, of_row = (np.asarray(each[:CHECKED], np.float64) for each in arguments)
    own = of_row.astype(np.int64)
    low = np.einsum('mk,mrk->mr', x, a[own])
    return _worst(found, y + scale[own, None] * np.einsum('mr,mrn->mn', low, b[own]))

  programs = {'kernel': (call, arguments), 'xla': (grouped_reference.add, arguments)}
  # The rows with the largest scale err the most, and are few.
  return Contest(programs, error, 2 * ROUNDED)


def _quantizer(case: Case, **how: Any) -> Contest:
  """What quantizes; its error is the share of codes that differ from XLA's, as one between two may."""
  call, arguments = _given(case, **how)

  def by_xla(x: jax.Array) -> Any:
    if case.kernel == dispatch.TOKENS:
      return activations.encode(x, activations.parse_activations('int8:axis=token'))
    w = quantize(x, case.scheme)
    return w.codes, w.scales

  def error(found: Any) -> float:
    codes, _ = by_xla(*arguments)
    return float(jnp.mean(found[0] != codes))

  return Contest({'kernel': (call, arguments), 'xla': (by_xla, arguments)}, error, 1e-4)


def _rounding(case: Case, **how: Any) -> Contest:
  """To bfloat16, at random; its error is relative: 2^7 numbers lie from one power of two to the next."""
  call, arguments = _given(case, **how)

  def by_xla(x: jax.Array, seed: jax.Array) -> jax.Array:
    bits = jax.random.bits(jax.random.key(seed), x.shape, jnp.uint32)
    return quantize_reference.stochastic_round(x, bits)

  def error(found: jax.Array) -> float:
    x = arguments[0]
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - x) / jnp.abs(x)))

  return Contest({'kernel': (call, arguments), 'xla': (by_xla, arguments)}, error, 2.0**-7)


_CONTESTS: dict[str, Callable[..., Contest]] = {
  **dict.fromkeys((*LOW_BIT, ADAPTED), _low_bit),
  dispatch.INT8: _integers,
  dispatch.GROUPED_ADAPTER: _adapters,
  **dict.fromkeys(('quantize_weight', dispatch.TOKENS), _quantizer),
  'stochastic_round': _rounding,
}


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
  return '\n'.join(lines)
