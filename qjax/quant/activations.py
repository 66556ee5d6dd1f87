"""The inputs of a product in few bits: how a scheme is spelled, codes and scales, and outliers kept aside.

An activation x [..., K] becomes symmetric integers, x ≈ scale · code, code in -127…127 (int8) or -7…7 (int4):

  int8:axis=token           one scale for each row of x, the largest magnitude of that row
  int8:axis=tensor          one scale for all of x, found anew for each x
  int8:axis=tensor,static   one scale from calibration: what lies beyond saturates
  none                      as it is

Which projection takes which is said by rules, (pattern over its path, spelling), first match wins, for
instance (('.*/down/kernel', 'none'), ('.*', 'int8:axis=token')). A path that no rule matches stays as it is.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax.errors import UserError, nearest
from qjax.quant.formats import FORMATS, Scheme, parse_scheme
from qjax.quant.qtensor import QTensor, dequantize, quantize

# (pattern over a projection's whole path, spelling), first match wins.
Rules = tuple[tuple[str, str], ...]

FORMAT_NAMES = ('int8', 'int4')
GRAMMAR = (
  "an activation scheme is 'none' or FORMAT:axis=token | axis=tensor[,static] with FORMAT one of "
  + ', '.join(FORMAT_NAMES)
  + "; for instance 'int8:axis=token'"
)
# The least range: the inverse of a smaller one might not be a finite float32.
TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class ActivationScheme:
  """How inputs of a product are quantized: in symmetric integers, or not at all.

  Attributes:
    format: 'int8', 'int4' or 'none'.
    axis: what shares a scale, a 'token' (one row over K) or the whole 'tensor'.
    is_static: the range comes from calibration, not from x.
  """

  format: Literal['int8', 'int4', 'none'] = 'none'
  axis: Literal['token', 'tensor'] = 'token'
  is_static: bool = False

  @property
  def is_none(self) -> bool:
    """Whether inputs stay as they are."""
    return self.format == 'none'

  @property
  def largest(self) -> int:
    """The largest code; codes are symmetric about 0."""
    return int(FORMATS[self.format].largest)

  def __str__(self) -> str:
    return 'none' if self.is_none else f'{self.format}:axis={self.axis}{",static" if self.is_static else ""}'


def parse_activations(spelling: str) -> ActivationScheme:
  """The scheme of a spelling.

  Raises:
    UserError: with the grammar.
  """

  def refuse(reason: str) -> UserError:
    return UserError(f'activation scheme {spelling!r}: {reason}. {GRAMMAR}')

  if spelling == 'none':
    return ActivationScheme()
  name, _, tail = spelling.partition(':')
  if name not in FORMAT_NAMES:
    raise refuse(f'{name!r} is not a format of activations{nearest(name, (*FORMAT_NAMES, "none"))}')
  axis, *options = tail.split(',')
  if axis not in ('axis=token', 'axis=tensor'):
    raise refuse(f'{axis!r} does not say what shares a scale; write axis=token or axis=tensor')
  if options not in ([], ['static']):
    raise refuse(f'{",".join(options)!r} is not the option static')
  if options and axis == 'axis=token':
    raise refuse('the range of a token is not known beforehand; write axis=tensor,static or axis=token')
  return ActivationScheme(name, axis.removeprefix('axis='), bool(options))  # type: ignore[arg-type]


def rules(given: Rules) -> Callable[[str], ActivationScheme]:
  """What maps a path, such as 'layers/mlp/down/kernel', to the scheme of the first rule that matches it.

  Raises:
    UserError: something that is no tuple of (regular expression, spelling), or a misspelt one.
  """
  shape = "write a tuple of (pattern, scheme), for instance (('.*', 'int8:axis=token'),)"
  if not isinstance(given, tuple):
    raise UserError(f'activations = {given!r} are no rules; {shape}')
  compiled = []
  for rule in given:
    if not (isinstance(rule, tuple) and len(rule) == 2 and all(isinstance(part, str) for part in rule)):
      raise UserError(f'activations: {rule!r} is no rule; {shape}')
    try:
      compiled.append((re.compile(rule[0]), parse_activations(rule[1])))
    except re.error as error:
      raise UserError(f'activations: {rule[0]!r} is not a regular expression: {error}') from None

  def scheme_of(path: str) -> ActivationScheme:
    return next((scheme for pattern, scheme in compiled if pattern.fullmatch(path)), ActivationScheme())

  return scheme_of


def encode(
  x: jax.Array, scheme: ActivationScheme, high: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Codes int8 [..., K] and their scale float32 [..., 1], or [1, …, 1] for one that is found for a tensor.

  code = round(x · (largest / high)), half to even, and scale = high · (1 / largest), in float32. Zeros give
  zeros. A `high` below 1e-30 counts as 1e-30. What shares a dynamic scale with a NaN or an infinity, or under
  a static one a token with a NaN, is read back as NaN.

  Args:
    x: [..., K] of any floating dtype.
    scheme: what shares a scale.
    high: float32 [], the range of a static scheme.
  """
  if scheme.is_static:
    assert high is not None, 'the caller has refused a static scheme without a range'
    top = high.astype(jnp.float32).reshape((1,) * x.ndim)
  else:
    # Two plain reductions in the dtype of x take half the time of one over magnitudes in float32 on CPU.
    axes = (x.ndim - 1,) if scheme.axis == 'token' else tuple(range(x.ndim))
    above = jnp.max(x, axes, keepdims=True, initial=0)
    below = jnp.min(x, axes, keepdims=True, initial=0)
    top = jnp.maximum(above, -below).astype(jnp.float32)
  top = jnp.maximum(top, TINY)
  # Products with inverses: XLA would divide for each element again, and by a constant in its own way.
  rounded = jnp.round(x.astype(jnp.float32) * (scheme.largest / top))
  codes = jnp.clip(rounded, -scheme.largest, scheme.largest).astype(jnp.int8)
  scale = top * np.float32(1 / scheme.largest)
  if scheme.is_static:
    has_nan = jnp.isnan(jnp.max(x, axis=-1, keepdims=True, initial=-np.inf))
    scale = jnp.where(has_nan, np.float32(np.nan), scale)
  return codes, scale


