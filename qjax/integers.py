"""Products of integer codes: sums in int32, exactly, then the scales; by a kernel, or by XLA.

A quantized input meets an integer weight (`product`), a quantized gradient the same weight (`input_gradient`)
or the input (`weight_gradient`). Whichever way is taken, codes and sums are the same integers. With one scale
an output the float32 products with the scales are the same, too, bit for bit; with several blocks each way
adds them up on its own.

Inputs are quantized by a kernel where each token has a scale of its own, on TPUs. Interpreted, it gives the
codes of XLA; no chip has been asked. Training and the converted model take the same way, and agree in any
case. Gradients, which are rounded at random, have no kernel: their bits come from JAX's keys, so that a run
that goes on after a stop gets the same ones, and a kernel would have to read from memory what XLA draws on
the way. Weights have none, either: XLA quantizes them in training as in conversion.

Over several devices each multiplies its part (`jax.shard_map`), as `qjax.kernels` has it.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.int8_matmul import reference
from qjax import kernels, sharding
from qjax.errors import UserError, nearest
from qjax.quant import activations, formats
from qjax.quant.activations import ActivationScheme, Decomposed
from qjax.quant.fake import Trained
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, per_column

# Products of two codes that an int32 holds the sum of, however they fall.
SAFE_TERMS = reference.SAFE_TERMS
# Each block of a weight is a product of its own, written out and scaled; three are slower than floats on CPU.
FEW_BLOCKS = 2
# XLA's CPU backend multiplies one row of integers five times more slowly than eight.
FEW_ROWS = 8

# Whether quantized inputs meet integer weights as integers.
INTEGER = {
  'auto': 'where it is possible and not slower',
  'always': 'or it is an error',
  'never': 'they are multiplied as floats',
}

# In which numbers a product of the backward pass is taken, and how a gradient is rounded to integers.
BACKWARD = ('compute', 'int8')
ROUNDINGS = ('stochastic', 'nearest')


@dataclasses.dataclass(frozen=True)
class Backward:
  """In which numbers gradients are multiplied, where weights are integers with a scale an output.

  Attributes:
    dx: of the input, g·Wᵀ: in the 'compute' dtype, or 'int8'.
    dw: of the weight, xᵀ·g: likewise; 'int8' needs inputs that are quantized, too.
    rounding: of gradients to integers, 'stochastic' or 'nearest'.
  """

  dx: str = 'compute'
  dw: str = 'compute'
  rounding: str = 'stochastic'

  def __post_init__(self) -> None:
    for name, known in (('dx', BACKWARD), ('dw', BACKWARD), ('rounding', ROUNDINGS)):
      if (value := getattr(self, name)) not in known:
        raise UserError(f'backward.{name} = {value!r} is not known{nearest(value, known)}')

  @property
  def draws(self) -> bool:
    """Whether random numbers are needed."""
    return self.rounding == 'stochastic' and 'int8' in (self.dx, self.dw)


def obstacle(scheme: Scheme | None, inputs: int) -> str | None:
  """Why a product with a weight [inputs, N] in a scheme can't be one of integers, None if it can."""
  if scheme is None:
    return 'the weight is not quantized'
  if not scheme.numbers.is_integer:
    return f'the codes of {scheme} are no integers'
  if scheme.asymmetric:
    return f'{scheme} has offsets'
  if (terms := scheme.block_of(inputs)) > SAFE_TERMS:
    return f'a sum of {terms} products of codes may exceed an int32, which holds {SAFE_TERMS}'
  return None


