"""Weights that rest in host memory: the same numbers, less of the device."""

import pytest

from qjax import trees
from tests import small

HOST = (('layers/.*', 'host'),)


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  found = tmp_path_factory.mktemp('offload')
  small.write(found)
  return found


@pytest.fixture(scope='module')
def resident(directory):
  prepared = small.prepare(small.run(directory, 'qlora'))
  return prepared, small.take_steps(prepared, 3)


def _hosted(tree):
  return [path for path, leaf in trees.flatten(tree).items() if leaf.sharding.memory_kind == 'pinned_host']


CASES = {
  'all layers': {'placement.rules': HOST},
  'all but what comes first': {'placement.rules': (('.*/attn/.*', 'device'), ('.*', 'host'))},
  'layer inputs': {'model.remat': 'offload'},
  'both': {'placement.rules': HOST, 'model.remat': 'offload'},
  'split over devices': {'placement.rules': HOST, 'mesh.fsdp': 2},
}


@pytest.mark.parametrize('case', CASES)
def test_losses_and_adapters_are_those_of_the_resident_model_bit_for_bit(directory, resident, case):
  pass
