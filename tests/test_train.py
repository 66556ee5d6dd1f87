"""The laws of a training step, the same for every method, and of the loop around it."""

import dataclasses
import functools
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import optim, records, train, trees
from qjax.errors import UserError
from qjax.models.objective import loss_sums
from qjax.precision import StaticLossScale
from qjax.quant.qtensor import dequantize, expected_nbytes, is_qtensor
from qjax.step import gradients
from tests import small

STEPS = 20
NF4 = 'nf4:block=32,dq'
BASES: dict[str, dict[str, Any]] = {
  'lora': {'projections': 'float32'},
  'qlora': {'projections': NF4},
  'qlora of integers': {'projections': 'int4:block=32,asym', 'rules': (('layers/attn/.*/kernel', 'int8'),)},
}
METHODS = ('full', *BASES)
SAME = {
  'precision__compute': 'float32', 'batch_size': 8, 'num_steps': STEPS, 'optimizer__weight_decay': 0.1,
  'precision__loss_scale': 'static', 'precision__loss_scale_initial': 1.0, 'model__remat': 'none',
  'optimizer__clip_norm': 3.0,
}  # fmt: skip


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('train')
  small.write(directory)
  return directory


def run_of(directory: Path, name: str, **more: Any) -> train.Run:
  method, given = name.split()[0], SAME | more
  if method != 'full':
    base = {f'storage__{field}': value for field, value in BASES[name].items()}
    given = base | {'storage__embeddings': 'float32'} | given
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


_sums = jax.jit(loss_sums, static_argnums=0)


def loss(run: train.Run, variables: Any, batch: Any) -> float:
  """The mean over one batch [1, rows, T], compiled."""
  sums = _sums(run.model, variables, {name: x[0] for name, x in batch.items()})
  return float(sums.nll / sums.tokens)


# ---- what each method is ----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', METHODS)
def test_adapters_are_an_exact_identity_at_the_start(trained: Train, name: str):
  prepared = trained(name).prepared
  run, batch = prepared.run, next(prepared.batches())
  moves, rests = prepared.state.trainable, prepared.frozen
  variables = trees.combine(moves, rests)
  assert ('lora' in variables) == (name != 'full')
  with_adapters, base = loss(run, variables, batch), loss(run, {'params': variables['params']}, batch)
  assert with_adapters == base
  assert trained(name).metrics[0]['loss'] == pytest.approx(base, rel=1e-6)
  if name == 'lora':  # stored like the weights of full fine-tuning
    assert base == loss(run, trained('full').prepared.state.trainable, batch)
  if name.startswith('qlora'):
    plain = jax.tree.map(lambda w: dequantize(w) if is_qtensor(w) else w, rests['params'], is_leaf=is_qtensor)
    # Not bit for bit: a compiler may or may not fuse the multiplication and addition that decode a scale.
    assert base == pytest.approx(loss(run, {'params': plain}, batch), rel=1e-6)
    assert base != trained('full').metrics[0]['loss']


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
  per_layer = 4 * sum(k + n for k, n in 3 * [(64, 128)] + 2 * [(64, 64)] + 2 * [(128, 64)])
  count = {'full': sum(np.prod(shape) for shape in prepared.run.shapes.values())}.get(name, 2 * per_layer)
  assert sizes['trainable_parameters'] == count
  scalars = len(jax.tree.leaves(prepared.state.optimizer)) - len(moments)
  assert sizes['optimizer_bytes'] == 2 * 4 * count + 4 * scalars
  assert sizes['adapter_bytes'] == (0 if name == 'full' else 4 * count)


@pytest.mark.parametrize('name', METHODS)
def test_the_norm_that_is_clipped_is_over_what_is_trained(trained: Train, name: str):
  """The gradient that Adam was given, from two moments, is as long as the metric says, and at most 3."""
  norms = [row['gradient_norm'] for row in trained(name).metrics]
  assert max(norms) > 3.5 and min(norms) < 2.5
  for step in (norms.index(max(norms)), norms.index(min(norms))):
    before, after = (
      [np.asarray(leaf) for path, leaf in trees.flatten(state.optimizer).items() if '/mu/' in path]
      for state, _ in (small.take_steps(trained(name).prepared, count) for count in (step, step + 1))
    )
    given = [(b - 0.9 * a) / 0.1 for a, b in zip(before, after, strict=True)]
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in given))
    assert norm == pytest.approx(min(3, norms[step]), rel=1e-3)


