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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qjax import checkpoint, evaluate, files, fused, kernels, records, sharding, trees
from qjax.adapters import is_adapter
from qjax.data.pipeline import Dataset, DataSpec, eval_batches, train_iterator
from qjax.errors import UserError
from qjax.evaluate import Score
from qjax.method import LAYERS_MOMENTS, Method, Reader, Stored
from qjax.models.transformer import Transformer
from qjax.precision import LossScale
from qjax.progress import Bar, stage
from qjax.step import Arrays, Loop, State, StepFunction, init_optimizer
from qjax.step import make_step as make_separate_step

Tree = Any


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


class _Kind(NamedTuple):
  """How a kind of update begins and what its step is."""

  init_optimizer: Callable[..., Tree]
  make_step: Callable[[Transformer, Method, Loop], StepFunction]


_KINDS = {
    'separate': _Kind(init_optimizer, make_separate_step),
    'fused': _Kind(fused.init_optimizer, fused.make_step),
    'fused_global': _Kind(fused.init_optimizer, fused.make_step),
}


def init_state(
  run: Program, trainable: Tree, set_aside: Callable[[Tree], Tree] | None = jax.device_get
) -> State:
  """The state before the first step. `set_aside` moves what is to wait on the host; None under a trace."""
  update = run.method.update
  is_aside = run.method.memory_of(LAYERS_MOMENTS) == 'host'
  init = _KINDS[update.kind].init_optimizer
  optimizer = init(update, run.loop.num_steps, trainable, set_aside if is_aside else None)
  return State(jnp.zeros((), jnp.int32), trainable, optimizer, run.loss_scale)


def make_step(model: Transformer, method: Method, loop: Loop) -> StepFunction:
  """The pure function of one step: (state, frozen, batch, key) to the next state and its metrics."""
  return _KINDS[method.update.kind].make_step(model, method, loop)


def state_shardings(run: Program, state: State) -> State:
  """Where each array of the state lives: moments beside the weights they belong to, or on the host."""

  def where(path: str, leaf: Any) -> Any:
    # Vectors stay: they are few, and XLA's TPU compiler fails on slices of host memory in some shapes.
    is_matrix = len(leaf.shape) > 2 and not path.endswith('/scale')
    return sharding.sharding_of(path, leaf, run.mesh, run.method.memory_of(path) if is_matrix else 'device')

  return trees.map_with_path(where, state)


class Compiled(NamedTuple):
  """The step as an executable, with what its compilation took and needs.

  Attributes:
    call: the step.
    memory: XLA's analysis.
    seconds: of tracing and compiling.
    products: by what each product with a projection's weight is computed, as `kernels.products` has it.
  """

  call: StepFunction
  memory: Any
  seconds: float
  products: Mapping[str, list[str]]


def compile_step(
  run: Program, state: Tree, frozen: Tree, batch: Arrays, key: Any, is_quantizing: bool = True
) -> Compiled:
  """Compiles the step for these arguments (arrays or shapes); the state's buffers are donated.

  `is_quantizing` is False for the steps before `Course.start_step`.

  Raises:
    UserError: a kernel was asked for by name and can't serve this model.
  """
  start = time.monotonic()
  model = run.model if is_quantizing else run.model.clone(numerics=run.model.numerics.plain)
  jitted = jax.jit(
      make_step(model, run.method, run.loop),
      donate_argnums=0,
      out_shardings=(state_shardings(run, state), NamedSharding(run.mesh, PartitionSpec())),
  )
  with kernels.noting() as notes:
    try:
      lowered = jitted.lower(state, frozen, batch, key)
    except kernels.Unserved as error:
      raise UserError(f'config.{error}') from error
  executable = lowered.compile()
  seconds = time.monotonic() - start
  return Compiled(executable, executable.memory_analysis(), seconds, kernels.products(notes))


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
    state = jax.device_put(state, state_shardings(run, state))
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
        status='running', sizes=sizes, unsplit=unsplit,
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
    record.update(kernels=kernels_used(run, compiled.products), products=compiled.products)
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
                f'{found_metrics["loss"]}, loss scale {found_metrics["loss_scale"]:g}). '
                f'{_KEPT[run.method.update.kind != "fused"]} Try a lower '
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


# What a step without a finite gradient leaves, by whether gradients are all known before anything moves.
_KEPT = {
    True: 'Weights and moments are as they were before the first of them and are saved.',
    False: "Layers above the first bad gradient have moved; optimizer.kind = 'fused_global' looks first.",
}


class _Stop(Exception):
  """Leaves the loop, or an evaluation inside it, where a stop was asked for."""


def _blank(spec: DataSpec, shard: tuple[int, int]) -> dict[str, np.ndarray]:
  """A batch of zeros of this process's rows, to compile with."""
  shape = (spec.batch_size // shard[1], spec.seq_len)
  dtypes = {'weights': np.float32} | dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), np.int32)
  return {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}


def measure(trainable: Tree, frozen: Tree, state: State) -> dict[str, int]:
  """Counts and bytes of what is held during training, from the arrays themselves."""
  leaves = jax.tree.leaves(trainable, is_leaf=is_adapter)
  adapters = [leaf for leaf in leaves if is_adapter(leaf)]
  resting = {name: tree for name, tree in frozen.items() if name != 'teacher'}
  return {
      'trainable_parameters': sum(leaf.size for leaf in jax.tree.leaves(trainable)),
      'weight_bytes': trees.nbytes(resting) + trees.nbytes(trainable) - trees.nbytes(adapters),
      'teacher_bytes': trees.nbytes(frozen.get('teacher', {})),
      'adapter_bytes': trees.nbytes(adapters),
      'optimizer_bytes': trees.nbytes(state.optimizer),
  }


def kernels_used(run: Program, products: Mapping[str, list[str]]) -> dict[str, str]:
  """Which implementations run in a step that was traced, for the record; `products` are its."""
  dtype = run.method.numerics.policy.compute
  return {
      'matmul': kernels.summary(products),
      'attention': run.model.kernel.resolve(dtype, run.model.config.head_dim),
  }


def _line(values: Mapping[str, float], run: Run, seconds: float) -> str:
  rate = f'{run.data.batch_size * run.data.seq_len / seconds:,.0f} tokens/s' if seconds else ''
  skipped = f'  skipped {int(values["skipped"])}' if values['skipped'] else ''
  memory = records.human_bytes(records.resident_bytes())
  return f'loss {values["loss"]:.4f}  {rate}  {memory}{skipped}'


