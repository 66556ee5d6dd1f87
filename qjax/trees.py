"""Paths, path rules, and the splitting of one pytree into what moves and what rests.

A path is the keys of a leaf joined by '/', such as 'layers/attn/q/kernel'. A rule is a regular expression
with a value; it must match the whole path. Rules are ordered and the first match wins.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from qjax.errors import UserError

Tree = Any
Rules = Sequence[tuple[str, Any]]


def key_name(key: Any) -> str:
  """The bare name of one step of a jax key path."""
  for attribute in ('key', 'name', 'idx'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def path_of(keys: Iterable[Any]) -> str:
  return '/'.join(key_name(key) for key in keys)


def is_stacked(path: str) -> bool:
  """Whether the leaf at a path is a stack over layers, its first axis."""
  return 'layers' in path.split('/')


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
  """Leaves by path, in the tree's own order."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
  return {path_of(keys): leaf for keys, leaf in leaves}


def map_with_path(
  fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
  """`jax.tree.map` whose function also receives each leaf's path, first."""
  return jax.tree_util.tree_map_with_path(
    lambda keys, *leaves: fn(path_of(keys), *leaves), tree, *rest, is_leaf=is_leaf
  )


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The nested dictionary whose paths are the keys of `flat`."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def is_match(pattern: str, path: str) -> bool:
  """Whether a pattern, a constant of the library or already checked, matches the whole path."""
  return re.fullmatch(pattern, path) is not None


def _compile(pattern: str, what: str) -> re.Pattern[str]:
  try:
    return re.compile(pattern)
  except re.error as error:
    raise UserError(f'{what}: {pattern!r} is not a regular expression: {error}') from None


def match_rules(
  rules: Rules, paths: Sequence[str], what: str, is_partial: bool = False
) -> dict[str, Any]:
  """The value of the first matching rule for each path.

  Args:
    rules: (regular expression over a whole path, value), in order.
    paths: to be matched.
    what: names the rules in errors, for instance 'storage rules'.
    is_partial: a path may have no rule, and then is left out.

  Raises:
    UserError: a rule matches no path at all, is never the first match, or a path has no rule.
  """
  compiled = [(_compile(pattern, what), value) for pattern, value in rules]
  matched, first = [False] * len(rules), [False] * len(rules)
  values: dict[str, Any] = {}
  for path in paths:
    for index, (pattern, value) in enumerate(compiled):
      if not pattern.fullmatch(path):
        continue
      matched[index] = True
      if path not in values:
        values[path] = value
        first[index] = True
  listing = '\n  '.join(paths)
  for index, (given, _) in enumerate(rules):
    if not matched[index]:
      raise UserError(
        f'{what}: {given!r} matches none of the paths (a rule must match a whole path):\n  {listing}'
      )
    if not first[index]:
      raise UserError(f'{what}: {given!r} is never used: earlier rules take every path that it matches')
  uncovered = [path for path in paths if path not in values]
  if uncovered and not is_partial:
    raise UserError(
      f'{what}: no rule covers\n  ' + '\n  '.join(uncovered) + "\nAdd a rule, for instance ('.*', …) last"
    )
  return values


def select(pattern: str, paths: Sequence[str], what: str) -> list[str]:
  """The paths that one pattern matches whole.

  Raises:
    UserError: it matches none.
  """
  compiled = _compile(pattern, what)
  found = [path for path in paths if compiled.fullmatch(path)]
  if not found:
    raise UserError(
      f'{what}: {pattern!r} matches none of the paths (a pattern must match a whole path):\n  '
      + '\n  '.join(paths)
    )
  return found


def partition(
  tree: Tree, is_selected: Callable[[str], bool], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[Tree, Tree]:
  """Two nested dictionaries: the leaves whose path is selected, and the others.

  Both keep only the branches that hold leaves, so that a map over one never visits the other.
  """
  flat = flatten(tree, is_leaf)
  return (
    nest({path: leaf for path, leaf in flat.items() if is_selected(path)}),
    nest({path: leaf for path, leaf in flat.items() if not is_selected(path)}),
  )


def combine(*trees: Tree) -> dict[str, Any]:
  """The union of nested dictionaries with disjoint leaves: what `partition` took apart."""
  result: dict[str, Any] = {}
  for tree in trees:
    for key, value in tree.items():
      if key not in result:
        result[key] = value
      elif isinstance(value, dict) and isinstance(result[key], dict):
        result[key] = combine(result[key], value)
      else:
        raise ValueError(f'both trees hold a leaf at {key!r}')
  return result


def nbytes(tree: Tree) -> int:
  """Bytes of the arrays of a tree, from shapes and dtypes (arrays or `ShapeDtypeStruct`s)."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
