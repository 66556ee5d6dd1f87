"""The one matrix product: cast, decode the weight, accumulate, add the adapter, and its gradient rule.

Why a gradient rule of our own. Plain autodiff through `x @ dequantize(w)` saves the dequantized weight of
every layer for the backward pass, and a QLoRA step then needs more memory than a LoRA step. Here the
residual is the packed weight, decoded again when the gradient needs it. A frozen weight gets no gradient,
and then x isn't saved either. The gradient of a float32 weight is accumulated and returned in float32, not
rounded through the compute dtype on the way.

Inputs may be quantized, too (`Numerics.activations`). With an integer weight the product is then one of
integers, int8 · int8 summed in int32 and scaled once; with any other weight, or where that is slower, the
input is rounded to its levels and multiplied as a float. Both compute the same numbers but for the roundings
of floats. What the gradient makes of rounding is said in `qjax.quant.fake`.

A weight may be trained through its quantizer (`Numerics.weights`). The product then is that of the converted
weight, bit for bit; its gradient reaches the weight, its ranges and an adapter inside the quantizer. With
integer weights the backward products may be integers too (`Numerics.backward`): a scale that lies along the
axis of a sum is moved onto the gradient first, which is then rounded, at random so that the mean is right
(Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models", has the
products of the input's gradient in int8; Xi et al. 2024, "Jetfire", both).
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import dispatch
from pallas_kernels.low_bit_matmul.reference import LowRank
from qjax import integers, kernels, trees
from qjax.adapters import Adapter, GroupedAdapter
from qjax.errors import UserError, nearest
from qjax.integers import Backward, Where
from qjax.precision import Policy
from qjax.quant import activations, fake
from qjax.quant.activations import ActivationScheme, Decomposed, Rules
from qjax.quant.fake import FakeQuantized, Trained
from qjax.quant.formats import Scheme, parse_scheme
from qjax.quant.qtensor import QTensor, dequantize, is_at_rest, per_column
from qjax.remat import LOW_RANK, named

Weight = jax.Array | QTensor
Projected = Weight | Decomposed | Trained  # what a projection may hold

@dataclasses.dataclass(frozen=True)
class Numerics:
  """In which numbers products compute, and by which kernels.

  Attributes:
    policy: dtypes.
    kernels: 'auto', or a name in `dispatch.KERNELS`, which then runs or raises. It says how products with a
      weight in few bits are computed, and the default goes by the platform that is compiled for.
    activations: (pattern over a projection's path, scheme of its inputs), first match wins; see
      `qjax.quant.activations`.
    integer: a name in `integers.INTEGER`.
    weights: (pattern over a projection's path, scheme or 'none') for weights that are trained through their
      quantizer, first match wins. An adapter of such a weight is inside the quantizer.
    weight_gradient: how their gradient passes, and whether ranges learn; a name in `fake.GRADIENTS`.
    weight_rounding: how such weights are rounded in training, 'nearest' or 'stochastic' (integers alone).
    activation_gradient: the same as `weight_gradient` for static activation schemes.
    backward: in which numbers gradients are multiplied.
  """

  policy: Policy
  kernels: str = 'auto'
  activations: Rules = ()
  integer: str = 'auto'
  weights: Rules = ()
  weight_gradient: str = 'ste'
  weight_rounding: str = 'nearest'
  activation_gradient: str = 'ste'
  backward: Backward = dataclasses.field(default_factory=Backward)

  def __post_init__(self) -> None:
    if self.kernels not in ('auto', *dispatch.KERNELS):
      raise UserError(
        f'kernels = {self.kernels!r} is not available{nearest(self.kernels, ("auto", *dispatch.KERNELS))}'
      )
    if self.integer not in integers.INTEGER:
      raise UserError(f'integer = {self.integer!r} is not known{nearest(self.integer, integers.INTEGER)}')
    activations.rules(self.activations)
    gradients, roundings = fake.GRADIENTS, integers.ROUNDINGS
    for name, known in (
      ('weight_gradient', gradients), ('activation_gradient', gradients), ('weight_rounding', roundings)
    ):  # fmt: skip
      if (value := getattr(self, name)) not in known:
        raise UserError(f'{name} = {value!r} is not known{nearest(value, known)}')
    for pattern, spelling in self.weights:
      scheme = None if spelling == 'none' else parse_scheme(spelling)
      if scheme is not None and scheme.asymmetric and self.weight_gradient in fake.LEARNED:
        raise UserError(
          f'weights: {pattern!r} wants {spelling!r} with ranges that learn, but an offset does not; '
          "use a scheme without asym, or 'ste'"
        )
      if scheme is not None and not scheme.numbers.is_integer and self.weight_rounding == 'stochastic':
        raise UserError(f'weights: {spelling!r} cannot be rounded at random; only integers can')

  @property
  def draws(self) -> bool:
    """Whether training needs random numbers."""
    return self.backward.draws or self.weight_rounding == 'stochastic'

  @property
  def has_static_ranges(self) -> bool:
    """Whether a rule quantizes inputs within a range that comes from calibration."""
    return any(activations.parse_activations(spelling).is_static for _, spelling in self.activations)

  @property
  def plain(self) -> 'Numerics':
    """The same with nothing quantized on the way."""
    return dataclasses.replace(
      self, activations=(), weights=(), backward=Backward(), weight_rounding='nearest'
    )

  def scheme_of(self, path: str | None) -> ActivationScheme:
    """How the inputs of the projection at `path` are quantized; None is no projection."""
    return ActivationScheme() if path is None else activations.rules(self.activations)(path)

  def trained_scheme_of(self, path: str | None, is_at_rest: bool, has_adapter: bool) -> Scheme | None:
    """The scheme in which the weight at `path` is multiplied while it is trained; None is as it is.

    A weight that rests in few bits is not trained, unless an adapter moves it.
    """
    if is_at_rest and not has_adapter:
      return None
    spellings = (spelling for pattern, spelling in self.weights if path and trees.is_match(pattern, path))
    spelling = next(spellings, 'none')
    return None if spelling == 'none' else parse_scheme(spelling)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is decided about one product before it runs."""

  policy: Policy
  transposed: bool = False
  scheme: ActivationScheme = dataclasses.field(default_factory=ActivationScheme)
  is_integer: bool = False
  gradient: str = 'ste'
  backward: Backward = dataclasses.field(default_factory=Backward)
  kernels: str = 'auto'
  path: str | None = None

  @property
  def where(self) -> Where:
    return Where(self.kernels, self.path)

  def note(self, product: str, found: dispatch.Choice | str) -> None:
    kernels.note(self.path, product, found)


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


def _operand(w: Projected, dtype: jnp.dtype) -> jax.Array:
  if isinstance(w, Trained):
    w = w.quantized()
  if isinstance(w, Decomposed):
    return w.dequantize(dtype)
  return dequantize(w, dtype) if isinstance(w, QTensor) else w.astype(dtype)


def _why_not(w: Projected) -> str:
  """Why no kernel decodes w while it multiplies."""
  if isinstance(w, Decomposed):
    return 'a decomposed weight is decoded as a whole'
  return 'the weight is plain' if not isinstance(w, QTensor) else f'a weight in {w.scheme} is not decoded'


def _resting_product(x: jax.Array, w: QTensor, plan: _Plan, transposed: bool) -> jax.Array:
  """x · w, or x · wᵀ, by the kernels of the plan."""
  policy = plan.policy
  found = kernels.explain(w, x.dtype, plan.kernels)
  plan.note('dx' if transposed else 'forward', found)
  if not isinstance(found, str):
    return kernels.multiply(x, w, found, plan.path, transposed).astype(policy.accum)
  axis = 1 if transposed else 0
  return contract(x, _operand(w, policy.compute), ((x.ndim - 1,), (axis,)), policy.accum)


def _product(x: jax.Array, w: Projected, high: jax.Array | None, plan: _Plan) -> jax.Array:
  policy, scheme = plan.policy, plan.scheme
  if isinstance(w, Trained):
    w = w.quantized()
  if not scheme.is_none and isinstance(w, Decomposed):
    rest = _product(jnp.where(w.is_ordinary, x, jnp.zeros((), x.dtype)), w.rest, high, plan)
    return rest + _product(w.outliers(x), w.kept, None, _Plan(policy))
  if plan.is_integer and isinstance(w, QTensor):
    return integers.product(x, w, scheme, high, plan.where).astype(policy.accum)
  if not scheme.is_none:
    x = activations.fake(x, scheme, high)
  if isinstance(w, QTensor) and not plan.transposed:
    return _resting_product(x.astype(policy.compute), w, plan, transposed=False)
  plan.note('forward', _why_not(w))
  x, w = x.astype(policy.compute), _operand(w, policy.compute)
  return contract(x, w, ((x.ndim - 1,), (1 if plan.transposed else 0,)), policy.accum)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(
  x: jax.Array, w: Projected, high: jax.Array | None, key: jax.Array | None, plan: _Plan
) -> jax.Array:
  return _product(x, w, high, plan)


class _Facts(NamedTuple):
  """What is known of a product's backward pass while it is traced."""

  is_trained: bool
  is_needed: bool
  learns: bool
  like: jax.ShapeDtypeStruct


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """Facts known while tracing, carried through residuals."""

  facts: _Facts


def _is_perturbed(tree: Any) -> bool:
  leaves = jax.tree.leaves(tree, is_leaf=lambda p: hasattr(p, 'perturbed'))
  return any(leaf.perturbed for leaf in leaves)


def _matmul_fwd(x: Any, w: Any, high: Any, key: Any, plan: _Plan) -> tuple[jax.Array, Any]:
  w_value, top, key_value = jax.tree.map(
    lambda p: p.value, (w, high, key), is_leaf=lambda p: hasattr(p, 'perturbed')
  )
  is_trained = not isinstance(w_value, QTensor | Decomposed) and _is_perturbed(w)
  learns = plan.scheme.is_static and plan.gradient in fake.LEARNED and _is_perturbed(high)
  like = jax.ShapeDtypeStruct(x.value.shape, x.value.dtype)
  passes = None
  if plan.scheme.is_static and x.perturbed and not learns:
    passes = jnp.abs(x.value.astype(jnp.float32)) <= top
    passes = passes | ~w_value.is_ordinary if isinstance(w_value, Decomposed) else passes
  kept = (x.value, top) if is_trained or learns else None
  facts = _Facts(is_trained, x.perturbed, learns, like)
  # Not `_matmul`: a remat policy that keeps products has to see one.
  return _product(x.value, w_value, top, plan), (kept, w_value, passes, key_value, _Static(facts))


def _input_gradient(g: jax.Array, w: Projected, key: jax.Array | None, plan: _Plan) -> jax.Array:
  """g [..., N] times wᵀ as [..., K] in `policy.accum`."""
  policy = plan.policy
  if plan.backward.dx == 'int8' and isinstance(w, QTensor):
    scale = per_column(w.scales, w.scheme, w.shape[-1])[0]
    codes, g_scale = fake.gradient_codes(g.astype(jnp.float32) * scale, -1, key)
    return integers.input_gradient(codes, g_scale, w, plan.where).astype(policy.accum)
  g = g.astype(policy.compute)
  if isinstance(w, QTensor) and not plan.transposed:
    return _resting_product(g, w, plan, transposed=True)
  plan.note('dx', _why_not(w))
  axis = 0 if plan.transposed else 1
  return contract(g, _operand(w, policy.compute), ((g.ndim - 1,), (axis,)), policy.accum)


def _weight_gradient(
  x: jax.Array, g: jax.Array, high: jax.Array | None, key: jax.Array | None, plan: _Plan
) -> jax.Array:
  """xᵀ·g [K, N] in `policy.accum` for x [..., K], quantized as the plan says, and g [..., N]."""
  policy, scheme = plan.policy, plan.scheme
  g_rows = g.reshape(-1, g.shape[-1])
  if plan.backward.dw == 'int8' and not plan.transposed and not scheme.is_none:
    if len(g_rows) <= integers.SAFE_TERMS:
      codes, x_scale = integers.encode(x, scheme, high, plan.where)
      scaled = (g.astype(jnp.float32) * x_scale).reshape(g_rows.shape)
      g_codes, g_scale = fake.gradient_codes(scaled, 0, key)
      g_codes = g_codes.reshape(g.shape)
      return integers.weight_gradient(codes, g_codes, g_scale, plan.where).astype(policy.accum)
    plan.note('dw', f'a sum over {len(g_rows)} rows may exceed an int32, so that floats are multiplied')
  else:
    plan.note('dw', 'it is a product of floats')
  x = x if scheme.is_none else activations.fake(x, scheme, high)
  x_rows, g_rows = x.reshape(-1, x.shape[-1]).astype(policy.compute), g_rows.astype(policy.compute)
  left, right = (g_rows, x_rows) if plan.transposed else (x_rows, g_rows)
  return rows_product(left, right, policy.accum)


def _matmul_bwd(plan: _Plan, residual: Any, g: Any) -> tuple[Any, Any, Any, None]:
  kept, w, passes, key, static = residual
  facts = static.facts
  if isinstance(g, SymbolicZero):
    return None, None, None, None
  x_key, w_key = (None, None) if key is None else jax.random.split(key)
  dx: Any = None
  dw: Any = None
  d_high = None
  if facts.is_needed or facts.learns:
    multiplied = w.quantized() if isinstance(w, Trained) else w
    dx = _input_gradient(g, multiplied, x_key, plan).astype(facts.like.dtype)
    dx = dx if passes is None else jnp.where(passes, dx, jnp.zeros((), dx.dtype))
  if facts.is_trained:
    x, high = kept
    dw = _weight_gradient(x, g, high, w_key, plan)
    dw = w.pull(dw) if isinstance(w, Trained) else dw.astype(w.dtype)
  if facts.learns:
    x, high = kept
    dx, d_high = fake.pull_input(x, high, plan.scheme, dx, plan.gradient)
  return dx if facts.is_needed else None, dw, d_high, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd, symbolic_zeros=True)


def _check(x: jax.Array, w: Projected, transposed: bool = False) -> None:
  inputs = w.shape[-1] if transposed else w.shape[-2]
  if w.ndim != 2 or x.shape[-1] != inputs:
    raise ValueError(f'x {x.shape} and w {w.shape}{" transposed" if transposed else ""} do not contract')


def matmul(x: jax.Array, w: Weight, policy: Policy, transposed: bool = False) -> jax.Array:
  """x [..., K] times w [K, N] (or [N, K] if `transposed`) as [..., N] in `policy.accum`.

  `dot` is the door for layers; this is for a caller that goes on in the accumulator's dtype.

  Raises:
    NotImplementedError: a transposed product with a weight in few bits.
    ValueError: x and w don't contract.
  """
  if transposed and isinstance(w, QTensor) and not w.scheme.numbers.is_float:
    # Blocks lie along the inputs of a projection.
    raise NotImplementedError(
      'a transposed product with a quantized weight is not implemented; keep it plain'
    )
  _check(x, w, transposed)
  return _matmul(x, w, None, None, _Plan(policy, transposed, kernels='xla'))


def explain(x_shape: tuple[int, ...], w: Projected, numerics: Numerics, path: str | None) -> str:
  """Which way the product of x [..., K] with w at `path` takes, and why: 'plain', 'integer' or 'fake: …'.

  Raises:
    UserError: as `dot` would.
  """
  scheme, compute = numerics.scheme_of(path), numerics.policy.compute
  if scheme.is_none:
    return f'plain: no rule quantizes the inputs of {path!r}; x and the weight are multiplied in {compute}'
  is_integer, reason = integers.choose(w, numerics.integer)
  aside = f'; {w.kept.inputs} outlying inputs apart in {compute}' if isinstance(w, Decomposed) else ''
  if not is_integer:
    return f'fake: x as {scheme} and the weight are read back and multiplied in {compute}: {reason}{aside}'
  rows = math.prod(x_shape[:-1])
  filled = f'; {rows} rows are filled up to {integers.FEW_ROWS} on CPU' if rows < integers.FEW_ROWS else ''
  return f'integer: codes of x as {scheme} times codes of the weight, summed in int32{filled}{aside}'


def slice_of(w: Weight, start: jax.Array, size: int, axis: int) -> Weight:
  """`size` rows (axis 0) or columns (axis 1) of a plain or 16-bit w [K, N] from a traced `start`.

  Plain half precision is sliced as integers: XLA's CPU backend would widen the whole of it before a loop.

  Raises:
    NotImplementedError: w rests in few bits.
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


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lower(x: jax.Array, factors: tuple[jax.Array, ...], policy: Policy) -> tuple[jax.Array, ...]:
  """x·A [..., r] in `policy.compute` for each Aᵀ [r, K]: all adapters that read one x, in one product."""
  return _lower_fwd(x, factors, policy)[0]


def _lower_fwd(
  x: jax.Array, factors: tuple[jax.Array, ...], policy: Policy
) -> tuple[tuple[jax.Array, ...], Any]:
  stacked = jnp.concatenate([a.astype(policy.compute) for a in factors])
  low = contract(x.astype(policy.compute), stacked, ((x.ndim - 1,), (1,)), policy.accum)
  low = named(low.astype(policy.compute), LOW_RANK)
  return tuple(jnp.split(low, _ends(factors), axis=-1)), (x, factors)


def _lower_bwd(
  policy: Policy, residual: Any, g: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  x, factors = residual
  stacked = jnp.concatenate([a.astype(policy.compute) for a in factors])
  rows = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in g], axis=-1)
  dx = contract(rows, stacked, ((1,), (0,)), policy.accum).astype(x.dtype).reshape(x.shape)
  # Turned first: a product that contracts over the leading axis of its left operand misses the CPU's units.
  x_rows = x.reshape(-1, x.shape[-1]).astype(policy.compute)
  d_stacked = contract(transpose(rows), x_rows, ((1,), (0,)), policy.accum)
  parts = jnp.split(d_stacked, _ends(factors))
  return dx, tuple(d.astype(a.dtype) for d, a in zip(parts, factors, strict=True))


def _ends(factors: tuple[jax.Array, ...]) -> list[int]:
  """Where each factor but the last ends in the stack of all."""
  return np.cumsum([a.shape[0] for a in factors])[:-1].tolist()


lower.defvjp(_lower_fwd, _lower_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _raise(low: jax.Array, b: jax.Array, scale: float, policy: Policy) -> jax.Array:
  """s·low·B [..., N] in `policy.accum`, for low [..., r] and B [r, N]."""
  product = contract(low, b.astype(policy.compute), ((low.ndim - 1,), (0,)), policy.accum)
  return jnp.asarray(scale, policy.accum) * product


def _raise_fwd(low: jax.Array, b: jax.Array, scale: float, policy: Policy) -> tuple[jax.Array, Any]:
  return _raise(low, b, scale, policy), (low, b)


def _raise_bwd(scale: float, policy: Policy, residual: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  low, b = residual
  s = jnp.asarray(scale, policy.accum)
  g_rows, low_rows = g.reshape(-1, g.shape[-1]).astype(policy.compute), low.reshape(-1, low.shape[-1])
  d_low = s * contract(g_rows, b.astype(policy.compute), ((1,), (1,)), policy.accum)
  db = s * contract(transpose(low_rows), g_rows, ((1,), (0,)), policy.accum)
  return d_low.astype(low.dtype).reshape(low.shape), db.astype(b.dtype)


_raise.defvjp(_raise_fwd, _raise_bwd)


def _adds(w: QTensor, scheme: ActivationScheme, plan: _Plan) -> bool:
  """Whether a kernel multiplies by w, and may add an adapter before it writes the result."""
  if not scheme.is_none or plan.policy.accum != jnp.float32:
    return False
  return not isinstance(kernels.explain(w, plan.policy.compute, plan.kernels), str)


def _with_adapter(
  x: jax.Array, w: QTensor, low: jax.Array, b: jax.Array, a: jax.Array | None, scale: float, plan: _Plan
) -> jax.Array:
  compute = plan.policy.compute
  choice = kernels.explain(w, compute, plan.kernels)
  assert not isinstance(choice, str), 'the caller has asked'
  for product in ('forward', 'adapter'):
    plan.note(product, choice)
  adapter = LowRank(low, b.astype(compute), scale, None if a is None else a.astype(compute))
  return kernels.multiply(x.astype(compute), w, choice, plan.path, adapter=adapter)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _adapted(
  x: jax.Array, w: QTensor, low: jax.Array, b: jax.Array, a: jax.Array | None, scale: float, plan: _Plan
) -> jax.Array:
  """x·w + s·low·B [..., N] in float32 by one kernel, for low = x·A [..., r].

  Where no gradient is wanted the kernel may have x·A by itself from Aᵀ [r, K]. The gradient of B needs low,
  which all adapters that read x have from one product.
  """
  return _with_adapter(x, w, low, b, a, scale, plan)


def _adapted_fwd(
  x: Any, w: Any, low: Any, b: Any, a: Any, scale: float, plan: _Plan
) -> tuple[jax.Array, Any]:
  del a
  w, low, b = jax.tree.map(lambda p: p.value, (w, low, b), is_leaf=lambda p: hasattr(p, 'perturbed'))
  facts = _Facts(False, x.perturbed, False, jax.ShapeDtypeStruct(x.value.shape, x.value.dtype))
  return _with_adapter(x.value, w, low, b, None, scale, plan), (w, low, b, _Static(facts))


def _adapted_bwd(scale: float, plan: _Plan, residual: Any, g: Any) -> tuple[Any, ...]:
  w, low, b, static = residual
  if isinstance(g, SymbolicZero):
    return None, None, None, None, None
  dx, *_ = _matmul_bwd(plan, (None, w, None, None, static), g)
  d_low, d_b = _raise_bwd(scale, plan.policy, (low, b), g)
  return dx, None, d_low, d_b, None


_adapted.defvjp(_adapted_fwd, _adapted_bwd, symbolic_zeros=True)


def _lowered(x: jax.Array, adapter: Adapter, dropout_key: jax.Array | None, policy: Policy) -> jax.Array:
  """x·A [..., r] of one adapter, with inputs dropped if there is a key."""
  if dropout_key is not None and adapter.dropout > 0:
    keep = jax.random.bernoulli(dropout_key, 1 - adapter.dropout, x.shape)
    x = jnp.where(keep, x / jnp.asarray(1 - adapter.dropout, x.dtype), jnp.zeros((), x.dtype))
  (low,) = lower(x, (adapter.a,), policy)
  return low


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _add_each(
  y: jax.Array, x: jax.Array, adapter: GroupedAdapter, numerics: Numerics, path: str | None
) -> jax.Array:
  """y [B, ..., N] in `policy.accum` with the adapters of its rows added."""
  of_row, compute = adapter.of_row, numerics.policy.compute
  if of_row is None or of_row.shape != x.shape[:1]:
    raise UserError(
      f'x {x.shape} has {x.shape[0]} rows, but adapters are assigned to'
      f' {0 if of_row is None else of_row.shape[0]}; give adapters.assign one index for each'
    )
  added = kernels.add_adapters(
    y.astype(jnp.float32), x.astype(compute), adapter.a.astype(compute), adapter.b.astype(compute),
    adapter.scale, of_row, numerics.kernels, path,
  )  # fmt: skip
  return added.astype(y.dtype)


@_add_each.defjvp
def _add_each_jvp(numerics: Numerics, path: str | None, primals: Any, tangents: Any) -> Any:
  raise UserError('several adapters in one batch have no gradient; train one at a time')


def dot(
  x: jax.Array,
  w: Projected,
  numerics: Numerics,
  adapter: Adapter | GroupedAdapter | None = None,
  bias: jax.Array | None = None,
  dropout_key: jax.Array | None = None,
  path: str | None = None,
  high: jax.Array | None = None,
  low: jax.Array | None = None,
  weight_high: jax.Array | None = None,
  rounding_key: jax.Array | None = None,
) -> jax.Array:
  """y = x·w + s·(x·A)·B + bias in `policy.compute`, or x·Q(w + s·A·B) + bias for a w that rules name.

  Args:
    x: [..., K].
    w: [K, N], plain, quantized or decomposed.
    numerics: dtypes, kernels, and which projections have their inputs quantized. The adapter sees x as it is.
    adapter: A, B and their scale; or several, with one for each index of the first axis of x, for which
      there is no gradient.
    bias: [N].
    dropout_key: drops inputs of A with the adapter's probability; None (evaluation) drops nothing.
    path: where the projection is, such as 'layers/mlp/down/kernel', for `numerics.activations`.
    high: float32 [], the largest magnitude of x that a static scheme represents.
    low: x·A from `lower`, if it is there already; nothing is dropped from it.
    weight_high: float32 in the shape of the scales, the ranges of a weight trained through its quantizer.
    rounding_key: draws how weights and gradients round to integers; None (evaluation) rounds weights to
      nearest.

  Raises:
    UserError: a static scheme without `high`; `integer = 'always'` where integers can't be multiplied, or
      gradients in integers where there are none; several adapters inside a quantizer, not one index for each
      first index of x, or a gradient wanted of them.
    ValueError: x and w don't contract.
    NotImplementedError: a kernel was asked for by name and can't; with the reason, and what can.
  """
  policy = numerics.policy
  scheme = numerics.scheme_of(path)
  _check(x, w)
  rests = isinstance(w, Decomposed | Trained) or is_at_rest(w)
  trained = numerics.trained_scheme_of(path, rests, adapter is not None)
  if trained is not None:
    assert not isinstance(w, Decomposed | Trained)
    if isinstance(adapter, GroupedAdapter):
      raise UserError(f'adapters inside the quantizer of {path!r} cannot share a batch; run one at a time')
    weight_key = None
    if numerics.weight_rounding == 'stochastic' and rounding_key is not None:
      weight_key, rounding_key = jax.random.split(rounding_key)
    rounding_key = rounding_key if numerics.backward.draws else None
    w = FakeQuantized(w, weight_high, adapter, weight_key, trained, numerics.weight_gradient)
    adapter = None
  # A weight that only rests takes no part in training.
  backward = Backward()
  if isinstance(w, Trained):
    backward = numerics.backward
    integers.check_backward(backward, scheme, path, w.scheme, w.shape)
  plan = _Plan(policy, backward=backward, kernels=numerics.kernels, path=path)
  if isinstance(w, QTensor) and isinstance(adapter, Adapter) and _adds(w, scheme, plan):
    low = _lowered(x, adapter, dropout_key, policy) if low is None else low
    a = None if dropout_key is not None and adapter.dropout > 0 else adapter.a
    y, adapter = _adapted(x, w, low, adapter.b, a, adapter.scale, plan), None
  elif scheme.is_none:
    y = _matmul(x, w, None, rounding_key, plan)
  else:
    if scheme.is_static and high is None:
      raise UserError(
        f"activations: {path!r} is to be quantized as {scheme}, but the collection 'act' holds no range for"
        f' it; calibrate first, or use {dataclasses.replace(scheme, is_static=False)}'
      )
    is_integer, _ = integers.choose(w, numerics.integer)
    plan = dataclasses.replace(
      plan, scheme=scheme, is_integer=is_integer, gradient=numerics.activation_gradient
    )
    y = _matmul(x, w, high if scheme.is_static else None, rounding_key, plan)
  if isinstance(adapter, GroupedAdapter):
    y, adapter = _add_each(y, x, adapter, numerics, path), None
  if adapter is not None:
    low = _lowered(x, adapter, dropout_key, policy) if low is None else low
    y = y + _raise(low, adapter.b, adapter.scale, policy)
  if bias is not None:
    y = y + bias.astype(policy.accum)
  return y.astype(policy.compute)
