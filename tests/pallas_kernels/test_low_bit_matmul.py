"""Each kernel, interpreted, against the reference; the reference against the weights' own decoding."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.low_bit_matmul import gpu, reference, tiling, tpu
from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul.reference import LowRank
from pallas_kernels.low_bit_matmul.tiling import Tiling
from qjax import kernels, ops
from qjax.adapters import Adapter
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant.qtensor import QTensor, dequantize, quantize

# (scheme, (M, K, N), dtype of x): every format, every granularity, blocks of 32, 64 and 128, sizes that tiles
# divide, and sizes that nothing divides.
CASES = (
  ('nf4:block=64', (1, 64, 128), 'bfloat16'),
  ('nf4:block=64', (7, 131, 127), 'float32'),
  ('nf4:block=32,dq', (64, 1536, 131), 'bfloat16'),
  ('bnb_fp4:block=64', (5, 127, 7), 'float32'),
  ('fp4:block=128', (17, 576, 64), 'bfloat16'),
  ('nf3:block=64', (17, 576, 64), 'float32'),
  ('nf3:block=128', (7, 131, 127), 'bfloat16'),
  ('nf2:block=64', (7, 131, 127), 'float32'),
  ('int4:block=32', (64, 131, 17), 'bfloat16'),
  ('int4:block=64,asym', (7, 131, 127), 'float32'),
  ('int4:axis=channel', (20, 1300, 520), 'float32'),
  ('int4:axis=tensor', (127, 17, 1), 'bfloat16'),
  ('int4:tile=64x32', (7, 131, 127), 'float32'),
  ('int3:block=32', (1, 1536, 64), 'float32'),
  ('int3:axis=channel', (7, 131, 127), 'bfloat16'),
  ('int2:block=128', (64, 576, 131), 'float32'),
  ('int8:axis=channel', (33, 1536, 600), 'bfloat16'),
  ('int8:block=64', (7, 131, 127), 'float32'),
  ('int8:axis=channel,asym', (17, 127, 131), 'float32'),
)
# The same, and the rank of an adapter that is added: a shorter last block, scales in 8 bits, shares of a sum,
# and more than a step of the sum over the rank.
ADAPTED = (
  ('nf4:block=64', (7, 131, 127), 'float32', 4),
  ('nf4:block=32,dq', (17, 576, 131), 'bfloat16', 1),
  ('int4:axis=channel', (1, 1536, 64), 'bfloat16', 16),
  ('int3:block=32', (131, 576, 64), 'float32', 130),
)
# Half the distance between neighbours at 1.
ROUNDING = {'float32': 2.0**-24, 'bfloat16': 2.0**-9, 'float16': 2.0**-12}


def draw(*shape: int, seed: int = 0, dtype: str = 'float32') -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def adapter_of(x: jax.Array, n: int, rank: int, has_a: bool) -> LowRank:
  """One with numbers near those of training; `has_a` is whether a kernel may multiply x by A itself."""
  a = 0.1 * draw(rank, x.shape[1], seed=2).astype(x.dtype)
  b = draw(rank, n, seed=3).astype(x.dtype)
  low = jnp.dot(x, a.T, precision='highest', preferred_element_type=jnp.float32).astype(x.dtype)
  # What nothing reads may be wrong.
  return LowRank(jnp.full_like(low, jnp.nan) if has_a else low, b, 0.5, a if has_a else None)


def raw(q: QTensor) -> tuple:
  return *kernels.arrays_of(q), kernels.layout_of(q)


@pytest.mark.parametrize(('scheme', 'shape', 'dtype'), CASES)
def test_the_reference_decodes_the_weight(scheme: str, shape: tuple[int, int, int], dtype: str):
  q = quantize(draw(*shape[1:]), scheme)
  np.testing.assert_array_equal(reference.dequantize(*raw(q)), dequantize(q))


@pytest.mark.parametrize('inputs,block', [(44, 20), (9, 9)])
def test_three_bits_of_blocks_that_no_byte_ends(inputs: int, block: int):
  q = quantize(draw(inputs, 5), f'int3:block={block}')
  np.testing.assert_array_equal(reference.dequantize(*raw(q)), dequantize(q))


class Contract:
  """What every kernel keeps. A subclass names the platform, whose row of the table is tested."""

  platform: str
  half: tuple[str, ...] = ()

  @property
  def products(self) -> dict[str, Callable[..., jax.Array]]:
    (row,) = (r for r in dispatch.TABLE if r.op == dispatch.LOW_BIT and r.platform == self.platform)
    return dict(row.products)

  def check(self, scheme: str, shape: tuple[int, int, int], dtype: str) -> None:
    tokens, k, n = shape
    q = quantize(draw(k, n), scheme)
    w = np.abs(np.asarray(dequantize(q), np.float64))
    for name, size in (('matmul', w), ('matmul_transposed', w.T)):
      given = draw(tokens, size.shape[0], seed=1, dtype=dtype)
      found = self.products[name](given, *raw(q), interpret=True)
      wanted = getattr(reference, name)(given, *raw(q))
      assert found.dtype == jnp.float32 and found.shape == wanted.shape
      # Both add up |x| · |w| in float32, in their own orders. A decoded weight is rounded once in either, but
      # its product and sum in float32 may be fused in one, after which the roundings may differ by a step. An
      # offset may be larger than what is left after it is added: what is lost there counts, too.
      total = np.abs(np.asarray(given, np.float64)) @ size
      unit = 2.0**-24 * (size.shape[0] + 2) + 2 * ROUNDING[dtype]
      lost = 0.0
      if q.offset is not None:
        lost = 2.0**-22 * float(jnp.max(jnp.abs(q.offset))) * np.sum(np.abs(given), axis=1, keepdims=True)
      assert np.all(np.abs(found - wanted) <= unit * total + np.asarray(lost) + 1e-30)
      np.testing.assert_array_equal(found, self.products[name](given, *raw(q), interpret=True))

  @pytest.mark.parametrize(('scheme', 'shape', 'dtype'), CASES)
  def test_both_products_are_those_of_the_reference(
    self, scheme: str, shape: tuple[int, int, int], dtype: str
  ):
    self.check(scheme, shape, dtype)

  @pytest.mark.parametrize(('scheme', 'shape', 'dtype', 'rank'), ADAPTED)
  def test_an_adapter_is_added_to_the_result(
    self, scheme: str, shape: tuple[int, int, int], dtype: str, rank: int
  ):
    tokens, k, n = shape
    q, x = quantize(draw(k, n), scheme), draw(tokens, k, seed=1, dtype=dtype)
    adapter = adapter_of(x, n, rank, has_a=False)
    found = self.products['matmul'](x, *raw(q), interpret=True, adapter=adapter)
    wanted = reference.matmul(x, *raw(q), adapter)
    plain = self.products['matmul'](x, *raw(q), interpret=True)
    # Sums of float32 in other orders; decoded weights may differ by one step of their dtype, as above.
    terms = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dequantize(q), np.float64))
    extra = 0.5 * np.abs(np.asarray(adapter.low, np.float64)) @ np.abs(np.asarray(adapter.b, np.float64))
    bound = (2.0**-24 * (k + 2) + 2 * ROUNDING[dtype]) * terms + 2.0**-24 * (rank + k + 4) * (terms + extra)
    assert np.all(np.abs(found - wanted) <= bound)
    # What was added to the same kernel's product is the adapter's part, whatever the bound above lets pass.
    part = reference.matmul(x, *raw(q), adapter) - reference.matmul(x, *raw(q))
    assert np.all(np.abs(found - plain - part) <= 2.0**-22 * (rank + k + 4) * (terms + extra))

  def test_dot_adds_an_adapter_with_its_gradients(self, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, 'target_platform', lambda: self.platform)
    stack = jax.vmap(lambda w: quantize(w, 'nf4:block=64'))(draw(3, 64, 64))
    x, a, b = draw(2, 5, 64, seed=1), 0.1 * draw(3, 4, 64, seed=2), draw(3, 4, 64, seed=3)

    def total(args: Any, name: str) -> jax.Array:
      x, a, b = args
      how = Numerics(policy(), name)

      def layer(x: jax.Array, weight: Any) -> jax.Array:
        q, a, b = weight
        adapter = Adapter(a, b, 0.5, 0.25)
        return ops.dot(x, q, how, adapter, dropout_key=jax.random.key(1), path='layers/mlp/down/kernel')

      step = lambda x, weight: (jax.checkpoint(layer)(x, weight) * 0.1, None)
      return jnp.sum(jax.lax.scan(step, x, (stack, a, b))[0])

    def both(name: str) -> Callable[[Any], Any]:
      over_x = lambda x: jax.value_and_grad(lambda args: total(args, name))((x, a, b))
      return jax.vmap(over_x)

    found, wanted = jax.jit(both('pallas_interpret'))(x), jax.jit(both('xla'))(x)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
      assert float(jnp.max(jnp.abs(theirs))) > 1e-3
    with kernels.noting() as notes:
      jax.make_jaxpr(lambda x: total((x, a, b), 'pallas_interpret'))(x[0])
    assert notes[('layers/mlp/down/kernel', 'adapter')] == {'pallas_interpret: low_bit_matmul'}

  def test_in_half_precision(self):
    for dtype in self.half:
      self.check('nf4:block=64', (7, 131, 127), dtype)

  def test_integers_add_up_exactly(self):
    # 127 everywhere: every partial sum is a whole number below 2^24 times one scale.
    q = quantize(jnp.full((1024, 130), 127.0), 'int8:axis=channel')
    y = self.products['matmul'](jnp.ones((16, 1024)), *raw(q), interpret=True)
    np.testing.assert_array_equal(y, jnp.full((16, 130), 127.0 * 1024))

  def test_what_lies_beside_the_weight_is_not_read(self):
    # Of the last block one input exists; its other codes are zeros, which stand for -1 in this table.
    q = quantize(jnp.ones((65, 3)), 'nf4:block=64')
    dx = self.products['matmul_transposed'](jnp.ones((2, 3)), *raw(q), interpret=True)
    np.testing.assert_array_equal(dx, jnp.full((2, 65), 3.0))
    y = self.products['matmul'](jnp.ones((2, 65)), *raw(q), interpret=True)
    np.testing.assert_array_equal(y, jnp.full((2, 3), 65.0))

  def test_dot_uses_it_under_jit_scan_remat_and_vmap(self, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, 'target_platform', lambda: self.platform)
    stack = jax.vmap(lambda w: quantize(w, 'nf4:block=64'))(draw(3, 64, 64))
    x = draw(2, 5, 64, seed=1)

    def total(x: jax.Array, name: str) -> jax.Array:
      how = Numerics(policy(), name)
      layer = jax.checkpoint(lambda x, q: ops.dot(x, q, how, path='layers/mlp/down/kernel'))
      return jnp.sum(jax.lax.scan(lambda x, q: (layer(x, q) * 0.1, None), x, stack)[0])

    def both(name: str) -> Callable[[jax.Array], Any]:
      return jax.vmap(jax.value_and_grad(lambda x: total(x, name)))

    text = str(jax.make_jaxpr(both('pallas_interpret'))(x))
    assert 'low_bit_matmul' in text and 'low_bit_matmul_transposed' in text
    found, wanted = jax.jit(both('pallas_interpret'))(x), jax.jit(both('xla'))(x)
    # Three layers that each add up 64 products of numbers near 1, and shrink by 0.1.
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-6)


class TestTPU(Contract):
  platform = 'tpu'

  @pytest.mark.parametrize('name', ['matmul', 'matmul_transposed'])
  def test_no_races_and_no_reads_out_of_bounds(self, name: str, capsys: pytest.CaptureFixture):
    # Several tiles along each axis. What a tile holds beyond an array is NaN, which the mask must drop.
    q = quantize(draw(600, 520), 'int8:axis=channel')
    given = draw(17, 600 if name == 'matmul' else 520, seed=1)
    how = pltpu.InterpretParams(detect_races=True)
    found = self.products[name](given, *raw(q), interpret=how)
    wanted = getattr(reference, name)(given, *raw(q))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(wanted))))
    assert 'RACE' not in capsys.readouterr().out.upper()

  @pytest.mark.parametrize('bits', [8, 4, 3, 2])
  def test_tiles_cover_what_a_tpu_addresses_and_holds(self, bits: int):
    for k in (17, 64, 576, 1536, 4096, 11008):
      for block in (32, 64, 128, k):
        layout = layouts.Layout(k, block, bits)
        if tpu.obstacle(layout) is not None:
          continue
        for tokens, outputs in ((16, 131), (2048, 4096), (3000, 11008)):
          for transposed in (False, True):
            tiles = tiling.choose(tokens, outputs, layout, 2, transposed)
            grid = tiles.grid(tokens, outputs, layout, transposed)
            assert layout.blocks > 1 or layout.rows % tiles.rows == 0
            assert tiles.rows == layout.rows or math.prod(tiles.runs(layout)) % tiling.LANES == 0
            assert tiles.columns == outputs or tiles.columns % tiling.LANES == 0
            assert tiles.blocks(layout) in (1, layout.blocks) or tiles.blocks(layout) % tiling.SUBLANES == 0
            assert tiles.held(grid, layout, 2, transposed) <= tiling.VMEM_BYTES

  @pytest.mark.parametrize('scheme', ['nf4:block=32,dq', 'int4:axis=channel'])
  def test_few_rows_are_multiplied_by_an_adapter_as_they_pass(
    self, scheme: str, capsys: pytest.CaptureFixture
  ):
    # The sum is whole, or in parts of which the last goes beyond the inputs; no program reads x·A.
    q, x = quantize(draw(1280, 300), scheme), draw(5, 1280, seed=1)
    layout = raw(q)[-1]
    adapter = adapter_of(x, 300, 4, has_a=True)
    wanted = reference.matmul(x, *raw(q), adapter_of(x, 300, 4, has_a=False))
    for rows in (layout.rows, 512 if layout.blocks > 1 else 128):
      tiles = Tiling(16, rows, 300)
      found = self.products['matmul'](x, *raw(q), interpret=True, tiles=tiles, adapter=adapter)
      # Products of numbers near 1, and of x·A near 4, in float32 added up in another order.
      np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=5e-4)
    how = pltpu.InterpretParams(detect_races=True)
    found = self.products['matmul'](x, *raw(q), interpret=how, tiles=tiles, adapter=adapter)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=5e-4)
    assert 'RACE' not in capsys.readouterr().out.upper()

  def test_rows_below_a_tile_that_stays_get_their_part_of_an_adapter(self):
    q, x = quantize(draw(1024, 700), 'nf4:block=32'), draw(40, 1024, seed=1)
    adapter = adapter_of(x, 700, 4, has_a=False)
    wanted = reference.matmul(x, *raw(q), adapter)
    for rows in (raw(q)[-1].rows, 384):
      for stays in (False, True):
        tiles = Tiling(16, rows, 256, stays)
        found = self.products['matmul'](x, *raw(q), interpret=True, tiles=tiles, adapter=adapter)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=5e-4)

  def test_a_tile_that_stays_is_decoded_once_for_all_rows(self):
    # Rows in three tiles below each of the weight; a sum in parts, with inputs or columns beyond its end.
    for scheme, tokens, k, n in (('nf4:block=32,dq', 40, 1024, 700), ('int4:axis=channel', 40, 512, 700)):
      q = quantize(draw(k, n), scheme)
      args = raw(q)
      parts = (args[-1].rows, 384 if args[-1].blocks > 1 else 128)
      cuts = [Tiling(16, rows, 256, stays) for rows in parts for stays in (False, True)]
      for name, size in (('matmul', k), ('matmul_transposed', n)):
        given = draw(tokens, size, seed=1)
        wanted = getattr(reference, name)(given, *args)
        for cut in cuts:
          found = self.products[name](given, *args, interpret=True, tiles=cut)
          # Both add up the same products of numbers near 1 in float32.
          np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-4)

class TestGPU(Contract):
  platform = 'gpu'
  half = ('float16',)

  def test_tiles_are_powers_of_two_that_cover_the_weight(self):
    for k in (17, 64, 131, 576, 1536, 4096):
      for block in (8, 32, 40, 64, 128, k):
        for bits in (8, 4, 3, 2):
          for transposed in (False, True):
            layout = layouts.Layout(k, block, bits)
            tiles = tiling.choose_gpu(7, 600, layout, 2, transposed)
            for size in (tiles.tokens, tiles.rows, tiles.columns):
              assert size >= tiling.LEAST and size & (size - 1) == 0
            assert tiles.tiles_of_block(layout) * tiles.rows >= layout.rows_of_block

  def test_few_rows_are_the_work_of_many_programs(self):
    layout = layouts.Layout(4096, 64, 4)
    for transposed in (False, True):
      assert tiling.choose_gpu(1, 4096, layout, 2, transposed).splits > 1
      assert tiling.choose_gpu(4096, 4096, layout, 2, transposed).splits == 1

  def test_shares_of_the_summed_axis_add_up(self):
    # 49 tiles of rows in 12 shares of 5: the last ones have less, and one holds the shorter last block.
    self.check('nf4:block=32', (1, 1553, 64), 'float32')


@pytest.mark.parametrize('path,scheme', [
  ('layers/mlp/up/kernel', 'nf4:block=64'), ('layers/mlp/down/kernel', 'int4:block=32,asym'),
  ('layers/mlp/down/kernel', 'int8:axis=channel'), ('layers/mlp/down/kernel', 'nf4:block=96'),
])  # fmt: skip
def test_each_device_of_a_mesh_multiplies_its_part(path: str, scheme: str):
  mesh = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  q, x = quantize(draw(256, 128), scheme), draw(4, 3, 256, seed=1)

  factors = 0.1 * draw(4, 256, seed=2), draw(4, 128, seed=3)

  def loss(x: jax.Array, factors: Any, name: str) -> jax.Array:
    adapter = None if factors is None else Adapter(*factors, 0.5, 0.0)
    y = ops.dot(x, q, Numerics(policy(), name), adapter, path=path)
    return jnp.sum(jnp.sin(0.1 * y))

  for given in (None, factors):
    step = jax.value_and_grad(loss, argnums=(0, 1) if given else 0)
    wanted = step(x, given, 'xla')
    with jax.set_mesh(mesh):
      on_mesh = jax.jit(step, static_argnums=2)
      text = on_mesh.lower(x, given, 'pallas_interpret').as_text()
      found = on_mesh(x, given, 'pallas_interpret')
      value = jax.jit(loss, static_argnums=2)(x, given, 'pallas_interpret')
    assert 'manual_computation' in text or 'shmap_body' in text
    np.testing.assert_allclose([found[0], value], [wanted[0]] * 2, rtol=1e-4)
    # 0.1 · y is near 2 and errs by up to 1e-5; the gradient adds up 128 such terms.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found[1], wanted[1])


@pytest.mark.parametrize(
  'name,scheme,compute,says',
  [
    ('pallas_tpu', 'fp8_e4m3:axis=channel', 'bfloat16', 'patterns of floats'),
    ('pallas_gpu', 'fp8_e4m3:axis=channel', 'bfloat16', 'patterns of floats'),
    ('pallas_tpu', 'int4:block=8', 'bfloat16', 'rows of bytes'),
    ('pallas_tpu', 'nf4:block=64', 'float16', 'no products in float16, only in bfloat16, float32'),
    ('pallas', 'nf4:block=64', 'bfloat16', 'runs on a cpu.*pallas_interpret runs here'),
  ],
)
def test_what_a_kernel_cannot_do_is_said_and_auto_goes_on(name: str, scheme: str, compute: str, says: str):
  q, x = quantize(draw(64, 16), scheme), draw(3, 64, dtype=compute)
  with pytest.raises(NotImplementedError, match=f"kernels = '{name}'.*{says}.*use kernels = 'auto' or 'xla'"):
    ops.dot(x, q, Numerics(policy(compute=compute), name), path='layers/mlp/down/kernel')
  y = ops.dot(x, q, Numerics(policy(compute=compute)), path='layers/mlp/down/kernel')
  assert np.isfinite(np.asarray(y, np.float32)).all()


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_the_default_goes_by_the_platform_compiled_for(platform: str):
  q = quantize(draw(64, 16), 'nf4:block=64')
  layout = kernels.layout_of(q)
  found = dispatch.choose(dispatch.LOW_BIT, 'auto', layout, 'bfloat16', platform=platform)
  assert found is not None and found.implementation.platform == platform and not found.interpret
  assert dispatch.choose(dispatch.LOW_BIT, 'auto', layout, 'bfloat16', platform='cpu') is None
  assert dispatch.choose(dispatch.LOW_BIT, 'xla', layout, 'bfloat16', platform=platform) is None
  half = dispatch.choose(dispatch.LOW_BIT, 'auto', layout, 'float16', platform=platform)
  assert (half is None) == (platform == 'tpu')


def test_kernels_say_what_they_cost():
  q, x = quantize(draw(4096, 512), 'nf4:block=64'), jnp.zeros((256, 4096), jnp.bfloat16)
  for module in (tpu, gpu):
    text = str(jax.make_jaxpr(lambda x, module=module: module.matmul(x, *raw(q)))(x))
    assert f'flops={2 * 256 * 4096 * 512}' in text
