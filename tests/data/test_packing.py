"""Packed rows hold exactly the documents, no target belongs to another document, weights mark answers."""

import numpy as np
import pytest

from qjax.data.packing import Batch, assemble, first_fit, packing_efficiency
from qjax.data.templates import Tokenized

PAD = 2


def random_documents(seed: int, n: int, longest: int) -> list[Tokenized]:
  """Token ids are all different, so that a leak cannot hide; some equal PAD."""
  rng = np.random.default_rng(seed)
  documents, first = [], 100
  for length in rng.integers(2, longest + 2, n):
    ids = np.arange(first, first + length, dtype=np.int32)
    ids[-1] = PAD  # A document that ends with the padding's own id.
    documents.append(Tokenized(ids, rng.random(length) < 0.5))
    first += length
  return documents


def unpack(batch: Batch, row: int) -> list[Tokenized]:
  """The documents of a row, read back from segments alone; the first token's mark is not in a batch."""
  documents = []
  for segment in range(1, batch['segments'][row].max(initial=0) + 1):
    here = batch['segments'][row] == segment
    tokens, targets = batch['tokens'][row][here], batch['targets'][row][here]
    ids = np.append(tokens, targets[-1])
    documents.append(Tokenized(ids, np.insert(batch['weights'][row][here] == 1, 0, False)))
    np.testing.assert_array_equal(tokens[1:], targets[:-1])
    np.testing.assert_array_equal(batch['positions'][row][here], np.arange(here.sum()))
  return documents


@pytest.mark.parametrize('pack', [True, False])
@pytest.mark.parametrize('seed', range(5))
def test_rows_are_the_documents(seed: int, pack: bool) -> None:
  seq_len = 13
  documents = random_documents(seed, 30, seq_len)
  plan = first_fit([len(d.ids) - 1 for d in documents], 30, seq_len, pack)
  batch = assemble([[documents[i] for i in row] for row in plan], 32, seq_len, PAD)
  assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
    name: ((32, seq_len), dtype)
    for name, dtype in zip(
      ('tokens', 'targets', 'weights', 'segments', 'positions'),
      ('int32', 'int32', 'float32', 'int32', 'int32'),
      strict=True,
    )
  }
  assert sorted(i for row in plan for i in row) == list(range(30))
  assert pack or all(len(row) == 1 for row in plan)
  for row, expected in enumerate(plan):
    found = unpack(batch, row)
    assert len(found) == len(expected)
    for document, i in zip(found, expected, strict=True):
      np.testing.assert_array_equal(document.ids, documents[i].ids)
      np.testing.assert_array_equal(document.trained[1:], documents[i].trained[1:])
  padding = batch['segments'] == 0
  for name, value in (('tokens', PAD), ('targets', PAD), ('weights', 0), ('positions', 0)):
    assert (batch[name][padding] == value).all()
  assert padding[len(plan) :].all()
  assert packing_efficiency([batch]) == sum(len(d.ids) - 1 for d in documents) / (32 * seq_len)


def test_by_hand() -> None:
  a = Tokenized(np.array([5, 6, 7, 2], np.int32), np.array([False, False, True, True]))
  b = Tokenized(np.array([8, 9, 2], np.int32), np.array([False, True, True]))
  batch = assemble([[a, b]], 1, 7, PAD)
  assert {name: x[0].tolist() for name, x in batch.items()} == {
    'tokens': [5, 6, 7, 8, 9, 2, 2],
    'targets': [6, 7, 2, 9, 2, 2, 2],
    'weights': [0, 1, 1, 1, 1, 0, 0],
    'segments': [1, 1, 1, 2, 2, 0, 0],
    'positions': [0, 1, 2, 0, 1, 0, 0],
  }


def test_first_fit_stops_at_the_first_that_fits_nowhere() -> None:
  # The 6 fits nowhere; the 1 would, and waits.
  assert first_fit([5, 4, 3, 2, 6, 1], 2, 8) == [[0, 2], [1, 3]]
  assert first_fit([5, 4, 3, 2], 3, 8, pack=False) == [[0], [1], [2]]
  assert first_fit([], 3, 8) == []
  assert first_fit([8], 1, 8) == [[0]]
  with pytest.raises(ValueError, match='never fit'):
    first_fit([9], 1, 8)


def test_first_fit_reads_a_prefix_and_fills_no_row_too_full() -> None:
  rng = np.random.default_rng(0)
  for _ in range(100):
    slots = rng.integers(1, 20, 50).tolist()
    rows = first_fit(slots, 4, 20)
    taken = sorted(i for row in rows for i in row)
    assert taken == list(range(len(taken)))
    assert all(sum(slots[i] for i in row) <= 20 for row in rows)
    rest = slots[len(taken)]
    assert len(rows) == 4 and all(sum(slots[i] for i in row) + rest > 20 for row in rows)


def test_efficiency_of_nothing() -> None:
  assert packing_efficiency([]) == 0.0
