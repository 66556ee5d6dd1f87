"""What a traced program holds at its fullest moment, without compiling it.

What XLA keeps in memory while a program of `qjax.operations` runs is told by a few rules:

  Elementwise work, broadcasts, slices and reshapes fuse into what uses them: they take no memory, but what
  they were computed from stays as long as they are used. A function of constants alone takes nothing at all.
  The operands of a product, and what a loop carries or reads, must be in memory; so are the results of
  products, sums, sorts and loops.
  A loop over layers holds what it reads and writes for all layers as long as it runs, and one layer's work.
  Elementwise work may write over an operand that nobody needs any more.

The peak is the largest sum over the program's order. It is what a compiler with these habits needs; the order
in which one really schedules, and what it pads, moves it by a few percent.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from qjax.operations import LOOPS, PRODUCTS, Operation, Value

# Operations whose operands and results are in memory.
_HARD = PRODUCTS | LOOPS | {'sort', 'scatter', 'scatter-add', 'scatter_add', 'top_k', 'cumsum', 'fft'}
# Reductions fuse what they read, but their results are in memory.
_REDUCTIONS = ('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or', 'argmax', 'gather')
# Copies from the host's memory are in that of the device.
_COPIES = ('device_put',)
# Another view of the same numbers: no memory of its own, and a product reads through it.
_VIEWS = frozenset({
  'reshape', 'squeeze', 'expand_dims', 'bitcast_convert_type', 'transpose', 'name', 'copy', 'copy_p',
  'optimization_barrier', 'reshard', 'sharding_constraint',
})  # fmt: skip
# Elementwise work that XLA rather keeps than does twice.
_EXPENSIVE = frozenset({
  'div', 'sqrt', 'rsqrt', 'cbrt', 'exp', 'exp2', 'expm1', 'log', 'log1p', 'pow', 'tanh', 'logistic', 'erf',
  'erfc', 'sin', 'cos', 'rem', 'random_bits', 'threefry2x32',
})  # fmt: skip

# Labels of arguments that a step reads and multiplies, and does not compute.
_RESTING = ('weights', 'adapters', 'host')


# ---- labels ------------------------------------------------------------------------------------------------


def annotate(operations: Sequence[Operation], layers: int, trained: Iterable[tuple[int, ...]]) -> None:
  """Labels what loops keep and work on.

  A loop of `layers` turns works on a 'layer'; stacks that it leaves for another loop are 'activations', other
  stacks and products with the shape of something trained are 'gradients'. Another loop without loops of its
  own is one over the vocabulary and works on 'logits'.
  """
  shapes = set(trained)
  later: set[Value] = set()  # read, slice by slice, by a loop that comes afterwards
  for operation in reversed(operations):
    for result in operation.results:
      if operation.name in _HARD and result.shape in shapes and result.dtype == np.float32:
        result.label = 'gradients'
    body = operation.body
    if body is None:
      continue
    has_loops = any(inner.body is not None for inner in body.operations)
    if operation.length == layers and operation.name == 'scan':
      operation.label = 'layer'
      for stack in operation.results[operation.num_carry :]:
        stack.label = 'activations' if stack in later else 'gradients'
      later.update(operation.operands[operation.num_consts + operation.num_carry :])
    elif has_loops:
      annotate(body.operations, layers, shapes)
      for result in operation.results:
        result.label = result.label or 'gradients'
    else:
      operation.label = 'logits'


# ---- liveness ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moment:
  """What is held beside the arguments while operation `index` of a block runs, bytes by label."""

  index: int
  held: Counter[str]

  @property
  def nbytes(self) -> int:
    return sum(self.held.values())


class Liveness:
  """Applies the rules to a program.

  Args:
    size: bytes that an array takes on the device, padding included.
    is_eager: within a layer, what can start starts, as XLA schedules for GPUs, while what is made of weights
      alone waits for its use; otherwise operations keep the program's order.
    recomputes: what is cheap and needed again later is computed again; XLA's CPU backend keeps it, too.
  """

  def __init__(self, size: Callable[[Value], int], is_eager: bool = False, recomputes: bool = True):
    self.size = size
    self.is_eager = is_eager
    self.recomputes = recomputes

  def moments(
    self, operations: Sequence[Operation], held: Iterable[Value], results: Iterable[Value], label: str = ''
  ) -> list[Moment]:
    """One moment for each operation in order.

    Args:
      operations: of a block.
      held: what is there before, paid for by the caller (arguments, a loop's slices).
      results: what is there after.
      label: of what the block makes, where nothing better is known.
    """
    if self.is_eager and label == 'layer':
      operations = _eagerly(operations)
    block = _Block(self, operations, set(held), list(results))
    return block.moments(label)


def _eagerly(operations: Sequence[Operation]) -> list[Operation]:
  """By the longest way from the block's inputs to an operation; what weights alone give, before its use."""
  depth: dict[Value, float] = {}
  at_rest: set[Value] = set()
  rank: dict[int, float] = {}
  for index, operation in enumerate(operations):
    inputs = [operand for operand in operation.operands if not operand.is_constant]
    rank[index] = 1 + max((depth.get(operand, 0) for operand in inputs), default=0)
    depth.update(dict.fromkeys(operation.results, rank[index]))
    if all(operand in at_rest or operand.label in _RESTING for operand in inputs):
      at_rest.update(operation.results)
      depth.update(dict.fromkeys(operation.results, 0))
  used: dict[Value, float] = {}
  for index in reversed(range(len(operations))):
    operation = operations[index]
    if operation.results and all(result in at_rest for result in operation.results):
      rank[index] = min(used.get(result, math.inf) for result in operation.results) - 1e-3
    for operand in operation.operands:
      used[operand] = min(used.get(operand, math.inf), rank[index])
  return [operations[index] for index in sorted(rank, key=lambda index: (rank[index], index))]


class _Block:
  def __init__(
    self, rules: Liveness, operations: Sequence[Operation], held: set[Value], results: list[Value]
  ):
    self.rules, self.operations, self.held, self.results = rules, operations, held, results
    self.made = {result: op for op in operations for result in op.results}
    self.in_memory = self._materialized()
    self.in_memory |= self._kept()
    self.roots: dict[Value, frozenset[Value]] = {}

  def _materialized(self) -> set[Value]:
    """Values that the rules put into memory."""
    found: set[Value] = set(self.results)
    for operation in self.operations:
      if operation.name in _HARD or operation.name in (*_REDUCTIONS, *_COPIES):
        found.update(operation.results)
      if operation.name in _HARD:
        found.update(self._behind_views(operand) for operand in operation.operands)
    return {value for value in found if not value.is_constant}

  def _kept(self) -> set[Value]:
    """Fused values that cost much and are needed again after a result that they went into is known.

    So the weights after a step, whose finiteness decides whether they are taken.
    """
    # `level` counts the results in memory that stand between the block's inputs and a value.
    level: dict[Value, int] = {}
    costly: set[Value] = set()
    for operation in self.operations:
      above = max((level.get(operand, 0) for operand in operation.operands), default=0)
      is_costly = not self.rules.recomputes and operation.name not in _VIEWS
      is_costly |= self._is_expensive(operation) or any(operand in costly for operand in operation.operands)
      for result in operation.results:
        level[result] = above + (result in self.in_memory)
        if is_costly and result not in self.in_memory and result.shape:
          costly.add(result)
    uses: dict[Value, list[int]] = {}
    for operation in self.operations:
      for operand in operation.operands:
        if operand in costly:
          uses.setdefault(operand, []).append(max(level[result] for result in operation.results))
    return {value for value, levels in uses.items() if max(levels) > min(levels) + 1}

  def _is_expensive(self, operation: Operation) -> bool:
    if operation.name != 'div':
      return operation.name in _EXPENSIVE
    # By one number for all it is a product with its inverse.
    below = self._behind_views(operation.operands[1])
    made = self.made.get(below)
    return bool(below.shape) and not (
      made is not None and made.name == 'broadcast_in_dim' and not made.operands[0].shape
    )

  def _behind_views(self, value: Value) -> Value:
    while value in self.made and self.made[value].name in _VIEWS:
      value = self.made[value].operands[0]
    return value

  def _roots(self, value: Value) -> frozenset[Value]:
    """The values in memory that a value is, or is computed from."""
    if value in self.roots:
      return self.roots[value]
    if value.is_constant:
      found: frozenset[Value] = frozenset()
    elif value in self.in_memory or value not in self.made:
      found = frozenset((value,))
    else:
      found = frozenset().union(*(self._roots(operand) for operand in self.made[value].operands))
    self.roots[value] = found
    return found

  def moments(self, label: str) -> list[Moment]:
    last: dict[Value, int] = {}
    for index, operation in enumerate(self.operations):
      for operand in operation.operands:
        for root in self._roots(operand):
          last[root] = index
    for result in self.results:
      for root in self._roots(result):
        last[root] = len(self.operations)
    alive: Counter[str] = Counter()
    dies: dict[int, list[Value]] = {}
    paid: dict[Value, str] = {}
    found = []
    for index, operation in enumerate(self.operations):
      born = [
        value for value in operation.results
        if value in self.in_memory and value not in self.held and value not in paid and value in last
      ]  # fmt: skip
      for value in born:
        paid[value] = value.label or label
        alive[paid[value]] += self.rules.size(value)
        dies.setdefault(last[value], []).append(value)
      now = Counter(alive)
      if operation.body is not None:
        now.update(self._inside(operation, label))
      ending = [value for value in dies.get(index, []) if value not in born]
      for value in self._overwriting(operation, born, ending):
        now[paid[value]] -= self.rules.size(value)
      found.append(Moment(index, +now))
      for value in dies.get(index, []):
        alive[paid[value]] -= self.rules.size(value)
    return found

  def _overwriting(self, operation: Operation, born: list[Value], ending: list[Value]) -> list[Value]:
    """Which of the values born here take the place of one that ends here."""
    if operation.body is not None:
      carried = operation.operands[operation.num_consts :][: operation.num_carry]
      pairs = zip(operation.results, carried, strict=False)
      return [new for new, old in pairs if new in born and any(root in ending for root in self._roots(old))]
    if operation.name in _HARD:
      return []
    free = Counter(self.rules.size(value) for value in ending)
    found = []
    for value in born:
      if free[self.rules.size(value)]:
        free[self.rules.size(value)] -= 1
        found.append(value)
    return found

  def _inside(self, loop: Operation, label: str) -> Counter[str]:
    """The fullest moment of one turn of a loop."""
    body = loop.body
    assert body is not None
    # Stacks are written into place, and a new carry over the old one unless a product or a loop makes it.
    made = {result: op for op in body.operations for result in op.results}
    in_place = {
      result for i, result in enumerate(body.results)
      if i >= loop.num_carry or result not in made or made[result].name not in _HARD
    }  # fmt: skip
    held = {*body.inputs, *in_place}
    inner = self.rules.moments(body.operations, held, body.results, loop.label or label)
    return max(inner, key=lambda moment: moment.nbytes).held if inner else Counter()