def choose(w: jax.Array | QTensor | Decomposed | Trained, integer: str) -> tuple[bool, str]:
  """Whether quantized inputs meet w as integers, and why not, '' if they do.

  Raises:
    UserError: `integer = 'always'` where they can't; with the reason.
  """
  w = w.rest if isinstance(w, Decomposed) else w
  reason = obstacle(w.scheme if isinstance(w, QTensor | Trained) else None, w.shape[-2])
  if integer == 'always' and reason:
    raise UserError(f"integer = 'always', but {reason}; use int8:axis=channel, or integer = 'auto'")
  if integer == 'never':
    reason = "integer = 'never'"
  elif integer == 'auto' and reason is None and isinstance(w, QTensor | Trained):
    blocks = -(-w.inputs // w.scheme.block_of(w.inputs))
    reason = f'{blocks} blocks of a weight are slower as integers' if blocks > FEW_BLOCKS else None
  return reason is None, reason or ''


def check_backward(
  backward: Backward, inputs: ActivationScheme, path: str | None, scheme: Scheme, shape: tuple[int, ...]
) -> None:
  """Refuses integer gradients where there are no integers to multiply, or scales that differ within a sum.

  Args:
    backward: what is asked for.
    inputs: how those of the projection are quantized.
    path: of the projection.
    scheme: in which its weight is trained.
    shape: of the weight, [..., K, N].

  Raises:
    UserError: naming the path.
  """
  terms, outputs = shape[-2:]
  if backward.dx == 'int8':
    reason = obstacle(scheme, terms)
    if reason is None and scheme.block_of(terms) < terms:
      reason = f'{scheme} has several scales an output'
    if reason is None and outputs > SAFE_TERMS:
      reason = f'a sum over {outputs} outputs may exceed an int32'
    if reason is not None:
      raise UserError(f"backward.dx = 'int8' for {path}: {reason}; use weights in int8:axis=channel")
  if backward.dw == 'int8' and inputs.is_none:
    raise UserError(
      f"backward.dw = 'int8' for {path}: its inputs are not quantized; use activations in int8:axis=token"
    )


class Where(NamedTuple):
  """Which product of a model this is, and by what it may be computed.

  Attributes:
    kernels: 'auto' or a name in `dispatch.KERNELS`.
    path: of the weight; None is not split over a mesh.
  """

  kernels: str = 'auto'
  path: str | None = None

  def choose(self, name: str) -> dispatch.Choice | None:
    """The kernel for the product called `name`, None where XLA multiplies.

    Raises:
      NotImplementedError: one was asked for by name and can't; with the reason, and what can.
    """
    found = dispatch.explain(dispatch.INT8, self.kernels, None, 'int8', kernels.mesh_obstacle())
    kernels.note(self.path, name, found)
    return None if isinstance(found, str) else found

  def axes(self, inputs: int, outputs: int) -> tuple[Any, Any]:
    """Mesh axes over which inputs and outputs of the weight stay split while it is multiplied."""
    mesh = jax.sharding.get_abstract_mesh()
    if self.path is None or not kernels.is_split():
      return None, None
    k_axes, n_axes = sharding.axes_inside(self.path)
    return sharding.fit(k_axes, inputs, mesh), sharding.fit(n_axes, outputs, mesh)


def _batch_axes(x: jax.Array) -> Any:
  """Mesh axes over which the rows of x [..., K] are split."""
  if not kernels.is_split() or x.ndim == 1:
    return None
  return sharding.fit(sharding.BATCH_AXES, x.shape[0], jax.sharding.get_abstract_mesh())


class _Axes(NamedTuple):
  """Mesh axes over which the rows and the columns of a product, and what it sums, are split."""

  rows: Any
  columns: Any
  summed: Any


def _by_kernel(
  choice: dispatch.Choice, form: str, axes: _Axes, a: jax.Array, b: jax.Array,
  row: jax.Array | None = None, column: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
  """(a · b) · column · row as float32, two axes each as `reference.FORMS` has them."""
  kernel = partial(choice.product('matmul'), form=form, interpret=choice.interpret)
  if not kernels.is_split():
    return kernel(a, b, row, column)
  first, second = reference.FORMS[form]

  def on_each(a: jax.Array, b: jax.Array, row: jax.Array | None, column: jax.Array | None) -> jax.Array:
    if axes.summed is None:
      return kernel(a, b, row, column)
    # Parts are added up as integers: the sum is exact in any order, and scaled once.
    sums = jax.lax.psum(kernel(a, b, dtype=jnp.dtype('int32')), axes.summed)
    return reference.scaled(sums, row, column, jnp.dtype('float32'))

  def spec(summed: int, kept: Any) -> PartitionSpec:
    return PartitionSpec(*((axes.summed, kept) if summed == 0 else (kept, axes.summed)))

  return jax.shard_map(
    on_each,
    in_specs=(
      spec(first, axes.rows), spec(second, axes.columns),
      None if row is None else PartitionSpec(axes.rows if row.shape[0] > 1 else None, None),
      None if column is None else PartitionSpec(None, axes.columns if column.shape[1] > 1 else None),
    ),
    out_specs=PartitionSpec(axes.rows, axes.columns),
    check_vma=False,
  )(a, b, row, column)  # fmt: skip


def encode(
  x: jax.Array, scheme: ActivationScheme, high: jax.Array | None, where: Where
) -> tuple[jax.Array, jax.Array]:
  """As `activations.encode`; int8 codes with a scale a token by a kernel where one serves.

  A kernel named for products is no demand here: what no kernel quantizes, XLA does.
  """
  reason = kernels.mesh_obstacle()
  if scheme.axis != 'token' or scheme.format != 'int8':
    reason = f'{scheme} is not in int8 with a scale a token'
  elif where.axes(x.shape[-1], 1)[0] is not None:
    reason = 'each device holds a part of a token'
  elif not x.size:
    reason = 'there are no rows'
  found = dispatch.explain(dispatch.TOKENS, where.kernels, x.shape[-1], x.dtype, reason, is_demand=False)
  kernels.note(where.path, 'inputs', found)
  if isinstance(found, str):
    return activations.encode(x, scheme, high)
  kernel = partial(found.product('tokens'), interpret=found.interpret)
  if kernels.is_split():
    rows = PartitionSpec(_batch_axes(x), None)
    kernel = jax.shard_map(kernel, in_specs=rows, out_specs=(rows, rows), check_vma=False)
  codes, scale = kernel(x.reshape(-1, x.shape[-1]))
  return codes.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


def _contract(a: jax.Array, b: jax.Array, first: int, second: int) -> jax.Array:
  """a · b over one axis of each as int32, exactly for up to `SAFE_TERMS` terms."""
  return jax.lax.dot_general(a, b, (((first,), (second,)), ((), ())), preferred_element_type=jnp.int32)


def _rows_times(codes: jax.Array, w_codes: jax.Array) -> jax.Array:
  """int8 [..., K] times int8 [K, N] as int32 [..., N]."""

  def direct(codes: jax.Array, w_codes: jax.Array) -> jax.Array:
    return _contract(codes, w_codes, codes.ndim - 1, 0)

  def filled_up(codes: jax.Array, w_codes: jax.Array) -> jax.Array:
    flat = codes.reshape(-1, codes.shape[-1])
    padded = jnp.pad(flat, ((0, FEW_ROWS - len(flat)), (0, 0)))
    return direct(padded, w_codes)[: len(flat)].reshape(*codes.shape[:-1], w_codes.shape[-1])

  if math.prod(codes.shape[:-1]) >= FEW_ROWS:
    return direct(codes, w_codes)
  return jax.lax.platform_dependent(codes, w_codes, cpu=filled_up, default=direct)


def product(
  x: jax.Array, w: QTensor, scheme: ActivationScheme, high: jax.Array | None, where: Where
) -> jax.Array:
  """x [..., K] quantized times a symmetric integer w [K, N] as float32 [..., N]: sums, then scales.

  Args:
    x: of any floating dtype.
    w: what `obstacle` has nothing against.
    scheme: of x.
    high: float32 [], the range of a static scheme.
    where: which product this is.

  Raises:
    NotImplementedError: a kernel was asked for by name and can't; with the reason, and what can.
  """
  k, numbers = w.inputs, w.scheme.numbers
  if not x.size:
    return jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32)
  codes, x_scale = encode(x, scheme, high, where)
  choice = where.choose('forward')
  scale = per_column(w.scales, w.scheme, w.shape[-1])
  block = w.scheme.block_of(k)
  rows = formats.packed_rows(block, numbers.bits)
  k_axes, n_axes = where.axes(k, w.shape[-1])
  is_whole = block == k
  axes = _Axes(_batch_axes(x), n_axes, k_axes if is_whole else None)
  y = jnp.zeros((), jnp.float32)
  for index, start in enumerate(range(0, k, block)):
    w_codes = w.codes[index * rows : (index + 1) * rows]
    size = min(block, k - start)
    if numbers.bits < 8:
      w_codes = formats.unpack(w_codes, numbers.bits, size).astype(jnp.int8) - np.int8(numbers.bias)
    x_codes = codes[..., start : start + size]
    if choice is None:
      y = y + _rows_times(x_codes, w_codes).astype(jnp.float32) * scale[index]
      continue
    # Both scales are applied where the sums are; of several blocks, that of a token after the last.
    row = x_scale.reshape(-1, 1) if is_whole else None
    part = _by_kernel(choice, 'nn', axes, x_codes.reshape(-1, size), w_codes, row, scale[index : index + 1])
    y = y + part.reshape(*x.shape[:-1], -1)
  return y if is_whole and choice is not None else y * x_scale


def input_gradient(codes: jax.Array, scale: jax.Array, w: QTensor, where: Where) -> jax.Array:
  """g [..., N] times wᵀ as float32 [..., K], for int8 codes of g · the scales of w.

  Args:
    codes: int8 [..., N].
    scale: float32 [..., 1].
    w: symmetric integers with one scale an output.
    where: which product this is.

  Raises:
    NotImplementedError: as `product`.
  """
  if not codes.size:
    return jnp.zeros((*codes.shape[:-1], w.inputs), jnp.float32)
  choice, w_codes = where.choose('dx'), w.unpacked()
  if choice is None:
    return _contract(codes, w_codes, codes.ndim - 1, 1).astype(jnp.float32) * scale
  k_axes, n_axes = where.axes(w.inputs, w.shape[-1])
  flat = codes.reshape(-1, codes.shape[-1])
  axes = _Axes(_batch_axes(codes), k_axes, n_axes)
  return _by_kernel(choice, 'nt', axes, flat, w_codes, scale.reshape(-1, 1)).reshape(*codes.shape[:-1], -1)


def weight_gradient(x_codes: jax.Array, codes: jax.Array, scale: jax.Array, where: Where) -> jax.Array:
  """xᵀ·g as float32 [K, N], for int8 codes of x and of g · the scales of x.

  Args:
    x_codes: int8 [..., K], no more than `SAFE_TERMS` rows.
    codes: int8 [..., N].
    scale: float32 [1, N].
    where: which product this is.

  Raises:
    NotImplementedError: as `product`.
  """
  if not codes.size:
    return jnp.zeros((x_codes.shape[-1], codes.shape[-1]), jnp.float32)
  choice = where.choose('dw')
  left, right = x_codes.reshape(-1, x_codes.shape[-1]), codes.reshape(-1, codes.shape[-1])
  if choice is None:
    return _contract(left, right, 0, 0).astype(jnp.float32) * scale
  axes = _Axes(*where.axes(left.shape[1], right.shape[1]), _batch_axes(x_codes))
  return _by_kernel(choice, 'tn', axes, left, right, None, scale)
