"""Plans: shapes without weights, what a traced program holds, and that compilers agree."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import common, lora_7b, qlora_7b
from experiments import plan as command
from qjax import build, chips, operations, plan, report, train, trees
from qjax.errors import UserError
from qjax.io.source import load_source
from qjax.liveness import Liveness
from tests import small
from tests.io import model_files

ROOT = Path(__file__).parents[1]
CPU, GPU, TPU = (chips.find(name) for name in ('cpu', 'rtx4090', 'v5e'))


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('plan')
  small.write(directory)
  return directory


# ---- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'parameters'),
  [
    ('smollm2_135m', 134_515_008),
    ('qwen2_0_5b', 494_032_768),
    ('llama2_7b', 6_738_415_616),
    ('llama3_8b', 8_030_261_248),
    ('llama_13b', 13_015_864_320),
    ('llama_65b', 65_285_660_672),
  ],
)
def test_published_models_have_their_parameters(name: str, parameters: int) -> None:
  source = load_source(f'shapes:{name}')
  assert source.config.num_parameters == parameters
  assert len(source.fingerprint) == 16


def test_a_misspelt_shape_is_refused_with_the_nearest() -> None:
  with pytest.raises(UserError, match="no shape 'llama2_7', .*did you mean 'llama2_7b'"):
    load_source('shapes:llama2_7')


def test_a_config_alone_is_a_shape(tmp_path: Path) -> None:
  described = model_files.hf_config(small.CONFIG)
  (tmp_path / 'config.json').write_text(json.dumps(described))
  assert load_source(f'shapes:{tmp_path}').config == small.CONFIG
  with pytest.raises(UserError, match='has neither model.safetensors'):
    load_source(tmp_path)


def test_a_shape_cannot_be_trained_or_read(directory: Path) -> None:
  config = small.config(directory, 'lora', model__path='shapes:smollm2_135m')
  with pytest.raises(UserError, match='shapes:smollm2_135m is a shape without weights: it can be planned'):
    build.run(config, directory / 'run')
  with pytest.raises(UserError, match='a shape without weights'):
    load_source('shapes:smollm2_135m').read('embed/embedding')


# ---- what a program holds ----------------------------------------------------------------------------------


def peak(fn: Callable[..., Any], *args: Any, platform: str = 'cuda', **rules: Any) -> int:
  """Bytes beside arguments and results."""
  closed = jax.make_jaxpr(fn)(*args)
  program = operations.read(closed, [''] * len(args), platform)
  found = Liveness(lambda value: value.nbytes, **rules).moments(
    program.operations, {*program.arguments, *program.results}, program.results
  )
  return max((moment.nbytes for moment in found), default=0)


X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def test_elementwise_work_takes_nothing() -> None:
  assert peak(lambda x: jnp.tanh(x * 2 + 1) @ W, X) == 32 * 64 * 4  # what the product reads
  assert peak(lambda x: jnp.sum(jnp.tanh(x) * 3), X) == 0


def test_a_result_is_held_until_its_last_use() -> None:
  def chain(x: jax.Array) -> jax.Array:
    first = x @ W
    second = first @ W
    third = second @ W
    return third @ W + first  # first is held beside second and third

  assert peak(chain, X) == 3 * 32 * 64 * 4


def test_what_nobody_needs_is_not_computed() -> None:
  def wasteful(x: jax.Array) -> jax.Array:
    _ = x @ jnp.ones((64, 4096))
    return x @ W

  assert peak(wasteful, X) == 0


def test_what_is_computed_twice_is_computed_once() -> None:
  def twice(x: jax.Array) -> jax.Array:
    return (x @ W + 1) @ W + (x @ W + 1) @ W

  def once(x: jax.Array) -> jax.Array:
    y = (x @ W + 1) @ W
    return y + y

  assert peak(twice, X) == peak(once, X)


def test_a_loop_holds_what_it_keeps_for_all_turns() -> None:
  def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda x, w: (jnp.square(x @ w), None), x, weights)
    return jnp.sum(y)

  def held(layers: int) -> int:
    return peak(jax.grad(loss), X, jnp.ones((layers, 64, 64)))

  turn = 32 * 64 * 4
  # The backward pass needs the product of each layer.
  assert held(12) - held(4) == 8 * turn
  assert held(4) <= 4 * turn + 6 * turn


def test_a_branch_for_another_platform_counts_nothing() -> None:
  def product(x: jax.Array) -> jax.Array:
    wide = jnp.ones((64, 4096))
    return jax.lax.platform_dependent(x, tpu=lambda x: (x @ wide) @ wide.T, default=lambda x: x @ W)

  assert peak(product, X, platform='tpu') >= 32 * 4096 * 4
  assert peak(product, X, platform='cuda') == 0


def test_costly_values_needed_again_later_are_kept() -> None:
  def update(x: jax.Array) -> jax.Array:
    moved = x / (jnp.sqrt(jnp.abs(x)) + 1)
    return jnp.where(jnp.all(jnp.isfinite(moved)), moved, x)

  def cheap(x: jax.Array) -> jax.Array:
    moved = 0.9 * x + 0.1
    return jnp.where(jnp.all(jnp.isfinite(moved)), moved, x)

  full = 32 * 64 * 4
  assert full <= peak(update, X) < full + 64
  assert peak(cheap, X) < 64
  assert full <= peak(cheap, X, recomputes=False) < full + 64


def test_products_are_counted() -> None:
  def loop(x: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda x, _: (x @ W, None), x, None, length=5)
    return y.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)

  program = operations.read(jax.make_jaxpr(loop)(X), [''], 'cpu')
  once = 2 * 32 * 64 * 64
  assert operations.flops(program.operations) == {'float32': 5 * once, 'bfloat16': once}


# ---- plans -------------------------------------------------------------------------------------------------


def traced(config: ConfigDict) -> plan.Traced:
  return plan.Traced(build.program(config))


@pytest.mark.parametrize('method', ['full', 'lora', 'qlora'])
def test_what_rests_is_what_training_holds(directory: Path, method: str) -> None:
  prepared = small.run(directory, method)
  trainable, frozen = train.prepare(prepared)
  state = train.init_state(prepared, trainable)
  sizes = train.measure(trainable, frozen, state)
  found = traced(small.config(directory, method)).plan(GPU)
  parts = found.breakdown
  assert parts['weights'] == sizes['weight_bytes']
  assert parts['adapters'] == sizes['adapter_bytes']
  assert parts['moments'] == sizes['optimizer_bytes']
  assert sum(parts.values()) == found.peak_bytes
  assert trees.nbytes((state, frozen)) < found.peak_bytes


def test_7b_by_three_methods() -> None:
  """The bounds are those of what must rest: 4 bytes a weight and two moments, 2 bytes, 4.127 bits."""
  lora, qlora = (traced(note.get_config()).plan(GPU) for note in (lora_7b, qlora_7b))
  full = traced(command._by('full', lora_7b.get_config())).plan(GPU)
  weights = 6_738_415_616
  assert 16 * weights < full.peak_bytes < 21 * weights
  assert 2 * weights < lora.peak_bytes < 2.3 * weights
  assert not full.fits and lora.fits and qlora.fits
  assert qlora.peak_bytes < 0.4 * lora.peak_bytes < 0.4 * 0.2 * full.peak_bytes
  # Two operations a weight and token forward, two backward, two forward again but for the last projection of
  # each layer, whose result the backward pass does not need; attention is small beside them.
  down, head = 32 * 4096 * 11008, 32000 * 4096
  least = (6 * (weights - 2 * head) - 2 * down + 4 * head) * 1024 / GPU.flops['bfloat16']
  assert lora.step_seconds is not None and least < lora.step_seconds < 1.1 * least


def test_more_work_takes_more_room(directory: Path) -> None:
  def of(**fields: Any) -> plan.Plan:
    return traced(small.config(directory, 'lora', **fields)).plan(GPU)

  plans = [of(model__remat=name) for name in ('full', 'projections', 'none')]
  kept = [found.breakdown['activations'] for found in plans]
  assert kept == sorted(kept) and kept[0] < kept[-1]
  assert of(data__seq_len=64).peak_bytes > plans[1].peak_bytes > of(micro_batch=1).peak_bytes


def test_tiles_of_a_tpu_are_filled() -> None:
  def tiled(shape: tuple[int, ...], dtype: str) -> int:
    return plan._tiled(operations.Value(shape, np.dtype(dtype)))

  assert tiled((16, 256), 'float32') == 16 * 256 * 4
  assert tiled((256, 64), 'float32') == 256 * 64 * 4  # turned
  assert tiled((8, 100), 'float32') == 8 * 128 * 4
  assert tiled((10, 640), 'uint16') == 16 * 640 * 2


@pytest.mark.parametrize('limit', [0, 1, 2, 3, 37, 64, 100])
def test_the_largest_that_fits_is_found(limit: int) -> None:
  for least, most in ((1, 100), (3, 100), (128, 100)):
    fitting = [n for n in range(least, most + 1, least) if n <= limit]
    asked: list[int] = []

    def fits(n: int, asked: list[int] = asked, most: int = most) -> bool:
      asked.append(n)
      return n <= min(limit, most)

    assert plan.largest(fits, least, most) == max(fitting, default=None)
    assert len(asked) <= 2 * math.log2(most) + 2


def test_several_devices_are_refused(directory: Path) -> None:
  with pytest.raises(UserError, match='plans are for one device'):
    traced(small.config(directory, 'lora', mesh__data=2))


# ---- compilers ---------------------------------------------------------------------------------------------

RESERVED = {
  'argument': 100, 'output': 60, 'alias': 60, 'temp': 90, 'peak': 150, 'host_argument': 0, 'host_output': 0,
  'host_alias': 0, 'host_temp': 0, 'kernels': {'matmul': 'xla', 'attention': 'xla'},
  'kernel_calls': {'int8_matmul': 3},
}  # fmt: skip


def test_which_number_of_a_compiler_counts() -> None:
  parts = dict.fromkeys(plan.PARTS, 0) | {'weights': 100, 'gradients': 10, 'temporaries': 30}
  mine = plan.Plan('v5e', 'arithmetic', 140, 0, 145, parts, 1.0, 8, {})
  on_tpu, on_gpu = (plan.from_compiler(RESERVED, chip, mine) for chip in (TPU, GPU))
  assert (on_tpu.peak_bytes, on_gpu.peak_bytes) == (150, 190)
  assert on_tpu.record()['kernel_calls'] == {'int8_matmul': 3} and mine.record()['kernel_calls'] == {}
  assert sum(on_tpu.breakdown.values()) == pytest.approx(150, abs=3)
  assert on_tpu.breakdown['weights'] == 100 and not on_tpu.fits
  offloaded = plan.from_compiler(RESERVED | {'host_argument': 40}, TPU, mine)
  assert (offloaded.peak_bytes, offloaded.host_bytes) == (190, 40)
  refused = plan.from_compiler({'needed_bytes': 1000, 'kernels': {}}, TPU, mine)
  assert refused.peak_bytes == 1000 and not refused.fits


def test_a_compilers_complaint_about_memory_is_read() -> None:
  said = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.24G) '
    'exceeds available HBM (15.75G).'
  )
  assert plan._needed(said) == int(16.24 * 2**30)
  assert plan._needed('RESOURCE_EXHAUSTED: Used 29.70G of 15.75G hbm.') == int(29.7 * 2**30)
  assert plan._needed('INVALID_ARGUMENT: HLO temporaries (16.24G)') is None


def test_a_compiler_is_asked_once(
  directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  asked = []

  def call(function: str, arguments: Any) -> Any:
    asked.append((function, arguments['chip']))
    return RESERVED

  monkeypatch.setenv('QJAX_CACHE', str(tmp_path))
  monkeypatch.setattr(chips, 'call', call)
  config = small.config(directory, 'lora')
  for changed in ({}, {'name': 'other', 'seed': 3}, {'data__path': 'elsewhere.jsonl'}):
    assert command._compiled(command._changed(config, **changed), TPU) == RESERVED
  assert asked == [('experiments.plan:compile_step', 'v5e')]
  command._compiled(config, GPU)
  command._compiled(command._changed(config, data__seq_len=16), TPU)
  assert len(asked) == 3


def near_the_compiler(chip: chips.Chip) -> None:
  """A model with two layers of a size at which the rules, not the compiler's constants, decide."""
  config = common.base()
  config.name, config.method = 'near', 'lora'
  common.add_lora(config)
  config = command._changed(
    config, model__path='shapes:smollm2_135m', batch_size=4, micro_batch=4, data__seq_len=256
  )
  mine = traced(config).plan(chip)
  compiled = chips.call('experiments.plan:compile_step', {'config': config.to_dict(), 'chip': chip.name})
  assert plan.from_compiler(compiled, chip, mine).peak_bytes == pytest.approx(mine.peak_bytes, rel=0.07)


