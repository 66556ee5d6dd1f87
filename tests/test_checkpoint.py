"""What is saved comes back bit for bit; a torn step is passed over, another run's refused by name."""

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qjax import checkpoint, sharding, trees
from qjax.checkpoint import Checkpoints
from qjax.errors import UserError

CONFIG = {'seed': 0, 'lora': {'rank': 4}}
MEANING = {'config': CONFIG, 'model': {'fingerprint': 'aa'}, 'data': {'train': 'bb'}}
DATA = {'iterator': {'next': 7}, 'history': {'seconds': 1.5}}


def tree(value: float = 1.0) -> dict[str, Any]:
  key = jax.random.key(int(value))
  wide = jax.random.normal(key, (2, 8, 16), jnp.float32) * value
  return {
    'params': {'layers': {'q': {'kernel': wide}, 'v': {'kernel': wide.astype(jnp.bfloat16)}}},
    'lora': {'a': wide.astype(jnp.float16)[0], 'count': jnp.asarray(int(value), jnp.int32)},
  }


def state(value: float = 1.0) -> dict[str, Any]:
  return {'mu': jnp.full((3,), value), 'scale': jnp.asarray(2.0**15)}


def assert_same(found: Any, wanted: Any) -> None:
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for (path, one), other in zip(trees.flatten(found).items(), jax.tree.leaves(wanted), strict=True):
    assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes(), path


def save(directory: Path, *steps: tuple[int, float | None], meaning: Any = MEANING) -> list[int]:
  saved = Checkpoints(directory, meaning)
  for step, nll in steps:
    saved.save(step, tree(step), state(step), DATA | {'step': step}, nll)
  kept = saved.steps
  saved.close()
  return kept


def restore(directory: Path, meaning: Any = MEANING, step: int | None = None) -> checkpoint.Restored | None:
  saved = Checkpoints(directory, meaning)
  try:
    return saved.restore(tree(0), state(0), step)
  finally:
    saved.close()


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path):
  save(tmp_path, (5, 1.0))
  found = restore(tmp_path)
  assert found is not None and found.step == 5 and found.data == DATA | {'step': 5}
  assert_same(found.trainable, tree(5))
  assert_same(found.state, state(5))


@pytest.mark.parametrize(('scores', 'best'), [([3.0, 1.0, 2.0], 2), ([None, None], 2)])
def test_the_best_step_is_read_without_its_state(tmp_path: Path, scores: list[float | None], best: int):
  save(tmp_path, *((step + 1, nll) for step, nll in enumerate(scores)))
  saved = Checkpoints(tmp_path, MEANING)
  assert_same(saved.best(tree(0)), tree(best))
  with pytest.raises(UserError, match='does not fit'):
    saved.best({'lora': tree(0)['lora']})
  saved.close()
  empty = Checkpoints(tmp_path / 'new', MEANING)
  with pytest.raises(UserError, match='has no checkpoint'):
    empty.best(tree(0))
  empty.close()


def test_nothing_saved_is_nothing_restored(tmp_path: Path):
  assert restore(tmp_path / 'new') is None


@pytest.mark.parametrize(
  ('scores', 'kept'),
  [
    ([1.0, 2.0, 3.0, 4.0], [1, 4]),  # worsening: the first is best, and the newest stays all the same
    ([4.0, 3.0, 2.0, 1.0], [4]),
    ([3.0, 1.0, 2.0, 4.0], [2, 4]),
    ([2.0, None, None, None], [1, 4]),  # steps without a score are kept as long as they are newest
    ([None, None, 3.0, None], [3, 4]),
    ([None, None], [2]),
    ([math.nan, 1.0, 0.5, 3.0], [3, 4]),  # what is no number is no best
  ],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, scores: list[float | None], kept: list[int]):
  assert save(tmp_path, *enumerate(scores, 1)) == kept
  assert sorted(int(p.name) for p in tmp_path.iterdir()) == kept
  found = restore(tmp_path)
  assert found is not None and found.step == len(scores)
  best = restore(tmp_path, step=kept[0])
  assert best is not None
  assert_same(best.trainable, tree(kept[0]))


