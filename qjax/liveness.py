"""What a traced program holds at its fullest moment, and what it multiplies, without compiling it.

A program's jaxpr is read into operations over values, branches for other platforms and dead code left out.
What XLA keeps in memory is then told by a few rules:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Operations whose operands and results are in memory.
_PRODUCTS = frozenset({'dot_general', 'conv_general_dilated', 'ragged_dot_general', 'pallas_call', 'custom_call'})
_LOOPS = frozenset({'scan', 'while'})
_HARD = _PRODUCTS | _LOOPS | {'sort', 'scatter', 'scatter-add', 'scatter_add', 'top_k', 'cumsum', 'fft'}
# Reductions fuse what they read, but their results are in memory.
_REDUCTIONS = ('reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or', 'argmax', 'gather')
# Another view of the same numbers: no memory of its own, and a product reads through it.
_VIEWS = frozenset({
  'reshape', 'squeeze', 'expand_dims', 'bitcast_convert_type', 'transpose', 'name', 'copy', 'copy_p',
  'optimization_barrier', 'reshard', 'sharding_constraint',
})  # fmt: skip
# Elementwise work that XLA rather keeps than does twice.
_EXPENSIVE = frozenset({
  'div', 'sqrt', 'rsqrt', 'cbrt', 'exp', 'exp2', 'expm1', 'log', 'log1p', 'pow', 'tanh', 'logistic', 'erf', 'erfc',
  'sin', 'cos', 'rem', 'random_bits', 'threefry2x32',
})  # fmt: skip


@dataclasses.dataclass(eq=False)
class Value:
  """An array of the program; `label` says what it is, from the arguments' labels or the loop that made it."""

  shape: tuple[int, ...]
  dtype: np.dtype
  label: str = ''
  is_constant: bool = False

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Body:
  """What a loop repeats: `inputs` are constants, carry and slices, in this order."""

  inputs: list[Value]
  operations: list['Operation']
  results: list[Value]


@dataclasses.dataclass(eq=False)
class Operation:
  name: str
  operands: list[Value]
  results: list[Value]
  params: Mapping[str, Any]
  label: str = ''  # of what a loop's turns work on
  body: Body | None = None
  length: int = 1
  num_consts: int = 0
  num_carry: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
  """A traced function: its arguments, operations in order, and results."""

  arguments: list[Value]
  operations: list[Operation]
  results: list[Value]


# ---- reading -----------------------------------------------------------------------------------------------


def _array(variable: Any, label: str = '') -> Value:
  aval = variable.aval
  dtype = getattr(aval, 'dtype', np.dtype('int32'))
  if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):  # random keys
    return Value((*aval.shape, 2), np.dtype('uint32'), label)
  return Value(tuple(aval.shape), np.dtype(dtype), label)


def _inner(eqn: Any) -> Any:
  """The jaxpr of a call that is no loop and no branch, None for other equations."""
  for name in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
    found = eqn.params.get(name)
    if isinstance(found, core.ClosedJaxpr | core.Jaxpr) and eqn.primitive.name not in (*_LOOPS, 'cond'):
      return found
  return None


class _Reader:
  """Turns equations into operations for one platform ('cpu', 'cuda', 'tpu')."""

  def __init__(self, platform: str):
    self.platform = platform

  def read(self, closed: Any, inputs: Sequence[Value], into: list[Operation]) -> list[Value]:
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, core.ClosedJaxpr) else (closed, ())
    known: dict[Any, Value] = {}
    branch: dict[Any, int] = {}
    for variable, _ in zip(jaxpr.constvars, consts, strict=False):
      known[variable] = _array(variable)
      known[variable].is_constant = True
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def value(atom: Any) -> Value:
      if isinstance(atom, core.Literal):
        constant = _array(atom)
        constant.is_constant = True
        return constant
      return known[atom]

    for eqn in jaxpr.eqns:
      name, operands = eqn.primitive.name, [value(atom) for atom in eqn.invars]
      if name == 'platform_index':
        branch[eqn.outvars[0]] = self._branch(eqn.params['platforms'])
        known[eqn.outvars[0]] = _array(eqn.outvars[0])
        continue
      if name == 'cond':
        branches = eqn.params['branches']
        # A branch that depends on data: the longest stands for all.
        index = branch.get(eqn.invars[0])
        chosen = branches[index] if index is not None else max(branches, key=lambda b: len(b.jaxpr.eqns))
        results = self.read(chosen, operands[1:], into)
      elif (inner := _inner(eqn)) is not None:
        results = self.read(inner, operands[len(operands) - len(_open(inner).invars) :], into)
      else:
        results = [_array(variable) for variable in eqn.outvars]
        into.append(self._operation(eqn, name, operands, results))
      known.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]

  def _branch(self, platforms: Sequence[Any]) -> int:
    """Which branch `platform_dependent` takes: the one that names the platform, else the default."""
    for index, names in enumerate(platforms):
      if names is not None and self.platform in names:
        return index
    return next((index for index, names in enumerate(platforms) if names is None), len(platforms) - 1)

  def _operation(self, eqn: Any, name: str, operands: list[Value], results: list[Value]) -> Operation:
    if name not in _LOOPS:
      for result in results:
        result.is_constant = all(operand.is_constant for operand in operands)
      return Operation(name, operands, results, eqn.params)
    if name == 'scan':
      consts, carry, length = (eqn.params[key] for key in ('num_consts', 'num_carry', 'length'))
      repeated = eqn.params['jaxpr']
    else:  # of a while loop the condition is small, and how often it runs is not known
      skipped = eqn.params['cond_nconsts']
      operands = operands[skipped:]
      consts, length, repeated = eqn.params['body_nconsts'], 1, eqn.params['body_jaxpr']
      carry = len(operands) - consts
    inputs = []
    for index, variable in enumerate(_open(repeated).invars):
      found = _array(variable, operands[index].label)
      found.is_constant = index < consts and operands[index].is_constant
      inputs.append(found)
    inside: list[Operation] = []
    body = Body(inputs, inside, self.read(repeated, inputs, inside))
    return Operation(name, operands, results, eqn.params, '', body, length, consts, carry)