def fake(x: jax.Array, scheme: ActivationScheme, high: jax.Array | None = None) -> jax.Array:
  """The values float32 [..., K] that the codes of x stand for."""
  codes, scale = encode(x, scheme, high)
  return codes.astype(jnp.float32) * scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decomposed:
  """A weight [..., K, N] whose rows of outlying inputs stay in 16 bits.

  A few inputs carry values far beyond the rest, and one scale a token would leave the rest few levels
  (Dettmers et al. 2022, "LLM.int8()", §3.2). Their columns of x multiply `kept`; the others go through
  `rest`. Which they are is decided once, from calibration, not for each x. Leading axes are those of a
  stack of layers.

  Attributes:
    rest: [..., K, N], with zeros in the rows kept elsewhere.
    rows: int32 [..., n], distinct; K or more fills up a layer that has fewer than n outliers.
    kept: [..., n, N] in a 16-bit float format.
  """

  rest: QTensor
  rows: jax.Array
  kept: QTensor

  @property
  def shape(self) -> tuple[int, ...]:
    return self.rest.shape

  @property
  def ndim(self) -> int:
    return self.rest.ndim

  @property
  def size(self) -> int:
    return self.rest.size

  @property
  def nbytes(self) -> int:
    """Bytes of the arrays that hold it."""
    return self.rest.nbytes + self.kept.nbytes + self.rows.size * self.rows.dtype.itemsize

  @property
  def is_ordinary(self) -> jax.Array:
    """bool [K] of one layer: which inputs `rest` multiplies."""
    ordinary = jnp.ones(self.rest.inputs, jnp.bool_)
    return ordinary.at[self.rows].set(False, mode='drop')

  def outliers(self, x: jax.Array) -> jax.Array:
    """The columns [..., n] of x [..., K] that `kept` multiplies, zeros for rows that only fill up."""
    return jnp.take(x, self.rows, axis=-1, mode='fill', fill_value=0)

  def dequantize(self, dtype: jnp.dtype) -> jax.Array:
    """The weight [K, N] of one layer."""
    return dequantize(self.rest, dtype).at[self.rows].set(dequantize(self.kept, dtype), mode='drop')


def decompose(
  w: jax.Array, rows: jax.Array, scheme: str | Scheme = 'int8:axis=channel', kept: str = 'bfloat16'
) -> Decomposed:
  """The weight [..., K, N] in a scheme, but for the rows int [..., n], which stay in 16 bits.

  Args:
    w: of any floating dtype.
    rows: distinct inputs; K or more is none.
    scheme: of the rest; its scales don't see the rows kept.
    kept: 'bfloat16' or 'float16'.

  Raises:
    UserError: a misspelt scheme, a format `kept` that isn't 16 bits wide, or leading axes that differ.
  """
  scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
  if kept not in FORMATS or not FORMATS[kept].is_float:
    raise UserError(f'outlying rows rest in bfloat16 or float16, not in {kept!r}')
  if rows.shape[:-1] != w.shape[:-2]:
    raise UserError(f'rows {rows.shape} and a weight {w.shape} are not of one stack of layers')
  w, rows = jnp.asarray(w), jnp.asarray(rows, jnp.int32)
  if w.ndim > 2:
    return jax.vmap(lambda w, rows: decompose(w, rows, scheme, kept))(w, rows)
  taken = jnp.take(w, rows, axis=0, mode='fill', fill_value=0)
  rest = quantize(w.at[rows].set(0, mode='drop'), scheme)
  return Decomposed(rest, rows, quantize(taken, kept))
