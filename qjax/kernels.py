"""Products with a weight in few bits by a kernel, on one device or each device of a mesh; grouped adapters.

`pallas_kernels.dispatch` says which kernel; here a `QTensor` becomes the raw arrays that it takes. XLA cannot
split a kernel, so over several devices each runs it on its own part (`jax.shard_map`): rows of x by the batch
axes of the mesh, the weight by the axes that split inside a layer, as `sharding.RULES` has them. What rests
split over the batch axes is gathered first, as bytes.

What is chosen for which product is noted while a program is traced (`noting`), for records and plans.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.grouped_adapter import reference
from pallas_kernels.grouped_adapter.tiling import Sizes
from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul.layout import Layout, Scales
from pallas_kernels.low_bit_matmul.reference import LowRank
from qjax import sharding
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import DQ_GROUP, DoubleQuantized, QTensor, per_column

Unserved = dispatch.Unserved

# By (path of a weight, product), what computes it.
Notes = dict[tuple[str, str], set[str]]
_NOTES: ContextVar[Notes | None] = ContextVar('notes', default=None)


@contextmanager
def noting() -> Iterator[Notes]:
  """By what each product of a program that is traced meanwhile is computed.

  Keys are (path of the weight, product): 'forward', 'adapter' (where it is added in the same pass), 'dx' (the
  gradient of the input), 'dw' (of the weight) or 'inputs' (their quantization). Values name a kernel,
  'pallas_tpu: int8_matmul', or say 'xla: ' and why.
  """
  outer, notes = _NOTES.get(), Notes()
  token = _NOTES.set(notes)
  try:
    yield notes
  finally:
    _NOTES.reset(token)
    if outer is not None:
      for key, ways in notes.items():
        outer.setdefault(key, set()).update(ways)


def note(path: str | None, product: str, found: dispatch.Choice | str) -> None:
  """Notes that a product runs by a kernel, or by XLA for the reason given."""
  notes = _NOTES.get()
  if notes is None or path is None:
    return
  told = f'xla: {found}' if isinstance(found, str) else found.told
  notes.setdefault((path, product), set()).add(told)


def products(notes: Notes) -> dict[str, list[str]]:
  """Notes as a record has them: each way with the products that take it, 'path product'."""
  found: dict[str, list[str]] = {}
  for (path, product), ways in sorted(notes.items()):
    for told in sorted(ways):
      found.setdefault(told, []).append(f'{path} {product}')
  return found


def summary(ways: Mapping[str, Any]) -> str:
  """What multiplies, from the keys of `products`: 'xla', 'pallas_tpu', or 'pallas_tpu and xla'."""
  return ' and '.join(sorted({told.partition(':')[0] for told in ways})) or 'xla'


# The name of a kernel in a line of a compiled program that calls it: on a TPU, and by Triton.
_CALL = re.compile(
  r'%(\w+)(?:\.[\w.]*)? = .*custom_call_target="tpu_custom_call"'
  r'|custom_call_target="__gpu\$xla\.gpu\.triton".* name = "(\w+)"'
)


def calls(program: str) -> dict[str, int]:
  """How often a compiled program, as text, calls each Pallas kernel; the body of a loop counts once."""
  found = Counter(match[1] or match[2] for line in program.splitlines() if (match := _CALL.search(line)))
  return dict(sorted(found.items()))


def mesh_obstacle() -> str | None:
  """Why kernels can't run on the ambient mesh, None if they can."""
  mesh = jax.sharding.get_abstract_mesh()
  types = set(mesh.axis_types)
  if len(types) > 1:
    return 'the axes of the mesh are of several types, as inside a shard_map over some of them'
  if AxisType.Explicit in types:
    return 'the axes of the mesh are explicit'
  if _is_split(mesh) and not set(sharding.AXES) <= set(mesh.axis_names):
    return f'the axes of the mesh are {", ".join(map(str, mesh.axis_names))}, not {", ".join(sharding.AXES)}'
  return None


def _is_split(mesh: AbstractMesh) -> bool:
  return not (mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types)


def is_split() -> bool:
  """Whether a kernel must be told which part of an array each device has; False where none can run."""
  return _is_split(jax.sharding.get_abstract_mesh()) and mesh_obstacle() is None


