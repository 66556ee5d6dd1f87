"""The training loop: one for all methods. Read `train` from top to bottom."""

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qjax import checkpoint, evaluate, files, optim, records, sharding, trees
from qjax.data.pipeline import Dataset, DataSpec, eval_batches, train_iterator
from qjax.errors import UserError
from qjax.evaluate import Score
from qjax.method import Method, Reader, Stored
from qjax.models.objective import LossSums, loss_sums
from qjax.models.transformer import Transformer
from qjax.precision import LossScale, is_all_finite
from qjax.progress import Bar, stage

Tree = Any
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Loop:
  """How long and how often.

  Attributes:
    num_steps: batches to train on.
    accumulate: micro-batches a step; the batch's rows are divided among them.
    eval_every: steps between evaluations; there is always one before and one after.
    checkpoint_every: steps between checkpoints; there is always one at each evaluation.
    max_skips: give up after this many steps in a row without a finite gradient.
    loss_chunk: most words of the vocabulary for which logits exist at a time.
    seed: of adapters, dropout and stochastic rounding (the data has its own copy).
  """

  num_steps: int
  accumulate: int
  eval_every: int
  checkpoint_every: int
  max_skips: int
  loss_chunk: int
  seed: int


@dataclasses.dataclass(frozen=True)
class Program:
  """What a step is compiled from: everything but weights and data.

  Attributes:
    shapes: of the model's parameters, by path.
  """

  model: Transformer
  method: Method
  shapes: Mapping[str, tuple[int, ...]]
  loss_scale: LossScale
  data: DataSpec
  mesh: Mesh
  loop: Loop


@dataclasses.dataclass(frozen=True)
class Run(Program):
  """Everything that `train` needs, already checked; `build.run` makes one from a config.

  Attributes:
    meaning: what a checkpoint of this run stands for, as JSON; resuming with another is refused.
    read: one array of the model file's parameters at a time.
    stored: the same as `QTensor`s where the file holds them so, else None.
    input_ranges: finds the largest inputs of projections, float32 [L] by path, for static activation schemes.
  """

  workdir: Path
  config: Mapping[str, Any]
  meaning: Mapping[str, Any]
  read: Reader
  dataset: Dataset
  input_ranges: Callable[[], Mapping[str, Any]] = dict
  stored: Stored = lambda path, layer: None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """What a step changes.

  Attributes:
    step: int32, batches consumed (skipped steps too, so it is also the data's position).
    trainable: what moves.
    optimizer: optax state over `trainable` alone.
    loss_scale: scale and skip counters.
  """

  step: jax.Array
  trainable: Tree
  optimizer: Tree
  loss_scale: LossScale


class StepMetrics(NamedTuple):
  """Of one step, float32 or int32 scalars. `loss` and `accuracy` are means over its trained tokens."""

  loss: jax.Array
  accuracy: jax.Array
  tokens: jax.Array
  gradient_norm: jax.Array
  learning_rate: jax.Array
  loss_scale: jax.Array
  skipped: jax.Array
  consecutive_skips: jax.Array


StepFunction = Callable[[State, Tree, Arrays, jax.Array], tuple[State, StepMetrics]]


def init_state(run: Program, trainable: Tree) -> State:
  tx = optim.make(run.method.update, run.loop.num_steps)
  return State(jnp.zeros((), jnp.int32), trainable, tx.init(trainable), run.loss_scale)


class Gradients(NamedTuple):
  """Of a batch: unscaled float32 gradients of its mean objective; summed nll and correct tokens; `seen`."""

  tree: Tree
  nll: jax.Array
  correct: jax.Array
  seen: Tree


