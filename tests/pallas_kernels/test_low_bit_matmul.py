"""Each kernel, interpreted, against the reference; the reference against the weights' own decoding."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from experiments import kernel_cases
from pallas_kernels import dispatch
from pallas_kernels.low_bit_matmul import gpu, reference, tiling, tpu
from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul.tiling import GpuTiling, Tiling
from qjax import kernels, ops
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
  ('int4:tile=64x32,asym', (7, 131, 127), 'float32'),
  ('nf4:tile=64x32,dq', (7, 131, 127), 'float32'),
  ('nf4:block=64,dq', (7, 131, 700), 'float32'),
  ('int3:block=32', (1, 1536, 64), 'float32'),
  ('int3:axis=channel', (7, 131, 127), 'bfloat16'),
  ('int2:block=128', (64, 576, 131), 'float32'),
  ('int8:axis=channel', (33, 1536, 600), 'bfloat16'),
  ('int8:block=64', (7, 131, 127), 'float32'),
  ('int8:axis=channel,asym', (17, 127, 131), 'float32'),
)
# Half the distance between neighbours at 1.
ROUNDING = {'float32': 2.0**-24, 'bfloat16': 2.0**-9, 'float16': 2.0**-12}


def draw(*shape: int, seed: int = 0, dtype: str = 'float32') -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def raw(q: QTensor) -> tuple:
  return *kernels.arrays_of(q), kernels.layout_of(q)


@pytest.mark.parametrize(('scheme', 'shape', 'dtype'), CASES)
def test_the_reference_decodes_the_weight(scheme: str, shape: tuple[int, int, int], dtype: str):
  q = quantize(draw(*shape[1:]), scheme)
  np.testing.assert_array_equal(reference.dequantize(*raw(q)), dequantize(q))


@pytest.mark.parametrize('numbers', ['nf4', 'nf3', 'nf2', 'fp4', 'bnb_fp4', 'int8', 'int4', 'int3', 'int2'])
@pytest.mark.parametrize('shared', ['block=32', 'tile=32x16', 'tile=32x1', 'tile=48x700', 'axis=channel'])
def test_what_kernels_are_given_is_the_weight(numbers: str, shared: str):
  options = ['', ',dq'] if shared[0] in 'bt' else ['']
  options += [',asym'] if numbers.startswith('int') else []
  for option in options + ([',scale=e8m0'] if numbers in ('fp4', 'int4') else []):
    q = quantize(draw(131, 97), f'{numbers}:{shared}{option}')
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

  def test_no_rows_have_no_results(self):
    q = quantize(draw(64, 8), 'nf4:block=32')
    for name, (given, wanted) in (('matmul', (64, 8)), ('matmul_transposed', (8, 64))):
      assert self.products[name](jnp.zeros((0, given)), *raw(q), interpret=True).shape == (0, wanted)

  def test_operands_that_do_not_belong_together_are_refused(self):
    x, g, q = draw(7, 100), draw(7, 48), quantize(draw(100, 48), 'int4:block=32,asym')
    codes, scale, offset, layout = raw(q)
    *_, in_8_bits = raw(quantize(draw(100, 48), 'nf4:block=32,dq'))
    for given, says in (
      ((x[:, :64], codes, scale, offset, layout), r'left operand is float32 \[7, 64\], not \[M, 100\]'),
      ((x.astype(jnp.int32), codes, scale, offset, layout), 'left operand is int32'),
      ((x, codes[:-1], scale, offset, layout), r'array of codes is uint8 \[49, 48\], not uint8 \[50, N\]'),
      ((x, codes.astype(jnp.int8), scale, offset, layout), 'array of codes is int8'),
      ((x, codes, scale[:2], offset, layout), r'scale is \[2, 48\], not \[4, 48 or 1\]'),
      ((x, codes, scale[:, :24], offset, layout), r'scale is \[4, 24\]'),
      ((x, codes, scale, None, layout), 'offset is missing'),
      ((x, codes, scale, offset[:1], layout), r'offset is \[1, 48\]'),
      ((x, codes, scale, None, in_8_bits), 'not in 8 bits'),
    ):
      with pytest.raises(ValueError, match=says):
        self.products['matmul'](*given, interpret=True)
      with pytest.raises(ValueError, match='left operand'):
        self.products['matmul_transposed'](g[:, :40], *raw(q), interpret=True)

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
  @pytest.mark.parametrize('stays', [False, True])
  @pytest.mark.parametrize(
    ('scheme', 'inputs', 'rows'), [('int8:axis=channel', 384, 128), ('nf4:block=64', 1100, 256)]
  )
  def test_no_races_and_no_reads_out_of_bounds(
    self, name: str, stays: bool, scheme: str, inputs: int, rows: int, capsys: pytest.CaptureFixture
  ):
    # Several tiles along each axis. What a tile holds beyond an array is NaN, which the mask must drop.
    q = quantize(draw(inputs, 300), scheme)
    given = draw(37, inputs if name == 'matmul' else 300, seed=1)
    tiles = tiling.Tiling(16, rows, 128, stays)
    assert min(tiles.grid(37, 300, raw(q)[-1], name != 'matmul')) >= 3
    how = pltpu.InterpretParams(detect_races=True)
    found = self.products[name](given, *raw(q), interpret=how, tiles=tiles)
    wanted = getattr(reference, name)(given, *raw(q))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(wanted))))
    assert 'RACE' not in capsys.readouterr().out.upper()

  def test_scales_in_8_bits_are_read_first_where_that_moves_less(self, monkeypatch: pytest.MonkeyPatch):
    layout = layouts.Layout(11008, 64, 4, double_quantized=True)
    for transposed in (False, True):
      assert tiling.reads_scales_first(2048, 4096, layout, 2, transposed)
      assert not tiling.reads_scales_first(16, 4096, layout, 2, transposed)
    # Of a product whose sizes no other test has: one that was traced before would not ask.
    monkeypatch.setattr(tiling, 'reads_scales_first', lambda *args: True)
    self.check('nf4:block=64,dq', (9, 219, 37), 'float32')
    q = quantize(draw(219, 37), 'nf4:block=64,dq')
    codes, scale, offset, layout = raw(q)
    for name, given in (('matmul', draw(10, 219)), ('matmul_transposed', draw(10, 37))):
      product = partial(self.products[name], offset=offset, layout=layout)
      (call,) = kernel_cases.pallas_calls(jax.make_jaxpr(product)(given, codes, scale).jaxpr)
      assert {each.aval.dtype.name for each in call.invars} == {'float32', 'uint8'}

  def test_all_rows_of_a_tall_tile_are_multiplied(self):
    assert tiling.choose(512, 128, raw(quantize(draw(128, 128), 'nf4:block=64'))[-1], 4, False).tokens == 512
    self.check('nf4:block=64', (512, 128, 128), 'float32')

  def test_a_tall_tile_meets_each_part_of_a_sum(self):
    q = quantize(draw(384, 300), 'int8:axis=channel')
    for name, size, tiles in (
      ('matmul', 384, tiling.Tiling(512, 128, 300)), ('matmul_transposed', 300, tiling.Tiling(512, 384, 128))
    ):  # fmt: skip
      assert tiles.grid(512, 300, raw(q)[-1], name != 'matmul') == (1, 1, 3)
      given = draw(512, size, seed=1)
      found = self.products[name](given, *raw(q), interpret=True, tiles=tiles)
      wanted = getattr(reference, name)(given, *raw(q))
      np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(wanted))))

  @pytest.mark.parametrize('bits', [8, 4, 3, 2])
  @pytest.mark.parametrize('double_quantized', [False, True])
  def test_tiles_cover_what_a_tpu_addresses_and_holds(self, bits: int, double_quantized: bool):
    for k in (17, 64, 576, 1536, 4096, 11008):
      for block in (32, 64, 128, 512, k):
        resting = layouts.Layout(k, block, bits, double_quantized=double_quantized)
        if tpu.obstacle(resting) is not None:
          continue
        for tokens, outputs in ((16, 131), (2048, 4096), (3000, 11008)):
          for transposed in (False, True):
            is_read = tiling.reads_scales_first(tokens, outputs, resting, 2, transposed)
            layout = dataclasses.replace(resting, double_quantized=double_quantized and not is_read)
            tiles = tiling.choose(tokens, outputs, layout, 2, transposed)
            grid = tiles.grid(tokens, outputs, layout, transposed)
            assert layout.blocks > 1 or layout.rows % tiles.rows == 0
            assert tiles.rows == layout.rows or math.prod(tiles.runs(layout)) % tiling.LANES == 0
            assert tiles.columns == outputs or tiles.columns % tiling.LANES == 0
            assert tiles.blocks(layout) in (1, layout.blocks) or tiles.blocks(layout) % tiling.SUBLANES == 0
            assert tiles.held(grid, layout, 2, transposed) <= tiling.VMEM_BYTES

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

  @pytest.mark.parametrize('scheme', ['nf4:block=32', 'nf3:block=64', 'int8:axis=channel'])
  @pytest.mark.parametrize('group', [1, 2, 4])
  def test_every_tile_is_computed_in_any_order(self, scheme: str, group: int):
    # Four tiles of tokens, in four, two or one groups; edges are ragged both ways.
    q = quantize(draw(256, 75), scheme)
    args = raw(q)
    for name, size in (('matmul', 256), ('matmul_transposed', 75)):
      given = draw(53, size, seed=1)
      cut = GpuTiling(16, 16, 32, group=group, stack=2 if name == 'matmul_transposed' else 1)
      assert cut.grid(53, 75, args[-1], name == 'matmul_transposed')[0] == 4
      found = self.products[name](given, *args, interpret=True, tiles=cut)
      # Both add up the same products of numbers near 1 in float32.
      np.testing.assert_allclose(found, getattr(reference, name)(given, *args), rtol=1e-5, atol=2e-4)

  def test_long_inputs_take_large_tiles_whose_stacks_divide_the_weight(self):
    for k in (4096, 4064, 11008, 4992):
      for block in (32, 64, 128, k):
        for bits in (8, 4, 3, 2):
          layout = layouts.Layout(k, block, bits)
          forward, back = (tiling.choose_gpu(2048, 4096, layout, 2, each) for each in (False, True))
          assert (forward.tokens, forward.columns, back.tokens) == (128, 128, 128)
          assert back.row_tiles(layout) % back.stack == 0
          assert back.stack * back.rows * layout.planes <= 128
          assert tiling.choose_gpu(2048, 4096, layout, 4, True).tokens == 32
    with pytest.raises(ValueError, match='stack = 2 does not divide 3 tiles'):
      GpuTiling(16, 32, 64, stack=2).grid(16, 64, layouts.Layout(192, 64, 4), True)
    for each in tiling.candidates_gpu(2048, 4096, layout, 2, True):
      assert each.row_tiles(layout) % each.stack == 0 and each.group <= each.grid(2048, 4096, layout, True)[0]


@pytest.mark.parametrize('path,scheme,n', [
  ('layers/mlp/up/kernel', 'nf4:block=64', 128), ('layers/mlp/down/kernel', 'int4:block=32,asym', 128),
  ('layers/mlp/down/kernel', 'int8:axis=channel', 128), ('layers/mlp/down/kernel', 'nf4:block=96', 128),
  # One whole block and a shorter one, between which inputs are not split.
  ('layers/mlp/down/kernel', 'int8:block=192', 128),
  # Groups of scales that each device has whole, and one that two devices would share.
  ('layers/mlp/up/kernel', 'nf4:block=64,dq', 1024), ('layers/mlp/up/kernel', 'nf4:block=64,dq', 384),
])  # fmt: skip
def test_each_device_of_a_mesh_multiplies_its_part(path: str, scheme: str, n: int):
  mesh = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  q, x = quantize(draw(256, n), scheme), draw(4, 3, 256, seed=1)

  def loss(x: jax.Array, name: str) -> jax.Array:
    y = ops.dot(x, q, Numerics(policy(), name), path=path)
    return jnp.sum(jnp.sin(0.1 * y))

  wanted = jax.value_and_grad(loss)(x, 'xla')
  with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    text = step.lower(x, 'pallas_interpret').as_text()
    found = step(x, 'pallas_interpret')
  assert 'manual_computation' in text or 'shmap_body' in text
  np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4)
  # 0.1 · y is near 2 and errs by up to 1e-5; the gradient adds up n such terms.
  np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=1e-6 * max(n, 100))


@pytest.mark.parametrize(('names', 'kind', 'says'), [
  (('data', 'fsdp', 'tensor'), 'Explicit', 'the axes of the mesh are explicit'),
  (('x', 'y', 'z'), 'Auto', 'the axes of the mesh are x, y, z, not data, fsdp, tensor'),
])  # fmt: skip
def test_other_meshes_multiply_by_xla(
  names: tuple[str, ...], kind: str, says: str, monkeypatch: pytest.MonkeyPatch
):
  x, q = draw(4, 64), quantize(draw(64, 32), 'int8:axis=channel')
  path, token = 'layers/mlp/down/kernel', (('.*', 'int8:axis=token'),)
  with jax.set_mesh(jax.make_mesh((2, 2, 2), names, axis_types=(getattr(jax.sharding.AxisType, kind),) * 3)):
    for inputs in ((), token):
      with pytest.raises(dispatch.Unserved, match=says):
        ops.dot(x, q, Numerics(policy(), 'pallas_interpret', inputs), path=path)
    # No kernel for a TPU could be lowered here.
    monkeypatch.setattr(dispatch, 'target_platform', lambda: 'tpu')
    for inputs in ((), token):
      found = ops.dot(x, q, Numerics(policy(), 'auto', inputs), path=path)
      np.testing.assert_array_equal(found, ops.dot(x, q, Numerics(policy(), 'xla', inputs), path=path))


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
def test_what_a_kernel_cannot_do_is_said_and_auto_goes_on(
  name: str, scheme: str, compute: str, says: str, monkeypatch: pytest.MonkeyPatch
):
  if name != 'pallas':
    monkeypatch.setattr(dispatch, 'target_platform', lambda: name.removeprefix('pallas_'))
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
