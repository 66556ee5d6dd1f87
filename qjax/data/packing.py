"""Documents into rows of fixed length, with the boundaries kept.

A document of n tokens takes n − 1 slots: `tokens` = ids[:-1], `targets` = ids[1:]. The last token of a
document is nobody's input, so no slot exists whose target would be the first token of the next document.

Shapes: B rows, T slots a row.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from qjax.data.templates import Tokenized

Batch = dict[str, np.ndarray]
"""`tokens`, `targets` int32 [B, T]; `weights` float32 [B, T], 1 where the target is trained on, else 0;
`segments` int32 [B, T], 1, 2, … for the documents of a row, 0 at padding; `positions` int32 [B, T], from 0
in each document."""


def first_fit(slots: Iterable[int], n_rows: int, seq_len: int, pack: bool = True) -> list[list[int]]:
  """The documents of each of at most `n_rows` rows, as indices into `slots`, the documents' lengths.

  Reads documents in order and puts each into the first row with room; stops before the first that fits
  nowhere. Without `pack` a row takes one document. What was read is therefore always a prefix of `slots`, of
  `sum(map(len, rows))` documents: a position in the stream is all that a resumed run needs to know.
  """
  rows: list[list[int]] = []
  room: list[int] = []
  for index, n in enumerate(slots):
    if n > seq_len:
      raise ValueError(f'a document of {n} slots can never fit a row of {seq_len}')
    row = next((r for r, free in enumerate(room) if free >= n), len(rows)) if pack else len(rows)
    if row == n_rows:
      break
    if row == len(rows):
      rows.append([])
      room.append(seq_len)
    rows[row].append(index)
    room[row] -= n
  return rows


def assemble(rows: Sequence[Sequence[Tokenized]], n_rows: int, seq_len: int, pad_id: int) -> Batch:
  """The batch of these rows; rows beyond the given ones are padding with weight zero."""
  shape = (n_rows, seq_len)
  batch = {
    'tokens': np.full(shape, pad_id, np.int32),
    'targets': np.full(shape, pad_id, np.int32),
    'weights': np.zeros(shape, np.float32),
    'segments': np.zeros(shape, np.int32),
    'positions': np.zeros(shape, np.int32),
  }
  for row, documents in enumerate(rows):
    start = 0
    for segment, (ids, trained) in enumerate(documents, 1):
      n = len(ids) - 1
      here = (row, slice(start, start + n))
      batch['tokens'][here] = ids[:-1]
      batch['targets'][here] = ids[1:]
      batch['weights'][here] = trained[1:]
      batch['segments'][here] = segment
      batch['positions'][here] = np.arange(n)
      start += n
  return batch


def packing_efficiency(batches: Iterable[Batch]) -> float:
  """The fraction of slots that hold a token rather than padding."""
  used = total = 0
  for batch in batches:
    used += int(np.count_nonzero(batch['segments']))
    total += batch['segments'].size
  return used / total if total else 0.0
