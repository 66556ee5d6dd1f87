"""Products of int8 codes: every backend, interpreted, against sums in int64; one contract for all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.int8_matmul import gpu, reference, tiling, tpu

BACKENDS: dict[str, Callable[..., jax.Array]] = {
  'reference': reference.matmul,
  'tpu': functools.partial(tpu.matmul, interpret=True),
  'gpu': functools.partial(gpu.matmul, interpret=True),
}
# Rows, columns and terms.
PRODUCTS = (
  ('nn', (131, 127, 17)), ('nt', (131, 127, 17)), ('tn', (131, 127, 17)), ('nn', (1, 1, 1)),
  ('nt', (7, 17, 131)), ('tn', (17, 127, 576)), ('nn', (64, 131, 127)), ('nt', (127, 64, 7)),
  ('tn', (131, 7, 17)), ('nn', (1, 576, 1536)), ('tn', (7, 1, 4200)),
  # Walked through in strips of rows.
  ('nn', (512, 64, 17)), ('tn', (512, 17, 64)),
  # In shares that whole steps fill, of which one more than there are would lie beyond the sum.
  ('nn', (64, 64, 1600)), ('nt', (8, 64, 3840)),
)  # fmt: skip


def draw(m: int, n: int, k: int, form: str) -> tuple[np.ndarray, ...]:
  """Codes of a and b, and their product in int64."""
  random = np.random.default_rng(m + n + k)
  a, b = random.integers(-127, 128, (m, k), np.int8), random.integers(-127, 128, (k, n), np.int8)
  exact = a.astype(np.int64) @ b.astype(np.int64)
  return a.T if form == 'tn' else a, b.T if form == 'nt' else b, exact


def scales(m: int, n: int) -> tuple[jax.Array, jax.Array]:
  random = np.random.default_rng(0)
  return tuple(jnp.asarray(random.uniform(1e-3, 1, size), jnp.float32) for size in ((m, 1), (1, n)))


@pytest.mark.parametrize('name', BACKENDS)
class TestContract:
  """What every backend guarantees."""

  @pytest.mark.parametrize('form,shape', PRODUCTS)
  def test_sums_are_exact_and_scaled_once(self, name: str, form: str, shape: tuple[int, int, int]):
    a, b, exact = draw(*shape, form)
    row, column = scales(*shape[:2])
    sums = BACKENDS[name](a, b, form=form, dtype=jnp.dtype('int32'))
    np.testing.assert_array_equal(sums, exact)
    found = BACKENDS[name](a, b, row, column, form=form)
    # The same float32 operations in the same order, on integers that float32 rounds alike.
    wanted = exact.astype(np.float32) * np.asarray(column) * np.asarray(row)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found, BACKENDS[name](a, b, row, column, form=form))

  def test_scales_may_be_one_or_none_and_results_narrow(self, name: str):
    a, b, exact = draw(17, 131, 64, 'nn')
    row, column = scales(17, 131)
    one = jnp.full((1, 1), 0.25)
    for r, c in ((row, one), (one, None), (None, column), (None, None)):
      wanted = exact.astype(np.float32)
      for scale in (c, r):
        wanted = wanted if scale is None else wanted * np.asarray(scale)
      np.testing.assert_array_equal(BACKENDS[name](a, b, r, c), wanted)
    found = BACKENDS[name](a, b, row, column, dtype=jnp.dtype('bfloat16'))
    full = BACKENDS[name](a, b, row, column)
    np.testing.assert_array_equal(found, full.astype(jnp.bfloat16))

  def test_the_largest_codes_add_up_exactly(self, name: str):
    # 127 · 127 · 2049 lies beyond 2^24, where float32 would have dropped bits.
    a, b = jnp.full((3, 2049), 127, jnp.int8), jnp.full((2049, 130), 127, jnp.int8)
    for b_signed in (b, -b):
      found = BACKENDS[name](a, b_signed, dtype=jnp.dtype('int32'))
      np.testing.assert_array_equal(found, int(b_signed[0, 0]) * 127 * 2049)

  def test_under_jit_vmap_and_scan(self, name: str):
    kernel = BACKENDS[name]
    pairs = [draw(7, 17, 64, 'nn') for _ in range(3)]
    a, b = (jnp.stack([pair[i] * (1 - 2 * (j % 2)) for j, pair in enumerate(pairs)]) for i in (0, 1))
    wanted = np.stack([np.int64(x) @ np.int64(y) for x, y in zip(np.asarray(a), np.asarray(b), strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(kernel))(a, b), wanted)
    _, scanned = jax.lax.scan(lambda _, each: (None, kernel(*each)), None, (a, b))
    np.testing.assert_array_equal(scanned, wanted)

  def test_what_cannot_be_is_said(self, name: str):
    ones = functools.partial(jnp.ones, dtype=jnp.int8)
    with pytest.raises(ValueError, match='do not contract'):
      BACKENDS[name](ones((3, 4)), ones((3, 4)))
    with pytest.raises(ValueError, match='may exceed an int32'):
      BACKENDS[name](ones((1, 133145)), ones((133145, 1)))
    with pytest.raises(ValueError, match=r'row_scale is \[2, 1\], not \[3, 1\] or \[1, 1\]'):
      BACKENDS[name](ones((3, 4)), ones((4, 3)), jnp.ones((2, 1)))
    with pytest.raises(ValueError, match='int32 sums take no scales'):
      BACKENDS[name](ones((3, 4)), ones((4, 3)), jnp.ones((3, 1)), dtype=jnp.dtype('int32'))
    with pytest.raises(ValueError, match='codes are int8'):
      BACKENDS[name](jnp.ones((3, 4)), ones((4, 3)))
    assert BACKENDS[name](ones((0, 4)), ones((4, 3))).shape == (0, 3)
    with pytest.raises(ValueError, match='nn, nt, tn'):
      BACKENDS[name](ones((3, 4)), ones((4, 3)), form='no')


def test_no_tile_is_raced_for():
  # Small tiles, so that the sum and both other axes are cut.
  a, b, exact = draw(131, 131, 256, 'nn')
  how = pltpu.InterpretParams(detect_races=True)
  found = tpu.matmul(a, b, dtype=jnp.dtype('int32'), interpret=how, tiles=tiling.Tiling(128, 128, 128))
  np.testing.assert_array_equal(found, exact)
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize('form', ['nn', 'nt', 'tn'])
@pytest.mark.parametrize('columns_first', [False, True])
@pytest.mark.parametrize('depth', [128, 256])
def test_a_tpu_computes_every_tile_in_either_order(form: str, columns_first: bool, depth: int):
  # Two rows and three columns of tiles, ragged at both ends, with the sum whole or in two parts.
  a, b, exact = draw(200, 300, 256, form)
  row, column = scales(200, 300)
  tiles = tiling.Tiling(128, 128, depth, columns_first)
  found = tpu.matmul(a, b, row, column, form=form, interpret=True, tiles=tiles)
  np.testing.assert_array_equal(found, exact.astype(np.float32) * np.asarray(column) * np.asarray(row))


@pytest.mark.parametrize('form', ['nn', 'nt', 'tn'])
@pytest.mark.parametrize('group', [1, 2, 3, 4])
def test_a_gpu_computes_every_tile_in_any_order(form: str, group: int, monkeypatch: pytest.MonkeyPatch):
  # Four rows and three columns of tiles, in groups of which the last may be shorter; ragged at each edge.
  cut = tiling.GpuTiling(16, 16, 32, splits=1, warps=4, group=group)
  monkeypatch.setattr(tiling, 'choose_gpu', lambda *_: cut)
  a, b, exact = draw(53, 37, 70, form)
  row, column = scales(53, 37)
  found = gpu.matmul.__wrapped__(a, b, row, column, form=form, interpret=True)
  np.testing.assert_array_equal(found, exact.astype(np.float32) * np.asarray(column) * np.asarray(row))


def test_tiles_fit_a_tpu_and_move_little():
  sizes = ((2048, 4096, 4096), (2048, 11008, 4096), (32, 4096, 11008), (8192, 8192, 8192))
  for rows, columns, depth in sizes:
    tiles = tiling.choose('nn', rows, columns, depth, 4)
    assert tiles.held(rows, columns, depth, 4) <= tiling.VMEM_BYTES
    for size, tile in ((rows, tiles.rows), (columns, tiles.columns), (depth, tiles.depth)):
      assert tile == size or tile % tiling.LANES == 0
    assert depth % tiles.depth == 0
    least = rows * depth + depth * columns + 4 * rows * columns
    assert tiles.moved(rows, columns, depth, 4) <= (1.1 if rows < 8192 else 2) * least


def test_generations_without_integers_are_refused():
  assert 'multiplies no integers' in (tpu.obstacle('TPU v4') or '')
  assert tpu.obstacle('TPU v5 lite') is None


def test_no_share_of_a_sum_on_a_gpu_is_empty():
  for rows in (1, 8, 64, 2048):
    for columns in (17, 64, 576, 1024, 4096):
      for depth in (1, 17, 576, 896, 1600, 3840, 11008, 13824):
        tiles = tiling.candidates_gpu(rows, columns, depth)[0]
        assert (tiles.splits - 1) * tiles.steps(depth) * tiles.depth < depth


def test_shares_beyond_the_sum_add_nothing():
  a, b, exact = draw(8, 64, 640, 'nn')
  tiles = tiling.GpuTiling(16, 64, 128, splits=4, warps=4)
  assert tiles.steps(640) * 128 * 3 >= 640  # the last share begins where the sum has ended
  found = gpu.matmul(jnp.asarray(a), jnp.asarray(b), dtype=jnp.dtype('int32'), interpret=True, tiles=tiles)
  np.testing.assert_array_equal(found, exact)