def gradients(
  model: Transformer,
  method: Method,
  loss_scale: LossScale,
  chunk: int,
  trainable: Tree,
  frozen: Tree,
  batch: Arrays,
  key: jax.Array,
) -> Gradients:
  """One backward pass a micro-batch; `batch` arrays are [micro-batches, rows, T].

  Each micro-batch's sum is divided by the tokens of the whole batch before its backward pass, so unequal
  micro-batches weigh exactly what their tokens weigh, and half-precision gradients have the size of a mean.
  """
  total = jnp.maximum(jnp.sum(batch['weights']), 1)
  lora = method.trainable.lora
  names = ['dropout'] if lora is not None and lora.dropout > 0 else []
  names += ['rounding'] if model.numerics.draws else []
  with_seen = method.course.momentum is not None

  def loss(trainable: Tree, micro: Arrays, index: jax.Array) -> tuple[jax.Array, LossSums]:
    keys = jax.random.split(jax.random.fold_in(key, index), max(len(names), 1))
    rngs = dict(zip(names, keys, strict=False)) or None
    variables = trees.combine(trainable, frozen)
    sums = loss_sums(model, variables, micro, chunk, rngs, method.distillation, with_seen)
    return loss_scale.scale(sums.objective / total), sums

  def one(micro: Arrays, index: jax.Array) -> Gradients:
    tree, sums = jax.grad(loss, has_aux=True)(trainable, micro, index)
    return Gradients(tree, sums.nll, sums.correct, sums.seen)

  def add(sum_: Gradients, x: Gradients) -> Gradients:
    widened = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sum_, x)
    return widened._replace(seen=jax.tree.map(jnp.maximum, sum_.seen, x.seen))

  count = batch['weights'].shape[0]
  first = {name: x[0] for name, x in batch.items()}
  if count == 1:
    found = one(first, jnp.zeros((), jnp.int32))
  else:
    like = jax.eval_shape(one, first, jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    steps = (dict(batch), jnp.arange(count))
    found, _ = jax.lax.scan(lambda carry, step: (add(carry, one(*step)), None), zeros, steps)
  grads = jax.tree.map(lambda x: x.astype(jnp.float32), loss_scale.unscale(found.tree))
  return found._replace(tree=grads)


def _follow(moved: Tree, seen: Tree, momentum: float) -> Tree:
  """`moved` with each range of inputs a step of its moving average nearer to what was seen."""
  latest = trees.flatten(seen)

  def average(path: str, high: jax.Array) -> jax.Array:
    if not path.startswith('act/'):
      return high
    return (momentum * high + (1 - momentum) * latest[path.removeprefix('act/')]).astype(high.dtype)

  return trees.map_with_path(average, moved)


def make_step(model: Transformer, method: Method, loop: Loop) -> StepFunction:
  """The pure function of one step: (state, frozen, batch, key) to the next state and its metrics."""
  tx = optim.make(method.update, loop.num_steps)
  rate = optim.schedule(method.update, loop.num_steps)
  course = method.course

  def step(state: State, frozen: Tree, batch: Arrays, key: jax.Array) -> tuple[State, StepMetrics]:
    step_key, rounding_key = jax.random.split(jax.random.fold_in(key, state.step))
    found = gradients(
        model, method, state.loss_scale, loop.loss_chunk, state.trainable, frozen, batch, step_key
    )  # fmt: skip
    grads, nll, correct = found.tree, found.nll, found.correct
    if course.freeze_step is not None:
      is_frozen = state.step >= course.freeze_step
      grads = trees.map_with_path(
          lambda path, g: jnp.where(is_frozen, jnp.zeros_like(g), g) if optim.is_range(path) else g, grads
      )
    tokens = jnp.sum(batch['weights'])
    is_finite = is_all_finite(grads) & jnp.isfinite(nll)
    updates, optimizer = tx.update(grads, state.optimizer, state.trainable)
    moved = optim.apply(state.trainable, updates, method.update.rounding, rounding_key)
    if course.momentum is not None:
      moved = _follow(moved, found.seen, course.momentum)
    if course.freeze_step is not None:  # moments go on moving what has no gradient any more
      moved = trees.map_with_path(
          lambda path, new, old: jnp.where(is_frozen, old, new) if optim.is_range(path) else new,
          moved,
          state.trainable,
      )
    # Finite gradients may still carry a weight past its dtype's largest value; that step is skipped too.
    is_finite = is_finite & is_all_finite(moved)

    def keep(new: Tree, old: Tree) -> Tree:
      return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

    scale = state.loss_scale.adjust(is_finite)
    after = State(state.step + 1, keep(moved, state.trainable), keep(optimizer, state.optimizer), scale)
    total = jnp.maximum(tokens, 1)
    metrics = StepMetrics(
        loss=nll / total,
        accuracy=correct / total,
        tokens=tokens,
        gradient_norm=optax.tree.norm(grads),
        learning_rate=jnp.asarray(rate(optim.applied_steps(state.optimizer)), jnp.float32),
        loss_scale=state.loss_scale.factor(),
        skipped=scale.skipped,
        consecutive_skips=scale.consecutive,
    )
    return after, metrics

  return step


def state_shardings(state: State, mesh: Mesh) -> State:
  """Where each array of the state lives: moments beside the weights they belong to."""
  return sharding.shardings(state, mesh)


class Compiled(NamedTuple):
  """The step as an executable, with what its compilation took and needs."""

  call: StepFunction
  memory: Any
  seconds: float


def compile_step(
  run: Program, state: Tree, frozen: Tree, batch: Arrays, key: Any, is_quantizing: bool = True
) -> Compiled:
  """Compiles the step for these arguments (arrays or shapes); the state's buffers are donated.

  `is_quantizing` is False for the steps before `Course.start_step`.
  """
  start = time.monotonic()
  model = run.model if is_quantizing else run.model.clone(numerics=run.model.numerics.plain)
  jitted = jax.jit(
      make_step(model, run.method, run.loop),
      donate_argnums=0,
      out_shardings=(state_shardings(state, run.mesh), NamedSharding(run.mesh, PartitionSpec())),
  )
  executable = jitted.lower(state, frozen, batch, key).compile()
  return Compiled(executable, executable.memory_analysis(), time.monotonic() - start)


def place_batch(batch: Arrays, micro_batches: int, mesh: Mesh) -> dict[str, jax.Array]:
  """A batch of this process's rows as global arrays [micro-batches, rows, T], rows over data × fsdp."""

  def place(x: np.ndarray) -> jax.Array:
    x = x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:])
    return jax.make_array_from_process_local_data(sharding.batch_sharding(mesh, x.ndim, batch_axis=1), x)

  return {name: place(x) for name, x in batch.items()}