def layout_in(scheme: Scheme, inputs: int) -> Layout:
  """What the bytes of a weight [inputs, N] in a scheme mean, as kernels take it.

  Scales in 8 bits stay so where each output has its own; those of a tile are read back first.
  """
  numbers = scheme.numbers
  stay = scheme.double_quantized and scheme.granularity == 'block'
  return Layout(
    inputs, scheme.block_of(inputs), numbers.bits, numbers.levels,
    bias=0 if scheme.asymmetric else numbers.bias,
    double_quantized=stay, has_offsets=scheme.asymmetric,
  )  # fmt: skip


def layout_of(w: QTensor) -> Layout:
  """What the bytes of w mean, as kernels take it."""
  return layout_in(w.scheme, w.inputs)


def arrays_of(w: QTensor) -> tuple[jax.Array, Scales, jax.Array | None]:
  """Codes, scales and offsets of w [K, N] in few bits, as its layout says that kernels take them.

  A weight in 16-bit floats has no scales, and none of these.
  """
  offset = None if w.offset is None else per_column(w.offset, w.scheme, w.shape[-1])
  if not layout_of(w).double_quantized:
    return w.codes, per_column(w.scales, w.scheme, w.shape[-1]), offset
  assert layouts.GROUP == DQ_GROUP and isinstance(w.scale, DoubleQuantized)
  scale = layouts.DoubleQuantized(w.scale.codes, w.scale.step, w.scale.offset.reshape(1, 1))
  return w.codes, scale, offset


def explain(w: QTensor, compute: Any, kernels: str) -> dispatch.Choice | str:
  """The kernel that multiplies w [K, N] in the dtype `compute`, or why XLA does.

  A weight in 16-bit floats is never decoded, and XLA's product is the one for it.

  Raises:
    NotImplementedError: a kernel was asked for by name and can't; with the reason, and what can.
  """
  if w.scheme.numbers.is_float:
    return f'a weight in {w.scheme} is not decoded'
  obstacle = mesh_obstacle()
  if w.scheme.numbers.dtype is not None:
    obstacle = f'codes of {w.scheme} are patterns of floats, neither integers nor places in a table'
  return dispatch.explain(dispatch.LOW_BIT, kernels, layout_of(w), compute, obstacle)


