"""Products of integers by a kernel, interpreted, against XLA's: the same codes and sums, there and back.

With one scale an output both ways round the same two products with scales, and results are equal to the last
bit. With several blocks each rounds every product and sum once, in an order of its own.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_cases
from pallas_kernels import dispatch, target
from qjax import integers, kernels, ops
from qjax.integers import Where
from qjax.ops import Backward, Numerics
from qjax.precision import policy
from qjax.quant import activations
from qjax.quant.qtensor import dequantize, quantize
from tests.pallas_kernels.test_low_bit_matmul import draw

PATH = 'layers/mlp/down/kernel'
TOKEN, TENSOR, STATIC = 'int8:axis=token', 'int8:axis=tensor', 'int8:axis=tensor,static'
INT8 = Backward('int8', 'int8')
SHAPES = ((1, 7, 17), (7, 131, 1), (17, 1, 7), (131, 17, 131))  # rows, K, N: each size in each place
PLATFORMS = ('tpu', 'gpu')


def how(name: str, inputs: str = TOKEN, weights: str = 'int8:axis=channel', **more: Any) -> Numerics:
  more = {'backward': INT8} | more
  rules = () if weights == '' else (('.*', weights),)
  return Numerics(policy(compute='bfloat16'), name, (('.*', inputs),), weights=rules, **more)


def both(numerics: Numerics, path: str = PATH) -> Any:
  """Value and gradients of x and w of a product that is trained in integers, under jit."""

  @jax.jit
  def step(x: jax.Array, w: jax.Array, g: jax.Array, key: jax.Array) -> Any:
    f = lambda x, w: ops.dot(x, w, numerics, path=path, high=jnp.float32(2), rounding_key=key)
    y, pull = jax.vjp(f, x, w)
    return y, *pull(g)

  return step


def equal(found: Any, wanted: Any) -> None:
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def calls(f: Any, *args: Any) -> dict[str, int]:
  jaxpr = jax.make_jaxpr(f)(*args).jaxpr
  found = Counter(each.params['name'] for each in kernel_cases.pallas_calls(jaxpr))
  assert set(found) <= {'int8_matmul', 'quantize_tokens'}
  return found


@pytest.mark.parametrize('platform', PLATFORMS)
class TestOneScaleAnOutput:
  """Results are equal bit for bit."""

  @pytest.fixture(autouse=True)
  def _target(self, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(dispatch, 'target_platform', lambda: platform)

  @pytest.mark.parametrize(('rows', 'k', 'n'), SHAPES)
  @pytest.mark.parametrize('inputs', [TOKEN, TENSOR, STATIC])
  def test_training_forward_and_backward(self, platform: str, inputs: str, rows: int, k: int, n: int):
    x, w = draw(rows, k, dtype='bfloat16'), draw(k, n, seed=1)
    args = x, w, draw(rows, n, seed=2, dtype='bfloat16'), jax.random.key(0)
    by_kernel, by_xla = (both(how(name, inputs)) for name in ('pallas_interpret', 'xla'))
    found = calls(by_kernel, *args)
    assert found['int8_matmul'] == 3
    # Of x, forward and for dw; Triton's division is not trusted with it.
    assert found['quantize_tokens'] == (2 if inputs == TOKEN and platform == 'tpu' else 0)
    assert not calls(by_xla, *args)
    equal(by_kernel(*args), by_xla(*args))

  @pytest.mark.parametrize('weights', ['int8:axis=channel', 'int8:axis=tensor', 'int4:axis=channel'])
  def test_a_weight_at_rest_as_in_training(self, platform: str, weights: str):
    x, w = draw(2, 7, 131, dtype='bfloat16'), draw(131, 17, seed=1)
    q, at_rest = quantize(w, weights), how('pallas_interpret', weights='', backward=Backward())
    f = jax.jit(lambda q: ops.dot(x, q, at_rest, path=PATH))
    equal(f(q), jax.jit(lambda q: ops.dot(x, q, how('xla', weights=''), path=PATH))(q))
    training = jax.jit(lambda w: ops.dot(x, w, how('pallas_interpret', weights=weights), path=PATH))
    equal(f(q), training(w))

  def test_under_vmap_scan_and_remat(self, platform: str):
    x, w = draw(3, 5, 17, dtype='bfloat16'), draw(4, 17, 17, seed=1)

    def both(name: str) -> Any:
      layer = jax.checkpoint(lambda x, w, key: ops.dot(x, w, how(name), path=PATH, rounding_key=key))

      def loss(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (layer(x, w, key) * jnp.bfloat16(0.25), None), x, w)
        return jnp.sum(y.astype(jnp.float32))

      return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None, None)))

    equal(both('pallas_interpret')(x, w, jax.random.key(1)), both('xla')(x, w, jax.random.key(1)))

  def test_what_is_not_finite_stays_so(self, platform: str):
    x = draw(8, 17).at[1, 2].set(jnp.nan).at[3, 4].set(jnp.inf)
    q, at_rest = quantize(draw(17, 7, seed=1), 'int8'), how('pallas_interpret', weights='')
    y = np.asarray(ops.dot(x, q, at_rest, path=PATH), np.float32)
    assert np.isnan(y[[1, 3]]).all() and np.isfinite(np.delete(y, [1, 3], 0)).all()


@pytest.mark.parametrize('weights', ['int8:block=64', 'int4:block=96'])
def test_two_blocks_add_up(weights: str):
  x, w = draw(17, 131), quantize(draw(131, 7, seed=1), weights)
  scheme = activations.parse_activations(TOKEN)
  found, wanted = (
    integers.product(x, w, scheme, None, Where(name, PATH)) for name in ('pallas_interpret', 'xla')
  )
  codes, scale = activations.encode(x, scheme)
  # Two products and a sum are rounded to float32 in either, or fused into one rounding, then times one scale.
  size = jnp.abs(codes.astype(jnp.float32) * scale) @ jnp.abs(dequantize(w))
  assert jnp.all(jnp.abs(found - wanted) <= 2 * 3 * 2.0**-24 * size)


def test_no_rows_have_no_results_and_no_gradients():
  x, w = jnp.zeros((2, 0, 16), jnp.bfloat16), draw(16, 8)
  for name in ('xla', 'pallas_interpret'):
    y, dx, dw = both(how(name))(x, w, jnp.zeros((2, 0, 8), jnp.bfloat16), jax.random.key(0))
    assert (y.shape, dx.shape) == ((2, 0, 8), (2, 0, 16))
    np.testing.assert_array_equal(dw, jnp.zeros((16, 8)))


@contextmanager
def mesh() -> Iterator[None]:
  auto = (jax.sharding.AxisType.Auto,) * 3
  with jax.set_mesh(jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), axis_types=auto)):
    yield


@pytest.mark.parametrize('name', ['up', 'down'])
@pytest.mark.parametrize(('rows', 'k', 'n'), [(8, 32, 64), (7, 17, 131)])
def test_each_device_multiplies_its_part(name: str, rows: int, k: int, n: int):
  """Sums over parts are added up as integers, so the same bits come out; odd sizes stay whole."""
  path = f'layers/mlp/{name}/kernel'
  x, w = draw(rows, 3, k, dtype='bfloat16'), draw(k, n, seed=1)
  args = x, w, draw(rows, 3, n, seed=2, dtype='bfloat16'), jax.random.key(0)
  wanted = both(how('xla'), path)(*args)
  with mesh():
    step = both(how('pallas_interpret'), path)
    with kernels.noting() as notes:
      text = step.lower(*args).as_text()
    found = step(*args)
  assert 'manual_computation' in text or 'shmap_body' in text
  is_cut = name == 'down' and k % 2 == 0
  (inputs,) = notes[path, 'inputs']
  by_xla, by_kernel = 'xla: each device holds a part of a token', 'pallas_interpret: quantize_tokens'
  assert inputs == (by_xla if is_cut else by_kernel)
  equal(found, wanted)


def test_sums_are_the_integers_of_numpy():
  rng = np.random.default_rng(0)
  x, g, w = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((17, 131), (17, 7), (131, 7)))
  wide = {name: each.astype(np.int64) for name, each in (('x', x), ('g', g), ('w', w))}
  q = quantize(jnp.asarray(w, jnp.float32).at[0].set(127.0), 'int8')
  np.testing.assert_array_equal(q.scales, np.ones((1, 7)))
  wide['w'][0] = 127
  where = Where('pallas_interpret', PATH)
  dx = integers.input_gradient(jnp.asarray(g), jnp.ones((17, 1)), q, where)
  np.testing.assert_array_equal(dx, wide['g'] @ wide['w'].T)
  dw = integers.weight_gradient(jnp.asarray(x), jnp.asarray(g), jnp.ones((1, 7)), where)
  np.testing.assert_array_equal(dw, wide['x'].T @ wide['g'])


# ---- what is told ------------------------------------------------------------------------------------------


def told(name: str, **more: Any) -> dict[tuple[str, str], set[str]]:
  x, w = draw(4, 17, dtype='bfloat16'), draw(17, 7, seed=1)
  with kernels.noting() as notes:
    jax.eval_shape(both(how(name, **more)), x, w, draw(4, 7, dtype='bfloat16'), jax.random.key(0))
  return notes


def test_each_product_is_noted_with_what_computes_it():
  by = 'pallas_interpret'
  wanted = {(PATH, 'inputs'): {f'{by}: quantize_tokens'}}
  wanted |= {(PATH, product): {f'{by}: int8_matmul'} for product in ('forward', 'dx', 'dw')}
  assert told(by) == wanted
  floats = told(by, backward=Backward())
  assert floats[PATH, 'dx'] == {f'{by}: low_bit_matmul'}
  assert floats[PATH, 'dw'] == {'xla: it is a product of floats'}
  plain = told(by, weights='', inputs='none', backward=Backward())
  assert all(way.startswith('xla: ') for ways in plain.values() for way in ways)
  by_default = {way for ways in told('auto').values() for way in ways}
  assert any('no kernel of int8_matmul runs on a cpu' in way for way in by_default)
  ways = kernels.products(floats)
  assert kernels.summary(ways) == 'pallas_interpret and xla'
  assert ways[f'{by}: low_bit_matmul'] == [f'{PATH} dx']


def test_calls_of_kernels_are_counted_in_a_compiled_program():
  program = """
  %low_bit_matmul.3 = f32[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={}
  ROOT %low_bit_matmul_transposed = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"
  %low_bit_matmul.3.remat2 = f32[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %call = f32[1] custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", {a = 1, name = "int8_matmul"}
  %dot.1 = f32[8] custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="low_bit_matmul"}
  %add = f32[8] add(%low_bit_matmul.3, %x)
  """
  assert kernels.calls(program) == {'int8_matmul': 1, 'low_bit_matmul': 2, 'low_bit_matmul_transposed': 1}


class _Device:
  def __init__(self, platform: str, device_kind: str):
    self.platform, self.device_kind = platform, device_kind


@pytest.mark.parametrize(('device', 'name', 'says'), [
  (_Device('tpu', 'TPU v4'), 'pallas', 'TPU v4 multiplies no integers'),
  (_Device('rocm', 'AMD Instinct MI300X'), 'pallas', 'no kernel of int8_matmul runs on a GPU of AMD'),
  (_Device('gpu', 'AMD Instinct MI300X'), 'pallas_gpu', 'not on a GPU of AMD'),
  (_Device('cpu', 'cpu'), 'pallas', 'no kernel of int8_matmul runs on a cpu'),
])  # fmt: skip
def test_a_device_that_cannot_is_named(
  device: _Device, name: str, says: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(target, 'device', lambda: device)
  with pytest.raises(NotImplementedError, match=f"kernels = '{name}': .*{says}.*use kernels = 'auto'"):
    told(name)
  assert any(says in way or 'of AMD' in way for ways in told('auto').values() for way in ways)


@pytest.mark.parametrize(('device', 'name', 'says'), [
  (_Device('cpu', 'cpu'), 'pallas_tpu', 'runs on a TPU, not on a CPU'),
  (_Device('tpu', 'TPU v5 lite'), 'pallas_gpu', 'runs on an NVIDIA GPU, not on a TPU'),
])  # fmt: skip
def test_a_kernel_of_another_platform_is_refused(
  device: _Device, name: str, says: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(target, 'device', lambda: device)
  with pytest.raises(dispatch.Unserved, match=says):
    told(name)


@pytest.mark.parametrize(('device', 'platform'), [
  (_Device('gpu', 'NVIDIA H100 80GB HBM3'), 'gpu'), (_Device('cuda', ''), 'gpu'),
  (_Device('rocm', 'gfx90a'), 'rocm'), (_Device('gpu', 'AMD Instinct MI250X'), 'rocm'),
  (_Device('tpu', 'TPU v5 lite'), 'tpu'),
])  # fmt: skip
def test_a_device_of_amd_is_no_gpu_of_the_table(
  device: _Device, platform: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(target, 'device', lambda: device)
  assert dispatch.target_platform() == platform