def _open(jaxpr: Any) -> Any:
  return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _without_dead(operations: list[Operation], wanted: Iterable[Value]) -> list[Operation]:
  """The operations that the wanted values need, loops without what they write for nobody."""
  needed = set(wanted)
  kept = []
  for operation in reversed(operations):
    if not any(result in needed for result in operation.results):
      continue
    if operation.body is not None:
      _prune(operation, needed)
    needed.update(operation.operands)
    kept.append(operation)
  return kept[::-1]


def _prune(loop: Operation, needed: set[Value]) -> None:
  """Takes from a loop the stacks that nobody reads, and then the operands that nobody needs."""
  body, carry = loop.body, loop.num_carry
  assert body is not None
  stacks = [i for i, result in enumerate(loop.results) if i < carry or result in needed]
  loop.results = [loop.results[i] for i in stacks]
  body.results = [body.results[i] for i in stacks]
  body.operations = _without_dead(body.operations, body.results)
  used = {operand for operation in body.operations for operand in operation.operands} | set(body.results)
  consts = loop.num_consts
  inputs = [i for i, x in enumerate(body.inputs) if consts <= i < consts + carry or x in used]
  loop.num_consts = sum(i < consts for i in inputs)
  loop.operands = [loop.operands[i] for i in inputs]
  body.inputs = [body.inputs[i] for i in inputs]


def read(closed: Any, labels: Sequence[str], platform: str) -> Program:
  """The program of `jax.make_jaxpr`'s result.

  Args:
    closed: the jaxpr.
    labels: what each argument is.
    platform: 'cpu', 'cuda' or 'tpu', for `jax.lax.platform_dependent`.
  """
  arguments = [_array(v, label) for v, label in zip(closed.jaxpr.invars, labels, strict=True)]
  operations: list[Operation] = []
  results = _Reader(platform).read(closed, arguments, operations)
  return Program(arguments, _without_dead(operations, results), results)


# ---- work --------------------------------------------------------------------------------------------------


def flops(operations: Sequence[Operation]) -> Counter[str]:
  """Operations of matrix products (two for each product and sum) by the dtype of the operands."""
  found: Counter[str] = Counter()
  for operation in operations:
    if operation.body is not None:
      for dtype, count in flops(operation.body.operations).items():
        found[dtype] += operation.length * count
    elif operation.name == 'dot_general':
      a, b = operation.operands
      (contracted, _), _ = operation.params['dimension_numbers']
      terms = math.prod(a.shape[axis] for axis in contracted)
      dtype = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize).name
      found[dtype] += 2 * terms * math.prod(operation.results[0].shape)
  return found


def traffic(operations: Sequence[Operation]) -> int:
  """Least bytes that loops move: each reads what it is given and writes what it returns, once.

  What passes between operations of one turn may stay on the chip.
  """
  found = 0
  for operation in operations:
    if operation.body is not None:
      inner = traffic(operation.body.operations)
      stacks = sum(x.nbytes for x in (*operation.operands, *operation.results) if not x.is_constant)
      found += operation.length * inner if inner else stacks
  return found


# ---- labels ------------------------------------------------------------------------------------------------


def annotate(operations: Sequence[Operation], layers: int, trained: Iterable[tuple[int, ...]]) -> None:
  """Labels what loops keep and work on.

  A loop of `layers` turns works on a 'layer'; stacks that it leaves for another loop are 'activations', other
  stacks and what has the shape of something trained are 'gradients'. Another loop without loops of its own
  is one over the vocabulary and works on 'logits'.
  """
  shapes = set(trained)
  later: set[Value] = set()  # read, slice by slice, by a loop that comes afterwards
  for operation in reversed(operations):
    for result in operation.results:
      if result.shape in shapes and result.dtype == np.float32:
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
    fuses_products: products read operands that are converted on the way, and convert their results (TPU).
  """

  def __init__(self, size: Callable[[Value], int], fuses_products: bool = False):
    self.size = size
    self.fuses_products = fuses_products

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
    block = _Block(self, operations, set(held), list(results))
    return block.moments(label)


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
      if operation.name in _HARD or operation.name in _REDUCTIONS:
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
      is_costly = self._is_expensive(operation) or any(operand in costly for operand in operation.operands)
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
