"""Several adapters in one batch: every backend, interpreted, against float64; one contract for all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.grouped_adapter import gpu, reference, tiling, tpu
from pallas_kernels.grouped_adapter.tiling import Sizes
from qjax import kernels

BACKENDS: dict[str, Callable[..., jax.Array]] = {
  'reference': reference.add,
  'tpu': functools.partial(tpu.add, interpret=True),
  'gpu': functools.partial(gpu.add, interpret=True),
}
DTYPES = [
  (name, dtype) for name in BACKENDS for dtype in ('float32', 'bfloat16', 'float16')
  if (name, dtype) != ('tpu', 'float16')
]  # fmt: skip
# Rows, inputs, outputs, adapters, rank, and which rows belong to which.
CASES = (
  (1, 17, 7, 1, 1, 'same'), (7, 576, 131, 3, 8, 'interleaved'), (17, 64, 127, 5, 16, 'runs'),
  (64, 131, 17, 4, 8, 'none'), (127, 7, 64, 4, 1, 'one empty'), (131, 127, 576, 40, 8, 'interleaved'),
  (576, 64, 1, 3, 16, 'runs'),
)  # fmt: skip


def owners(rows: int, groups: int, how: str) -> np.ndarray:
  row = np.arange(rows)
  found = {
    'same': 0 * row + groups - 1, 'interleaved': row % (groups + 1) - 1, 'runs': row * groups // rows,
    'none': 0 * row - 1, 'one empty': np.where(row % groups == 1, 0, row % groups),
  }[how]  # fmt: skip
  return found.astype(np.int32)


def draw(case: tuple[int, int, int, int, int, str], dtype: str) -> tuple[list[jax.Array], np.ndarray]:
  """The arguments, and the answer in float64 but for x·A, which is rounded as the contract has it."""
  rows, inputs, outputs, groups, rank, how = case
  random = np.random.default_rng(sum(case[:5]))

  def normal(*shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape), dtype)

  y = jnp.asarray(random.standard_normal((rows, outputs)), jnp.float32)
  x, a, b = normal(rows, inputs), normal(groups, rank, inputs) / inputs**0.5, normal(groups, rank, outputs)
  a, scale = a.astype(dtype), jnp.asarray(random.uniform(0.5, 2, groups), jnp.float32)
  of_row = owners(rows, groups, how)
  wanted = np.asarray(y, np.float64)
  for row in np.flatnonzero(of_row >= 0):
    g = of_row[row]
    low = np.asarray(a[g], np.float64) @ np.asarray(x[row], np.float64)
    low = np.asarray(jnp.asarray(low, jnp.float32).astype(dtype), np.float64)
    wanted[row] += float(scale[g]) * (low @ np.asarray(b[g], np.float64))
  return [y, x, a, b, scale, jnp.asarray(of_row)], wanted


@pytest.mark.parametrize('name,dtype', DTYPES)
@pytest.mark.parametrize('case', CASES)
def test_each_row_gets_its_own_adapter(name: str, dtype: str, case: tuple[int, int, int, int, int, str]):
  arguments, wanted = draw(case, dtype)
  found = BACKENDS[name](*arguments)
  assert found.dtype == jnp.float32
  # Sums in float32 differ by their order; where x·A lies between two numbers of the dtype, it may round to
  # either: then one of r products, of size about 1 times |b| ≤ 5 and a scale ≤ 2, moves by one unit.
  unit = {'float32': 2.0**-23, 'bfloat16': 2.0**-8, 'float16': 2.0**-11}[dtype]
  tolerance = 16 * 2.0**-23 * (1 + np.abs(wanted)) + (0 if dtype == 'float32' else 20 * unit)
  assert (np.abs(np.asarray(found, np.float64) - wanted) <= tolerance + 64 * 2.0**-23).all()
  is_none = np.asarray(arguments[-1]) < 0
  np.testing.assert_array_equal(np.asarray(found)[is_none], np.asarray(arguments[0])[is_none])
  np.testing.assert_array_equal(found, BACKENDS[name](*arguments))


@pytest.mark.parametrize('name', BACKENDS)
class TestContract:
  """What every backend guarantees beside."""

  def test_the_order_of_rows_changes_no_bit_of_one(self, name: str):
    # The kernels multiply a row in a tile of others, whichever they are.
    arguments, _ = draw((131, 64, 127, 5, 8, 'interleaved'), 'float32')
    y, x, a, b, scale, of_row = arguments
    order = np.argsort(np.asarray(of_row), kind='stable')
    found = BACKENDS[name](y[order], x[order], a, b, scale, of_row[order])
    np.testing.assert_array_equal(found, BACKENDS[name](*arguments)[order])

  def test_under_jit_and_scan(self, name: str):
    y, x, a, b, scale, of_row = draw((17, 64, 131, 3, 8, 'interleaved'), 'float32')[0]
    add = BACKENDS[name]
    once = add(y, x, a, b, scale, of_row)
    found, _ = jax.lax.scan(lambda y, _: (jax.jit(add)(y, x, a, b, scale, of_row), None), y, None, 2)
    np.testing.assert_array_equal(found, add(once, x, a, b, scale, of_row))

  def test_what_cannot_be_is_said(self, name: str):
    y, x, a, b, scale, of_row = draw((7, 17, 64, 2, 8, 'same'), 'float32')[0]
    with pytest.raises(ValueError, match='do not belong together'):
      BACKENDS[name](y, x, a, b, scale, of_row[1:])
    with pytest.raises(ValueError, match='must be'):
      BACKENDS[name](y, x, a[0], b, scale, of_row)


@pytest.mark.parametrize('name', ['tpu', 'gpu'])
def test_an_adapter_that_is_not_met_is_not_multiplied(name: str):
  y, x, a, b, scale, of_row = draw((17, 64, 127, 3, 8, 'same'), 'float32')[0]
  found = BACKENDS[name](y, x, a.at[0].set(jnp.nan), b.at[0].set(jnp.nan), scale, of_row)
  np.testing.assert_array_equal(found, BACKENDS[name](y, x, a, b, scale, of_row))


def test_no_tile_is_raced_for():
  arguments, wanted = draw((64, 17, 131, 3, 8, 'interleaved'), 'float32')
  how = pltpu.InterpretParams(detect_races=True)
  found = tpu.add(*arguments, interpret=how, tiles=tiling.Tiling(16))
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  assert not interpret_pallas_call.races.races_found


def test_a_tile_meets_its_own_adapters_in_order():
  of_row = jnp.asarray([3, 1, 3, -1, -1, -1, 0, 2, 0], jnp.int32)
  table, counts = tiling.meetings(of_row, 3, 4)
  np.testing.assert_array_equal(counts, [2, 0, 2])
  np.testing.assert_array_equal(table[0], [1, 3, 3])
  np.testing.assert_array_equal(table[2], [0, 2, 2])


def test_tiles_fit_a_tpu_and_what_cannot_is_refused():
  for sizes in (Sizes(8, 16, 4096, 11008), Sizes(64, 128, 11008, 4096), Sizes(2, 1, 17, 7)):
    rows = tiling.choose(2048, sizes, 4).rows
    assert rows >= 16 and sizes.held(rows, 4) <= tiling.VMEM_BYTES
  huge = Sizes(2, 8, 10**6, 10**6)
  with pytest.raises(NotImplementedError, match=r"do not fit vector memory; use kernels = 'auto' or 'xla'"):
    dispatch.choose(dispatch.GROUPED_ADAPTER, 'pallas_tpu', huge, 'float32', platform='tpu')
  assert dispatch.choose(dispatch.GROUPED_ADAPTER, 'auto', huge, 'float32', platform='tpu') is None
  with pytest.raises(NotImplementedError, match='no products in float16'):
    dispatch.choose(dispatch.GROUPED_ADAPTER, 'pallas_tpu', Sizes(2, 8, 64, 64), 'float16', platform='tpu')
  with pytest.raises(NotImplementedError, match='a rank of 256'):
    dispatch.choose(dispatch.GROUPED_ADAPTER, 'pallas', Sizes(2, 256, 512, 512), 'float16', platform='gpu')


def test_an_empty_batch_stays_empty():
  y, x, of_row = jnp.zeros((0, 3, 8)), jnp.zeros((0, 3, 4)), jnp.zeros((0,), jnp.int32)
  a, b = jnp.ones((2, 2, 4)), jnp.ones((2, 2, 8))
  for name in ('xla', 'pallas_interpret'):
    assert kernels.add_adapters(y, x, a, b, jnp.ones(2), of_row, name, None).shape == (0, 3, 8)


@pytest.mark.parametrize('name', ['up', 'down'])
@pytest.mark.parametrize(('rows', 'inputs', 'outputs'), [(8, 256, 64), (7, 17, 131)])
def test_each_device_of_a_mesh_adds_its_part(name: str, rows: int, inputs: int, outputs: int):
  """By numbers that leave only x·A to round, so that the same bits come out; odd sizes stay whole."""
  random = np.random.default_rng(0)

  def integers(low: int, high: int, *shape: int, dtype: str = 'bfloat16') -> jax.Array:
    return jnp.asarray(random.integers(low, high, shape), jnp.float32).astype(dtype)

  x, a, b = integers(-9, 10, rows, 3, inputs), integers(-9, 10, 5, 4, inputs), integers(-3, 4, 5, 4, outputs)
  y, scale = integers(-9, 10, rows, 3, outputs, dtype='float32'), 2.0 ** -jnp.arange(5, dtype=jnp.float32)
  of_row = jnp.asarray(np.arange(rows) % 6 - 1, jnp.int32)
  # Of x·A in parts, each rounded, other numbers would come out.
  low = jnp.einsum('btk,grk->btgr', x, a, preferred_element_type=jnp.float32)
  assert jnp.any(low.astype(jnp.bfloat16).astype(jnp.float32) != low)

  @functools.partial(jax.jit, static_argnums=0)
  def add(how: str, *arguments: jax.Array) -> jax.Array:
    return kernels.add_adapters(*arguments, how, f'layers/mlp/{name}/kernel')

  arguments = y, x, a, b, scale, of_row
  wanted = add('xla', *arguments)
  with jax.set_mesh(jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), (jax.sharding.AxisType.Auto,) * 3)):
    text = add.lower('pallas_interpret', *arguments).as_text()
    found = add('pallas_interpret', *arguments)
  assert 'manual_computation' in text or 'shmap_body' in text
  assert len({str(shard.index) for shard in found.addressable_shards}) == (
    1 if rows == 7 else 8 if name == 'up' else 4
  )
  np.testing.assert_array_equal(found, wanted)
