"""The laws of a training step, the same for every method, and of the loop around it."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qjax import records, train, trees
from qjax.errors import UserError
from qjax.models.loss import loss_sums
from qjax.precision import StaticLossScale
from qjax.quant.qtensor import dequantize, is_qtensor
from tests import small

STEPS = 20
BASES = {'qlora': 'nf4:block=32,dq', 'qlora int4': 'int4:block=32,asym', 'qlora int8': 'int8'}
METHODS = ('full', 'lora', *BASES)
SAME = {'precision__compute': 'float32', 'batch_size': 8, 'num_steps': STEPS, 'optimizer__weight_decay': 0.1}


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('train')
  small.write(directory)
  return directory


def run_of(directory: Path, name: str, **more: Any) -> train.Run:
  method, given = name.split()[0], SAME | more
  if method != 'full':
    base = BASES.get(name, 'float32')
    given = {'storage__projections': base, 'storage__embeddings': 'float32'} | given
  return small.run(directory, method, **given)


@dataclasses.dataclass
class Trained:
  """A run, prepared, and what twenty steps made of it."""

  prepared: small.Prepared
  after: train.State
  metrics: list[dict[str, Any]]


Train = Callable[[str], Trained]


@pytest.fixture(scope='module')
def trained(directory: Path) -> Train:
  """Twenty steps of a method with weight decay; each method is compiled and run once for all tests."""

  @functools.cache
  def of(name: str) -> Trained:
    prepared = small.prepare(run_of(directory, name))
    return Trained(prepared, *small.take_steps(prepared, STEPS))

  return of


def assert_same(found: Any, wanted: Any) -> None:
  """Bit for bit, NaN included."""
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for (path, one), other in zip(trees.flatten(found).items(), jax.tree.leaves(wanted), strict=True):
    assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes(), path


def loss(run: train.Run, variables: Any, batch: Any) -> float:
  """The mean over one batch [1, rows, T], compiled."""
  sums = jax.jit(functools.partial(loss_sums, run.model))(variables, {name: x[0] for name, x in batch.items()})
  return float(sums.nll / sums.tokens)


# ---- what each method is ------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', METHODS)
def test_adapters_are_an_exact_identity_at_the_start(trained: Train, name: str):
  prepared = trained(name).prepared
  run, batch = prepared.run, next(prepared.batches())
  moves, rests = prepared.state.trainable, prepared.frozen
  variables = trees.combine(moves, rests)
  with_adapters = loss(run, variables, batch)
  assert ('lora' in variables) == (name != 'full')
  # The base as it rests, decoded to plain arrays, without any adapter.
  plain = jax.tree.map(lambda w: dequantize(w) if is_qtensor(w) else w, variables['params'], is_leaf=is_qtensor)
  assert with_adapters == loss(run, {'params': plain}, batch)
  assert trained(name).metrics[0]['loss'] == pytest.approx(with_adapters, rel=1e-6)
  if name == 'lora':
    assert with_adapters == loss(run, {'params': trained('full').prepared.state.trainable['params']}, batch)


@pytest.mark.parametrize('name', METHODS)
def test_each_method_learns_what_can_be_memorized(trained: Train, name: str):
  losses = [row['loss'] for row in trained(name).metrics]
  assert losses[-1] < 0.2 * losses[0] and np.mean(losses[-5:]) < 0.2 * np.mean(losses[:3])


@pytest.mark.parametrize('name', METHODS)
def test_what_is_frozen_stays_bit_identical_and_what_is_trained_moves(trained: Train, name: str):
  done = trained(name)
  _, frozen_anew = train.prepare(done.prepared.run)
  assert_same(done.prepared.frozen, frozen_anew)
  before, after = trees.flatten(done.prepared.state.trainable), trees.flatten(done.after.trainable)
  assert before.keys() == after.keys()
  for path in before:
    assert not np.array_equal(before[path], after[path]), path


@pytest.mark.parametrize('name', METHODS)
def test_gradients_moments_and_norms_cover_what_is_trained_and_nothing_else(trained: Train, name: str):
  prepared = trained(name).prepared
  trainable = jax.tree.leaves(prepared.state.trainable)
  moments = [leaf for leaf in jax.tree.leaves(prepared.state.optimizer) if leaf.ndim]
  assert sorted(m.shape for m in moments) == sorted(2 * [leaf.shape for leaf in trainable])
  assert all(m.dtype == jnp.float32 for m in moments)
  sizes = train.measure(prepared.state.trainable, prepared.frozen, prepared.state)
  per_layer = 4 * sum(64 + out for out in (64, 32, 32, 64, 128, 128)) + 4 * (128 + 64)
  count = {'full': sum(np.prod(shape) for shape in prepared.run.shapes.values())}.get(name, 2 * per_layer)
  assert sizes['trainable_parameters'] == count
  scalars = len(jax.tree.leaves(prepared.state.optimizer)) - len(moments)
  assert sizes['optimizer_bytes'] == 2 * 4 * count + 4 * scalars
  assert sizes['adapter_bytes'] == (0 if name == 'full' else 4 * count)
  with jax.set_mesh(prepared.run.mesh):
    grads, _, _ = jax.jit(functools.partial(train.gradients, prepared.run.model), static_argnums=(1,))(
      prepared.run.loss_scale, 4096, prepared.state.trainable, prepared.frozen, next(prepared.batches()), None
    )
  assert jax.tree.structure(grads) == jax.tree.structure(prepared.state.trainable)
  assert trained(name).metrics[0]['gradient_norm'] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)


def test_the_learning_rate_follows_its_schedule(trained: Train):
  rates = [row['learning_rate'] for row in trained('lora').metrics]
  peak = 1e-2
  assert rates[:3] == pytest.approx([peak / 3, peak * 2 / 3, peak])
  assert rates[2:] == pytest.approx([peak * (1 + np.cos(np.pi * i / 18)) / 2 for i in range(18)])


# ---- float16, overflow, skipped steps -----------------------------------------------------------------------


@pytest.fixture(scope='module')
def half(directory: Path) -> small.Prepared:
  """LoRA in float16 from a loss scale that overflows for a while."""
  return small.prepare(run_of(
    directory, 'lora', precision__compute='float16', storage__projections='float16', num_steps=60,
    storage__embeddings='float16', precision__loss_scale='dynamic', precision__loss_scale_initial=2.0**40,
    precision__loss_scale_period=8,
  ))  # fmt: skip


def test_float16_skips_until_the_loss_scale_fits_and_then_trains(half: small.Prepared):
  state, metrics = small.take_steps(half, 60)
  skipped = [row['skipped'] for row in metrics]
  first = next(i for i, row in enumerate(metrics) if row['consecutive_skips'] == 0)
  assert 10 <= first <= 30 and skipped[:first] == list(range(1, first + 1))
  assert [row['loss_scale'] for row in metrics[: first + 1]] == [2.0 ** (40 - i) for i in range(first + 1)]
  assert [row['consecutive_skips'] for row in metrics[:first]] == list(range(1, first + 1))
  # The schedule stands still while steps are skipped, and counts only applied updates afterwards.
  assert {row['learning_rate'] for row in metrics[: first + 1]} == {metrics[0]['learning_rate']}
  assert int(train.optim.applied_steps(state.optimizer)) == 60 - skipped[-1]
  # Nothing was learned before, all is learned after; the scale grows again after eight finite steps.
  assert metrics[-1]['loss'] < 0.3 * metrics[0]['loss']
  grown = [b['loss_scale'] > a['loss_scale'] for a, b in zip(metrics, metrics[1:], strict=False)]
  assert any(grown) and grown.index(True) >= first + 7


@pytest.mark.parametrize('poison', ['weights', 'frozen'])
def test_overflows_in_a_row_change_nothing_but_their_count(half: small.Prepared, poison: str):
  state, _ = small.take_steps(half, 40)
  before = jax.tree.map(np.asarray, state)
  batch, frozen = next(half.batches()), half.frozen
  if poison == 'weights':
    batch = batch | {'weights': jnp.full_like(batch['weights'], jnp.nan)}
  else:
    frozen = trees.map_with_path(lambda path, x: x * jnp.inf if path.endswith('final_norm/scale') else x, frozen)
  rates = set()
  for count in range(1, 26):
    state, metrics = half.compiled.call(state, frozen, batch, half.key)
    assert not np.isfinite(metrics.loss) and int(metrics.consecutive_skips) == count
    rates.add(float(metrics.learning_rate))
  assert_same(state.trainable, before.trainable)
  assert_same(state.optimizer, before.optimizer)
  assert len(rates) == 1
  assert int(state.loss_scale.skipped) == int(before.loss_scale.skipped) + 25
  assert float(state.loss_scale.value) == max(1.0, float(before.loss_scale.value) / 2**25)
  state, metrics = half.compiled.call(state, half.frozen, next(half.batches()), half.key)
  assert int(metrics.consecutive_skips) == 0 and np.isfinite(metrics.loss)


def test_clipping_sees_unscaled_gradients(directory: Path):
  """A power of two as loss scale changes no bit of a float32 run whose clipping is always active."""
  run = run_of(directory, 'lora', precision__loss_scale='static', optimizer__clip_norm=0.05)
  prepared = small.prepare(run)
  after, norms = {}, {}
  for scale in (1.0, 2.0**10):
    state = dataclasses.replace(prepared.state, loss_scale=StaticLossScale(jnp.asarray(scale)))
    after[scale], metrics = small.take_steps(prepared._replace(state=state), 5)
    norms[scale] = [row['gradient_norm'] for row in metrics]
  assert min(norms[1.0]) > 0.05 and norms[1.0] == norms[2.0**10]
  assert_same(after[1.0].trainable, after[2.0**10].trainable)


# ---- accumulation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['full', 'lora'])
def test_accumulation_gives_the_same_gradients_however_unequal_the_parts(directory: Path, name: str):
  prepared_run = run_of(directory, name)
  trainable, frozen = train.prepare(prepared_run)
  rng = np.random.default_rng(0)
  shape = (8, 32)
  # From no trained token at all to every one; rows 2 and 3 make one of four parts fully masked.
  weights = np.zeros(shape, np.float32)
  for row, count in enumerate((1, 32, 0, 0, 2, 0, 5, 31)):
    weights[row, :count] = 1
  words = rng.integers(0, 256, (2, *shape)).astype(np.int32)
  batch = {
    'tokens': words[0], 'targets': words[1], 'weights': weights, 'segments': np.ones(shape, np.int32),
    'positions': np.broadcast_to(np.arange(32, dtype=np.int32), shape),
  }  # fmt: skip
  call = jax.jit(functools.partial(train.gradients, prepared_run.model), static_argnums=1)
  found = {}
  for parts in (1, 4, 8):
    placed = train.place_batch(batch, parts, prepared_run.mesh)
    found[parts] = call(prepared_run.loss_scale, 4096, trainable, frozen, placed, None)
  # The plain mean over the batch, by autodiff and without any of the bookkeeping.
  def mean(trainable: Any) -> jax.Array:
    return loss_sums(prepared_run.model, trees.combine(trainable, frozen), batch).nll / weights.sum()

  wanted = jax.jit(jax.grad(mean))(trainable)
  for parts, (grads, nll, correct) in found.items():
    assert float(nll) == pytest.approx(float(found[1][1]), rel=1e-6) and correct == found[1][2]
    for path, grad in trees.flatten(grads).items():
      other = trees.flatten(wanted)[path]
      assert grad.dtype == jnp.float32
      assert float(jnp.max(jnp.abs(grad - other))) <= 1e-5 * float(jnp.max(jnp.abs(other))), (parts, path)


# ---- many devices -------------------------------------------------------------------------------------------

MESHES = {'data 4 × fsdp 2': (4, 2, 1), 'fsdp 4 × tensor 2': (1, 4, 2)}


@pytest.mark.parametrize(
  ('name', 'mesh'),
  [
    ('full', 'data 4 × fsdp 2'), ('lora', 'data 4 × fsdp 2'), ('qlora', 'data 4 × fsdp 2'),
    ('full', 'fsdp 4 × tensor 2'), ('qlora', 'fsdp 4 × tensor 2'),
  ],
)  # fmt: skip
def test_many_devices_give_the_losses_of_one_and_share_the_bytes(
  directory: Path, trained: Train, name: str, mesh: str
):
  data, fsdp, tensor = MESHES[mesh]
  sizes = {'mesh__data': data, 'mesh__fsdp': fsdp, 'mesh__tensor': tensor}
  prepared = small.prepare(run_of(directory, name, **sizes))
  after, metrics = small.take_steps(prepared, 5)
  alone = trained(name).metrics[:5]
  for field in ('loss', 'gradient_norm', 'tokens', 'accuracy'):
    assert [row[field] for row in metrics] == pytest.approx([row[field] for row in alone], rel=2e-4), field

  # Whole leaves: norms, per-matrix constants, counters. All that belongs to a projection or embedding is split.
  shards = fsdp * tensor
  for tree in (prepared.frozen, after.trainable, after.optimizer):
    for path, leaf in trees.flatten(tree).items():
      held = {shard.data.nbytes for shard in leaf.addressable_shards}
      assert len(leaf.addressable_shards) == 8 and len(held) == 1, path
      parts = leaf.nbytes / held.pop()
      is_small = 'norm' in path or leaf.ndim < 2 or path.endswith(('/step', '/offset'))
      if is_small:
        assert parts == 1, path
      elif '/lora/' in f'/{path}':
        assert parts in (1, tensor, fsdp, shards), path
      else:
        assert parts == shards, path
  weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((prepared.frozen, after.trainable)))
  assert weights < 1.35 / shards * trees.nbytes((prepared.frozen, after.trainable))