def prepare(run: Run, progress: Callable[[str], None] = lambda path: None) -> tuple[Tree, Tree]:
  """The method's two trees, every array where it rests: on its devices, or on the host."""
  memory_of = run.method.memory_of

  def place(path: str, leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, sharding.sharding_of(path, leaf, run.mesh, memory_of(path)))

  def set_aside(path: str, layer: jax.Array) -> jax.Array | np.ndarray:
    # What is too large for the device is not to be stacked there either.
    return jax.device_get(layer) if memory_of(path) == 'host' else layer

  key = jax.random.key(run.loop.seed)
  ranges = run.input_ranges()
  return run.method.prepare(run.shapes, run.read, key, place, progress, ranges, run.stored, set_aside)


class Interrupted(Exception):
  """The run was asked to stop and has saved; `signal_number` says by what."""

  def __init__(self, signal_number: int, step: int):
    self.signal_number = signal_number
    name = signal.Signals(signal_number).name
    super().__init__(f'stopped by {name} after step {step}; the same command goes on from there')


class StopRequest:
  """Remembers the first SIGINT or SIGTERM, so that the loop can stop where nothing is half done."""

  def __init__(self) -> None:
    self.signal_number: int | None = None

  def __call__(self, number: int, frame: FrameType | None) -> None:
    if self.signal_number is not None:
      raise KeyboardInterrupt
    self.signal_number = number
    name = signal.Signals(number).name
    print(f'\n{name}: saving after this step (again to stop at once)', file=sys.stderr, flush=True)

  @classmethod
  @contextmanager
  def listen(cls) -> Iterator['StopRequest']:
    request = cls()
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
      yield request
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


