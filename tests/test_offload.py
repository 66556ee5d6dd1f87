"""Weights that rest in host memory: the same numbers bit for bit, and one layer at a time on the device."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qjax import build, checkpoint, chips, method, plan, precision, sharding, train, trees
from qjax.adapters import LoraSpec
from qjax.data.pipeline import DataSpec
from qjax.errors import UserError
from qjax.models.config import ModelConfig, parameter_shapes
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from tests import small

HOST = {'placement__rules': (('layers/.*', 'host'),)}
PART = {'placement__rules': (('.*/attn/.*', 'device'), ('.*', 'host'))}


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  found = tmp_path_factory.mktemp('offload')
  small.write(found)
  return found


@pytest.fixture(scope='module')
def resident(directory):
  prepared = small.prepare(small.run(directory, 'qlora'))
  return prepared, *small.take_steps(prepared, 3)


@pytest.fixture(scope='module')
def hosted(directory):
  return small.prepare(small.run(directory, 'qlora', **HOST))


def _on_host(prepared):
  leaves = trees.flatten(prepared.frozen).items()
  return {path for path, leaf in leaves if leaf.sharding.memory_kind == 'pinned_host'}


def _assert_same(found, wanted):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(a, b)


def test_losses_and_adapters_are_those_of_the_resident_model_bit_for_bit(resident, hosted):
  paths = _on_host(hosted)
  assert len(paths) == 7 and all(path.endswith('/kernel/codes') for path in paths)
  assert not _on_host(resident[0])
  state, metrics = small.take_steps(hosted, 3)
  assert metrics == resident[2]
  _assert_same(state, resident[1])


def test_they_are_with_a_part_on_the_host_and_layer_inputs_there_too(directory, resident):
  prepared = small.prepare(small.run(directory, 'qlora', **PART, model__remat='offload'))
  assert _on_host(prepared) == {f'params/layers/mlp/{n}/kernel/codes' for n in ('gate', 'up', 'down')}
  state, metrics = small.take_steps(prepared, 3)
  assert metrics == resident[2]
  _assert_same(state, resident[1])


def test_a_run_goes_on_from_a_checkpoint_of_another_placement(resident, hosted, tmp_path):
  first, wanted, _ = resident
  state, _ = small.take_steps(first, 2)
  saved = checkpoint.Checkpoints(tmp_path, first.run.meaning)
  saved.save(2, state.trainable, dataclasses.replace(state, trainable=()), {})
  saved.close()
  again = checkpoint.Checkpoints(tmp_path, hosted.run.meaning)
  like = hosted.fresh_state()
  restored = again.restore(like.trainable, dataclasses.replace(like, trainable=()))
  again.close()
  state = dataclasses.replace(restored.state, trainable=restored.trainable)
  batches = hosted.batches()
  next(batches), next(batches)
  with jax.set_mesh(hosted.run.mesh):
    state, _ = hosted.compiled.call(state, hosted.frozen, next(batches), hosted.key)
  _assert_same(state, wanted)


FUSED = {
  'optimizer__kind': 'fused', 'model__remat': 'full', 'optimizer__learning_rate': 3e-3,
  'precision__param': 'bfloat16', 'precision__rounding': 'stochastic',
}  # fmt: skip
MOMENTS = {'placement__rules': (('optimizer/layers', 'host'),)}


@pytest.mark.parametrize('name', ['adamw', 'adamw8bit'])
def test_moments_on_the_host_move_weights_as_moments_on_the_device_do(directory, tmp_path, name):
  update = FUSED | {'optimizer__name': name}
  near, far = (small.prepare(small.run(directory, 'full', **update, **more)) for more in ({}, MOMENTS))
  wanted, rows = small.take_steps(near, 3)
  found, same = small.take_steps(far, 3)
  assert same == rows
  _assert_same(found, wanted)
  moments = trees.flatten(found.optimizer)
  waits = {path for path, x in moments.items() if x.sharding.memory_kind == 'pinned_host'}
  # Both moments of seven projections; of those in 8 bits, their codes.
  assert len(waits) == 14 and all(path.startswith('layers/') and '/kernel' in path for path in waits)
  on_host = sum(moments[path].nbytes for path in waits)
  assert on_host > 0.9 * trees.nbytes(found.optimizer['layers'])

  # A checkpoint goes on exactly, and comes back to where it was.
  half, _ = small.take_steps(far, 2)
  saved = checkpoint.Checkpoints(tmp_path, far.run.meaning)
  saved.save(2, half.trainable, dataclasses.replace(half, trainable=()), {})
  like = far.fresh_state()
  again = saved.restore(like.trainable, dataclasses.replace(like, trainable=()))
  saved.close()
  batches = far.batches()
  next(batches), next(batches)
  state = dataclasses.replace(again.state, trainable=again.trainable)
  with jax.set_mesh(far.run.mesh):
    state, _ = far.compiled.call(state, far.frozen, next(batches), far.key)
  _assert_same(state, wanted)
  parts = [plan.Traced(build.program(small.config(directory, 'full', **update, **more))).plan(
    chips.find('v5e')) for more in ({}, MOMENTS)]  # fmt: skip
  assert parts[1].host_bytes == on_host and parts[1].host_traffic_bytes == 2 * on_host
  assert parts[0].peak_bytes - parts[1].peak_bytes > 0.8 * on_host


def test_as_much_stays_as_a_budget_of_bytes_allows(directory, resident, hosted):
  frozen = trees.flatten(hosted.frozen)
  sizes = {path: frozen[path].nbytes for path in _on_host(hosted)}
  share = 0.4 * sum(sizes.values())
  some = HOST | {'placement__resident_gib': share / 2**30}
  prepared = small.prepare(small.run(directory, 'qlora', **some))
  kept = sizes.keys() - _on_host(prepared)
  filled = sum(sizes[path] for path in kept)
  left_over = min(size for path, size in sizes.items() if path not in kept)
  assert 0 < filled <= share < filled + left_over
  assert small.take_steps(prepared, 2)[1] == resident[2][:2]
  whole, part = (
    plan.Traced(build.program(small.config(directory, 'qlora', **more))).plan(chips.find('v5e'))
    for more in (HOST, some)
  )
  assert whole.host_bytes - part.host_bytes == filled
  assert whole.host_traffic_bytes - part.host_traffic_bytes == 2 * filled


@pytest.mark.parametrize(
  ('sizes', 'budget', 'kept'),
  [({'a': 5, 'b': 4, 'c': 3}, 7, 'bc'), ({'a': 5, 'b': 4, 'c': 3}, 2, ''), ({'a': 5, 'b': 4}, 99, 'ab')],
)
def test_what_stays_fills_most_of_the_budget(sizes, budget, kept):
  assert ''.join(sharding.resident(sizes, budget)) == kept


@pytest.mark.parametrize(
  'method_name, changed, problem',
  [
    ('qlora', {'placement__resident_gib': 1.0}, 'rules put on the host, but these put none there'),
    ('qlora', HOST | {'placement__resident_gib': -1.0}, 'resident_gib = -1.0 must be at least 0'),
    ('full', MOMENTS, "a layer moves at a time; use optimizer.kind = 'fused'"),
    ('full', {'placement__rules': (('.*/up/kernel', 'host'),)}, 'is trained and cannot rest on the host'),
    ('qlora', {'placement__rules': (('.*', 'hosst'),)}, r"'hosst'.*host"),
    ('qlora', {'placement__rules': (('embed/.*', 'host'),)}, 'matches none'),
    ('qlora', HOST | {'model__remat': 'none'}, 'device copy of every layer'),
    ('qlora', {'model__remat': 'ofload'}, 'offload'),
  ],
)
def test_what_cannot_work_is_refused(directory, method_name, changed, problem):
  with pytest.raises(UserError, match=problem):
    small.run(directory, method_name, **changed)


def test_what_is_trained_stays_on_the_device():
  update = method.Update(1e-3)
  chosen = dataclasses.replace(
    method.full(Numerics(precision.policy()), update), placement=(('.*', 'host'),)
  )
  with pytest.raises(UserError, match='is trained and cannot rest on the host'):
    chosen.plan(parameter_shapes(small.CONFIG))


# ---- compiled for a TPU that is not here -------------------------------------------------------------------


def compiled_bytes(layers: int, rules: Any) -> dict[str, int]:
  """In a process that `chips.call` started: bytes of a step of a model of so many layers."""
  jax.config.update('jax_exec_time_optimization_effort', -1.0)
  mesh = sharding.make_mesh(sharding.MeshSpec(), chips.devices(chips.find('v5e')))
  config = ModelConfig(256, layers, 512, 1024, 4, 4, 128)
  numerics = Numerics(precision.policy('float32', 'bfloat16', 'float32', 'float32'), 'pallas')
  spec = LoraSpec(4, 4.0, 'standard', 0.0, 'layers/attn/q/kernel')
  chosen = dataclasses.replace(
    method.qlora(numerics, method.Update(1e-3), spec), placement=tuple(map(tuple, rules))
  )
  program = train.Program(
    Transformer(config, numerics), chosen, parameter_shapes(config), precision.loss_scale('none', 1.0, 1),
    DataSpec(1, 128, 0, True, 'chat', 'truncate'), mesh, train.Loop(1, 1, 1, 1, 1, 256, 0),
  )  # fmt: skip
  trainable, frozen = chosen.abstract(program.shapes)
  state = jax.eval_shape(partial(train.init_state, program), trainable)

  def place(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)

  dtypes = {'weights': jnp.float32} | dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), jnp.int32)
  everywhere = NamedSharding(mesh, PartitionSpec())
  batch = {n: jax.ShapeDtypeStruct((1, 1, 128), d, sharding=everywhere) for n, d in dtypes.items()}
  key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=everywhere)
  with jax.set_mesh(mesh):
    memory = train.compile_step(
      program, place(state, sharding.shardings(state, mesh)),
      place(frozen, sharding.shardings(frozen, mesh, chosen.memory_of)), batch, key,
    ).memory  # fmt: skip
  return {
    'host': memory.host_argument_size_in_bytes,
    'host_temporary': memory.host_temp_size_in_bytes,
    'temporary': memory.temp_size_in_bytes,
    'codes': sum(x.size for path, x in trees.flatten(frozen).items() if chosen.memory_of(path) == 'host'),
  }


def test_a_tpu_holds_a_layer_at_a_time_not_the_stack():
  function = 'tests.test_offload:compiled_bytes'
  try:
    few, many = (chips.call(function, {'layers': n, 'rules': [['.*', 'host']]}) for n in (4, 12))
  except UserError as error:
    pytest.skip(str(error))
  assert many['host'] == many['codes'] == 3 * few['codes'] > 0
  assert few['host_temporary'] == many['host_temporary'] == 0
  # What grows is the layers' inputs and adapters with their gradients, not the codes.
  layer = many['codes'] / 12
  assert many['temporary'] - few['temporary'] < 8 * layer / 2
