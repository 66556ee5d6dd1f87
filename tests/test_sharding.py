"""Where arrays live: rules for all that belongs to a weight, meshes, and products that don't notice."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qjax import ops, precision, sharding, trees
from qjax.adapters import Adapter
from qjax.errors import UserError
from qjax.quant.qtensor import is_qtensor, quantize
from qjax.sharding import MeshSpec, make_mesh, spec_for

SPLIT = ('tensor', 'fsdp')
_quantize = jax.jit(quantize, static_argnums=1)


@pytest.fixture(scope='module')
def mesh():
  return make_mesh(MeshSpec(2, 2, 2))


def _normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'path, shape, spec',
  [
    # Weights, one or stacked. The inputs of o and down are the outputs of what comes before.
    ('layers/attn/q/kernel', (3, 16, 32), P(None, None, SPLIT)),
    ('layers/mlp/up/kernel', (3, 16, 32), P(None, None, SPLIT)),
    ('layers/attn/o/kernel', (3, 16, 32), P(None, 'tensor', 'fsdp')),
    ('layers/mlp/down/kernel', (3, 16, 32), P(None, 'tensor', 'fsdp')),
    ('head/kernel', (16, 32), P(None, SPLIT)),
    ('embed/embedding', (32, 16), P('tensor', 'fsdp')),
    ('embed/embedding/codes', (32, 16), P('tensor', 'fsdp')),
    ('layers/attn/k/bias', (3, 32), P(None, SPLIT)),
    ('layers/attn_norm/scale', (3, 32), P(None, None)),
    ('final_norm/scale', (32,), P(None)),
    # What a quantized weight consists of.
    ('layers/attn/q/kernel/codes', (3, 8, 32), P(None, None, SPLIT)),
    ('layers/attn/q/kernel/scale', (3, 4, 32), P(None, None, SPLIT)),
    ('layers/attn/q/kernel/offset', (3, 4, 32), P(None, None, SPLIT)),
    ('layers/attn/q/kernel/scale', (3, 1, 1), P(None, None, None)),
    ('layers/attn/o/kernel/codes', (3, 8, 32), P(None, 'tensor', 'fsdp')),
    ('layers/attn/o/kernel/scale', (3, 1, 32), P(None, None, 'fsdp')),
    ('layers/attn/o/kernel/scale/codes', (3, 4, 32), P(None, 'tensor', 'fsdp')),
    ('layers/attn/o/kernel/scale/step', (3, 4, 1), P(None, 'tensor', None)),
    ('layers/attn/o/kernel/scale/offset', (3,), P(None)),
    ('blocks/attn/o/kernel/scale/offset', (8,), P(None)),
    ('head/kernel/codes', (8, 32), P(None, SPLIT)),
    ('head/kernel/scale/offset', (), P()),
    ('head/kernel/offset', (4, 32), P(None, SPLIT)),
    # Adapter factors are [r, in] and [r, out]; the rank stays whole.
    ('lora/layers/attn/q/kernel/a', (3, 2, 16), P(None, None, None)),
    ('lora/layers/attn/q/kernel/b', (3, 2, 32), P(None, None, SPLIT)),
    ('lora/layers/attn/o/kernel/a', (3, 2, 16), P(None, None, 'tensor')),
    ('lora/layers/attn/o/kernel/b', (3, 2, 32), P(None, None, 'fsdp')),
    ('lora/head/kernel/b', (4, 32), P(None, SPLIT)),
    # Moments are named after what they belong to.
    ('optimizer/1/0/mu/lora/layers/attn/q/kernel/a', (3, 2, 16), P(None, None, None)),
    ('optimizer/1/0/nu/lora/layers/attn/o/kernel/a', (3, 2, 16), P(None, None, 'tensor')),
    ('optimizer/1/0/mu/params/layers/attn/q/kernel', (3, 16, 32), P(None, None, SPLIT)),
    ('optimizer/0/mu/lora/layers/attn/o/kernel/a/codes', (3, 2, 16), P(None, None, 'tensor')),
    ('optimizer/0/nu/lora/layers/attn/o/kernel/a/scale', (3, 2, 1), P(None, None, None)),
    ('optimizer/1/0/mu/params/embed/embedding', (32, 16), P('tensor', 'fsdp')),
    (
      'optimizer/0/v_row/layers/attn/o/kernel',
      (8, 16),
      P(None, 'fsdp'),
    ),  # factored: an axis less, still a stack
    ('optimizer/1/0/count', (), P()),
    ('step', (), P()),
  ],
)
def test_every_array_follows_the_weight_it_belongs_to(mesh, path, shape, spec):
  assert spec_for(path, shape, mesh) == spec


@pytest.mark.parametrize(
  'path, shape, spec',
  [
    (
      'layers/attn/q/kernel',
      (3, 16, 6),
      P(None, None, 'fsdp'),
    ),  # 6 over 2 × 2 does not come out, over 2 it does
    ('layers/attn/q/kernel', (3, 16, 7), P(None, None, None)),
    ('layers/attn/o/kernel/scale', (3, 9, 32), P(None, None, 'fsdp')),
    ('layers/attn/o/kernel/codes', (3, 9, 7), P(None, None, None)),
    ('embed/embedding', (33, 16), P(None, 'fsdp')),
  ],
)
def test_an_axis_that_does_not_divide_is_left_whole(mesh, path, shape, spec):
  assert spec_for(path, shape, mesh) == spec


def test_every_component_of_a_state_gets_a_layout_that_fits(mesh):
  weights = {
    'q': {'kernel': _quantize(_normal(0, 3, 10, 12), 'nf4:block=4,dq')},
    'o': {'kernel': _quantize(_normal(1, 3, 12, 10), 'int4:block=4,asym')},
    'down': {'kernel': _quantize(_normal(2, 3, 12, 10), 'int8:axis=channel')},
    'up': {'kernel': _quantize(_normal(3, 3, 10, 12), 'int8:axis=tensor')},
  }
  lora = {'q': {'kernel': Adapter(_normal(4, 3, 2, 10), _normal(5, 3, 2, 12), 1.0)}}
  state = {'params': {'layers': weights}, 'lora': {'layers': lora}, 'optimizer': optax.adam(1e-3).init(lora)}
  placed = jax.device_put(state, sharding.shardings(state, mesh))
  for left, right in zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True):
    np.testing.assert_array_equal(left, right)
  assert placed['params']['layers']['q']['kernel'].codes.sharding.spec == P(None, None, SPLIT)
  paths = trees.flatten(state)
  assert any('mu/q/kernel/b' in path for path in paths), 'this test wants moments of an adapter'
  for path, leaf in paths.items():
    assert len(spec_for(path, leaf.shape, mesh)) == leaf.ndim, path


def test_unsplit_names_large_arrays_that_every_device_holds(mesh):
  tree = {
    'q': {'kernel': jax.ShapeDtypeStruct((16, 32), np.float32)},
    'k': {'kernel': jax.ShapeDtypeStruct((16, 33), np.float32)},
    'norm': {'scale': jax.ShapeDtypeStruct((32,), np.float32)},
  }
  assert sharding.unsplit(tree, mesh, least_bytes=1000) == ['k/kernel']
  assert sharding.unsplit(tree, mesh, least_bytes=1) == ['k/kernel', 'norm/scale']
  assert sharding.unsplit(tree, make_mesh(MeshSpec(data=8)), least_bytes=1) == []


# ---- meshes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'sizes, shape',
  [((1, 1, 1), (1, 1, 1)), ((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((1, 3, 2), (1, 3, 2))],
)
def test_a_mesh_has_the_sizes_of_its_spec(sizes, shape):
  mesh = make_mesh(MeshSpec(*sizes))
  assert tuple(mesh.shape.values()) == shape and mesh.axis_names == ('data', 'fsdp', 'tensor')
  assert list(mesh.devices.flat) == jax.devices()[: np.prod(shape)]


@pytest.mark.parametrize('sizes', [(0, 1, 1), (1, -2, 1), (-1, -1, 1), (1, 1, 0)])
def test_sizes_that_mean_nothing_are_refused(sizes):
  with pytest.raises(UserError, match='sizes are at least 1'):
    MeshSpec(*sizes)


@pytest.mark.parametrize(
  'spec, message',
  [
    (MeshSpec(data=4, fsdp=4), 'needs 16 devices; 8 are visible'),
    (MeshSpec(data=-1, fsdp=3), '8 devices do not divide by 3'),
    (MeshSpec(data=-1, fsdp=16), '8 devices do not divide by 16'),
  ],
)
def test_a_mesh_that_the_machine_cannot_hold_is_refused(spec, message):
  with pytest.raises(UserError, match=message):
    make_mesh(spec)


def test_a_batch_is_split_over_data_and_fsdp(mesh):
  assert sharding.batch_sharding(mesh, 2).spec == P(('data', 'fsdp'), None)
  assert sharding.batch_sharding(mesh, 3, batch_axis=1).spec == P(None, ('data', 'fsdp'), None)


# ---- activations -------------------------------------------------------------------------------------------


def test_constrain_without_a_mesh_is_the_array_itself():
  x = _normal(0, 4, 4)
  assert sharding.constrain(x, 'data', None) is x
  with jax.set_mesh(make_mesh(MeshSpec())):
    assert sharding.constrain(x, 'data', None) is x


def test_constrain_lays_out_what_divides_and_changes_no_value(mesh):
  x = _normal(0, 8, 3, 6)
  with jax.set_mesh(mesh):
    y = jax.jit(lambda x: sharding.constrain(x, sharding.BATCH_AXES, 'tensor', 'tensor'))(x)
  assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(('data', 'fsdp'), None, 'tensor')), 3)
  np.testing.assert_array_equal(y, x)
  with jax.set_mesh(mesh), pytest.raises(ValueError):
    sharding.constrain(x, 'data')


# ---- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, storage, compute',
  [
    ('q', None, 'float32'),
    ('o', None, 'bfloat16'),
    ('q', 'nf4:block=4,dq', 'bfloat16'),
    ('q', 'fp4:block=4,scale=e4m3', 'bfloat16'),
    ('o', 'int8:tile=4x2', 'bfloat16'),
    ('o', 'int4:block=6,asym', 'float32'),  # packed rows and blocks are cut in two
    ('down', 'int8:axis=channel', 'float16'),
  ],
)
def test_a_product_with_sharded_weights_equals_the_whole(mesh, name, storage, compute):
  k, n, r = 24, 20, 2
  numerics = ops.Numerics(precision.policy(compute=compute))
  w = _normal(1, k, n)
  params = {name: {'kernel': _quantize(w, storage) if storage else w}}
  lora = {name: {'kernel': Adapter(_normal(2, r, k), _normal(3, r, n), 0.5)}}
  x, g = _normal(4, 8, 3, k).astype(compute), _normal(5, 8, 3, n).astype(compute)

  @jax.jit
  def step(params, lora, x, g):
    weight = params[name]['kernel']
    trained = (x, lora[name]['kernel'], None if is_qtensor(weight) else weight)

    def f(x, adapter, w):
      return ops.dot(x, weight if w is None else w, numerics, adapter)

    y, vjp = jax.vjp(f, *trained)
    return y, vjp(g)

  whole = step(params, lora, x, g)
  sharded = [jax.device_put(tree, sharding.shardings(tree, mesh)) for tree in (params, lora)]
  batches = [jax.device_put(leaf, sharding.batch_sharding(mesh, 3)) for leaf in (x, g)]
  with jax.set_mesh(mesh):
    split = step(*sharded, *batches)
  leaf = sharded[0][name]['kernel'].codes if storage else sharded[0][name]['kernel']
  assert len({str(shard.index) for shard in leaf.addressable_shards}) == 4, (
    'this test wants a weight in four parts'
  )
  # Only the order of sums differs, before the last rounding to `compute`.
  step_size = {'float32': 2.0**-23, 'bfloat16': 2.0**-7, 'float16': 2.0**-10}[compute]
  for left, right in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    np.testing.assert_allclose(left, right, rtol=2 * step_size, atol=4 * step_size * np.abs(right).max())