def train(run: Run, record: records.Record) -> dict[str, Any]:
  """Trains, evaluates and saves; goes on from the newest checkpoint if there is one.

  Returns the results that also go into the record: scores before and after, bytes, seconds.

  Raises:
    Interrupted: a signal came; everything up to the last whole step is saved.
    UserError: gradients stay non-finite, or the checkpoint belongs to another run.
  """
  with StopRequest.listen() as stop, jax.set_mesh(run.mesh):
    # Model.
    with stage(f'reading the model and storing it ({run.method.name})'):
      trainable, frozen = prepare(run)
      jax.block_until_ready((trainable, frozen))
    state = init_state(run, trainable)
    state = jax.device_put(state, state_shardings(state, run.mesh))
    sizes = measure(trainable, frozen, state)
    unsplit = sharding.unsplit((trainable, frozen), run.mesh)
    del trainable

    # Where the run stands: a fresh start, or the newest checkpoint.
    saved = checkpoint.Checkpoints(run.workdir / 'checkpoints', run.meaning)
    restored = saved.restore(state.trainable, dataclasses.replace(state, trainable=()))
    # Only now, because a run that is refused leaves the record of the one that it was refused for.
    trained = {path: list(leaf.shape) for path, leaf in trees.flatten(state.trainable).items()}
    slices = {path: list(layers) for path, layers in run.method.trainable.slices}
    record.update(
        status='running', sizes=sizes, kernels=kernels_used(run), unsplit=unsplit,
        trained={'leaves': trained, 'layers': slices},
    )  # fmt: skip
    history: dict[str, Any] = {'seconds': 0.0}
    shard = (jax.process_index(), jax.process_count())
    batches = train_iterator(run.dataset.train, run.data, shard)
    if restored is not None:
      state = dataclasses.replace(restored.state, trainable=restored.trainable)
      batches.set_state(restored.data['iterator'])
      history = restored.data['history']
      saved.forget_after(restored.step)
      print(f'resuming after step {restored.step}', file=sys.stderr)
    done = int(state.step)
    # A stop may come between a step and the evaluation that is due after it.
    is_scored = history.get('scored') == done
    metrics = records.Metrics(run.workdir, None if restored is None else done, is_scored)

    # Compile.
    key = jax.random.key(run.loop.seed + 1)
    like = place_batch(_blank(run.data, shard), run.loop.accumulate, run.mesh)
    with stage('compiling the step'):
      compiled = compile_step(run, state, frozen, like, key)
      start_step = run.method.course.start_step
      early = compile_step(run, state, frozen, like, key, False) if done < start_step else compiled
    held_out = HeldOut(run, run.model, shard)

    def score(step: int) -> Score:
      with Bar('evaluating', len(held_out)) as bar:

        def shown(done: int) -> None:
          bar.advance(done)
          if stop.signal_number is not None:
            raise _Stop

        found = held_out.score(state.trainable, frozen, shown)
      metrics.write(step, 'eval', found.as_dict())
      print(f'step {step}: held-out nll {found.nll:.4f}, perplexity {found.perplexity:.2f}, '
            f'accuracy {found.accuracy:.3f}', file=sys.stderr, flush=True)  # fmt: skip
      return found

    def score_and_save(step: int) -> None:
      found = files.plain(score(step).as_dict())
      history.setdefault('before', found)
      history.update(after=found, scored=step)
      save(step, found['nll'])

    since = time.monotonic()

    def save(step: int, nll: float | None = None) -> None:
      nonlocal since
      now = time.monotonic()
      history['seconds'] += now - since
      since = now
      rest = dataclasses.replace(state, trainable=())
      saved.save(step, state.trainable, rest, {'iterator': batches.get_state(), 'history': history}, nll)

    is_due = lambda step: step % run.loop.eval_every == 0 or step == run.loop.num_steps
    try:
      # Before.
      if is_due(done) and not is_scored:
        score_and_save(done)

      # The loop.
      with Bar('training', run.loop.num_steps, done) as bar:
        while done < run.loop.num_steps:
          batch = place_batch(next(batches), run.loop.accumulate, run.mesh)
          call = (early if done < start_step else compiled).call
          state, step_metrics = call(state, frozen, batch, key)
          done += 1
          found_metrics = {name: x.item() for name, x in jax.device_get(step_metrics)._asdict().items()}
          metrics.write(done, 'train', found_metrics)
          bar.advance(done, _line(found_metrics, run, bar.seconds_a_step))
          if found_metrics['consecutive_skips'] >= run.loop.max_skips:
            save(done)
            record.update(status='failed', step=done)
            raise UserError(
                f'{run.loop.max_skips} steps in a row had no finite gradient (loss '
                f'{found_metrics["loss"]}, loss scale {found_metrics["loss_scale"]:g}). Weights and moments '
                'are as they were before the first of them and are saved. Try a lower '
                'optimizer.learning_rate, precision.compute=bfloat16, or look at the data'
            )
          if stop.signal_number is not None:
            raise _Stop
          if is_due(done):
            score_and_save(done)
            bar.restart_clock()
          elif done % run.loop.checkpoint_every == 0:
            save(done)
    except _Stop:
      save(done)
      record.update(status='interrupted', step=done)
      assert stop.signal_number is not None
      raise Interrupted(stop.signal_number, done) from None
    finally:
      metrics.close()
      saved.close()

  rows = [row for row in records.read_metrics(run.workdir) if row['kind'] == 'train']
  results = {
      'before': history['before'],
      'after': history['after'],
      'steps': done,
      'skipped_steps': rows[-1]['skipped'] if rows else 0,
      'seconds': history['seconds'],
      'compile_seconds': compiled.seconds,
      'step_seconds': bar.seconds_a_step,
      'peak_memory_bytes': records.peak_memory(),
      **sizes,
  }
  record.update(status='finished', results=results)
  return results


