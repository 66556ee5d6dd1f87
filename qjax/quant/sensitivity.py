"""What each part of a model loses in each scheme, and the cheapest choice of schemes that fits a budget.

An item is whatever gets one scheme: a path such as 'layers/mlp/down/kernel' (a stack holds all layers of a
projection in one array and one scheme), or a pair (path, layer) where layers may differ. The choice is the
multiple-choice knapsack problem (Kellerer, Pferschy & Pisinger 2004, "Knapsack Problems", ch. 11).
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from qjax import files
from qjax.errors import UserError, nearest

Item = TypeVar('Item', bound=Hashable)

VERSION = 1
# Cells of the dynamic programme: 210 items of 6 schemes take a second.
CELLS = 2**16


# ---- allocation --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Allocation(Generic[Item]):
  """One scheme for every item.

  Attributes:
    schemes: the choice.
    cost: its total cost.
    nbytes: its bytes, within the budget.
    bound: no choice within the budget costs less than this. `gap` is what a better one could save; 0 means
      that this is the best.
  """

  schemes: dict[Item, str]
  cost: float
  nbytes: int
  bound: float

  @property
  def gap(self) -> float:
    return max(0.0, self.cost - self.bound)


def _table(
  costs: Mapping[Item, Mapping[str, float]], nbytes: Mapping[Item, Mapping[str, int]]
) -> list[tuple[list[str], np.ndarray, np.ndarray]]:
  """(schemes, float64 costs, int64 bytes) of each item, checked."""
  if not costs:
    raise UserError('no item to allocate a scheme to; give the costs of at least one')
  if set(costs) != set(nbytes):
    item = next(iter(set(costs) ^ set(nbytes)))
    raise UserError(f'{item!r} has costs or bytes, not both')
  table = []
  for item, by_scheme in costs.items():
    if not by_scheme or set(by_scheme) != set(nbytes[item]):
      raise UserError(
        f'{item!r} has costs for {sorted(by_scheme)} and bytes for {sorted(nbytes[item])}; give both '
        'for each scheme, and one scheme at least'
      )
    schemes = list(by_scheme)
    for scheme in schemes:
      if not math.isfinite(by_scheme[scheme]) or nbytes[item][scheme] < 0:
        raise UserError(
          f'{item!r} in {scheme}: cost {by_scheme[scheme]}, {nbytes[item][scheme]} bytes; costs must be '
          'finite and bytes not negative. Leave out a scheme that is not to be chosen'
        )
    cost = np.array([by_scheme[scheme] for scheme in schemes], np.float64)
    table.append((schemes, cost, np.array([nbytes[item][scheme] for scheme in schemes], np.int64)))
  return table


def _cheapest(table: Sequence[tuple[Any, np.ndarray, np.ndarray]], price: float) -> list[int]:
  """For each item the scheme with the least cost + price · bytes; of equals, the smallest."""
  choice = []
  for _, cost, size in table:
    value = cost + price * size
    choice.append(min(range(len(value)), key=lambda i: (value[i], size[i])))
  return choice


def _totals(table: Sequence[tuple[Any, np.ndarray, np.ndarray]], choice: Sequence[int]) -> tuple[float, int]:
  cost = math.fsum(cost[i] for (_, cost, _), i in zip(table, choice, strict=True))
  return cost, sum(int(size[i]) for (_, _, size), i in zip(table, choice, strict=True))


def _by_price(table: Sequence[tuple[Any, np.ndarray, np.ndarray]], budget: int) -> tuple[list[int], float]:
  """A choice that fits, and a lower bound of the cost of any: Lagrangian relaxation.

  For any price ≥ 0 of a byte, min over all choices of cost + price · (bytes − budget) is at most the cost of
  the best choice that fits, so each price tried gives a bound, and bisection drives it to the best one.
  """
  free = _cheapest(table, 0.0)
  cost, size = _totals(table, free)
  if size <= budget:
    return free, cost
  # At this price the least change of bytes outweighs any change of cost.
  spread = sum(float(np.ptp(cost)) for _, cost, _ in table)
  low, high = 0.0, 2 * spread + 1.0
  best, bound = _cheapest(table, high), -math.inf
  for _ in range(200):
    price = (low + high) / 2
    choice = _cheapest(table, price)
    cost, size = _totals(table, choice)
    bound = max(bound, cost + price * (size - budget))
    if size <= budget:
      high = price
      best = min(best, choice, key=lambda c: _totals(table, c)[0])
    else:
      low = price
  return best, bound


def _by_cells(
  table: Sequence[tuple[Any, np.ndarray, np.ndarray]], budget: int, cells: int
) -> tuple[list[int], bool]:
  """The best choice on a budget cut into `cells`, and whether it is the best of all.

  Sizes above each item's least are rounded up to whole cells, so what fits in cells fits in bytes. Nothing is
  lost if the sizes' common divisor is a large enough cell.
  """
  extras = [size - size.min() for _, _, size in table]
  slack = budget - sum(int(size.min()) for _, _, size in table)
  divisor = int(np.gcd.reduce(np.concatenate(extras))) or 1
  unit = divisor * max(1, -(-(slack // divisor) // cells))
  width = slack // unit + 1
  best = np.zeros(width)  # the least cost of the items so far within each number of cells
  taken = []
  for (_, cost, _), extra in zip(table, extras, strict=True):
    after = np.full(width, np.inf)
    which = np.zeros(width, np.int32)
    for i, steps in enumerate(-(-extra // unit)):
      if steps < width:
        candidate = best[: width - steps] + cost[i]
        is_less = candidate < after[steps:]
        after[steps:][is_less] = candidate[is_less]
        which[steps:][is_less] = i
    best = after
    taken.append(which)
  cell, choice = width - 1, []
  for which, extra in zip(reversed(taken), reversed(extras), strict=True):
    i = int(which[cell])
    choice.append(i)
    cell -= int(-(-extra[i] // unit))
  return choice[::-1], unit == divisor


def allocate(
  costs: Mapping[Item, Mapping[str, float]],
  nbytes: Mapping[Item, Mapping[str, int]],
  budget: int,
  cells: int = CELLS,
) -> Allocation[Item]:
  """One scheme for each item, at the least total cost within a budget of bytes.

  Costs are taken to add up over items. A dynamic programme over the budget in `cells` steps is exact where
  sizes share a large enough divisor; else the better of it and of Lagrangian relaxation is returned, with the
  relaxation's bound.

  Args:
    costs: of each scheme that an item may have, for instance the KL it alone causes; of any sign.
    nbytes: the same of bytes.
    budget: bytes for all items together.
    cells: resolution of the dynamic programme; its time grows in proportion.

  Raises:
    UserError: no choice fits (with the least possible bytes), or the tables are incomplete or not finite.
  """
  table = _table(costs, nbytes)
  least = sum(int(size.min()) for _, _, size in table)
  if least > budget:
    raise UserError(
      f'a budget of {budget} bytes holds no choice of schemes: the smallest takes {least} bytes. Raise the '
      'budget to that, or admit smaller schemes'
    )
  priced, bound = _by_price(table, budget)
  if _totals(table, priced)[0] <= bound:
    choice = priced
  else:
    celled, is_exact = _by_cells(table, budget, cells)
    choice = min(celled, priced, key=lambda c: _totals(table, c)[0])
    if is_exact:
      bound = _totals(table, choice)[0]
  cost, size = _totals(table, choice)
  schemes = {item: table[i][0][choice[i]] for i, item in enumerate(costs)}
  return Allocation(schemes, cost, size, min(bound, cost))


def by_path(table: Mapping[tuple[str, Any], Mapping[str, float]]) -> dict[str, dict[str, float]]:
  """Costs or bytes by (path, layer), summed over layers: where a stack has one scheme for all its layers.

  Raises:
    UserError: the layers of a path offer different schemes.
  """
  summed: dict[str, dict[str, float]] = {}
  for (path, layer), values in table.items():
    into = summed.setdefault(path, dict.fromkeys(values, 0))
    if set(into) != set(values):
      raise UserError(f'{path} layer {layer} offers {sorted(values)}, layers before it {sorted(into)}')
    for scheme, value in values.items():
      into[scheme] += value
  return summed


def rules(allocation: Allocation[Any]) -> tuple[tuple[str, str], ...]:
  """The allocation as storage rules, one for each path, that match the path and nothing else.

  Raises:
    UserError: layers of one path have different schemes, which one stack cannot hold.
  """
  found: dict[str, str] = {}
  for item, scheme in allocation.schemes.items():
    path = item if isinstance(item, str) else item[0]
    if found.setdefault(path, scheme) != scheme:
      raise UserError(
        f'{path} has layers in {found[path]} and in {scheme}, but one stack holds one scheme; allocate by '
        'path (`by_path` sums its layers)'
      )
  return tuple((re.escape(path), scheme) for path, scheme in found.items())


def with_default(given: Sequence[tuple[str, str]]) -> tuple[str, tuple[tuple[str, str], ...]]:
  """The most frequent scheme of some rules, and the rules of those that have another."""
  default = collections.Counter(scheme for _, scheme in given).most_common(1)[0][0]
  return default, tuple(rule for rule in given if rule[1] != default)


_LAYER = re.compile(r'(.*)\[(\d+)\]')


def layer_item(path: str, layer: int) -> str:
  """The name of one layer of a stack in a record, 'layers/mlp/down/kernel[3]'."""
  return f'{path}[{layer}]'


def worst_slices(
  found: 'Sensitivity', scheme: str, shapes: Mapping[str, tuple[int, ...]], budget: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """The matrices whose KL in a scheme adds up to most within a budget of parameters, by `allocate`.

  Args:
    found: measured layer by layer.
    scheme: a spelling among those measured.
    shapes: of the model's parameters, by path.
    budget: parameters.

  Returns:
    (path of a stack, layers in order), in the order of the record.

  Raises:
    UserError: the scheme was not measured, or no single layers, or the budget holds no matrix.
  """
  if scheme not in found.schemes:
    raise UserError(f'the record has no costs in {scheme}; it has {", ".join(found.schemes)}')
  parts = {item: match for item in found.paths if (match := _LAYER.fullmatch(item))}
  if not parts:
    raise UserError('the record was not measured layer by layer; run experiments.sensitivity --each_layer')
  costs = found.costs('kl')
  size = {item: int(np.prod(shapes[match[1]][1:])) for item, match in parts.items()}
  # To leave a matrix costs what it loses, to train it costs room.
  chosen = allocate(
    {item: {'rests': max(costs[item][scheme], 0.0), 'moves': 0.0} for item in parts},
    {item: {'rests': 0, 'moves': size[item]} for item in parts},
    budget,
  )
  layers: dict[str, list[int]] = {}
  for item, match in parts.items():
    if chosen.schemes[item] == 'moves':
      layers.setdefault(match[1], []).append(int(match[2]))
  if not layers:
    raise UserError(f'a budget of {budget} parameters holds no matrix; the least has {min(size.values())}')
  return tuple((path, tuple(sorted(found))) for path, found in layers.items())


# ---- records -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sensitivity:
  """What a model loses when one path alone rests in a scheme and all else stays as it was.

  Attributes:
    about: what it was measured on: model, data, versions.
    paths: the parts.
    schemes: the schemes tried on each.
    kl: mean KL in nats a token, [paths][schemes].
    nll_difference: candidate − reference in nats a token, the same shape.
    nbytes: bytes of that part, the same shape.
  """

  about: dict[str, Any]
  paths: tuple[str, ...]
  schemes: tuple[str, ...]
  kl: tuple[tuple[float, ...], ...]
  nll_difference: tuple[tuple[float, ...], ...]
  nbytes: tuple[tuple[int, ...], ...]

  def __post_init__(self) -> None:
    shape = (len(self.paths), len(self.schemes))
    for name in ('kl', 'nll_difference', 'nbytes'):
      rows = getattr(self, name)
      if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        raise UserError(f'sensitivity: {name} must have {shape[0]} rows of {shape[1]} values')
      if not all(isinstance(value, int | float) and math.isfinite(value) for row in rows for value in row):
        raise UserError(f'sensitivity: {name} holds a value that is no finite number; measure it again')

  def _by_item(self, rows: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    return {
      path: dict(zip(self.schemes, row, strict=True)) for path, row in zip(self.paths, rows, strict=True)
    }

  def costs(self, measure: str = 'kl') -> dict[str, dict[str, float]]:
    """'kl' or 'nll_difference' by path and scheme, as `allocate` takes it."""
    if measure not in ('kl', 'nll_difference'):
      raise UserError(f'{measure!r} is not measured{nearest(measure, ("kl", "nll_difference"))}')
    return self._by_item(getattr(self, measure))

  def sizes(self) -> dict[str, dict[str, int]]:
    """Bytes by path and scheme, as `allocate` takes them."""
    return self._by_item(self.nbytes)

  def as_dict(self) -> dict[str, Any]:
    return {'version': VERSION} | dataclasses.asdict(self)

  def save(self, path: Path) -> None:
    """JSON, written whole: a reader, or a crash, finds the old file or the new one."""
    files.write_json(path, self.as_dict())

  @classmethod
  def load(cls, path: Path) -> 'Sensitivity':
    """What `save` wrote.

    Raises:
      UserError: there is no such file, it is damaged, or of another version.
    """
    try:
      fields = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
      raise UserError(
        f'there is no sensitivity record {path}; first python -m '
        'experiments.sensitivity --each_layer --schemes=int4:axis=channel'
      ) from None
    except ValueError as error:
      raise UserError(f'{path} is damaged ({error}); measure it again') from None
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(fields, dict) or set(fields) != names | {'version'}:
      raise UserError(f'{path} is no sensitivity record: it must hold version, {", ".join(sorted(names))}')
    if fields.pop('version') != VERSION:
      raise UserError(f'{path} is of another version than {VERSION}; measure it again')
    try:
      grids = {name: tuple(tuple(row) for row in fields[name]) for name in ('kl', 'nll_difference', 'nbytes')}
      paths, schemes = tuple(fields['paths']), tuple(fields['schemes'])
    except TypeError as error:
      raise UserError(f'{path} is damaged ({error}); measure it again') from None
    return cls(fields['about'], paths, schemes, **grids)
