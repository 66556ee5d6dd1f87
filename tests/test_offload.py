"""Weights that rest in host memory: the same numbers, less of the device."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qjax import trees
from qjax.errors import UserError
from tests import small

HOST = (('layers/.*', 'host'),)


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  found = tmp_path_factory.mktemp('offload')
  small.write(found)
  return found


@pytest.fixture(scope='module')
def resident(directory: Path) -> tuple[Any, list[float]]:
  return steps(directory)


def steps(directory: Path, **more: Any) -> tuple[Any, list[float]]:
  """What three steps of QLoRA move, and their losses."""
  prepared = small.prepare(small.run(directory, 'qlora', **more))
  if 'placement__rules' in more:
    memories = {path: leaf.sharding.memory_kind for path, leaf in trees.flatten(prepared.frozen).items()}
    assert 'pinned_host' in memories.values()
    assert all(kind == 'device' for path, kind in memories.items() if not path.endswith('codes'))
  state, metrics = small.take_steps(prepared, 3)
  return state.trainable, [row['loss'] for row in metrics]


CASES: dict[str, dict[str, Any]] = {
  'all layers': {'placement__rules': HOST},
  'all but what comes first': {'placement__rules': (('.*/attn/.*', 'device'), ('.*', 'host'))},
  'layer inputs': {'model__remat': 'offload'},
  'both': {'placement__rules': HOST, 'model__remat': 'offload'},
}


@pytest.mark.parametrize('case', CASES)
def test_losses_and_adapters_are_those_of_the_resident_model_bit_for_bit(
  directory: Path, resident: tuple[Any, list[float]], case: str
):
  more = CASES[case]
  if 'model__remat' in more:  # what is kept changes how XLA fuses, and with it the last bits
    resident = steps(directory, model__remat='full')
  trainable, losses = steps(directory, **more)
  assert losses == resident[1]
  jax.tree.map(np.testing.assert_array_equal, trainable, resident[0])


def test_it_is_split_over_devices(directory: Path, resident: tuple[Any, list[float]]):
  _, losses = steps(directory, placement__rules=HOST, mesh__fsdp=2)
  np.testing.assert_allclose(losses, resident[1], rtol=1e-5)


@pytest.mark.parametrize(
  'rules, says',
  [
    ((('layers/.*', 'hots'),), "did you mean 'host'"),
    ((('layers/.*/dwon/.*', 'host'),), 'matches none'),
  ],
)
def test_what_cannot_work_is_refused(directory: Path, rules: Any, says: str):
  with pytest.raises(UserError, match=says):
    small.run(directory, 'qlora', placement__rules=rules)


def test_what_is_trained_stays_on_the_device(directory: Path):
  run = small.run(directory, 'full')
  with pytest.raises(UserError, match='is trained and cannot rest on the host'):
    dataclasses.replace(run.method, placement=HOST).plan(run.shapes)
