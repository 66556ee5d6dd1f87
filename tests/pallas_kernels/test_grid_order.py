"""The order of tiles on a GPU: each is taken once, waves read what is counted, and kernels read little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_cases
from pallas_kernels import grid_order
from pallas_kernels.grid_order import Cores

# Both products of a 7B model with more than half of an H100's cache in an operand.
LONG = {'low_bit_matmul': (2048, 11008, 4096), 'low_bit_matmul_transposed': (2048, 4096, 11008)}


@pytest.mark.parametrize('down,across', [(1, 7), (7, 1), (5, 3), (16, 32), (13, 11)])
def test_every_tile_is_taken_once(down: int, across: int):
  programs = np.arange(down * across)
  for group in range(1, down + 1):
    rows, columns = grid_order.place(programs, down, across, group)
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == down * across
    assert (rows.min(), columns.min()) == (0, 0) and (rows.max(), columns.max()) == (down - 1, across - 1)
    # A group is done before the next begins, and within it a column before the next.
    assert np.all(np.diff(rows // group) >= 0)
    assert np.all(np.diff(columns)[np.diff(rows // group) == 0] >= 0)
    traced = jax.jit(lambda p, group=group: grid_order.place(p, down, across, group))
    assert [int(each) for each in traced(jnp.int32(programs[-1]))] == [rows[-1], columns[-1]]


def test_a_wave_shares_what_it_reads():
  # Four tiles by six, a wave of eight. By rows: 1 1/3 rows a wave; in groups of two: two by four.
  programs, cores = np.arange(24), Cores(8, 0)
  counts = {1: (2 + 2 + 2, 6 + 6 + 6), 2: (2 + 4 + 2, 4 + 4 + 4), 4: (4 + 4 + 4, 2 + 2 + 2)}
  for group, wanted in counts.items():
    for places, parts in zip(grid_order.place(programs, 4, 6, group), wanted, strict=True):
      assert grid_order.moved(places, np.full(24, 10), 60, cores) == 10 * parts
  # Up to half of the cache an array is read once.
  assert grid_order.moved(places, np.full(24, 10), 60, Cores(8, 120)) == 60


def test_groups_follow_the_larger_operand():
  # Rows read nothing, so all of a column's tiles are taken at once; and the other way round.
  assert grid_order.best_group(16, 32, 0, 2**24) == 16
  assert grid_order.best_group(16, 32, 2**24, 0) == 1
  assert 1 < grid_order.best_group(64, 64, 2**24, 2**24) < 64


@pytest.mark.parametrize('kernel', LONG)
def test_long_inputs_are_read_little_more_than_once(kernel: str):
  for scheme in kernel_cases.KERNELS[kernel]:
    for shape in LONG.values():
      found = kernel_cases.traffic(kernel_cases.Case(kernel, scheme, shape, 'sm90'))['bytes_over_least']
      # With codes of a byte both operands exceed half the cache, and four waves of tiles cover the result:
      # none reads less than a quarter of them both.
      assert 1 <= found <= (2 if scheme == 'int8:axis=channel' else 1.1)
      if shape != LONG[kernel]:
        assert found <= 1.05


def test_the_count_is_of_the_order_that_kernels_use(monkeypatch: pytest.MonkeyPatch):
  (kernel, shape), *_ = LONG.items()
  case = kernel_cases.Case(kernel, 'nf4:block=64', shape, 'sm90')
  before = kernel_cases.traffic(case)['bytes_moved']
  place = grid_order.place
  # As if all rows were one group.
  monkeypatch.setattr(grid_order, 'place', lambda p, down, across, group: place(p, down, across, down))
  assert kernel_cases.traffic(case)['bytes_moved'] > 1.5 * before


def test_integers_are_read_little_more_than_once():
  for form in kernel_cases.KERNELS['int8_matmul']:
    for shape in LONG.values():
      for chip in ('sm89', 'sm90'):
        found = kernel_cases.traffic(kernel_cases.Case('int8_matmul', form, shape, chip))
        assert found['bytes_over_least'] <= 1.1
