"""Paths and rules: who gets which value, and that splitting a tree loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import trees
from qjax.adapters import Adapter, is_adapter
from qjax.errors import UserError
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import DoubleQuantized, QTensor, is_qtensor

PATHS = ['embed/embedding', 'layers/attn/q/kernel', 'layers/mlp/up/kernel', 'final_norm/scale']


def _array(*shape, dtype=np.float32):
  return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def _tree():
  packed = QTensor(
    _array(2, 3, 3, dtype=np.uint8), _array(2, 3, 3), None, scheme=parse_scheme('int4:block=2'), inputs=5
  )
  return {
    'embed': {'embedding': _array(4, 5)},
    'layers': {
      'q': {'kernel': packed, 'bias': _array(2, 3, dtype=jnp.bfloat16)},
      'up': {'kernel': _array(2, 5, 3), 'lora': Adapter(_array(2, 1, 5), _array(2, 1, 3), 2.0, 0.5)},
    },
    'steps': _array(dtype=np.int32),
  }


def _is_whole(value):
  return is_qtensor(value) or is_adapter(value)


def _assert_same(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


# ---- paths -------------------------------------------------------------------------------------------------


def test_a_path_joins_keys_of_every_kind():
  scale = DoubleQuantized(_array(1, 2, dtype=np.int8), _array(1, 1), _array())
  packed = QTensor(_array(1, 2, dtype=np.uint8), scale, None, scheme=parse_scheme('nf4:block=2,dq'), inputs=2)
  tree = {'opt': (_array(1), [packed])}
  assert list(trees.flatten(tree)) == [
    'opt/0',
    'opt/1/0/codes',
    'opt/1/0/scale/codes',
    'opt/1/0/scale/step',
    'opt/1/0/scale/offset',
  ]
  assert list(trees.flatten(tree, is_qtensor)) == ['opt/0', 'opt/1/0']


def test_nest_undoes_flatten():
  tree = _tree()
  _assert_same(trees.nest(trees.flatten(tree, _is_whole)), tree)


def test_map_with_path_hands_over_the_leaf_of_every_tree():
  tree = {'a': {'b': 1, 'c': 2}, 'd': 3}
  mapped = trees.map_with_path(lambda path, x, y: (path, x + y), tree, jax.tree.map(lambda x: 10 * x, tree))
  assert mapped == {'a': {'b': ('a/b', 11), 'c': ('a/c', 22)}, 'd': ('d', 33)}


# ---- rules -------------------------------------------------------------------------------------------------


def test_the_first_matching_rule_wins():
  rules = [('.*/q/kernel', 1), ('layers/.*', 2), ('.*', 3)]
  assert trees.match_rules(rules, PATHS, 'rules') == dict(zip(PATHS, [3, 1, 2, 3], strict=True))


def test_a_rule_must_match_the_whole_path():
  rules = [('layers', 1), ('.*', 2)]
  with pytest.raises(UserError, match="'layers' matches none.*whole path"):
    trees.match_rules(rules, PATHS, 'rules')


@pytest.mark.parametrize(
  'rules, message, listed',
  [
    ([('.*/z/kernel', 1), ('.*', 2)], "storage rules: '.*/z/kernel' matches none", PATHS),
    ([('.*', 1), ('layers/.*', 2)], "storage rules: 'layers/.*' is never used", []),
    ([('layers/.*', 1), ('.*/q/kernel', 2), ('.*', 3)], "'.*/q/kernel' is never used", []),
    ([('layers/.*', 1)], 'storage rules: no rule covers', [PATHS[0], PATHS[3]]),
    ([], 'no rule covers', PATHS),
    ([('(', 1)], r"storage rules: '\(' is not a regular expression", []),
  ],
)
def test_rules_that_cannot_be_meant_are_refused(rules, message, listed):
  with pytest.raises(UserError, match=message) as caught:
    trees.match_rules(rules, PATHS, 'storage rules')
  assert all(path in str(caught.value) for path in listed)


def test_uncovered_lists_no_path_that_is_covered():
  with pytest.raises(UserError) as caught:
    trees.match_rules([('layers/.*', 1)], PATHS, 'rules')
  assert PATHS[1] not in str(caught.value)


def test_select_lists_exactly_the_matches_in_order():
  assert trees.select('.*/(q|up)/kernel', PATHS, 'targets') == PATHS[1:3]
  with pytest.raises(UserError, match='targets') as caught:
    trees.select('q/kernel', PATHS, 'targets')
  assert all(path in str(caught.value) for path in PATHS)


# ---- splitting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('selected', ['kernel', 'lora', 'embed', 'steps', 'x', ''])
def test_combine_undoes_partition(selected):
  tree = _tree()
  parts = trees.partition(tree, lambda path: selected in path, is_leaf=_is_whole)
  _assert_same(trees.combine(*parts), tree)
  _assert_same(trees.combine(*reversed(parts)), tree)
  yes, no = (trees.flatten(part, _is_whole) for part in parts)
  assert all(selected in path for path in yes) and not any(selected in path for path in no)
  assert len(yes) + len(no) == len(trees.flatten(tree, _is_whole))


def test_partition_keeps_quantized_weights_and_adapters_whole():
  yes, no = trees.partition(_tree(), lambda path: path.endswith('q/kernel'), is_leaf=_is_whole)
  assert is_qtensor(yes['layers']['q']['kernel'])
  assert is_adapter(no['layers']['up']['lora']) and no['layers']['up']['lora'].dropout == 0.5
  assert list(yes) == ['layers'], 'a part must hold no empty branch'
  assert 'kernel' not in no['layers']['q']


def test_combine_refuses_two_leaves_in_one_place():
  with pytest.raises(ValueError, match="'b'"):
    trees.combine({'a': {'b': 1}}, {'a': {'b': 2}})
  with pytest.raises(ValueError, match="'a'"):
    trees.combine({'a': {'b': 1}}, {'a': 2})


def test_combine_leaves_its_arguments_alone():
  left, right = {'a': {'b': 1}}, {'a': {'c': 2}}
  assert trees.combine(left, right) == {'a': {'b': 1, 'c': 2}}
  assert (left, right) == ({'a': {'b': 1}}, {'a': {'c': 2}})


def test_nbytes_counts_every_dtype_and_abstract_arrays_too():
  tree = _tree()
  by_hand = 4 * 4 * 5 + (2 * 3 * 3 + 4 * 2 * 3 * 3) + 2 * 2 * 3 + 4 * 30 + 4 * (2 * 5 + 2 * 3) + 4
  assert trees.nbytes(tree) == by_hand
  assert trees.nbytes(jax.eval_shape(lambda: tree)) == by_hand
  assert trees.nbytes({}) == 0