class HeldOut:
  """The batches that a run is scored on, and a compiled step for a model."""

  def __init__(self, run: Run, model: Transformer, shard: tuple[int, int] = (0, 1)):
    self._mesh = run.mesh
    self._step = evaluate.make_step(model, run.loop.loss_chunk)
    spec = dataclasses.replace(run.data, batch_size=run.data.batch_size // run.loop.accumulate)
    self._batches = eval_batches(run.dataset.eval, spec, shard)

  def __len__(self) -> int:
    return len(self._batches)

  def score(self, trainable: Tree, frozen: Tree, progress: Callable[[int], None]) -> Score:
    """Of the variables that the two trees are together; `progress` hears how many batches are done."""
    placed = ({name: x[0] for name, x in place_batch(b, 1, self._mesh).items()} for b in self._batches)
    return evaluate.evaluate(self._step, trainable, frozen, placed, progress)


class _Stop(Exception):
  """Leaves the loop, or an evaluation inside it, where a stop was asked for."""


def _blank(spec: DataSpec, shard: tuple[int, int]) -> dict[str, np.ndarray]:
  """A batch of zeros of this process's rows, to compile with."""
  shape = (spec.batch_size // shard[1], spec.seq_len)
  dtypes = {'weights': np.float32} | dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), np.int32)
  return {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}


def measure(trainable: Tree, frozen: Tree, state: State) -> dict[str, int]:
  """Counts and bytes of what is held during training, from the arrays themselves."""
  lora = trainable.get('lora', {})
  trained_weights = {name: tree for name, tree in trainable.items() if name != 'lora'}
  resting = {name: tree for name, tree in frozen.items() if name != 'teacher'}
  return {
      'trainable_parameters': sum(leaf.size for leaf in jax.tree.leaves(trainable)),
      'weight_bytes': trees.nbytes(resting) + trees.nbytes(trained_weights),
      'teacher_bytes': trees.nbytes(frozen.get('teacher', {})),
      'adapter_bytes': trees.nbytes(lora),
      'optimizer_bytes': trees.nbytes(state.optimizer),
  }


def kernels_used(run: Run) -> dict[str, str]:
  """Which implementations run, for the record."""
  dtype = run.method.numerics.policy.compute
  return {
      'matmul': run.method.numerics.used,
      'attention': run.model.kernel.resolve(dtype, run.model.config.head_dim),
  }


def _line(values: Mapping[str, float], run: Run, seconds: float) -> str:
  rate = f'{run.data.batch_size * run.data.seq_len / seconds:,.0f} tokens/s' if seconds else ''
  skipped = f'  skipped {int(values["skipped"])}' if values['skipped'] else ''
  memory = records.human_bytes(records.resident_bytes())
  return f'loss {values["loss"]:.4f}  {rate}  {memory}{skipped}'


