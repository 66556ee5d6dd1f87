"""The TPU kernel, interpreted, against the reference; the reference against the weights' own decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_bit_matmul import layout as layouts
from pallas_kernels.low_bit_matmul import reference, tiling, tpu
from qjax import kernels, ops
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant.qtensor import QTensor, dequantize, per_column, quantize

SCHEMES = (
  'nf4:block=64', 'nf4:block=32,dq', 'fp4:block=128', 'int4:block=32', 'int4:block=64,asym',
  'int4:axis=channel', 'int4:axis=tensor',
  'nf2:block=64', 'int2:block=128', 'int8:axis=channel', 'int8:block=64',
)  # fmt: skip
SHAPES = ((1, 64, 128), (7, 131, 127), (17, 576, 64), (64, 1536, 131), (5, 127, 7), (127, 17, 1))


def draw(*shape: int, seed: int = 0, dtype: str = 'float32') -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def raw(q: QTensor) -> tuple:
  return q.codes, per_column(q.scales, q.scheme, q.shape[-1]), q.offset, kernels.layout_of(q)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('scheme', SCHEMES)
def test_the_reference_decodes_the_weight(scheme: str, shape: tuple[int, int, int]):
  q = quantize(draw(*shape[1:]), scheme)
  np.testing.assert_array_equal(reference.dequantize(*raw(q)), dequantize(q))


@pytest.mark.parametrize('shape', SHAPES)
def test_planes_are_taken_apart_and_joined(shape: tuple[int, int, int]):
  tokens, k, _ = shape
  for bits in (8, 4, 2):
    layout = layouts.Layout(k, 64, bits)
    x = draw(tokens, k)
    joined = layouts.join(layouts.split(x, layout), layout)
    np.testing.assert_array_equal(joined, x[:, : layout.blocks * layout.span])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  'scheme,shape',
  [(scheme, SHAPES[1]) for scheme in SCHEMES] + [('nf4:block=64', shape) for shape in SHAPES]
  + [('int8:axis=channel', (33, 1536, 600)), ('int4:axis=channel', (20, 1300, 520))],
)  # fmt: skip
def test_both_products_are_those_of_the_reference(scheme: str, shape: tuple[int, int, int], dtype: str):
  tokens, k, n = shape
  q = quantize(draw(k, n), scheme)
  x, g = draw(tokens, k, seed=1, dtype=dtype), draw(tokens, n, seed=2, dtype=dtype)
  w = np.abs(np.asarray(dequantize(q)))
  for kernel, plain, given, size in (
    (tpu.matmul, reference.matmul, x, w),
    (tpu.matmul_transposed, reference.matmul_transposed, g, w.T),
  ):
    found, wanted = kernel(given, *raw(q), interpret=True), plain(given, *raw(q))
    assert found.dtype == jnp.float32 and found.shape == wanted.shape
    # The same rounded factors; float32 sums in another order, of magnitudes that add up to |x| · |w|. Planes
    # may be fused into the scale's product, which rounds once more before bfloat16.
    total = np.abs(np.asarray(given, np.float64)) @ size
    unit = 2.0**-24 * size.shape[0] if dtype == 'float32' else 2.0**-9
    assert np.all(np.abs(found - wanted) <= unit * total + 1e-30)
    np.testing.assert_array_equal(found, kernel(given, *raw(q), interpret=True))


def test_integers_add_up_exactly():
  # 127 everywhere: every partial sum is a whole number below 2^24 times one scale.
  q = quantize(jnp.full((1024, 130), 127.0), 'int8:axis=channel')
  x = jnp.ones((16, 1024))
  np.testing.assert_array_equal(tpu.matmul(x, *raw(q), interpret=True), jnp.full((16, 130), 127.0 * 1024))


@pytest.mark.parametrize('scheme', ['nf4:block=64', 'int8:axis=channel'])
def test_dot_uses_it_forward_and_backward(scheme: str):
  q, x = quantize(draw(128, 96), scheme), draw(2, 9, 128, seed=1)

  def loss(x: jax.Array, name: str) -> jax.Array:
    y = ops.dot(x, q, Numerics(policy(), name), path='layers/mlp/down/kernel')
    return jnp.sum(jnp.sin(y))

  plain, kernel = (jax.value_and_grad(loss)(x, name) for name in ('xla', 'pallas_interpret'))
  np.testing.assert_allclose(kernel[0], plain[0], rtol=1e-5)
  # y is near 20, so both cos(y) and y err by up to 1e-5, and 96 of them add up to a gradient.
  np.testing.assert_allclose(kernel[1], plain[1], rtol=1e-4, atol=2e-4)
  text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(x, 'pallas_interpret'))
  assert 'low_bit_matmul' in text and 'low_bit_matmul_transposed' in text


def test_under_scan_vmap_and_remat():
  stack = jax.vmap(lambda w: quantize(w, 'nf4:block=64'))(draw(3, 64, 64))
  x = draw(5, 64, seed=1)

  def total(x: jax.Array, name: str) -> jax.Array:
    how = Numerics(policy(), name)
    layer = jax.checkpoint(lambda x, q: ops.dot(x, q, how, path='layers/mlp/down/kernel'))
    return jnp.sum(jax.lax.scan(lambda x, q: (layer(x, q) * 0.1, None), x, stack)[0])

  for transform in (lambda f: f, lambda f: jax.vmap(f)):
    given = x if transform(total) is total else jnp.stack([x, 2 * x])
    found, wanted = (
      jax.jit(transform(jax.grad(lambda x, name=name: total(x, name))))(given)
      for name in ('pallas_interpret', 'xla')
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  'scheme,compute,says',
  [
    ('int3:block=32', 'bfloat16', 'not of 8, 4 or 2 bits'),
    ('fp8_e4m3:axis=channel', 'bfloat16', 'not of 8, 4 or 2 bits'),
    ('int4:tile=32x8', 'bfloat16', 'tiles'),
    ('int4:block=8', 'bfloat16', 'rows of bytes'),
    ('nf4:block=64', 'float16', 'no products in float16'),
  ],
)
def test_what_the_kernel_cannot_do_is_said_and_auto_goes_on(scheme: str, compute: str, says: str):
  q, x = quantize(draw(64, 16), scheme), draw(3, 64, dtype=compute)
  with pytest.raises(NotImplementedError, match=says):
    ops.dot(x, q, Numerics(policy(compute=compute), 'pallas'), path='layers/mlp/down/kernel')
  y = ops.dot(x, q, Numerics(policy(compute=compute)), path='layers/mlp/down/kernel')
  assert np.isfinite(np.asarray(y, np.float32)).all()


def test_tiles_cover_what_a_tpu_addresses():
  for k in (17, 64, 576, 1536, 4096, 11008):
    for block in (32, 64, 128, k):
      for bits in (8, 4, 2):
        layout = layouts.Layout(k, block, bits)
        if layout.blocks > 1 and layout.rows_of_block % tiling.SUBLANES:
          continue
        tiles = tiling.choose(2048, 4096, layout)
        assert tiles.rows == layout.rows or tiles.rows % tiling.LANES == 0
        assert tiles.scales == layout.blocks or tiles.scales % tiling.SUBLANES == 0 or layout.blocks == 1