def multiply(
  x: jax.Array,
  w: QTensor,
  choice: dispatch.Choice,
  path: str | None,
  transposed: bool = False,
  adapter: LowRank | None = None,
) -> jax.Array:
  """x [..., K] · w [K, N], or x [..., N] · wᵀ, as float32.

  Args:
    x: in the compute dtype.
    w: the weight.
    choice: the kernel, of `explain`.
    path: of the weight, which says how it is split over a mesh; None is not at all.
    transposed: whether w is.
    adapter: what is added to x · w, its x·A [..., r], in the compute dtype.
  """
  kernel = choice.product('matmul_transposed' if transposed else 'matmul')
  layout = layout_of(w)

  def product(layout: Layout, x: jax.Array, adapter: LowRank | None, *weight: Any) -> jax.Array:
    more = {}
    if adapter is not None:
      low = adapter.low.reshape(-1, adapter.rank)
      more['adapter'] = dataclasses.replace(adapter, low=low)
    y = kernel(x.reshape(-1, x.shape[-1]), *weight, layout, interpret=choice.interpret, **more)
    return y.reshape(*x.shape[:-1], y.shape[-1])

  codes, scale, offset = arrays_of(w)
  mesh = jax.sharding.get_abstract_mesh()
  if not is_split():
    return product(layout, x, adapter, codes, scale, offset)

  k_axes, n_axes = _axes(path, w, layout, mesh)
  summed, kept = (n_axes, k_axes) if transposed else (k_axes, n_axes)
  lead = [None] * (x.ndim - 1)
  if lead:
    lead[0] = sharding.fit(sharding.BATCH_AXES, x.shape[0], mesh)
  blocks = k_axes if layout.blocks > 1 else None
  per_block: Any = PartitionSpec(blocks, n_axes)
  of_scale = per_block
  outputs = w.shape[-1] // sharding.axis_size(mesh, n_axes)
  if isinstance(scale, layouts.DoubleQuantized) and n_axes is not None and outputs % DQ_GROUP:
    # A group of scales would belong to several devices.
    scale, layout = layouts.read_scales(scale), dataclasses.replace(layout, double_quantized=False)
  if isinstance(scale, layouts.DoubleQuantized):
    of_scale = layouts.DoubleQuantized(per_block, per_block, PartitionSpec())
  elif scale.shape[-1] == 1:
    per_block = of_scale = PartitionSpec(blocks, None)
  part = dataclasses.replace(layout, inputs=w.inputs // sharding.axis_size(mesh, k_axes))

  of_adapter: Any = None
  if adapter is not None:
    # x·A is the whole sum over inputs; where those are split, one device adds the adapter.
    adapter = adapter if summed is None else dataclasses.replace(adapter, a=None)
    of_adapter = dataclasses.replace(
      adapter, low=PartitionSpec(*lead, None), b=PartitionSpec(None, n_axes),
      a=None if adapter.a is None else PartitionSpec(),
    )  # fmt: skip

  def on_each(x: jax.Array, adapter: LowRank | None, *weight: Any) -> jax.Array:
    if summed is None:
      return product(part, x, adapter, *weight)
    if adapter is not None:
      is_first = jax.lax.axis_index(summed) == 0
      low = jnp.where(is_first, adapter.low, jnp.zeros((), adapter.low.dtype))
      adapter = dataclasses.replace(adapter, low=low)
    return jax.lax.psum(product(part, x, adapter, *weight), summed)

  return jax.shard_map(
    on_each,
    in_specs=(
      PartitionSpec(*lead, summed), of_adapter, PartitionSpec(k_axes, n_axes), of_scale,
      None if offset is None else per_block,
    ),
    out_specs=PartitionSpec(*lead, kept),
    check_vma=False,
  )(x, adapter, codes, scale, offset)  # fmt: skip


def add_adapters(
  y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array, of_row: jax.Array, kernels: str,
  path: str | None,
) -> jax.Array:
  """y [B, ..., N] in float32 with each row's adapter added, by a kernel or by XLA; see the reference's `add`.

  Over several devices each adds to its rows and outputs. It sees all inputs of its rows, even where the
  product before split them: x·A is rounded once, after the whole sum, and the result needs no sum over
  devices, which would move more than x.

  Args:
    y: float32 [B, ..., N].
    x: [B, ..., K] in the compute dtype.
    a: Aᵀ [G, r, K] in it.
    b: B [G, r, N] in it.
    scale: float32 [G].
    of_row: int32 [B] in -1…G-1.
    kernels: 'auto' or a name in `dispatch.KERNELS`.
    path: of the weight, as for `multiply`.

  Raises:
    NotImplementedError: a kernel was asked for by name and can't; with the reason, and what can.
  """
  if not y.size:
    return y
  mesh, n_axes = jax.sharding.get_abstract_mesh(), None
  if is_split() and path is not None:
    n_axes = sharding.fit(sharding.axes_inside(path)[1], b.shape[-1], mesh)
  outputs = b.shape[-1] // sharding.axis_size(mesh, n_axes)
  sizes = Sizes(b.shape[0], b.shape[1], a.shape[-1], outputs)
  choice = dispatch.choose(dispatch.GROUPED_ADAPTER, kernels, sizes, x.dtype, mesh_obstacle())
  add = reference.add if choice is None else partial(choice.product('add'), interpret=choice.interpret)

  def on_each(y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, *rest: jax.Array) -> jax.Array:
    scale, of_row = rest
    rows = jnp.broadcast_to(of_row.reshape(-1, *[1] * (x.ndim - 2)), x.shape[:-1]).reshape(-1)
    return add(y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), a, b, scale, rows).reshape(y.shape)

  if choice is None or not is_split():
    return on_each(y, x, a, b, scale, of_row)
  batch = sharding.fit(sharding.BATCH_AXES, x.shape[0], mesh)
  lead, whole = (batch, *[None] * (x.ndim - 2)), PartitionSpec()
  return jax.shard_map(
    on_each,
    in_specs=(
      PartitionSpec(*lead, n_axes), PartitionSpec(*lead, None), whole, PartitionSpec(None, None, n_axes),
      whole, PartitionSpec(batch),
    ),
    out_specs=PartitionSpec(*lead, n_axes),
    check_vma=False,
  )(y, x, a, b, scale, of_row)  # fmt: skip


def _axes(path: str | None, w: QTensor, layout: Layout, mesh: AbstractMesh) -> tuple[Any, Any]:
  """Mesh axes over which the inputs and the outputs of w stay split while it is multiplied.

  Inputs are split between blocks, or anywhere if each has a byte of its own.
  """
  if path is None:
    return None, None
  k_axes, n_axes = sharding.axes_inside(path)
  units = layout.blocks if layout.blocks > 1 and layout.tail is None else 1
  units = w.inputs if layout.blocks == 1 and layout.tail is None and layout.bits == 8 else units
  return sharding.fit(k_axes, units, mesh), sharding.fit(n_axes, w.shape[-1], mesh)
