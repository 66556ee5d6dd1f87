"""Every kernel with its formats and shapes: how each is called, compiled for a chip, and what it must move.

Bytes moved are counted from the grid and the blocks of the kernel itself. On a TPU a block that comes again
at the next step of the grid stays where it is. On a GPU programs that run at the same time, one a core, share
what they read through the second-level cache, and an array of less than half that cache is read once.
"""

import dataclasses
import functools
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, grid_order, hardware
from pallas_kernels.grid_order import Cores
from pallas_kernels.grouped_adapter import tiling as grouped_tiling
from pallas_kernels.grouped_adapter.tiling import Sizes
from pallas_kernels.int8_matmul import gpu as int8_gpu
from pallas_kernels.int8_matmul import tpu as int8_tpu
from pallas_kernels.low_bit_matmul import tiling as low_bit_tiling
from pallas_kernels.low_bit_matmul.layout import GROUP, DoubleQuantized, Layout, read_scales
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.quantize import gpu as quantize_gpu
from pallas_kernels.quantize import tpu as quantize_tpu
from qjax import chips, kernels
from qjax.chips import Chip
from qjax.quant.formats import packed_rows, parse_scheme

# Rows of x, inputs and outputs: decoding, prefill and training of a 7B model, and of a small one.
SHAPES = (
  (2048, 4096, 4096), (8, 4096, 4096), (2048, 4096, 11008), (2048, 11008, 4096),
  (1024, 576, 1536), (1024, 1536, 576), (7, 576, 131),
)  # fmt: skip
WEIGHTS = (
  'nf4:block=64', 'nf4:block=64,dq', 'fp4:block=32', 'int4:block=32', 'int4:axis=channel', 'nf3:block=64',
  'nf2:block=64', 'int8:axis=channel',
)  # fmt: skip
QUANTIZED = ('nf4:block=64', 'int4:block=32', 'int8:axis=channel')
LOW_BIT = low_bit_tiling.NAMES
# The first of them, with an adapter of that rank and weight that is added in the same pass.
ADAPTED, RANK, ALPHA = 'low_bit_matmul_adapted', 16, 2.0
# By kernel: its formats, with the dtype of activations where it is not bfloat16.
KERNELS = {
  **dict.fromkeys(LOW_BIT, (*WEIGHTS, 'nf4:block=64 float16')),
  ADAPTED: ('nf4:block=64,dq', 'int8:axis=channel', 'nf4:block=64 float16'),
  'int8_matmul': ('nn', 'nt', 'tn'),
  'quantize_weight': QUANTIZED,
  'quantize_tokens': ('nearest', 'stochastic'),
  'stochastic_round': ('bfloat16',),
  # Adapters and their rank; each has as many neighbouring rows as the next.
  dispatch.GROUPED_ADAPTER: ('8:16', '64:16', '8:16 float16'),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One kernel in one format at one shape, for one chip.

  Attributes:
    kernel: a name in `KERNELS`.
    format: of the weight, or which product or rounding it is.
    shape: rows of x, inputs, outputs.
    chip: a name in `chips.CHIPS`; of what is here 'tpu' or 'gpu' will do.
  """

  kernel: str
  format: str
  shape: tuple[int, int, int]
  chip: str

  @property
  def target(self) -> Chip:
    return chips.find(self.chip)

  @property
  def kind(self) -> str:
    return self.chip if self.chip in ('tpu', 'gpu') else self.target.kind

  @property
  def scheme(self) -> str:
    return self.format.partition(' ')[0]

  @property
  def dtype(self) -> str:
    """Of activations."""
    return self.format.partition(' ')[2] or 'bfloat16'

  @property
  def operands(self) -> str:
    """The dtype whose rate bounds the products, '' where there are none."""
    is_float = self.kernel in (*LOW_BIT, ADAPTED, dispatch.GROUPED_ADAPTER)
    return {'int8_matmul': 'int8'}.get(self.kernel, self.dtype if is_float else '')

  @property
  def operations(self) -> int:
    """Multiplications and additions of the product."""
    if self.kernel == dispatch.GROUPED_ADAPTER:
      return 2 * self.shape[0] * self.sizes().rank * (self.shape[1] + self.shape[2])
    more = 2 * self.shape[0] * RANK * (self.shape[1] + self.shape[2]) if self.kernel == ADAPTED else 0
    return 2 * math.prod(self.shape) + more if self.operands else 0

  def sizes(self) -> Sizes:
    """Of the adapters that format names."""
    groups, rank = map(int, self.scheme.split(':'))
    return Sizes(groups, rank, *self.shape[1:])

  def of_row(self) -> np.ndarray:
    """The adapter of each row, int32."""
    return np.arange(self.shape[0], dtype=np.int32) * self.sizes().groups // self.shape[0]

  def layout(self) -> Layout:
    """What the bytes of a weight of that format mean."""
    return kernels.layout_in(parse_scheme(self.scheme), self.shape[1])

  def multiplied(self) -> Layout:
    """The layout that a product is given: on a TPU scales in 8 bits may be read back before it."""
    layout, (tokens, _, outputs) = self.layout(), self.shape
    if self.kind != 'tpu':
      return layout
    # Of the rows that the kernel fills x up to.
    tokens, itemsize = max(tokens, low_bit_tiling.FEWEST_TOKENS), jnp.dtype(self.dtype).itemsize
    rank = RANK if self.kernel == ADAPTED else 0
    return low_bit_tiling.multiplied(tokens, outputs, layout, itemsize, self.kernel == LOW_BIT[1], rank)


def cases(names: list[str], is_quick: bool) -> list[Case]:
  """All of them for the chips named; `is_quick` is one shape a kernel."""
  shapes = SHAPES[:1] if is_quick else SHAPES
  return [
    Case(kernel, each, shape, chips.find(name).name)
    for name in names for kernel, formats in KERNELS.items() for each in formats for shape in shapes
  ]  # fmt: skip


def implementation(case: Case) -> dispatch.Implementation:
  """The row of dispatch's table for a kernel that has one."""
  op = dispatch.LOW_BIT if case.kernel in (*LOW_BIT, ADAPTED) else case.kernel
  (row,) = (row for row in dispatch.TABLE if (row.op, row.platform) == (op, case.kind))
  return row


def why_not(case: Case, device_kind: str) -> str | None:
  """Why the kernel can't serve on a kind of device, None if it can."""
  is_tpu = case.kind == 'tpu'
  if case.kernel == 'quantize_weight':
    return (quantize_tpu if is_tpu else quantize_gpu).obstacle(case.layout())
  if case.kernel in (dispatch.TOKENS, 'stochastic_round'):
    # That one serves is not to say that training uses it: see its row.
    is_random = 'stochastic' in (case.format, case.kernel.partition('_')[0])
    fused = 'XLA fuses the drawing of bits with the rounding and moves as few bytes'
    return fused if is_random and not is_tpu else None
  if case.kernel == dispatch.INT8:
    return implementation(case).why_not(None, 'int8', device_kind)
  meant = case.sizes() if case.kernel == dispatch.GROUPED_ADAPTER else case.layout()
  return implementation(case).why_not(meant, case.dtype, device_kind)


def obstacle(case: Case) -> str | None:
  """Why the kernel can't serve and what does instead, before anything is compiled; None if it can."""
  reason = why_not(case, f'TPU {case.target.name}' if case.kind == 'tpu' else '')
  return reason and f'{reason}; falls back to XLA'


def both_scales(form: str, scales: tuple[Any, ...]) -> tuple[Any, Any]:
  """Of the rows and of the columns of a product of integers: a gradient has one, as the codes of g do."""
  row, column = {'nn': scales, 'nt': (*scales, None), 'tn': (None, *scales)}[form]
  return row, column


Program = tuple[Callable[..., Any], list[Any]]


def program(case: Case, **how: Any) -> Program:
  """The call of a kernel, and the shapes and dtypes of its arguments; `how` is passed on to it.

  Where that holds tiles, scales in 8 bits are read back before the product if the kernel would do so itself.
  """
  m, k, n = case.shape
  is_tpu = case.kind == 'tpu'
  array = jax.ShapeDtypeStruct
  if case.kernel in (*LOW_BIT, ADAPTED):
    layout = case.layout()
    product = implementation(case).products['matmul_transposed' if case.kernel == LOW_BIT[1] else 'matmul']
    tail = packed_rows(layout.tail.inputs, layout.bits) if layout.tail else 0
    codes = array((layout.byte_rows + tail, n), layout.dtype)
    blocks = layout.blocks + (layout.tail is not None)
    scale: Any = array((blocks, n), jnp.float32)
    if layout.double_quantized:
      step = array((blocks, -(-n // GROUP)), jnp.float32)
      scale = DoubleQuantized(array((blocks, n), jnp.int8), step, array((1, 1), jnp.float32))
    dtype = jnp.dtype(case.dtype)
    x = array((m, n if case.kernel == LOW_BIT[1] else k), dtype)
    given = case.multiplied() if 'tiles' in how else layout
    if case.kernel != ADAPTED:
      offset = [array((blocks, n), jnp.float32)] if layout.has_offsets else []

      def multiply(x: jax.Array, codes: jax.Array, scale: Any, offset: jax.Array | None = None) -> Any:
        scale = scale if given.double_quantized else read_scales(scale)
        return product(x, codes, scale, offset, given, **how)

      return multiply, [x, codes, scale, *offset]
    factors = [array((m, RANK), dtype), array((RANK, n), dtype), array((RANK, k), dtype)]

    def add(x: jax.Array, codes: jax.Array, scale: Any, low: jax.Array, b: jax.Array, a: jax.Array) -> Any:
      scale = scale if given.double_quantized else read_scales(scale)
      return product(x, codes, scale, None, given, adapter=LowRank(low, b, ALPHA, a), **how)

    return add, [x, codes, scale, *factors]
  if case.kernel == 'int8_matmul':
    a, b, rows, columns = {
      'nn': ((m, k), (k, n), m, n), 'nt': ((m, n), (k, n), m, k), 'tn': ((m, k), (m, n), k, n)
    }[case.format]  # fmt: skip
    matmul = (int8_tpu if is_tpu else int8_gpu).matmul
    scales = [array((rows, 1), jnp.float32), array((1, columns), jnp.float32)]
    held = {'nn': scales, 'nt': scales[:1], 'tn': scales[1:]}[case.format]

    def call(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
      return matmul(a, b, *both_scales(case.format, scales), form=case.format, **how)

    return call, [array(a, jnp.int8), array(b, jnp.int8), *held]
  if case.kernel == dispatch.GROUPED_ADAPTER:
    g, r, dtype = case.sizes().groups, case.sizes().rank, jnp.dtype(case.dtype)
    factors = [array((m, k), dtype), array((g, r, k), dtype), array((g, r, n), dtype)]
    return functools.partial(implementation(case).products['add'], **how), [
      array((m, n), jnp.float32), *factors, array((g,), jnp.float32), array((m,), jnp.int32)
    ]
  quantizers: Any = quantize_tpu if is_tpu else quantize_gpu
  if case.kernel == 'quantize_weight':
    return functools.partial(quantizers.weight, layout=case.layout(), **how), [array((k, n), jnp.float32)]
  seed = array((), jnp.int32)
  if case.kernel == 'quantize_tokens':
    x = array((m, k), jnp.bfloat16)
    return functools.partial(quantizers.tokens, **how), [x] if case.format == 'nearest' else [x, seed]
  return functools.partial(quantize_tpu.stochastic_round, **how), [array((k, n), jnp.float32), seed]


@dataclasses.dataclass(frozen=True)
class Panel:
  """What a program of a kernel's grid reads or writes of one array.

  Attributes:
    size: of the array.
    block: of what one program holds of it.
    places: int [programs, axes], which block that is, in the order in which programs start.
    itemsize: bytes of an element.
    copies: blocks that a TPU holds at once.
  """

  size: tuple[int, ...]
  block: tuple[int, ...]
  places: np.ndarray
  itemsize: int
  copies: int = 2

  @property
  def nbytes(self) -> int:
    """Of the array."""
    return math.prod(self.size) * self.itemsize

  @property
  def moved(self) -> np.ndarray:
    """Bytes of each program's block; one at an edge ends there."""
    size, block = np.asarray(self.size), np.asarray(self.block)
    return np.prod(np.minimum(block, size - self.places * block), axis=1, dtype=np.int64) * self.itemsize


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
  """Every Pallas call in a program."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'pallas_call':
      yield equation
      continue
    for value in equation.params.values():
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from pallas_calls(inner)


def _programs(grid: tuple[int, ...], is_tpu: bool) -> np.ndarray:
  """Places in the grid in running order: the last axis moves first on a TPU, the first on a GPU."""
  order = grid if is_tpu else grid[::-1]
  places = np.indices(order).reshape(len(order), -1).T
  return places if is_tpu else places[:, ::-1]


def _from_blocks(equation: Any, is_tpu: bool) -> list[Panel]:
  """Panels as the block specs of a Pallas call have them."""
  mapping = equation.params['grid_mapping']
  programs = _programs(mapping.grid, is_tpu)
  panels = []
  for each in mapping.block_mappings:
    array = each.array_aval
    block = tuple(getattr(size, 'block_size', 1) for size in each.block_shape)
    places = np.asarray(_places(each.index_map_jaxpr, programs))
    copies = getattr(each.pipeline_mode, 'buffer_count', 2)
    panels.append(Panel(array.shape, block, places, array.dtype.itemsize, copies))
  return panels


def _places(closed: Any, programs: np.ndarray) -> Any:
  """The blocks that an index map names for every place in the grid."""
  index = jax.extend.core.jaxpr_as_fun(closed)
  mapped = jax.vmap(lambda place: jnp.stack([jnp.int32(i) for i in index(*place)]))
  return mapped(jnp.asarray(programs, jnp.int32))


def _from_tiles(case: Case, equation: Any) -> list[Panel]:
  """Panels of the GPU's kernels for weights in few bits, which address memory themselves, by their tiling."""
  mapping, layout = equation.params['grid_mapping'], case.layout()
  is_transposed = case.kernel == LOW_BIT[1]
  x, *weight, y = (each.array_aval for each in mapping.block_mappings)
  factors, weight = (weight[:2], weight[2:]) if case.kernel == ADAPTED else ([], weight)
  tiles = low_bit_tiling.choose_gpu(
    case.shape[0], case.shape[2], layout, x.dtype.itemsize, transposed=is_transposed
  )
  programs, splits = _programs(mapping.grid, False).T
  size = (case.shape[0], case.shape[2], layout)
  tokens, others = tiles.place(programs, *size, transposed=is_transposed)
  along, across = (others, splits) if is_transposed else (splits, others)
  # Programs along the other axis of the result, and along the summed one.
  cuts = (tiles.grid(*size, is_transposed)[1], tiles.splits)
  parts = cuts if is_transposed else cuts[::-1]

  def panel(array: Any, block: tuple[int, ...], *places: np.ndarray) -> Panel:
    inside = [np.minimum(at, (n - 1) // b) for at, n, b in zip(places, array.shape, block, strict=True)]
    return Panel(array.shape, block, np.stack(inside, 1), array.dtype.itemsize)

  def share(size: int, parts: int) -> int:
    return -(-size // parts)

  panels = [panel(x, (tiles.tokens, share(x.shape[1], tiles.splits)), tokens, splits)]
  if factors:
    low, b = factors
    panels.append(panel(low, (tiles.tokens, RANK), tokens, 0 * tokens))
    panels.append(panel(b, (RANK, tiles.columns), 0 * others, others))
  for array in weight:
    if len(array.shape) == 1:
      panels.append(panel(array, array.shape, 0 * tokens))
    else:
      block = share(array.shape[0], parts[0]), share(array.shape[1], parts[1])
      panels.append(panel(array, block, along * array.shape[0] // (block[0] * parts[0]), across))
  return [*panels, panel(y, (1, tiles.tokens, share(y.shape[2], cuts[0])), splits, tokens, others)]


def _from_meetings(case: Case, equation: Any, is_tpu: bool) -> list[Panel]:
  """Panels of the kernels for several adapters, whose table of them is an argument; those that no row has are
  left out. A GPU reads each of the others once, as its cache holds them."""
  mapping, sizes = equation.params['grid_mapping'], case.sizes()
  of_row = jnp.asarray(case.of_row())
  met = np.unique(of_row)
  rank = max(sizes.rank, hardware.FEWEST_RANK) if is_tpu else sizes.rank
  factors = [(sizes.groups, rank, size) for size in (sizes.inputs, sizes.outputs)]
  if not is_tpu:
    return [
      dataclasses.replace(each, size=shape, block=shape) if each.size in factors else each
      for each in _from_blocks(equation, is_tpu) for shape in [(len(met), *each.size[1:])]
    ]  # fmt: skip
  tall = getattr(mapping.block_mappings[0].block_shape[0], 'block_size', 1)
  table, _ = grouped_tiling.meetings(of_row, tall, sizes.groups)
  tile, slot = _programs(mapping.grid, is_tpu).T
  group = np.searchsorted(met, np.asarray(table)[tile, slot])
  panels = []
  for each in mapping.block_mappings:
    array = each.array_aval
    block = tuple(getattr(size, 'block_size', 1) for size in each.block_shape)
    is_factor = array.shape in factors
    size = (len(met), *array.shape[1:]) if is_factor else array.shape
    places = np.stack([group if is_factor else tile, *[0 * tile] * (len(block) - 1)], 1)
    panels.append(Panel(size, block, places, array.dtype.itemsize))
  return panels


def moved(panel: Panel, chip: Chip) -> int:
  """Bytes between a chip's memory and its cores for one array, as said at the top."""
  if chip.kind == 'tpu':
    is_new = np.any(np.diff(panel.places, axis=0), axis=1)
    return int(panel.moved[0] + panel.moved[1:][is_new].sum())
  # A kernel that addresses an array itself, and is not in `_from_tiles`, reads each part in one program.
  if panel.block == panel.size:
    return panel.nbytes
  parts = np.ravel_multi_index(panel.places.T, panel.places.max(0) + 1)
  return grid_order.moved(parts, panel.moved, panel.nbytes, Cores(chip.cores, chip.l2_bytes))


def _scales_read_first(case: Case) -> int:
  """How many scales in 8 bits XLA reads and writes as float32 before the kernel, which then has those."""
  if case.kernel not in (*LOW_BIT, ADAPTED) or case.multiplied() == case.layout():
    return 0
  # Of the blocks before a tail.
  return case.layout().blocks * case.shape[2]


def traffic(case: Case) -> dict[str, Any]:
  """Bytes that the kernel moves, the least that any could, and of a TPU's vector memory what its tiles hold.

  Of what XLA does before and after the kernel only the reading of scales in 8 bits is counted; the joining of
  planes of a result, for instance, is not.
  """
  call, arguments = program(case)
  chip, found = case.target, dict.fromkeys(('bytes_moved', 'bytes_least', 'vmem_bytes'), 0)
  if scales := _scales_read_first(case):
    found['bytes_moved'], found['bytes_least'] = 5 * scales, -3 * scales
  for equation in pallas_calls(jax.make_jaxpr(call)(*arguments).jaxpr):
    is_tpu = chip.kind == 'tpu'
    if case.kernel in (*LOW_BIT, ADAPTED) and not is_tpu:
      panels = _from_tiles(case, equation)
    elif case.kernel == dispatch.GROUPED_ADAPTER:
      panels = _from_meetings(case, equation, is_tpu)
    else:
      panels = _from_blocks(equation, is_tpu)
    # One array may be several operands, each a part of it.
    arrays = [*equation.invars, *equation.outvars]
    found['bytes_least'] += sum({a: panel.nbytes for a, panel in zip(arrays, panels, strict=False)}.values())
    for panel in panels:
      found['bytes_moved'] += moved(panel, chip)
      found['vmem_bytes'] += panel.copies * math.prod(panel.block) * panel.itemsize if is_tpu else 0
    for scratch in equation.params['grid_mapping'].scratch_avals if is_tpu else ():
      found['vmem_bytes'] += math.prod(scratch.shape) * scratch.dtype.itemsize
  return {**found, 'bytes_over_least': found['bytes_moved'] / found['bytes_least']}


def roofline_us(case: Case, nbytes: int) -> float:
  """The least microseconds by the chip's data sheet: of the bytes, or of the products, whichever is more."""
  chip = case.target
  seconds = nbytes / chip.bandwidth
  if case.operands:
    seconds = max(seconds, case.operations / chip.flops[case.operands])
  return 1e6 * seconds


def compile_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """In a process of its own: compiles cases, given as their fields, for one chip."""
  return [_compiled(Case(**{**row, 'shape': tuple(row['shape'])})) for row in rows]


def _compiled(case: Case) -> dict[str, Any]:
  """Whether a case compiles or why not, its traffic and bound, and of a GPU its instruction and registers."""
  found: dict[str, Any] = {'compiled': False, 'reason': ''}
  place = jax.sharding.SingleDeviceSharding(chips.devices(case.target)[0])
  try:
    found |= traffic(case)
    found['roofline_us'] = roofline_us(case, found['bytes_least'])
    call, arguments = program(case)
    placed = jax.tree.map(
      lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), arguments
    )
    lowered = jax.jit(call).lower(*placed)
    with tempfile.TemporaryDirectory() as folder:
      is_gpu = case.target.kind == 'gpu'
      lowered.compile(compiler_options={'xla_dump_to': folder} if is_gpu else None)
      found |= _assembly(Path(folder)) if is_gpu else {}
  except Exception as error:
    found['reason'] = f'{type(error).__name__}: {" ".join(str(error).split())}'[:400]
    return found
  return found | {'compiled': True}


def _assembly(folder: Path) -> dict[str, Any]:
  """Of Triton's kernels: the instruction that multiplies matrices, the newest there is, '' for none.

  Where ptxas is here, also the most registers of a thread and bytes spilled, as it says.
  """
  ptxas, found = shutil.which('ptxas'), dict[str, Any]()
  for ptx in folder.glob('*.ptx'):
    text = ptx.read_text(encoding='utf-8')
    target = re.search(r'^\.target (\w+)', text, re.MULTILINE)
    if target is None or 'global_smem' not in text:
      continue
    uses = next((name for name in ('wgmma', 'mma') if f'{name}.' in text), '')
    found['instruction'] = max(found.get('instruction', ''), uses)
    if not ptxas:
      continue
    command = [ptxas, '-v', f'-arch={target[1]}', str(ptx), '-o', str(folder / 'kernel.cubin')]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    used, spilled = re.search(r'Used (\d+) registers', said), re.search(r'(\d+) bytes spill stores', said)
    if used and spilled:
      now = {'registers': int(used[1]), 'spilled_bytes': int(spilled[1])}
      found |= {name: max(value, found.get(name, 0)) for name, value in now.items()}
  return found