def test_the_best_is_remembered_across_a_restart(tmp_path: Path):
  save(tmp_path, (1, 1.0), (2, 2.0))
  assert save(tmp_path, (3, 3.0)) == [1, 3]


def test_a_step_saved_before_its_score_was_known_is_saved_again_with_it(tmp_path: Path):
  assert save(tmp_path, (1, 2.0), (2, None), (2, 1.0), (3, 3.0)) == [2, 3]
  assert save(tmp_path, (3, None)) == [2, 3]


def remove(name: str) -> Callable[[Path], None]:
  return lambda step: shutil.rmtree(step / name)


def truncate(pattern: str) -> Callable[[Path], None]:
  """Cuts every file that matches to half its length, at least one of them."""

  def cut(step: Path) -> None:
    files = [path for path in step.glob(pattern) if path.is_file() and path.stat().st_size]
    assert files, f'{pattern} matches none of {[str(p.relative_to(step)) for p in step.rglob("*")]}'
    for path in files:
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

  return cut


def empty(step: Path) -> None:
  shutil.rmtree(step)
  step.mkdir()


TEARS = {
  'no trainable': remove('trainable'),
  'no state': remove('state'),
  'no data': remove('data'),
  'no meaning': remove('meaning'),
  'empty': empty,
  'trainable cut': truncate('trainable/**/*'),
  'arrays cut': truncate('trainable/**/d/*'),
  'state cut': truncate('state/**/*'),
  'data cut': truncate('data/**/*'),
  'meaning cut': truncate('meaning/**/*'),
  'score cut': truncate('score/**/*'),
  'no score': remove('score'),
  'all cut': truncate('**/*'),
  'no step metadata': lambda step: (step / '_CHECKPOINT_METADATA').unlink(),
}


# Leaves are read concurrently: what fails after the first failure has nobody left to raise it to.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('tear', TEARS)
def test_a_torn_step_is_passed_over(tmp_path: Path, tear: str, caplog: pytest.LogCaptureFixture):
  save(tmp_path, (1, 1.0), (2, 2.0))
  TEARS[tear](tmp_path / '2')
  with caplog.at_level(logging.WARNING, logger='qjax'):
    found = restore(tmp_path)
  assert found is not None
  assert_same(found.trainable, tree(found.step))
  assert_same(found.state, state(found.step))
  if found.step == 1:
    assert f'{tmp_path}/2' in caplog.text and 'passed over' in caplog.text
    assert all(len(record.getMessage()) < 600 for record in caplog.records if record.name.startswith('qjax'))
  else:
    assert tear in ('score cut', 'no score', 'no step metadata')  # what these lose is not needed to go on
  # A run goes on from there, and its next saves are whole again.
  saved = Checkpoints(tmp_path, MEANING)
  saved.forget_after(found.step)
  saved.save(3, tree(3), state(3), DATA, 3.0)
  saved.close()
  again = restore(tmp_path)
  assert again is not None and again.step == 3


def test_a_directory_left_by_a_killed_save_is_no_step(tmp_path: Path):
  save(tmp_path, (1, 1.0), (2, 2.0))
  left = tmp_path / '3.orbax-checkpoint-tmp'
  shutil.copytree(tmp_path / '2' / 'state', left / 'state.orbax-checkpoint-tmp')
  found = restore(tmp_path)
  assert found is not None and found.step == 2
  assert save(tmp_path, (3, 0.5)) == [3]


def test_when_no_step_can_be_read_the_run_is_not_begun_anew_unasked(tmp_path: Path):
  save(tmp_path, (1, 1.0), (2, 2.0))
  for step in (1, 2):
    shutil.rmtree(tmp_path / str(step) / 'trainable')
  with pytest.raises(UserError, match='no checkpoint .* can be read.*--restart'):
    restore(tmp_path)


