"""Tilings that were measured, in a table beside this file; they go before what a kernel chooses by itself.

A row is of one kind of device, kernel, weight layout, dtype size, K and N, and of numbers of tokens up to the
next power of two. `python -m experiments.tune_kernels` measures rows and writes them.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import target
from pallas_kernels.low_bit_matmul.layout import Layout

TABLE = Path(__file__).with_name('tuned.json')
VERSION = 1


# Device, kernel, weight, shape and size of an element: the first fields of `Row`.
Key = tuple[str, str, tuple[int, int, bool, bool], tuple[int, int, int], int]


@dataclasses.dataclass(frozen=True)
class Row:
  """What was measured for one product.

  Attributes:
    device: kind of device, as JAX names it.
    kernel: 'low_bit_matmul' or 'low_bit_matmul_transposed'.
    weight: bits, inputs of a block, whether codes are places in a table, and whether scales are in 8 bits.
    shape: tokens as a power of two, K, N.
    itemsize: bytes of an element of x.
    tiles: fields of the kernel's tiling record.
    microseconds: of a call with these tiles, the median.
    heuristic_microseconds: of one with the tiles that the kernel chooses by itself, in the same turns.
  """

  device: str
  kernel: str
  weight: tuple[int, int, bool, bool]
  shape: tuple[int, int, int]
  itemsize: int
  tiles: Mapping[str, Any]
  microseconds: float
  heuristic_microseconds: float

  @property
  def key(self) -> Key:
    return self.device, self.kernel, self.weight, self.shape, self.itemsize


def key(kernel: str, tokens: int, outputs: int, layout: Layout, itemsize: int) -> Key:
  """Of the row for a product on what is compiled for now; see `Row`."""
  weight = (layout.bits, layout.span, layout.levels is not None, layout.double_quantized)
  shape = (1 << (tokens - 1).bit_length(), layout.inputs, outputs)
  return target.device().device_kind, kernel, weight, shape, itemsize


def read(path: Path = TABLE) -> dict[Key, Row]:
  """The rows of a table by key.

  Raises:
    ValueError: the file is damaged, of another version, or a row lacks or misspells a field; it is named.
  """
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
    if found['version'] != VERSION:
      raise ValueError(f'version {found["version"]}, where {VERSION} is read')
    rows = [
      Row(**{**row, 'weight': tuple(row['weight']), 'shape': tuple(row['shape'])}) for row in found['rows']
    ]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is no table of tuned tiles: {error}') from error
  return {row.key: row for row in rows}


def write(rows: Mapping[Key, Row], path: Path = TABLE) -> None:
  """Writes a table that `read` reads, its rows in order."""
  ordered = [dataclasses.asdict(rows[each]) for each in sorted(rows, key=str)]
  beside = path.with_name(f'.{path.name}.new')
  beside.write_text(json.dumps({'version': VERSION, 'rows': ordered}, indent=1) + '\n', encoding='utf-8')
  beside.replace(path)


_table = functools.cache(read)


def tiles(record: Any, kernel: str, tokens: int, outputs: int, layout: Layout, itemsize: int) -> Any | None:
  """The tiles measured for a product, as the tiling record of its kernel; None if none were.

  Raises:
    ValueError: the table is damaged, or a row does not hold the fields of the record.
  """
  row = _table().get(key(kernel, tokens, outputs, layout, itemsize))
  if row is None:
    return None
  names = {field.name for field in dataclasses.fields(record)}
  if set(row.tiles) != names:
    raise ValueError(f'{TABLE}: tiles of {row.key} hold {sorted(row.tiles)}, not {sorted(names)}')
  return record(**row.tiles)
