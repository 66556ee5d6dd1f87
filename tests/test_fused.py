"""The update inside the backward pass: the numbers of the other one, with one layer's gradient at a time."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import checkpoint, train, trees
from qjax.errors import UserError
from tests import small

EXACT = {
  'precision__compute': 'float32', 'model__remat': 'full', 'optimizer__clip_norm': 0.0,
  'optimizer__weight_decay': 0.1,
}  # fmt: skip
HEADS = {'tied': small.CONFIG, 'untied': dataclasses.replace(small.CONFIG, tie_embeddings=False)}


@pytest.fixture(scope='module')
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
  found = {name: tmp_path_factory.mktemp(name) for name in HEADS}
  for name, directory in found.items():
    small.write(directory, HEADS[name])
  return found


@pytest.fixture(scope='module')
def prepare(directories: dict[str, Path]) -> Any:
  """A prepared run with these settings; each is compiled once."""

  @functools.cache
  def of(head: str, settings: tuple[tuple[str, Any], ...]) -> small.Prepared:
    return small.prepare(small.run(directories[head], 'full', **EXACT | dict(settings)))

  return lambda name, kind, head='tied', **more: of(
    head, tuple({'optimizer__name': name, 'optimizer__kind': kind, **more}.items())
  )


def go_on(prepared: small.Prepared, state: train.State, batches: list[Any]) -> train.State:
  with jax.set_mesh(prepared.run.mesh):
    for batch in batches:
      state, _ = prepared.compiled.call(state, prepared.frozen, batch, prepared.key)
  return state


def assert_same(found: Any, wanted: Any) -> None:
  """Bit for bit."""
  for path, leaf in trees.flatten(wanted).items():
    assert np.asarray(trees.flatten(found)[path]).tobytes() == np.asarray(leaf).tobytes(), path


@pytest.mark.parametrize('head', HEADS)
def test_sgd_inside_the_backward_pass_is_sgd_bit_for_bit(prepare: Any, head: str):
  runs = [prepare('sgd', kind, head, optimizer__learning_rate=0.5) for kind in ('separate', 'fused')]
  (apart, rows), (fused, fused_rows) = (small.take_steps(run, 3) for run in runs)
  assert_same(fused.trainable, apart.trainable)
  assert [row['loss'] for row in fused_rows] == [row['loss'] for row in rows]
  norms = [row['gradient_norm'] for row in fused_rows]
  assert norms == pytest.approx([row['gradient_norm'] for row in rows], rel=1e-6)
  for path, leaf in trees.flatten(runs[0].state.trainable).items():
    assert not np.array_equal(leaf, trees.flatten(fused.trainable)[path]), path


@pytest.mark.parametrize('name', ['adamw8bit', 'adafactor', 'lion'])
def test_every_optimizer_moves_inside_the_backward_pass_as_after_it(prepare: Any, name: str):
  """Losses after two and three steps, of which the second is far from the first."""
  more = {'optimizer__learning_rate': 3e-3}
  apart, fused = (small.take_steps(prepare(name, kind, **more), 3)[1] for kind in ('separate', 'fused'))
  assert [row['loss'] for row in fused] == pytest.approx([row['loss'] for row in apart], rel=1e-4)
  assert fused[2]['loss'] < 0.8 * fused[0]['loss']
  assert [row['learning_rate'] for row in fused] == [row['learning_rate'] for row in apart]


GLOBAL_CLIP = {'optimizer__clip_norm': 0.5, 'optimizer__learning_rate': 0.5}


def test_the_norm_over_everything_is_clipped_by_after_a_pass_that_finds_it(prepare: Any):
  runs = [prepare('sgd', kind, 'untied', **GLOBAL_CLIP) for kind in ('separate', 'fused_global')]
  (apart, rows), (fused, fused_rows) = (small.take_steps(run, 2) for run in runs)
  assert min(row['gradient_norm'] for row in rows) > 1, 'this test wants gradients that are clipped'
  for field in ('loss', 'gradient_norm'):
    assert [row[field] for row in fused_rows] == pytest.approx([row[field] for row in rows], rel=1e-5)
  for path, leaf in trees.flatten(apart.trainable).items():
    np.testing.assert_allclose(trees.flatten(fused.trainable)[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)


LAYER_CLIP = {
  'optimizer__clip_norm': 1e-2, 'optimizer__weight_decay': 0.0, 'optimizer__learning_rate': 1.0
}  # fmt: skip


def test_each_layer_is_clipped_by_its_own_norm(prepare: Any):
  prepared = prepare('sgd', 'fused', 'untied', **LAYER_CLIP)
  after, rows = small.take_steps(prepared, 1)
  moved = jax.tree.map(lambda a, b: np.asarray(a - b), after.trainable, prepared.state.trainable)['params']
  layers = moved.pop('layers')
  groups = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(2)]
  groups += [moved.pop('embed'), moved]
  for group in groups:
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(group)))
    assert norm / rows[0]['learning_rate'] == pytest.approx(1e-2, rel=1e-3)


def test_bfloat16_weights_with_stochastic_rounding_learn_without_moments(directories: dict[str, Path]):
  more = {'precision__param': 'bfloat16', 'precision__rounding': 'stochastic', 'num_steps': 20}
  more |= {'model__remat': 'full'}
  more |= {'optimizer__name': 'adafactor', 'optimizer__kind': 'fused', 'optimizer__learning_rate': 1e-2}
  prepared = small.prepare(small.run(directories['tied'], 'full', **more))
  state, rows = small.take_steps(prepared, 20)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.trainable))
  assert rows[-1]['loss'] < 0.2 * rows[0]['loss']


@pytest.mark.parametrize('kind', ['fused', 'fused_global'])
def test_a_loss_that_is_not_finite_moves_nothing_and_is_counted(prepare: Any, kind: str):
  prepared = prepare('sgd', kind, 'untied', **(GLOBAL_CLIP if kind == 'fused_global' else LAYER_CLIP))
  batch = next(prepared.batches())
  state = prepared.fresh_state()
  embedding = state.trainable['params']['embed']['embedding']
  state.trainable['params']['embed']['embedding'] = jnp.full_like(embedding, jnp.inf)
  before = jax.tree.map(np.asarray, (state.trainable, state.optimizer))
  after = go_on(prepared, state, [batch])
  assert_same((after.trainable, after.optimizer), before)
  assert int(after.step) == 1 and int(after.loss_scale.skipped) == 1


@pytest.mark.parametrize(('name', 'kind'), [('adamw8bit', 'fused'), ('adamw8bit', 'separate')])
def test_a_checkpoint_goes_on_exactly(prepare: Any, tmp_path: Path, name: str, kind: str):
  prepared = prepare(name, kind, optimizer__learning_rate=3e-3)
  stream = prepared.batches()
  batches = [next(stream) for _ in range(4)]
  half = go_on(prepared, prepared.fresh_state(), batches[:2])
  saved = checkpoint.Checkpoints(tmp_path, {})
  rest = lambda state: dataclasses.replace(state, trainable=())
  saved.save(2, half.trainable, rest(half), {})
  restored = saved.restore(prepared.state.trainable, rest(prepared.state))
  saved.close()
  assert restored is not None
  assert_same(restored.state.optimizer, half.optimizer)
  resumed = dataclasses.replace(restored.state, trainable=restored.trainable)
  done = go_on(prepared, half, batches[2:])
  assert_same(go_on(prepared, resumed, batches[2:]), done)
  assert any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(done.optimizer))


def test_many_devices_give_the_losses_of_one(prepare: Any):
  sizes = {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2}
  more = {'optimizer__learning_rate': 3e-3}
  split, alone = (small.take_steps(prepare('adamw8bit', 'fused', **more | m), 3) for m in (sizes, {}))
  assert [row['loss'] for row in split[1]] == pytest.approx([row['loss'] for row in alone[1]], rel=2e-4)
  for tree in (split[0].trainable, split[0].optimizer['layers']):
    for path, leaf in trees.flatten(tree).items():
      if leaf.ndim == 3 and not path.endswith('/scale'):
        assert leaf.nbytes == 4 * leaf.addressable_shards[0].data.nbytes, path


def test_no_more_than_a_layers_gradient_is_there_at_a_time(tmp_path: Path):
  """By the compiler's count; all layers' gradients and what they become are what is saved."""
  deep = dataclasses.replace(small.CONFIG, num_layers=12, d_model=128, d_ff=512)
  small.write(tmp_path, deep)
  temporary = {}
  for kind in ('separate', 'fused'):
    more = {'optimizer__kind': kind, 'optimizer__name': 'sgd', 'batch_size': 1, 'data__seq_len': 16}
    run = small.run(tmp_path, 'full', **EXACT | more)
    trainable, frozen = run.method.abstract(run.shapes)
    state = jax.eval_shape(functools.partial(train.init_state, run), trainable)
    like = {
      name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in train._blank(run.data, (0, 1)).items()
    }
    with jax.set_mesh(run.mesh):
      compiled = train.compile_step(run, state, frozen, like, jax.eval_shape(lambda: jax.random.key(0)))
    temporary[kind] = compiled.memory.temp_size_in_bytes
  layers = trees.nbytes(trainable['params']['layers'])
  assert temporary['separate'] > layers
  assert temporary['fused'] < 0.5 * layers


@pytest.mark.parametrize(
  ('method', 'more', 'message'),
  [
    ('lora', {}, "not what 'lora' trains; use method = 'full'"),
    ('full', {'micro_batch': 2}, 'gradients of 2 micro-batches.*raise config.micro_batch'),
    ('full', {'precision__loss_scale': 'dynamic'}, "loss scale must undo|a loss scale.*'fused_global'"),
    ('full', {'optimizer__kind': 'inside'}, 'optimizer.kind'),
    ('full', {'model__remat': 'projections'}, "not what model.remat = 'projections' keeps; .*remat = 'full'"),
    ('full', {'model__remat': 'none', 'optimizer__kind': 'fused_global'}, "model.remat = 'none'"),
  ],
)
def test_what_it_cannot_do_is_refused_by_name(
  directories: dict[str, Path], method: str, more: dict[str, Any], message: str
):
  with pytest.raises(UserError, match=message):
    small.run(directories['tied'], method, **{'optimizer__kind': 'fused'} | more)
