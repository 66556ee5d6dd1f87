"""The one matrix product: cast, decode the weight, accumulate, add the adapter, and its gradient rule.

Why a gradient rule of our own. Plain autodiff through `x @ dequantize(w)` saves the dequantized weight of
every layer for the backward pass, and a QLoRA step then needs more memory than a LoRA step. Here the
residual is the packed weight, decoded again when the gradient needs it. A frozen weight gets no gradient,
and then x isn't saved either. The gradient of a float32 weight is accumulated and returned in float32, not
rounded through the compute dtype on the way.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from qjax.adapters import Adapter
from qjax.errors import UserError
from qjax.precision import Policy
from qjax.quant.qtensor import QTensor, dequantize

Weight = jax.Array | QTensor

# Implementations of the product by name, with what each is. 'auto' takes the first that serves.
IMPLEMENTATIONS = {'xla': 'dequantize, then dot_general, compiled by XLA'}


@dataclasses.dataclass(frozen=True)
class Numerics:
  """In which numbers products compute, and by which implementation.

  Attributes:
    policy: dtypes.
    implementation: 'auto', or a name in `IMPLEMENTATIONS`, which then runs or raises.
  """

  policy: Policy
  implementation: str = 'auto'

  def __post_init__(self) -> None:
    if self.implementation not in ('auto', *IMPLEMENTATIONS):
      raise UserError(
        f'kernels = {self.implementation!r} is not available; there are auto, {", ".join(IMPLEMENTATIONS)}'
      )

  @property
  def used(self) -> str:
    """The implementation that runs."""
    return 'xla' if self.implementation == 'auto' else self.implementation


def contract(
  a: jax.Array,
  b: jax.Array,
  axes: tuple[tuple[int, ...], tuple[int, ...]],
  accum: jnp.dtype,
  batch: tuple[int, ...] = (),
) -> jax.Array:
  """a · b over `axes` with results in `accum`, for each index of the shared axes `batch`.

  XLA's CPU backend multiplies float16 operands in scalar code; products of two float16 numbers are exact in
  float32, so widening them first gives the tensor-core result at many times the speed. bfloat16 operands
  with a float32 result reach its matrix unit, bfloat16 results do not.

  float32 operands are multiplied as float32: TPUs and recent GPUs would round them to fewer bits by default.
  """
  contraction = (axes, (batch, batch))
  if a.dtype == jnp.float16 and accum == jnp.float32:
    return jax.lax.platform_dependent(
      a,
      b,
      cpu=lambda a, b: jax.lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), contraction),
      default=lambda a, b: jax.lax.dot_general(a, b, contraction, preferred_element_type=accum),
    )
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(a, b, contraction, precision=precision, preferred_element_type=accum)


def _turned(x: jax.Array) -> jax.Array:
  """bfloat16 [..., M, K] as [..., K, M] through a product with the identity.

  Every sum has one term, so no bit changes, and XLA does not fold it into the product that follows, as it
  does with a plain transpose.
  """
  last, batch = x.ndim - 1, tuple(range(x.ndim - 2))
  identity = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), (*x.shape[:-2], x.shape[-1], x.shape[-1]))
  return contract(identity, x, ((last,), (last,)), jnp.dtype('float32'), batch).astype(x.dtype)


def transpose(x: jax.Array) -> jax.Array:
  """x with its last two axes exchanged, in the way that a neighbouring product runs fastest."""
  if x.dtype != jnp.bfloat16:
    return jnp.swapaxes(x, -1, -2)
  return jax.lax.platform_dependent(x, cpu=_turned, default=lambda x: jnp.swapaxes(x, -1, -2))


def rows_product(a: jax.Array, b: jax.Array, accum: jnp.dtype) -> jax.Array:
  """aᵀ·b [..., K, N] for a [..., M, K] and b [..., M, N] of one dtype: the gradient of a weight.

  A left operand that contracts over its rows misses the CPU's bfloat16 units; turning it first is three times
  as fast.
  """
  batch = tuple(range(a.ndim - 2))
  rows = a.ndim - 2

  def direct(a: jax.Array, b: jax.Array) -> jax.Array:
    return contract(a, b, ((rows,), (rows,)), accum, batch)

  def transposed_first(a: jax.Array, b: jax.Array) -> jax.Array:
    # A wide `a` would pay more for the identity than it gains.
    if a.dtype != jnp.bfloat16 or a.shape[-1] > 3 * b.shape[-1]:
      return direct(a, b)
    return contract(_turned(a), b, ((rows + 1,), (rows,)), accum, batch)

  return jax.lax.platform_dependent(a, b, cpu=transposed_first, default=direct)


def _operand(w: Weight, dtype: jnp.dtype) -> jax.Array:
  return dequantize(w, dtype) if isinstance(w, QTensor) else w.astype(dtype)


def _product(x: jax.Array, w: Weight, policy: Policy, transposed: bool) -> jax.Array:
  w_axis = 1 if transposed else 0
  x, w = x.astype(policy.compute), _operand(w, policy.compute)
  return contract(x, w, ((x.ndim - 1,), (w_axis,)), policy.accum)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x: jax.Array, w: Weight, policy: Policy, transposed: bool) -> jax.Array:
  return _product(x, w, policy, transposed)


def _matmul_fwd(x: Any, w: Any, policy: Policy, transposed: bool) -> tuple[jax.Array, Any]:
  weight = jax.tree.map(lambda p: p.value, w, is_leaf=lambda p: hasattr(p, 'perturbed'))
  is_trained = not isinstance(weight, QTensor) and w.perturbed
  like = jax.ShapeDtypeStruct(x.value.shape, x.value.dtype)
  residual = (x.value if is_trained else None, weight, _Static((is_trained, x.perturbed, like)))
  # Not `_matmul`: a remat policy that keeps products has to see one.
  return _product(x.value, weight, policy, transposed), residual


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """Facts known while tracing, carried through residuals."""

  facts: tuple[bool, bool, jax.ShapeDtypeStruct]


def _matmul_bwd(policy: Policy, transposed: bool, residual: Any, g: Any) -> tuple[Any, Any]:
  x, w, static = residual
  is_trained, is_needed, like = static.facts
  if isinstance(g, SymbolicZero):
    return None, None
  g = g.astype(policy.compute)
  dx = dw = None
  if is_needed:
    w_axis = 0 if transposed else 1
    dx = contract(g, _operand(w, policy.compute), ((g.ndim - 1,), (w_axis,)), policy.accum).astype(like.dtype)
  if is_trained:
    x_rows = x.reshape(-1, x.shape[-1]).astype(policy.compute)
    g_rows = g.reshape(-1, g.shape[-1])
    left, right = (g_rows, x_rows) if transposed else (x_rows, g_rows)
    dw = rows_product(left, right, policy.accum).astype(w.dtype)
  return dx, dw


_matmul.defvjp(_matmul_fwd, _matmul_bwd, symbolic_zeros=True)


def matmul(x: jax.Array, w: Weight, policy: Policy, transposed: bool = False) -> jax.Array:
  """x [..., K] times w [K, N] (or [N, K] if `transposed`) as [..., N] in `policy.accum`.

  `dot` is the door for layers; this is for a caller that goes on in the accumulator's dtype.
  """
  if transposed and isinstance(w, QTensor) and not w.scheme.numbers.is_float:
    # Blocks lie along the inputs of a projection.
    raise NotImplementedError(
      'a transposed product with a quantized weight is not implemented; keep it plain'
    )
  inputs = w.shape[-1] if transposed else w.shape[-2]
  if w.ndim != 2 or x.shape[-1] != inputs:
    raise ValueError(f'x {x.shape} and w {w.shape}{" transposed" if transposed else ""} do not contract')
  return _matmul(x, w, policy, transposed)


def slice_of(w: Weight, start: jax.Array, size: int, axis: int) -> Weight:
  """`size` rows (axis 0) or columns (axis 1) of a plain or 16-bit w [K, N] from a traced `start`.

  Plain half precision is sliced as integers: XLA's CPU backend would widen the whole of it before a loop.
  """
  if isinstance(w, QTensor):
    if not w.scheme.numbers.is_float:
      raise NotImplementedError('only weights in 16-bit floats are sliced; blocks may straddle a slice')
    codes = jax.lax.dynamic_slice_in_dim(w.codes, start, size, axis)
    return dataclasses.replace(w, codes=codes, inputs=codes.shape[0])
  if w.dtype.itemsize != 2:
    return jax.lax.dynamic_slice_in_dim(w, start, size, axis)
  bits = jax.lax.bitcast_convert_type(w, jnp.uint16)
  return jax.lax.bitcast_convert_type(jax.lax.dynamic_slice_in_dim(bits, start, size, axis), w.dtype)


@jax.custom_vjp
def take_rows(w: Weight, rows: jax.Array) -> jax.Array:
  """The rows of a plain or 16-bit w [V, D] at int `rows` [...] as [..., D], in the dtype of w.

  A gradient is summed in float32, however often a row is taken. Half precision is gathered as integers, for
  the reason given at `slice_of`.
  """
  if isinstance(w, QTensor):
    return dequantize(dataclasses.replace(w, codes=w.codes[rows]), jnp.dtype(w.scheme.numbers.name))
  if w.dtype.itemsize != 2:
    return w[rows]
  return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(w, jnp.uint16)[rows], w.dtype)


def _take_rows_fwd(w: Weight, rows: jax.Array) -> tuple[jax.Array, Any]:
  return take_rows(w, rows), (w, rows)


def _take_rows_bwd(residual: Any, g: jax.Array) -> tuple[Any, None]:
  w, rows = residual
  if isinstance(w, QTensor):
    return None, None
  return jnp.zeros(w.shape, jnp.float32).at[rows].add(g.astype(jnp.float32)).astype(w.dtype), None


take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _low_rank(x: jax.Array, a: jax.Array, b: jax.Array, scale: float, policy: Policy) -> jax.Array:
  """s·(x·A)·B [..., N] in `policy.accum`, for Aᵀ [r, K] and B [r, N]."""
  compute, accum, last = policy.compute, policy.accum, x.ndim - 1
  low = contract(x.astype(compute), a.astype(compute), ((last,), (1,)), accum).astype(compute)
  return jnp.asarray(scale, accum) * contract(low, b.astype(compute), ((last,), (0,)), accum)


def _low_rank_fwd(x: Any, a: Any, b: Any, scale: float, policy: Policy) -> tuple[jax.Array, Any]:
  return _low_rank(x, a, b, scale, policy), (x, a, b)


def _low_rank_bwd(
  scale: float, policy: Policy, residual: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of x, A and B.

  The [r, rows] products that the factors' gradients need are formed in that layout from the start: a product
  that contracts over the leading axis of its left operand misses the CPU's bfloat16 units.
  """
  x, a, b = residual
  compute, accum = policy.compute, policy.accum
  s = jnp.asarray(scale, accum)
  x_rows, g_rows = x.reshape(-1, x.shape[-1]).astype(compute), g.reshape(-1, g.shape[-1]).astype(compute)
  a_low, b_low = a.astype(compute), b.astype(compute)
  d_low = (s * contract(g_rows, b_low, ((1,), (1,)), accum)).astype(compute)
  dx = contract(d_low, a_low, ((1,), (0,)), accum).astype(x.dtype).reshape(x.shape)
  d_low_r = (s * contract(b_low, g_rows, ((1,), (1,)), accum)).astype(compute)
  da = contract(d_low_r, x_rows, ((1,), (0,)), accum).astype(a.dtype)
  low_r = (s * contract(a_low, x_rows, ((1,), (1,)), accum)).astype(compute)
  db = contract(low_r, g_rows, ((1,), (0,)), accum).astype(b.dtype)
  return dx, da, db


_low_rank.defvjp(_low_rank_fwd, _low_rank_bwd)


def dot(
  x: jax.Array,
  w: Weight,
  numerics: Numerics,
  adapter: Adapter | None = None,
  bias: jax.Array | None = None,
  dropout_key: jax.Array | None = None,
) -> jax.Array:
  """y = x·w + s·(x·A)·B + bias in `policy.compute`.

  Args:
    x: [..., K].
    w: [K, N], plain or quantized.
    numerics: dtypes and implementation.
    adapter: A, B and their scale.
    bias: [N].
    dropout_key: drops inputs of A with the adapter's probability; None (evaluation) drops nothing.
  """
  policy = numerics.policy
  y = matmul(x, w, policy)
  if adapter is not None:
    z = x
    if dropout_key is not None and adapter.dropout > 0:
      keep = jax.random.bernoulli(dropout_key, 1 - adapter.dropout, x.shape)
      z = jnp.where(keep, x / jnp.asarray(1 - adapter.dropout, x.dtype), jnp.zeros((), x.dtype))
    y = y + _low_rank(z, adapter.a, adapter.b, adapter.scale, policy)
  if bias is not None:
    y = y + bias.astype(policy.accum)
  return y.astype(policy.compute)
