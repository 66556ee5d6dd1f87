"""Tilings that were measured, in a table beside this file; they go before what a kernel chooses by itself.

A row is of one kind of device, kernel, form, dtype size, K and N, and of numbers of tokens up to the next
power of two. `python -m experiments.tune_kernels` measures rows and writes them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pallas_kernels import target
from pallas_kernels.hardware import power_of_two

TABLE = Path(__file__).with_name('tuned.json')
VERSION = 2
# Tiles have no fewer rows, so that products of fewer tokens are cut alike.
FEWEST_TOKENS = 16

T = TypeVar('T')


class Product(NamedTuple):
  """What a kernel is to compute.

  Attributes:
    kernel: as a profile names it, 'int8_matmul'.
    form: what else its tiles depend on, such as how the weight rests, or which axes are summed; in words that
      the kernel chooses.
    shape: tokens, K and N.
    itemsize: bytes of an element of activations, or of the result of integers.
  """

  kernel: str
  form: str
  shape: tuple[int, int, int]
  itemsize: int


# A kind of device, as JAX names it, and a product whose tokens are a power of two.
Key = tuple[str, Product]


@dataclasses.dataclass(frozen=True)
class Row:
  """What was measured for one product.

  Attributes:
    device: as in `Key`.
    product: likewise.
    tiles: fields of the kernel's tiling record.
    microseconds: of a call with these tiles, the median.
    heuristic_microseconds: of one with the tiles that the kernel chooses by itself, in the same turns.
  """

  device: str
  product: Product
  tiles: Mapping[str, Any]
  microseconds: float
  heuristic_microseconds: float

  @property
  def key(self) -> Key:
    return self.device, self.product


def key(product: Product) -> Key:
  """Of the row for a product on what is compiled for now."""
  tokens, inputs, outputs = product.shape
  shape = power_of_two(tokens, FEWEST_TOKENS), inputs, outputs
  return target.device().device_kind, product._replace(shape=shape)


def read(path: Path = TABLE) -> dict[Key, Row]:
  """The rows of a table by key; none where there is no file.

  Raises:
    ValueError: the file is damaged, of another version, or a row lacks or misspells a field; it is named.
  """
  if not path.exists():
    return {}
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
    if found['version'] != VERSION:
      raise ValueError(f'version {found["version"]}, where {VERSION} is read')
    rows = [Row(**{**row, 'product': _product(row['product'])}) for row in found['rows']]
    return {row.key: row for row in rows}
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is no table of tuned tiles: {error}') from error


def _product(fields: Mapping[str, Any]) -> Product:
  tokens, inputs, outputs = fields['shape']
  return Product(**{**fields, 'shape': (tokens, inputs, outputs)})


def write(rows: Mapping[Key, Row], path: Path = TABLE) -> None:
  """Writes a table that `read` reads, its rows in order."""
  ordered = [
    {**dataclasses.asdict(rows[each]), 'product': rows[each].product._asdict()}
    for each in sorted(rows, key=str)
  ]
  beside = path.with_name(f'.{path.name}.new')
  beside.write_text(json.dumps({'version': VERSION, 'rows': ordered}, indent=1) + '\n', encoding='utf-8')
  beside.replace(path)


_table = functools.cache(read)


def choose(tried: Sequence[T], product: Product, fitted: Callable[[T], T] | None = None) -> T:
  """The tiles that were measured to be fastest for a product; the first of `tried` if none were.

  Args:
    tried: what the kernel itself would try, the best first, as records of one class.
    product: what is to be computed.
    fitted: cuts tiles that were measured with another number of tokens to the size at hand. They must then
      be among those tried. None is a kernel whose tiles serve any size.

  Raises:
    ValueError: the table is damaged, or a row does not hold the fields of the record.
  """
  row = _table().get(key(product))
  if row is None:
    return tried[0]
  record: Any = type(tried[0])
  names = {field.name for field in dataclasses.fields(record)}
  if set(row.tiles) != names:
    raise ValueError(f'{TABLE}: tiles of {row.key} hold {sorted(row.tiles)}, not {sorted(names)}')
  found: T = record(**row.tiles)
  if fitted is None:
    return found
  found = fitted(found)
  return found if found in tried else tried[0]


def neighbours(first: T, bounds: Mapping[str, tuple[int, int]]) -> tuple[T, ...]:
  """A record of tiles, and those with one field twice or half as large, within bounds, by name of field."""
  record: Any = first
  others = (
    dataclasses.replace(record, **{name: size})
    for name, (least, most) in bounds.items()
    for size in (2 * getattr(first, name), getattr(first, name) // 2) if least <= size <= most
  )  # fmt: skip
  return (first, *others)
