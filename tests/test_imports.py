"""Imports point one way: every import in every module of ours is held against one table."""

import ast
import graphlib
import pathlib
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('qjax', 'pallas_kernels', 'configs', 'experiments')
ANY = ('*',)


class Row(NamedTuple):
  """What a module and all below it may import; a name stands for itself and all below it, too."""

  ours: tuple[str, ...] = ()
  third_party: tuple[str, ...] = ANY  # the standard library is always allowed
  never: tuple[str, ...] = ('absl.app', 'absl.flags', 'ml_collections')


def _names(short: str) -> tuple[str, ...]:
  return tuple(f'qjax.{name}' for name in short.split())


# Each sees those before it and none after.
LADDER = _names(
  'errors files cache trees precision quant storage adapters remat kernels integers ops models method optim'
  ' step fused train'
)


def _below(name: str) -> tuple[str, ...]:
  return LADDER[: LADDER.index(f'qjax.{name}')]


# What sees more than the ladder gives it, and what sits beside the ladder. A module goes by the row of its
# longest name here; one without a row is an error.
TABLE: dict[str, Row] = {name: Row(LADDER[:i]) for i, name in enumerate(LADDER)} | {
  'qjax': Row(),  # the package file alone: it stays empty, so that importing a part does not import all
  'qjax.kernels': Row((*_names('quant sharding'), 'pallas_kernels')),
  'qjax.integers': Row((*_names('errors quant sharding kernels'), 'pallas_kernels')),
  'qjax.ops': Row((*_below('ops'), 'pallas_kernels')),
  'qjax.models': Row((*_below('models'), 'qjax.sharding')),
  'qjax.method': Row((*_below('method'), 'qjax.sharding')),
  'qjax.fused': Row((*_below('fused'), 'qjax.sharding')),
  'qjax.train': Row((*_below('train'), *_names('sharding data checkpoint records evaluate progress'))),
  'qjax.sharding': Row(_below('adapters')),
  'qjax.checkpoint': Row(_names('errors trees quant')),
  'qjax.records': Row(_names('errors files')),
  'qjax.progress': Row(),
  'qjax.data': Row(
    _names('errors cache'),
    never=(*Row().never, 'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'),  # workers start without a device
  ),
  'qjax.io': Row(_names('errors files cache trees quant adapters models.config data.tokenizer')),
  'qjax.evaluate': Row((*_below('optim'), *_names('sharding data'))),
  'qjax.generate': Row((*_below('optim'), *_names('sharding data'))),
  'qjax.walk': Row(_below('optim')),
  'qjax.convert': Row((*_below('optim'), 'qjax.sharding')),
  'qjax.quantize': Row((*_below('optim'), *_names('data walk'))),
  'qjax.verification': Row((*_below('optim'), *_names('data io walk generate'))),
  'qjax.operations': Row(third_party=('jax', 'numpy')),  # knows jaxprs, and nothing of ours
  'qjax.liveness': Row(_names('operations'), third_party=('numpy',)),
  'qjax.plan': Row((*LADDER, *_names('sharding chips liveness operations'))),
  'qjax.chips': Row(_names('errors')),  # JAX only inside the process that compiles
  'qjax.report': Row(_names('errors files records')),  # tables and figures are drawn from records alone
  'qjax.build': Row(('qjax', 'pallas_kernels'), never=('absl.app', 'absl.flags')),
  'pallas_kernels': Row(third_party=('jax', 'jaxlib', 'numpy')),
  'configs': Row(third_party=('ml_collections',), never=()),
  'experiments': Row(('qjax', 'pallas_kernels'), never=()),
}


def _covers(prefix: str, name: str) -> bool:
  return name == prefix or name.startswith(prefix + '.')


def _row(module: str) -> str | None:
  """The table's longest name that covers `module`."""
  found = [name for name in TABLE if _covers(name, module) and (name != 'qjax' or module == 'qjax')]
  return max(found, key=len, default=None)


def _imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, list[str]]]:
  """(line, names) for each name that `source` imports anywhere, in functions too.

  `from a import b` may mean the module a.b or something inside a: both names are given, the longer first.
  """
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, [alias.name]
    elif isinstance(node, ast.ImportFrom):
      parts = module.split('.')
      parents = parts[: len(parts) - node.level + is_package] if node.level else []
      base = '.'.join([*parents, *([node.module] if node.module else [])])
      for alias in node.names:
        yield node.lineno, [base] if alias.name == '*' else [f'{base}.{alias.name}', base]
    elif isinstance(node, ast.Call):
      match node.func, node.args:
        case (ast.Name(id=called) | ast.Attribute(attr=called), [ast.Constant(value=str(target)), *_]):
          if called in ('import_module', '__import__') and not target.startswith('.'):
            yield node.lineno, [target]


def _is_allowed(names: list[str], row: str, modules: Container[str]) -> bool:
  """Whether the table's row admits an import that goes by one of `names`."""
  rule = TABLE[row]
  if any(_covers(bad, name) for bad in rule.never for name in names):
    return False
  top = names[0].split('.')[0]
  if top in PACKAGES:
    # Of `from qjax import trees` the module counts; of `from qjax.trees import match` the module, too.
    target = next((name for name in names if name in modules), names[-1])
    own = () if row == 'qjax' else (row,)
    return any(_covers(allowed, target) for allowed in (*own, *rule.ours))
  return rule.third_party == ANY or top in sys.stdlib_module_names or top in rule.third_party