def test_the_learning_rate_follows_its_schedule(trained: Train):
  rates = [row['learning_rate'] for row in trained('lora').metrics]
  peak = 1e-2
  assert rates[:3] == pytest.approx([peak / 3, peak * 2 / 3, peak])
  assert rates[2:] == pytest.approx([peak * (1 + np.cos(np.pi * i / 18)) / 2 for i in range(18)], rel=1e-4)


# ---- float16, overflow, skipped steps ---------------------------------------------------------------------


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
  assert int(optim.applied_steps(state.optimizer)) == 60 - skipped[-1]
  # Nothing was learned before, all is learned after; the scale grows again after eight finite steps.
  assert metrics[-1]['loss'] < 0.3 * metrics[0]['loss']
  grown = [b['loss_scale'] > a['loss_scale'] for a, b in itertools.pairwise(metrics)]
  assert any(grown) and grown.index(True) >= first + 7


@pytest.mark.parametrize('poison', ['weights', 'frozen'])
def test_overflows_in_a_row_change_nothing_but_their_count(half: small.Prepared, poison: str):
  state, _ = small.take_steps(half, 40)
  before = jax.tree.map(np.asarray, state)
  batch, frozen = next(half.batches()), half.frozen
  if poison == 'weights':
    batch = batch | {'weights': jnp.full_like(batch['weights'], jnp.nan)}
  else:
    frozen = trees.map_with_path(lambda path, x: x * jnp.inf if 'final_norm' in path else x, frozen)
  rates = set()
  for count in range(1, 26):
    state, metrics = half.compiled.call(state, frozen, batch, half.key)
    assert not np.isfinite(metrics.loss)
    assert int(metrics.consecutive_skips) == int(before.loss_scale.consecutive) + count
    rates.add(float(metrics.learning_rate))
  assert_same(state.trainable, before.trainable)
  assert_same(state.optimizer, before.optimizer)
  assert len(rates) == 1
  assert int(state.loss_scale.skipped) == int(before.loss_scale.skipped) + 25
  assert float(state.loss_scale.value) == max(1.0, float(before.loss_scale.value) / 2**25)
  state, metrics = half.compiled.call(state, half.frozen, next(half.batches()), half.key)
  assert int(metrics.consecutive_skips) == 0 and np.isfinite(metrics.loss)


def test_clipping_sees_unscaled_gradients(trained: Train):
  """A power of two as loss scale changes no bit of a float32 run, which is clipped in its first steps."""
  prepared = trained('lora').prepared
  scaled = dataclasses.replace(prepared.state, loss_scale=StaticLossScale(jnp.asarray(2.0**10)))
  after, metrics = small.take_steps(prepared._replace(state=scaled), STEPS)
  assert_same(after.trainable, trained('lora').after.trainable)
  norms = [row['gradient_norm'] for row in metrics]
  assert norms == [row['gradient_norm'] for row in trained('lora').metrics] and max(norms) > 3


# ---- accumulation -----------------------------------------------------------------------------------------


def test_accumulation_gives_the_same_gradients_however_unequal_the_parts(tmp_path: Path):
  small.write(tmp_path, dataclasses.replace(small.CONFIG, num_layers=1))
  run = run_of(tmp_path, 'full')
  trainable, frozen = train.prepare(run)
  rng = np.random.default_rng(0)
  shape = (8, 32)
  # From no trained token at all to every one; the first of two parts is fully masked.
  weights = np.zeros(shape, np.float32)
  for row, count in enumerate((0, 0, 0, 0, 1, 32, 5, 31)):
    weights[row, :count] = 1
  words = rng.integers(0, 256, (2, *shape)).astype(np.int32)
  batch = {
    'tokens': words[0], 'targets': words[1], 'weights': weights, 'segments': np.ones(shape, np.int32),
    'positions': np.broadcast_to(np.arange(32, dtype=np.int32), shape),
  }  # fmt: skip

  # The plain mean over the batch, by autodiff and without any of the bookkeeping.
  def mean(trainable: Any) -> jax.Array:
    return loss_sums(run.model, trees.combine(trainable, frozen), batch).nll / weights.sum()

  value, gradient = jax.jit(jax.value_and_grad(mean))(trainable)
  wanted, nll = trees.flatten(gradient), float(value) * weights.sum()
  call = jax.jit(functools.partial(gradients, run.model, run.method), static_argnums=1)
  for parts in (1, 2, 8):
    placed = train.place_batch(batch, parts, run.mesh)
    found = call(run.loss_scale, 4096, trainable, frozen, placed, jax.random.key(0))
    grads, summed = found.tree, found.nll
    assert float(summed) == pytest.approx(nll, rel=1e-6)
    for path, grad in trees.flatten(grads).items():
      assert grad.dtype == jnp.float32
      error = float(jnp.max(jnp.abs(grad - wanted[path])))
      assert error <= 1e-5 * float(jnp.max(jnp.abs(wanted[path]))), (parts, path)


