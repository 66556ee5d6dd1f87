"""A traced program as operations over values, for one platform, and how much they multiply and move.

A jaxpr is read into operations in order: calls are opened, branches for other platforms and dead code are
left out, and what is computed twice is computed once, as XLA does before anything else.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Products, whose operands and results are in memory, and loops.
PRODUCTS = frozenset({'dot_general', 'ragged_dot_general', 'pallas_call', 'custom_call'})
LOOPS = frozenset({'scan', 'while'})
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
  """The jaxpr of a call that is no loop, branch or kernel, None for other equations."""
  if eqn.primitive.name in (*LOOPS, *PRODUCTS, 'cond'):
    return None
  for name in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
    found = eqn.params.get(name)
    if isinstance(found, core.ClosedJaxpr | core.Jaxpr):
      return found
  return None


class _Reader:
  """Turns equations into operations for one platform ('cpu', 'cuda', 'tpu')."""

  def __init__(self, platform: str):
    self.platform = platform
    self.literals: dict[Any, Value] = {}
    self.done: dict[Any, list[Value]] = {}  # what is computed twice is computed once

  def read(self, closed: Any, inputs: Sequence[Value], into: list[Operation]) -> list[Value]:
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, core.ClosedJaxpr) else (closed, ())
    known: dict[Any, Value] = {}
    branch: dict[Any, int] = {}
    for variable, _ in zip(jaxpr.constvars, consts, strict=False):
      known[variable] = _array(variable)
      known[variable].is_constant = True
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def value(atom: Any) -> Value:
      if not isinstance(atom, core.Literal):
        return known[atom]
      constant = _array(atom)
      constant.is_constant = True
      return self.literals.setdefault((str(atom.val), constant.dtype, constant.shape), constant)

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
        key = (name, tuple(operands), '' if name in LOOPS else str(eqn.params))
        if name in LOOPS or name == 'optimization_barrier' or key not in self.done:
          into.append(self._operation(eqn, name, operands, results))
          self.done[key] = results
        results = self.done[key]
      known.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]

  def _branch(self, platforms: Sequence[Any]) -> int:
    """Which branch `platform_dependent` takes: the one that names the platform, else the default."""
    for index, names in enumerate(platforms):
      if names is not None and self.platform in names:
        return index
    return next((index for index, names in enumerate(platforms) if names is None), len(platforms) - 1)

  def _operation(self, eqn: Any, name: str, operands: list[Value], results: list[Value]) -> Operation:
    if name not in LOOPS:
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