def violations(sources: Mapping[str, str], packages: Iterable[str] = ()) -> list[str]:
  """A line for each import that the table forbids, and for each module that it does not cover.

  `sources` maps module names to their text; `packages` says which of them are packages' own files.
  """
  found = []
  packages = set(packages)
  for module, source in sources.items():
    row = _row(module)
    if row is None:
      found.append(f'{module} has no row in the table of tests/test_imports.py')
      continue
    for line, names in _imports(source, module, module in packages):
      if not _is_allowed(names, row, sources):
        allowed = ', '.join((row, *TABLE[row].ours))
        found.append(f'{module}:{line} imports {names[0]}; of ours, {row} may import: {allowed}')
  return found


def _tree() -> tuple[dict[str, str], set[str]]:
  """The text of every module of ours by its dotted name, and which are packages."""
  sources, packages = {}, set()
  for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob('*.py')):
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
      packages.add('.'.join(parts))
    sources['.'.join(parts)] = path.read_text(encoding='utf-8')
  return sources, packages


def test_imports_point_one_way() -> None:
  sources, packages = _tree()
  assert 'qjax.errors' in sources  # the walk found the library
  assert not (found := violations(sources, packages)), '\n'.join(found)


def test_table_has_no_cycle() -> None:
  """The table itself points one way: no chain of rows leads back to its start."""
  sees = {name: {_row(seen) for seen in rule.ours} - {name, None} for name, rule in TABLE.items()}
  graphlib.TopologicalSorter(sees).prepare()  # raises CycleError, which lists the rows


OURS = dict.fromkeys(
  [
    *('qjax', 'qjax.trees', 'qjax.errors', 'qjax.quant', 'qjax.quant.fake', 'qjax.quant.qtensor'),
    *('qjax.models', 'qjax.models.config', 'qjax.models.layers', 'qjax.train', 'qjax.build'),
    *('pallas_kernels', 'configs.common'),
  ],
  '',
)


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('qjax', 'from qjax import train'),
    ('qjax', 'from . import train'),
    ('qjax.trees', 'import qjax.train'),
    ('qjax.trees', 'import qjax.train as t'),
    ('qjax.trees', 'from qjax import errors, train'),
    ('qjax.trees', 'from qjax.train import step'),
    ('qjax.trees', 'from qjax.train import *'),
    ('qjax.trees', 'from . import train'),
    ('qjax.trees', 'from .quant import fake'),
    ('qjax.trees', 'import qjax'),
    ('qjax.trees', 'from qjax import nothing_there'),
    ('qjax.trees', 'import experiments.train'),
    ('qjax.trees', 'import pallas_kernels'),
    ('qjax.trees', 'def f():\n  from qjax.quant import qtensor'),
    ('qjax.trees', 'if TYPE_CHECKING:\n  from qjax.quant import qtensor'),
    ('qjax.trees', "import importlib\nimportlib.import_module('qjax.train')"),
    ('qjax.quant', 'from .. import train'),
    ('qjax.quant.fake', 'from .. import train'),
    ('qjax.quant.fake', 'from ..models.layers import Attention'),
    ('qjax.trees', 'from ml_collections import config_dict'),
    ('qjax.trees', 'from absl import flags'),
    ('qjax.trees', 'import absl.flags'),
    ('qjax.build', 'from absl import flags'),
    ('qjax.build', 'from configs import common'),
    ('qjax.io.hf', 'from qjax.models import layers'),
    ('qjax.data.packing', 'import jax.numpy as jnp'),
    ('qjax.data.packing', 'from qjax import trees'),
    ('qjax.records', 'from qjax import models'),
    ('pallas_kernels.rmsnorm.tpu', 'from qjax import errors'),
    ('pallas_kernels.rmsnorm.tpu', 'import flax'),
    ('configs.qlora', 'import jax'),
    ('configs.qlora', 'from qjax import errors'),
    ('qjax.unheard_of', ''),
  ],
)
def test_planted_import_is_found(module: str, source: str) -> None:
  assert len(violations(OURS | {module: source}, packages={'qjax', 'qjax.quant', 'qjax.models'})) == 1


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('qjax.train', 'import dataclasses\nimport jax\nfrom absl import logging'),
    ('qjax.train', 'from qjax import errors, trees\nimport qjax.errors'),
    ('qjax.train', 'from qjax.trees import match\nfrom .quant.fake import quantize'),
    ('qjax.quant', 'from .fake import quantize\nfrom . import fake'),
    ('qjax.quant.fake', 'from . import qtensor\nfrom .. import trees\nfrom ..errors import UserError'),
    ('qjax.ops', 'from pallas_kernels import dispatch'),
    ('qjax.io.hf', 'from qjax.models import config\nfrom qjax.models.config import ModelConfig'),
    ('qjax.data.packing', 'import grain\nfrom qjax.data import tokenizer'),
    ('qjax.build', 'import ml_collections\nfrom qjax import train'),
    ('pallas_kernels.rmsnorm.tpu', 'import functools\nfrom jax import lax\nfrom . import tiling'),
    ('configs.qlora', 'import ml_collections\nfrom configs import common'),
    ('experiments.train', 'from absl import app, flags\nfrom qjax import build'),
  ],
)
def test_lawful_import_passes(module: str, source: str) -> None:
  assert violations(OURS | {module: source}, packages={'qjax', 'qjax.quant', 'qjax.models'}) == []
