"""A method decides what each parameter rests in and what moves, and is checked before a weight is read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import method, precision, trees
from qjax.adapters import Adapter, LoraSpec, is_adapter
from qjax.errors import UserError
from qjax.method import Method, Update
from qjax.models.config import parameter_shapes
from qjax.ops import Numerics
from qjax.quant import ptq
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import dequantize, expected_nbytes, is_qtensor, quantize
from tests import small

NUMERICS = Numerics(precision.policy())
UPDATE = Update(1e-3)
SHAPES = parameter_shapes(small.CONFIG)
KERNELS = [path for path in SHAPES if path.endswith('/kernel')]
SPEC = LoraSpec(4, 8.0)


def weight(path: str, layer: int | None) -> np.ndarray:
  """The same numbers each time, others for each path and layer."""
  shape = SHAPES[path] if layer is None else SHAPES[path][1:]
  seed = sum(path.encode()) * 100 + (0 if layer is None else layer + 1)
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def prepare(chosen: Method, read: Any = weight) -> tuple[dict[str, Any], dict[str, Any]]:
  moves, rests = chosen.prepare(SHAPES, read, jax.random.key(0))
  either = lambda leaf: is_qtensor(leaf) or is_adapter(leaf)
  return trees.flatten(moves, either), trees.flatten(rests, either)


def test_full_moves_every_parameter_in_the_param_dtype():
  moves, rests = prepare(method.full(Numerics(precision.policy('bfloat16')), UPDATE))
  assert set(moves) == {f'params/{path}' for path in SHAPES} and not rests
  for path, shape in SHAPES.items():
    leaf = moves[f'params/{path}']
    assert leaf.shape == shape and leaf.dtype == jnp.bfloat16
    layers = range(2) if path.startswith('layers/') else ()
    whole = np.stack([weight(path, i) for i in layers]) if layers else weight(path, None)
    np.testing.assert_array_equal(leaf, jnp.asarray(whole, jnp.bfloat16))


def test_lora_moves_adapters_over_a_base_at_rest():
  moves, rests = prepare(method.lora(NUMERICS, UPDATE, SPEC))
  assert set(moves) == {f'lora/{path}' for path in KERNELS}
  for path in KERNELS:
    adapter = moves[f'lora/{path}']
    depth, k, n = SHAPES[path]
    assert isinstance(adapter, Adapter) and adapter.scale == 2.0
    assert adapter.a.shape == (depth, 4, k) and adapter.b.shape == (depth, 4, n)
    assert not np.asarray(adapter.b).any() and np.asarray(adapter.a).any()
  for path in SHAPES:
    leaf = rests[f'params/{path}']
    if path.endswith('scale'):
      assert leaf.dtype == jnp.float32
    else:
      # Half precision rests as integers, whose bits are exactly the rounded weight.
      layers = [jnp.asarray(weight(path, i), jnp.bfloat16) for i in range(2)]
      wanted = jnp.stack(layers) if path in KERNELS else jnp.asarray(weight(path, None), jnp.bfloat16)
      np.testing.assert_array_equal(dequantize(leaf, jnp.dtype('bfloat16')), wanted)


@pytest.mark.parametrize('scheme', ['nf4:block=32,dq', 'int4:block=32,asym', 'int8', 'int8:axis=tensor'])
def test_qlora_stores_each_layer_as_quantize_would(scheme: str):
  _, rests = prepare(method.qlora(NUMERICS, UPDATE, SPEC, scheme))
  for path in KERNELS:
    found = rests[f'params/{path}']
    assert found.shape == SHAPES[path] and found.nbytes == expected_nbytes(SHAPES[path], scheme)
    for index in range(2) if path == 'layers/mlp/down/kernel' else ():
      alone = quantize(jnp.asarray(weight(path, index)), scheme)
      np.testing.assert_allclose(dequantize(found[index]), dequantize(alone), rtol=1e-6, atol=1e-7)


def test_rules_go_first_and_may_store_one_kind_of_layer_otherwise():
  rules = (('layers/mlp/down/kernel', 'int8'), ('layers/attn/.*/kernel', 'float32'))
  _, rests = prepare(method.qlora(NUMERICS, UPDATE, SPEC, rules=rules))
  assert str(rests['params/layers/mlp/down/kernel'].scheme).startswith('int8')
  assert rests['params/layers/attn/q/kernel'].dtype == jnp.float32
  assert str(rests['params/layers/mlp/gate/kernel'].scheme).startswith('nf4')


def test_targets_get_adapters_and_nothing_else_does():
  spec = LoraSpec(4, 8.0, targets='layers/attn/(q|v)/kernel')
  moves, _ = prepare(method.lora(NUMERICS, UPDATE, spec))
  assert list(moves) == ['lora/layers/attn/q/kernel', 'lora/layers/attn/v/kernel']
  more, _ = prepare(method.lora(NUMERICS, UPDATE, SPEC))
  for path in moves:  # another target changes no other adapter
    np.testing.assert_array_equal(moves[path].a, more[path].a)


@pytest.mark.parametrize(
  'chosen', [method.full(NUMERICS, UPDATE), method.qlora(NUMERICS, UPDATE, SPEC)], ids=lambda m: m.name
)
def test_shapes_without_weights_are_those_with_weights(chosen: Method):
  real, shapes = chosen.prepare(SHAPES, weight, jax.random.key(0)), chosen.abstract(SHAPES)
  assert jax.tree.structure(real) == jax.tree.structure(shapes)
  for one, other in zip(jax.tree.leaves(real), jax.tree.leaves(shapes), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_weights_are_read_one_layer_at_a_time_and_placed_by_path():
  read, placed = [], []

  def place(path: str, leaf: jax.Array) -> jax.Array:
    placed.append(path)
    return leaf

  def reader(path: str, layer: int | None) -> np.ndarray:
    read.append((path, layer))
    return weight(path, layer)

  method.qlora(NUMERICS, UPDATE, SPEC).prepare(SHAPES, reader, jax.random.key(0), place)
  in_layers = [(path, i) for path in SHAPES if path.startswith('layers/') for i in range(2)]
  outside = [(path, None) for path in SHAPES if not path.startswith('layers/')]
  assert sorted(read, key=str) == sorted(in_layers + outside, key=str)
  assert 'params/layers/attn/q/kernel/codes' in placed and 'lora/layers/attn/q/kernel/a' in placed


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_damaged_weight_is_refused_by_path_and_place(value: float):
  def read(path: str, layer: int | None) -> np.ndarray:
    w = weight(path, layer)
    if path == 'layers/mlp/up/kernel' and layer == 1:
      w[3, 5] = value
    return w

  for chosen in (method.full(NUMERICS, UPDATE), method.qlora(NUMERICS, UPDATE, SPEC)):
    with pytest.raises(UserError, match=rf'layers/mlp/up/kernel holds {value} at \(3, 5\)'):
      prepare(chosen, read)


def test_a_weight_beyond_float16_is_refused():
  half = Numerics(precision.policy('float16', 'float16'))
  with pytest.raises(UserError, match='beyond the largest float16'):
    prepare(method.full(half, UPDATE), lambda path, layer: weight(path, layer) * 1e6)
  for embeddings, grown in (('float16', 'embed'), ('float32', 'layers/attn/q/kernel')):
    with pytest.raises(UserError, match=f'{grown}.*beyond the largest float16'):
      prepare(
        method.lora(NUMERICS, UPDATE, SPEC, 'float16', embeddings),
        lambda path, layer, grown=grown: weight(path, layer) * (1e6 if path.startswith(grown) else 1),
      )


LOFTQ = dataclasses.replace(SPEC, init='loftq:rounds=2,clip', targets='.*/attn/(q|v)/kernel')


def test_adapters_may_start_from_what_rounding_lost():
  path, chosen = 'layers/attn/q/kernel', method.qlora(NUMERICS, UPDATE, LOFTQ, 'nf2:block=32,dq')
  moves, rests = prepare(chosen)
  for layer in range(2):
    w = jnp.asarray(weight(path, layer))
    correct = ptq.make('loftq:rank=4,rounds=2,clip').quantizer
    alone, factors = correct(w, parse_scheme('nf2:block=32,dq'), None, None)
    q, adapter = jax.tree.map(lambda x, i=layer: x[i], (rests[f'params/{path}'], moves[f'lora/{path}']))
    np.testing.assert_array_equal(q.codes, alone.codes)
    np.testing.assert_allclose(adapter.delta(), factors[0].T @ factors[1], atol=1e-5)
    error = lambda found, w=w: float(jnp.linalg.norm(found - w))
    assert error(dequantize(q) + adapter.delta()) < 0.8 * error(dequantize(quantize(w, 'nf2:block=32,dq')))
  # What is no target rests as it would without.
  other = 'params/layers/mlp/up/kernel'
  plain = prepare(method.qlora(NUMERICS, UPDATE, SPEC, 'nf2:block=32,dq'))[1]
  np.testing.assert_array_equal(rests[other].codes, plain[other].codes)
  described = lambda trees: jax.tree.map(lambda x: (x.shape, x.dtype), trees)
  assert described(chosen.abstract(SHAPES)) == described(chosen.prepare(SHAPES, weight, jax.random.key(0)))


def test_a_correction_wants_the_weight_as_it_was():
  chosen = method.qlora(NUMERICS, UPDATE, LOFTQ, 'nf2:block=32,dq')
  stored = lambda path, layer: quantize(weight(path, layer), 'nf2:block=32,dq') if path in KERNELS else None
  with pytest.raises(UserError, match='comes in nf2:block=32,dq already.*the model that it was made from'):
    chosen.prepare(SHAPES, weight, jax.random.key(0), stored=stored)


def _start(init: str) -> LoraSpec:
  return dataclasses.replace(SPEC, init=init)


THROUGH = Numerics(precision.policy(), weights=(('.*', 'nf4'),))
QUANTIZED = (('layers/.*/kernel', 'int8'), ('.*', 'param'))


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: method.lora(NUMERICS, UPDATE, LoraSpec(4, 8.0, targets='.*/moe')), 'lora.targets.*matches none'),
    (lambda: method.lora(NUMERICS, UPDATE, LoraSpec(65, 8.0)), 'exceeds the rank 64 of layers/attn/q/kernel'),
    (lambda: method.lora(NUMERICS, UPDATE, SPEC, 'nf5'), 'a scheme is FORMAT'),
    (lambda: method.lora(NUMERICS, UPDATE, SPEC, embeddings='int8'), 'embed/embedding is no projection'),
    (lambda: method.lora(NUMERICS, UPDATE, SPEC, embeddings='float15'), "did you mean 'float16'"),
    (lambda: method.lora(NUMERICS, UPDATE, SPEC, rules=(('moe/.*', 'int8'),)), "'moe/.*' matches none"),
    (lambda: method.lora(NUMERICS, UPDATE, SPEC, rules=(('.*', 'int8'),)), 'never used'),
    (lambda: method.qlora(NUMERICS, UPDATE, _start('gptq')), "init = 'gptq' is no start.*'loftq:rounds=5"),
    (lambda: method.qlora(NUMERICS, UPDATE, _start('loftq:rank=2')), 'the rank is lora.rank'),
    (lambda: method.qlora(NUMERICS, UPDATE, _start('loftq:weighted')), 'no inputs to weigh by'),
    (lambda: method.qlora(NUMERICS, UPDATE, _start('zeros')), "'zeros' is no quantizer"),
    (lambda: method.lora(NUMERICS, UPDATE, _start('loftq')), 'no target rests in few bits'),
    (lambda: method.qat_lora(THROUGH, UPDATE, _start('loftq')), 'act inside a quantizer'),
    (lambda: method.qlora(NUMERICS, UPDATE, SPEC, 'bfloat16'), 'quantizes nothing'),
    (lambda: method.qlora(NUMERICS, UPDATE, SPEC, 'float32'), 'quantizes nothing'),
    (
      lambda: Method('x', QUANTIZED, NUMERICS, method.Trainable('params/.*'), UPDATE),
      'is trained and cannot rest',
    ),
    (
      lambda: Method('x', (('.*', 'param'),), NUMERICS, method.Trainable('params/layers/moe/.*'), UPDATE),
      'trainable.*matches none',
    ),
  ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(make: Any, message: str):
  with pytest.raises(UserError, match=message):
    make().prepare(SHAPES, pytest.fail, jax.random.key(0))


def test_a_kernel_by_name_wants_a_weight_in_few_bits():
  for name in ('pallas', 'pallas_tpu', 'pallas_gpu', 'pallas_interpret'):
    how = Numerics(precision.policy(), name)
    trained = Numerics(precision.policy(), name, weights=(('.*/down/kernel', 'int8:axis=channel'),))
    for plain in (method.full(how, UPDATE), method.lora(how, UPDATE, SPEC, 'bfloat16')):
      with pytest.raises(UserError, match=f"kernels = '{name}', but no weight.*use kernels = 'auto'"):
        plain.plan(SHAPES)
    method.qlora(how, UPDATE, SPEC).plan(SHAPES)
    method.qat(trained, UPDATE).plan(SHAPES)
  for name in ('auto', 'xla'):
    method.full(Numerics(precision.policy(), name), UPDATE).plan(SHAPES)


def test_a_fourth_method_is_a_value():
  """Only the MLP of a quantized model moves: no branch anywhere knows of it."""
  trainable = method.Trainable('params/layers/mlp/.*')
  storage = (('layers/attn/.*/kernel', 'int8'), ('.*', 'param'))
  moves, rests = prepare(Method('mlp', storage, NUMERICS, trainable, UPDATE))
  assert set(moves) == {f'params/layers/mlp/{name}/kernel' for name in ('gate', 'up', 'down')}
  assert is_qtensor(rests['params/layers/attn/q/kernel'])
