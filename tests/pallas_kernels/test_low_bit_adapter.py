"""A product with few bits that adds an adapter in the same pass, interpreted, against the reference."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.low_bit_matmul import gpu, reference, tiling, tpu
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.low_bit_matmul.tiling import GpuTiling, Tiling
from qjax import kernels, ops
from qjax.adapters import Adapter
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant.qtensor import QTensor, dequantize, quantize
from qjax.remat import POLICIES
from tests.pallas_kernels.test_low_bit_matmul import ROUNDING, draw, raw

PATH = 'layers/mlp/down/kernel'
# (scheme, (M, K, N), r, dtype): ranks that fill no tile and more than one, a shorter last block, scales in
# 8 bits.
CASES = (
  ('nf4:block=64', (1, 576, 131), 16, 'bfloat16'),
  ('nf4:block=64', (7, 131, 131), 4, 'float32'),
  ('nf4:block=64,dq', (17, 576, 1536), 1, 'bfloat16'),
  ('int3:block=64', (131, 576, 131), 130, 'float32'),
  ('int4:block=32,asym', (7, 131, 131), 130, 'bfloat16'),
  ('int4:axis=channel', (17, 576, 131), 16, 'float32'),
  ('int8:axis=channel', (131, 131, 131), 4, 'bfloat16'),
)
# By platform and tiles: result and sum in one piece or many; a tile of the weight that stays or one of x.
TILES = {
  'tpu': (None, Tiling(16, 128, 256), Tiling(16, 128, 256, weight_stays=True)),
  'gpu': (None, GpuTiling(16, 16, 32, splits=3), GpuTiling(16, 32, 64)),
}
MODULES = {'tpu': tpu, 'gpu': gpu}


def adapted(scheme: str, shape: tuple[int, int, int], rank: int, dtype: str) -> tuple[Any, ...]:
  """x, the weight, Aᵀ, B and x·A."""
  m, k, n = shape
  x, a = draw(m, k, seed=1, dtype=dtype), draw(rank, k, seed=2, dtype=dtype)
  b = draw(rank, n, seed=3, dtype=dtype)
  low = jax.lax.dot(x, a.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return x, quantize(draw(k, n), scheme), a, b, low.astype(dtype)


def bound(x: jax.Array, q: QTensor, a: jax.Array, b: jax.Array, low: jax.Array, s: float, dtype: str) -> Any:
  """By how much two ways to add up the same numbers may differ."""
  wide = [np.abs(np.asarray(each, np.float64)) for each in (x, dequantize(q), low, b)]
  terms = x.shape[1] + b.shape[0] + 4
  lost = 0.0
  if q.offset is not None:
    lost = 2.0**-22 * float(jnp.max(jnp.abs(q.offset))) * np.sum(wide[0], axis=1, keepdims=True)
  # A decoded weight may be rounded to either neighbour, as may x·A, whose own sum is in another order; that
  # errs by as much as its terms are large.
  inner = wide[0] @ np.abs(np.asarray(a, np.float64)).T * 2.0**-24 * x.shape[1]
  unit = 2.0**-24 * terms + 2 * ROUNDING[dtype]
  return unit * (wide[0] @ wide[1] + s * wide[2] @ wide[3]) + s * inner @ wide[3] + lost


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize(('scheme', 'shape', 'rank', 'dtype'), CASES)
def test_the_sum_is_that_of_the_reference(
  platform: str, scheme: str, shape: tuple[int, int, int], rank: int, dtype: str
):
  x, q, a, b, low = adapted(scheme, shape, rank, dtype)
  for factor in (None, a):
    given = LowRank(low, b, 0.5, factor)
    found = MODULES[platform].matmul(x, *raw(q), interpret=True, adapter=given)
    wanted = reference.matmul(x, *raw(q), adapter=given)
    assert found.dtype == jnp.float32 and found.shape == wanted.shape
    assert np.all(np.abs(found - wanted) <= bound(x, q, a, b, low, 0.5, dtype))
  # Without the adapter it is another result, by much more than that.
  plain = reference.matmul(x, *raw(q))
  assert np.max(np.abs(plain - wanted)) > 0.1


@pytest.mark.parametrize(
  ('platform', 'tiles'), [(name, each) for name, all_tiles in TILES.items() for each in all_tiles]
)
@pytest.mark.parametrize('scheme', ['nf4:block=64', 'nf4:block=64,dq', 'int4:axis=channel'])
def test_it_is_added_once_however_the_product_is_cut(platform: str, tiles: Any, scheme: str):
  if platform == 'tpu' and tiles is not None and scheme.startswith('nf4'):
    # Eight blocks of 64 inputs are 256 rows of a plane; a tile begins at a multiple of that.
    tiles = Tiling(tiles.tokens, 1024 if 'dq' in scheme else 256, tiles.columns, tiles.weight_stays)
  x, q, a, b, low = adapted(scheme, (40, 1536, 600), 20, 'float32')
  given = LowRank(low, b, 2.0, a)
  found = MODULES[platform].matmul(x, *raw(q), interpret=True, tiles=tiles, adapter=given)
  wanted = reference.matmul(x, *raw(q), adapter=given)
  assert np.all(np.abs(found - wanted) <= bound(x, q, a, b, low, 2.0, 'float32'))


def test_half_precision_on_a_gpu():
  x, q, a, b, low = adapted('nf4:block=64', (7, 131, 131), 4, 'float16')
  given = LowRank(low, b, 0.5)
  found = gpu.matmul(x, *raw(q), interpret=True, adapter=given)
  assert np.all(
    np.abs(found - reference.matmul(x, *raw(q), adapter=given)) <= bound(x, q, a, b, low, 0.5, 'float16')
  )


def test_tiles_leave_room_for_an_adapter():
  layout = kernels.layout_of(quantize(jnp.zeros((4096, 128)), 'nf4:block=64'))
  for tokens in (16, 2048):
    for rank in (1, 16, 512, 4096):
      tiles = tiling.choose(tokens, 4096, layout, 2, False, rank)
      grid = tiles.grid(tokens, 4096, layout, False)
      assert tiles.held(grid, layout, 2, False, rank) <= tiling.VMEM_BYTES
      more = tiles.held(grid, layout, 2, False, rank) - tiles.held(grid, layout, 2, False)
      assert more >= rank * (tiles.tokens + tiles.columns) * 2
      moved = [tiles.moved(tokens, 4096, layout, 2, False, each) for each in (0, rank)]
      assert moved[1] - moved[0] >= rank * (tokens + 4096) * 2


# ---- the one matrix product --------------------------------------------------------------------------------


def both(name: str, compute: str = 'float32', remat: str = 'none', scheme: str = 'nf4:block=64') -> Callable:
  """Loss of three layers with adapters, with gradients for x, A and B, under vmap, scan and remat."""
  how = Numerics(policy(compute=compute), name)
  q = jax.vmap(lambda w: quantize(w, scheme))(0.1 * draw(3, 64, 64))

  def loss(x: jax.Array, adapters: Adapter) -> jax.Array:
    def layer(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
      return ops.dot(x, each[0], how, each[1], path=PATH), None

    layer = layer if remat == 'none' else jax.checkpoint(layer, policy=POLICIES[remat])
    return jnp.sum(jnp.sin(jax.lax.scan(layer, x, (q, adapters))[0].astype(jnp.float32)))

  return jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, None))


def trained(rank: int = 4) -> tuple[jax.Array, Adapter]:
  a, b = 0.1 * draw(3, rank, 64, seed=2), 0.1 * draw(3, rank, 64, seed=3)
  return draw(2, 5, 64, seed=1), Adapter(a, b, 0.5)


@functools.cache
def by_xla() -> Any:
  return jax.jit(both('xla'))(*trained())


@pytest.mark.parametrize(
  ('platform', 'remat'),
  [('tpu', 'none'), ('gpu', 'full'), ('tpu', 'full'), ('tpu', 'projections'), ('tpu', 'dots')],
)
def test_gradients_are_those_of_separate_products(platform: str, remat: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(dispatch, 'target_platform', lambda: platform)
  with kernels.noting() as notes:
    found = jax.jit(both('pallas_interpret', remat=remat))(*trained())
  by = {'pallas_interpret: low_bit_matmul'}
  assert notes == {(PATH, 'forward'): by, (PATH, 'adapter'): by, (PATH, 'dx'): by}
  # Sums of 64 numbers near 0.1 through three layers, in float32 in other orders.
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(by_xla()), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(other))))


def test_a_gradient_is_that_of_the_plain_sum():
  (x, adapters), q = trained(), quantize(draw(64, 32), 'nf4:block=64')
  a, b = adapters.a[0], draw(4, 32, seed=3)

  def plain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    high = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(jnp.sin(high(x, dequantize(q)) + 0.5 * high(high(x, a.T), b)))

  def fused(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    how = Numerics(policy(), 'pallas_interpret')
    return jnp.sum(jnp.sin(ops.dot(x, q, how, Adapter(a, b, 0.5), path=PATH)))

  found, wanted = (jax.grad(f, argnums=(0, 1, 2))(x, a, b) for f in (fused, plain))
  for one, other in zip(found, wanted, strict=True):
    # y is near 8 and errs by 64 roundings of float32, which its sine keeps; up to 64 such terms add up.
    np.testing.assert_allclose(one, other, atol=64 * 64 * 2.0**-24 * float(jnp.max(jnp.abs(other))))


@pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
def test_a_value_without_a_gradient_is_the_same(compute: str):
  """The kernel then has x·A by itself, and nothing else multiplies by A."""
  how = Numerics(policy(compute=compute), 'pallas_interpret')
  q, x = quantize(draw(128, 64), 'nf4:block=64'), draw(3, 128, dtype=compute)
  adapter = Adapter(draw(4, 128, seed=2), draw(4, 64, seed=3), 0.5)
  value = jax.jit(lambda x, adapter: ops.dot(x, q, how, adapter, path=PATH))
  found, kept = value(x, adapter), jax.vjp(value, x, adapter)[0]
  # All that XLA multiplies is in interpreted loops; x·A [3, 4] would be outside of them.
  lines = value.lower(x, adapter).compile().as_text().splitlines()
  assert not any(' dot(' in line and '[3,4]' in line for line in lines)
  # x·A may round to the other neighbour, times B; and y once more.
  largest = float(jnp.max(jnp.abs(kept.astype(jnp.float32))))
  np.testing.assert_allclose(
    found.astype(jnp.float32), kept.astype(jnp.float32), atol=8 * ROUNDING[compute] * largest
  )