def test_the_cpus_compiler_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(ROOT)
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  near_the_compiler(CPU)


def test_a_tpus_compiler_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
  pytest.importorskip('libtpu', reason="the TPU compiler is not installed: pip install 'qjax[plan]'")
  monkeypatch.chdir(ROOT)
  near_the_compiler(TPU)


# ---- the command -------------------------------------------------------------------------------------------

# Imports once and forks for each command, which then runs as if it had been started.
SERVER = '''
import json, os, runpy, sys
from experiments import cli
from qjax import build, plan
for argv, out, err in json.loads(sys.argv[1]):
  child = os.fork()
  if not child:
    for path, number in ((out, 1), (err, 2)):
      os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = argv
    status = 0
    try:
      runpy.run_module('experiments.plan', run_name='__main__', alter_sys=True)
    except SystemExit as stop:
      status = stop.code or 0
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''

CONFIG = ['--config=configs/qlora_7b.py']
LARGE = ['--config=configs/full.py', '--config.model.path=shapes:llama2_13b']
TINY = ['--config=configs/lora.py', '--config.model.path=shapes:smollm2_135m']
COMMANDS: dict[str, tuple[list[str], int, str]] = {
  'two chips': ([*CONFIG, '--chip=rtx4090,v5e', '--json'], 0, ''),
  'does not fit': ([*LARGE, '--chip=l4', '--json'], 1, ''),
  'find': ([*TINY, '--chip=v5e', '--find=method', '--json'], 0, ''),
  'misspelt chip': ([*CONFIG, '--chip=rtx409'], 2, "no chip 'rtx409'; did you mean 'rtx4090'"),
  'misspelt shape': ([*CONFIG, '--config.model.path=shapes:lama2_7b'], 2, "did you mean 'llama2_7b'"),
  'misspelt field': ([*CONFIG, '--config.lora.rnk=8'], 2, "no field 'rnk'"),
  'misspelt search': ([*CONFIG, '--find=batches'], 2, 'batch|sequence|method'),
  'kernel of a chip': ([*CONFIG, '--config.kernels=pallas', '--chip=v5e'], 0, ''),
  'kernel of another': (
    [*CONFIG, '--config.kernels=pallas_tpu', '--chip=v5e,h100'], 2,
    "for h100: it runs on a TPU, not on an NVIDIA GPU; use 'auto' or 'xla'",
  ),
  'misspelt kernel': ([*CONFIG, '--config.kernels=palas'], 2, "did you mean 'pallas'"),
  'no config': ([], 2, '--config is missing'),
  'no chip': ([*CONFIG, '--chip='], 2, '--chip is empty'),
}


@pytest.fixture(scope='module')
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
  """Status, output and errors of every command."""
  folder = tmp_path_factory.mktemp('commands')
  files = {name: (folder / f'{name}.out', folder / f'{name}.err') for name in COMMANDS}
  jobs = [
    [['experiments/plan.py', *argv], str(files[name][0]), str(files[name][1])]
    for name, (argv, _, _) in COMMANDS.items()
  ]
  command = [sys.executable, '-W', 'ignore', '-c', SERVER, json.dumps(jobs)]
  statuses = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
  return {
    name: (int(status), *(file.read_text() for file in files[name]))
    for name, status in zip(COMMANDS, statuses, strict=True)
  }


@pytest.mark.parametrize('name', COMMANDS)
def test_the_status_and_the_message(ended: dict[str, tuple[int, str, str]], name: str) -> None:
  status, _, err = ended[name]
  _, expected, message = COMMANDS[name]
  assert status == expected, err
  assert message in err
  assert 'Traceback' not in err


def test_the_last_line_is_json(ended: dict[str, tuple[int, str, str]]) -> None:
  plans = json.loads(ended['two chips'][1].splitlines()[-1])['plans']
  assert [found['chip'] for found in plans] == ['rtx4090', 'v5e']
  for found in plans:
    assert found['fits'] and found['source'] == 'arithmetic' and found['host_gib'] == 0
    assert sum(found['breakdown'].values()) == pytest.approx(found['peak_gib'])
    assert found['tokens_per_second_bound'] == pytest.approx(1024 / found['step_seconds_bound'])


def test_what_would_make_it_fit_is_told(ended: dict[str, tuple[int, str, str]]) -> None:
  out = ended['does not fit'][1]
  found = json.loads(out.splitlines()[-1])
  assert not found['fits'] and found['peak_gib'] > 200
  # What saves nothing is not advised.
  assert 'qlora' in out and '0.00 GiB' not in out.partition('what would make it fit')[2]


def test_the_method_that_fits_is_named(ended: dict[str, tuple[int, str, str]]) -> None:
  assert json.loads(ended['find'][1].splitlines()[-1]) == {'chip': 'v5e', 'method': 'full'}


def test_the_largest_batch_fits_and_one_more_does_not(directory: Path) -> None:
  config = small.config(directory, 'lora')

  def peak_of(rows: int) -> int:
    return traced(command._changed(config, batch_size=rows, micro_batch=rows)).plan(GPU).peak_bytes

  chip = dataclasses.replace(GPU, memory_bytes=peak_of(3))
  assert command._search(config, chip, 'batch') == 3
  assert command._search(config, dataclasses.replace(GPU, memory_bytes=1), 'batch') is None
  assert peak_of(4) > chip.memory_bytes


def test_the_picture_is_a_png(directory: Path) -> None:
  found = traced(small.config(directory, 'lora'))
  png = report.plan_picture([{'config': 'a'} | found.plan(chip).record() for chip in (GPU, TPU)])
  assert png.startswith(b'\x89PNG') and len(png) > 5000