def test_a_torn_step_that_was_asked_for_is_an_error(tmp_path: Path):
  save(tmp_path, (1, 1.0), (2, 2.0))
  shutil.rmtree(tmp_path / '1' / 'trainable')
  with pytest.raises(UserError, match='1 cannot be read'):
    restore(tmp_path, step=1)
  with pytest.raises(UserError, match=r'no checkpoint of step 7; there are \[1, 2\]'):
    restore(tmp_path, step=7)


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'config': {'seed': 1, 'lora': {'rank': 4}}}, 'config.seed was 0 and is 1'),
    ({'config': {'seed': 0, 'lora': {'rank': 8}}}, 'config.lora.rank was 4 and is 8'),
    ({'config': {'seed': 0, 'lora': None}}, r"config.lora was \{'rank': 4\} and is None"),
    ({'config': {'seed': 0, 'lora': {'rank': 4}, 'pack': True}}, 'config.pack was absent and is True'),
    ({'config': {'lora': {'rank': 4}}}, 'config.seed was 0 and is absent'),
    ({'model': {'fingerprint': 'cc'}}, "model.fingerprint was 'aa' and is 'cc'"),
    ({'data': {'train': 'dd'}}, "data.train was 'bb' and is 'dd'"),
  ],
)
def test_another_runs_step_is_refused_by_field(tmp_path: Path, changed: dict[str, Any], message: str):
  save(tmp_path, (1, 1.0))
  with pytest.raises(UserError, match=f'belongs to another run:\n  {message}$'):
    restore(tmp_path, MEANING | changed)


def test_a_field_that_came_later_stands_for_what_was_done_before_it(tmp_path: Path):
  old = {'config': {'seed': 0, 'optimizer': {'beta1': 0.9}}}
  new = {'config': {'seed': 0, 'optimizer': {'beta1': 0.9, 'name': 'adamw', 'kind': 'separate'}}}
  save(tmp_path, (1, 1.0), meaning=old)
  assert restore(tmp_path, new) is not None
  with pytest.raises(UserError, match="config.optimizer.name was 'adamw' and is 'lion'$"):
    restore(tmp_path, {'config': {'seed': 0, 'optimizer': new['config']['optimizer'] | {'name': 'lion'}}})
  assert old == {'config': {'seed': 0, 'optimizer': {'beta1': 0.9}}}


def test_leaves_that_differ_are_refused_by_path(tmp_path: Path):
  save(tmp_path, (1, 1.0))
  wanted = tree(0)
  layers = wanted['params']['layers']
  layers['query'] = layers.pop('q')
  layers['v']['kernel'] = jnp.zeros((2, 8, 15), jnp.bfloat16)
  wanted['lora']['a'] = wanted['lora']['a'].astype(jnp.float32)
  saved = Checkpoints(tmp_path, MEANING)
  with pytest.raises(UserError) as refused:
    saved.restore(wanted, state(0))
  saved.close()
  lines = str(refused.value).splitlines()[1:]
  assert [line.strip() for line in lines] == [
    'missing: params/layers/query/kernel',
    'unexpected: params/layers/q/kernel',
    'lora/a: saved float16[8, 16], wanted float32[8, 16]',
    'params/layers/v/kernel: saved bfloat16[2, 8, 16], wanted bfloat16[2, 8, 15]',
  ]


@pytest.mark.parametrize('sizes', [(1, 1, 1), (2, 4, 1), (1, 4, 2), (1, 3, 1)], ids=str)
def test_a_step_is_restored_onto_another_number_of_devices(tmp_path: Path, sizes: tuple[int, int, int]):
  def placed(value: float, mesh: jax.sharding.Mesh) -> Any:
    return jax.device_put(tree(value), sharding.shardings(tree(value), mesh))

  four, other = (sharding.make_mesh(sharding.MeshSpec(*s)) for s in ((1, 4, 1), sizes))
  saved = Checkpoints(tmp_path, MEANING)
  saved.save(1, placed(1, four), state(1), DATA, 1.0)
  whole = NamedSharding(other, PartitionSpec())
  found = saved.restore(placed(0, other), jax.device_put(state(0), whole))
  saved.close()
  assert found is not None
  assert_same(found.trainable, tree(1))
  for path, leaf in trees.flatten(found.trainable).items():
    assert leaf.sharding == NamedSharding(other, sharding.spec_for(path, leaf.shape, other)), path
