"""Allocations against every choice there is, bounds against the best, records against damage."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from qjax import trees
from qjax.errors import UserError
from qjax.quant import sensitivity
from qjax.quant.qtensor import expected_nbytes
from qjax.quant.sensitivity import Sensitivity, allocate, by_path, rules


def _problem(seed, items=6, step=1):
  random = np.random.default_rng(seed)
  costs, nbytes = {}, {}
  for item in range(items):
    schemes = [f's{i}' for i in range(random.integers(1, 5))]
    sizes = step * random.integers(1, 60, len(schemes))
    # Smaller is mostly dearer; some costs are negative, as measured differences are.
    costs[f'p{item}'] = dict(
      zip(schemes, (20 / sizes + random.normal(0, 0.3, len(schemes))).tolist(), strict=True)
    )
    nbytes[f'p{item}'] = dict(zip(schemes, sizes.tolist(), strict=True))
  return costs, nbytes


def _brute(costs, nbytes, budget):
  """The least cost of all choices that fit."""
  best = math.inf
  for choice in itertools.product(*(list(costs[item]) for item in costs)):
    if sum(nbytes[item][scheme] for item, scheme in zip(costs, choice, strict=True)) <= budget:
      best = min(best, math.fsum(costs[item][scheme] for item, scheme in zip(costs, choice, strict=True)))
  return best


def _check(found, costs, nbytes, budget):
  assert set(found.schemes) == set(costs)
  assert found.nbytes == sum(nbytes[item][scheme] for item, scheme in found.schemes.items()) <= budget
  assert math.isclose(found.cost, math.fsum(costs[item][s] for item, s in found.schemes.items()))


@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('step', [1, 4096])
def test_exact_where_cells_suffice(seed, step):
  costs, nbytes = _problem(seed, step=step)
  least = sum(min(sizes.values()) for sizes in nbytes.values())
  most = sum(max(sizes.values()) for sizes in nbytes.values())
  for budget in (least, least + (most - least) // 3, (least + most) // 2 + 1, most, 10 * most):
    found = allocate(costs, nbytes, budget)
    _check(found, costs, nbytes, budget)
    assert found.gap == 0
    np.testing.assert_allclose(found.cost, _brute(costs, nbytes, budget), rtol=1e-12)


def test_bound_and_gap_hold_where_cells_are_coarse():
  gaps = []
  for seed in range(30):
    costs, nbytes = _problem(seed)
    least = sum(min(sizes.values()) for sizes in nbytes.values())
    most = sum(max(sizes.values()) for sizes in nbytes.values())
    budget = (2 * least + most) // 3
    found = allocate(costs, nbytes, budget, cells=8)
    _check(found, costs, nbytes, budget)
    best = _brute(costs, nbytes, budget)
    assert found.bound <= best + 1e-9 <= found.cost + 2e-9
    assert found.gap >= found.cost - best - 1e-9
    gaps.append(found.gap)
    # Without the relaxation's steps one item at most separates it from its bound.
    assert found.gap <= max(np.ptp(list(values.values())) for values in costs.values()) + 1e-9
  assert max(gaps) > 0  # coarse cells were coarse


def test_a_model_of_real_size_is_nearly_exact():
  """210 projections, sizes by arithmetic, and a gap below a thousandth of what the budget is worth."""
  random = np.random.default_rng(0)
  shapes = {'q': (576, 576), 'k': (576, 192), 'gate': (576, 1536), 'down': (1536, 576), 'odd': (577, 191)}
  schemes = ('nf4:block=64,dq', 'int4:block=32,asym', 'int8:axis=channel', 'bfloat16')
  costs, nbytes = {}, {}
  for layer, (name, shape) in itertools.product(range(42), shapes.items()):
    weight = float(np.exp(random.normal()))
    costs[layer, name] = {s: weight * e for s, e in zip(schemes, (1e-2, 8e-3, 1e-4, 1e-6), strict=True)}
    nbytes[layer, name] = {s: expected_nbytes(shape, s) for s in schemes}
  least = sum(min(sizes.values()) for sizes in nbytes.values())
  most = sum(max(sizes.values()) for sizes in nbytes.values())
  budget = (3 * least + most) // 4
  found = allocate(costs, nbytes, budget)
  _check(found, costs, nbytes, budget)
  worst = sum(values['nf4:block=64,dq'] for values in costs.values())
  assert found.gap < 1e-3 * (worst - found.cost)
  assert len(set(found.schemes.values())) >= 2


def test_what_does_not_fit_is_refused_with_the_least():
  costs, nbytes = _problem(3)
  least = sum(min(sizes.values()) for sizes in nbytes.values())
  assert allocate(costs, nbytes, least).nbytes == least
  with pytest.raises(UserError, match=f'a budget of {least - 1} bytes .* takes {least} bytes'):
    allocate(costs, nbytes, least - 1)


@pytest.mark.parametrize(
  ('costs', 'nbytes', 'message'),
  [
    ({}, {}, 'no item'),
    ({'a': {'x': 1.0}}, {'b': {'x': 1}}, 'costs or bytes, not both'),
    ({'a': {'x': 1.0}}, {'a': {'y': 1}}, r"'a' has costs for \['x'\] and bytes for \['y'\]"),
    ({'a': {'x': math.nan}}, {'a': {'x': 1}}, "'a' in x: cost nan"),
    ({'a': {'x': 1.0}}, {'a': {'x': -1}}, '-1 bytes'),
  ],
)
def test_incomplete_tables_are_refused(costs, nbytes, message):
  with pytest.raises(UserError, match=message):
    allocate(costs, nbytes, 10)


def test_rules_match_their_paths_alone():
  costs = {'layers/mlp/down/kernel': {'int8': 1.0}, 'layers/a.b/q/kernel': {'nf4': 1.0}}
  nbytes = {item: dict.fromkeys(values, 1) for item, values in costs.items()}
  found = rules(allocate(costs, nbytes, 2))
  assert trees.match_rules([*found, ('.*', 'bfloat16')], [*costs, 'layers/axb/q/kernel'], 'rules') == {
    'layers/mlp/down/kernel': 'int8',
    'layers/a.b/q/kernel': 'nf4',
    'layers/axb/q/kernel': 'bfloat16',
  }


def test_layers_of_a_stack_share_a_scheme():
  costs = {(path, layer): {'a': layer + 1.0, 'b': 2.5} for layer in range(2) for path in ('p', 'q')}
  nbytes = {item: {'a': 1, 'b': 1} for item in costs}
  mixed = allocate(costs, nbytes, 4)
  assert mixed.schemes == dict.fromkeys(costs, 'a')
  assert rules(mixed) == (('p', 'a'), ('q', 'a'))
  costs['q', 1] = {'a': 9.0, 'b': 2.5}
  with pytest.raises(UserError, match='q has layers in a and in b'):
    rules(allocate(costs, nbytes, 4))
  assert by_path(costs) == {'p': {'a': 3.0, 'b': 5.0}, 'q': {'a': 10.0, 'b': 5.0}}
  assert rules(allocate(by_path(costs), by_path(nbytes), 4)) == (('p', 'a'), ('q', 'b'))
  with pytest.raises(UserError, match='p layer 1 offers'):
    by_path({('p', 0): {'a': 1.0}, ('p', 1): {'b': 1.0}})


def _record():
  return Sensitivity(
    {'model': 'tiny', 'data': 'made up'},
    ('layers/mlp/down/kernel', 'layers/mlp/up/kernel'),
    ('nf4', 'int8'),
    ((0.1, 0.01), (0.2, 0.001)),
    ((0.05, -0.001), (0.1, 0.0)),
    ((10, 20), (10, 20)),
  )


def test_record_survives_the_file(tmp_path):
  path = tmp_path / 'deep' / 'sensitivity.json'
  record = _record()
  record.save(path)
  assert Sensitivity.load(path) == record
  assert [file.name for file in path.parent.iterdir()] == ['sensitivity.json']
  assert json.loads(path.read_text())['version'] == sensitivity.VERSION
  found = allocate(record.costs(), record.sizes(), 30)
  assert found.schemes == {'layers/mlp/down/kernel': 'nf4', 'layers/mlp/up/kernel': 'int8'}
  assert record.costs('nll_difference')['layers/mlp/down/kernel'] == {'nf4': 0.05, 'int8': -0.001}
  with pytest.raises(UserError, match="did you mean 'kl'"):
    record.costs('kl_')


def test_a_failed_save_leaves_the_old_file(tmp_path):
  path = tmp_path / 'sensitivity.json'
  _record().save(path)
  bad = Sensitivity({'model': object()}, ('p',), ('s',), ((0.0,),), ((0.0,),), ((1,),))
  with pytest.raises(TypeError):
    bad.save(path)
  assert Sensitivity.load(path) == _record()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda text: text[:50], 'is damaged'),
    (lambda text: text.replace('"version": 1', '"version": 0'), 'another version than 1'),
    (lambda text: text.replace('"kl"', '"lk"'), 'is no sensitivity record'),
    (lambda text: '[]', 'is no sensitivity record'),
    (lambda text: text.replace(' 0.001\n', ' null\n'), 'kl holds a value'),
    (
      lambda text: re.sub(r'"schemes": \[[^]]*\]', '"schemes": ["nf4"]', text),
      'must have 2 rows of 1 values',
    ),
    (lambda text: re.sub(r'"paths": \[[^]]*\]', '"paths": 3', text), 'is damaged'),
  ],
)
def test_damaged_records_are_refused(tmp_path, change, message):
  path = tmp_path / 'sensitivity.json'
  _record().save(path)
  text = path.read_text()
  assert change(text) != text
  path.write_text(change(text))
  with pytest.raises(UserError, match=message):
    Sensitivity.load(path)
  with pytest.raises(UserError, match='there is no sensitivity record'):
    Sensitivity.load(tmp_path / 'other.json')


def test_the_most_frequent_scheme_is_the_default() -> None:
  given = (('a', 'nf4'), ('b', 'nf3'), ('c', 'nf4'))
  assert sensitivity.with_default(given) == ('nf4', (('b', 'nf3'),))
  assert sensitivity.with_default(given[:1]) == ('nf4', ())