# ---- many devices -----------------------------------------------------------------------------------------

MESHES = {'data 4 × fsdp 2': (4, 2, 1), 'fsdp 4 × tensor 2': (1, 4, 2)}


@pytest.mark.parametrize(
  ('name', 'mesh'),
  [
    ('full', 'data 4 × fsdp 2'), ('lora', 'data 4 × fsdp 2'), ('qlora', 'data 4 × fsdp 2'),
    ('qlora', 'fsdp 4 × tensor 2'),
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

  # Norms, constants of a matrix and counters are copied; all else is split.
  shards = fsdp * tensor
  for tree in (prepared.frozen, after.trainable, after.optimizer):
    for path, leaf in trees.flatten(tree).items():
      held = {shard.data.nbytes for shard in leaf.addressable_shards}
      assert len(leaf.addressable_shards) == 8 and len(held) == 1, path
      parts = leaf.nbytes / held.pop()
      if 'norm' in path or leaf.ndim < 2:
        assert parts == 1, path
      elif path.endswith('/step'):  # one number for 256 scales: split where it divides
        assert parts in (1, tensor, fsdp), path
      elif '/lora/' in f'/{path}':
        assert parts in (1, tensor, fsdp, shards), path
      else:
        assert parts == shards, path
  if name == 'full':
    tree = (after.trainable, after.optimizer)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert held < 1.02 / shards * trees.nbytes(tree)


# ---- memory -----------------------------------------------------------------------------------------------

DEEP = dataclasses.replace(small.CONFIG, num_layers=6, d_model=128, d_ff=512, num_heads=4, head_dim=32)


class Need:
  """Bytes of a compiled step, as the compiler counts them."""

  def __init__(self, memory: Any):
    self.arguments, self.temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    self.total = self.arguments + self.temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes


@pytest.fixture(scope='module')
def deep_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, train.Run]:
  directory = tmp_path_factory.mktemp('deep')
  small.write(directory, DEEP)
  same = {'batch_size': 2, 'data__seq_len': 16, 'model__remat': 'full'}
  return {name: run_of(directory, name, **same) for name in ('full', 'lora', 'qlora')}


def abstract(run: train.Run) -> tuple[Any, Any, Any, Any]:
  """The arguments of a step as shapes."""
  trainable, frozen = run.method.abstract(run.shapes)
  state = jax.eval_shape(functools.partial(train.init_state, run), trainable)
  batch = {
    name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in train._blank(run.data, (0, 1)).items()
  }
  return state, frozen, batch, jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture(scope='module')
def needs(deep_runs: dict[str, train.Run]) -> dict[str, Need]:
  found = {}
  for name, run in deep_runs.items():
    with jax.set_mesh(run.mesh):
      found[name] = Need(train.compile_step(run, *abstract(run)).memory)
  return found


def layer_bytes(run: train.Run) -> int:
  """Of the projections of one layer in the compute dtype."""
  shapes = (shape for path, shape in run.shapes.items() if path.endswith('/kernel'))
  return sum(int(np.prod(shape[1:])) for shape in shapes) * run.method.numerics.policy.compute.itemsize


@pytest.mark.parametrize('name', ['full', 'lora', 'qlora'])
def test_a_step_holds_what_arithmetic_says(
  deep_runs: dict[str, train.Run], needs: dict[str, Need], name: str
):
  run = deep_runs[name]
  count = sum(int(np.prod(shape)) for shape in run.shapes.values())
  adapters = 4 * sum(
    6 * (shape[1] + shape[2]) for path, shape in run.shapes.items() if path.endswith('/kernel')
  )  # fmt: skip
  moved = count if name == 'full' else adapters
  weights = 4 * count
  if name == 'qlora':
    weights = sum(
      expected_nbytes(shape, NF4) if path.endswith('/kernel') else 4 * int(np.prod(shape))
      for path, shape in run.shapes.items()
    )
  batch = 5 * 4 * 2 * 16
  wanted = weights + 2 * 4 * moved + batch + (0 if name == 'full' else 4 * adapters)
  assert needs[name].arguments == pytest.approx(wanted, rel=0.01)


def test_quantizing_the_base_saves_memory(deep_runs: dict[str, train.Run], needs: dict[str, Need]):
  """The weights that are saved at rest are saved in training: no decoded copy of more than a layer lives."""
  full, lora, qlora = (needs[name] for name in ('full', 'lora', 'qlora'))
  layer = layer_bytes(deep_runs['qlora'])
  assert qlora.temporary - lora.temporary <= 1.5 * layer
  saved = lora.arguments - qlora.arguments
  assert saved > 4 * layer
  assert qlora.total <= lora.total - 0.9 * saved
  assert lora.total < 0.5 * full.total


def test_the_memory_bound_can_fail(deep_runs: dict[str, train.Run], needs: dict[str, Need]):
  """MLPs one after another, whose decoded weights autodiff keeps: what the bound is there to catch."""
  run = deep_runs['qlora']
  state, frozen, _, _ = abstract(run)

  def unrolled(trainable: Any, frozen: Any, x: jax.Array) -> jax.Array:
    def product(x: jax.Array, name: str, layer: int) -> jax.Array:
      q = frozen['params']['layers']['mlp'][name]['kernel'][layer]
      adapter = trainable['lora']['layers']['mlp'][name]['kernel']
      return x @ dequantize(q) + adapter.scale * (x @ adapter.a[layer].T) @ adapter.b[layer]

    for layer in range(DEEP.num_layers):
      x = x + product(jax.nn.silu(product(x, 'gate', layer)) * product(x, 'up', layer), 'down', layer)
    return jnp.sum(x * x)

  x = jax.ShapeDtypeStruct((2, 16, DEEP.d_model), jnp.float32)
  compiled = jax.jit(jax.grad(unrolled)).lower(state.trainable, frozen, x).compile()
  unrolled_bytes = Need(compiled.memory_analysis()).temporary
  assert unrolled_bytes - needs['lora'].temporary > 1.5 * layer_bytes(run)


# ---- the loop ---------------------------------------------------------------------------------------------


def projections(run: train.Run) -> list[str]:
  return [path for path in run.shapes if path.endswith('/kernel')]


def record_of(run: train.Run) -> records.Record:
  return records.Record(run.workdir / records.RECORD, {'meaning': dict(run.meaning)})


def test_a_run_without_a_finite_gradient_gives_up_saved_and_without_nan_in_a_file(
  directory: Path, trained: Train, monkeypatch: pytest.MonkeyPatch
):
  compiled = trained('lora').prepared.compiled
  monkeypatch.setattr(train, 'compile_step', lambda *arguments: compiled)
  run = run_of(directory, 'lora', workdir='hopeless', max_skips=3, eval_every=50)

  def read(path: str, layer: int | None) -> np.ndarray:
    return run.read(path, layer) * np.float32(1e38 if path.endswith('final_norm/scale') else 1)

  broken = dataclasses.replace(run, read=read)
  with pytest.raises(UserError, match='3 steps in a row had no finite gradient.*saved.*learning_rate'):
    train.train(broken, record_of(run))
  rows = records.read_metrics(run.workdir)
  assert [row['step'] for row in rows] == [0, 1, 2, 3]
  assert rows[1]['loss'] is None and rows[0]['nll'] is None
  assert [row['consecutive_skips'] for row in rows[1:]] == [1, 2, 3]
  found = records.read_record(run.workdir)
  assert found is not None and found['status'] == 'failed' and found['step'] == 3
  # What runs is told by product, with the reason.
  assert found['kernels']['matmul'] == 'xla'
  products = [product for told in found['products'].values() for product in told]
  wanted = {f'{path} {product}' for path in projections(run) for product in ('forward', 'dx')}
  assert set(products) == wanted and len(products) == len(wanted)
  assert set(found['products']) == {'xla: the weight is plain'}
  for path in run.workdir.rglob('*'):
    if path.is_file() and (path.suffix in ('.json', '.jsonl') or path.name == 'metadata'):
      assert 'NaN' not in path.read_text() and 'Infinity' not in path.read_text(), path
  assert (run.workdir / 'checkpoints' / '3').is_dir()
  # Adapters are saved, and the base, which the model file holds already, is not.
  sizes = found['sizes']
  files = [path for path in (run.workdir / 'checkpoints' / '3').rglob('*') if path.is_file()]
  saved = sum(path.stat().st_size for path in files)
  assert saved < sizes['adapter_bytes'] + sizes['optimizer_bytes'] + 2**16 < 0.8 * sizes['weight_bytes']


def test_the_first_signal_is_remembered_and_the_second_stops_at_once(capsys: pytest.CaptureFixture[str]):
  before = signal.getsignal(signal.SIGTERM)
  with train.StopRequest.listen() as stop:
    assert stop.signal_number is None
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal_number == signal.SIGTERM and 'again to stop at once' in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert signal.getsignal(signal.SIGTERM) == before
