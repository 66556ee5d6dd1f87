"""Chips are found by name; what happens in a child process comes back as a value or as one clear reason."""

import os
import signal
import time
from pathlib import Path

import pytest

from qjax import chips
from qjax.errors import UserError

ROOT = Path(__file__).parents[1]


# ---- what children run -------------------------------------------------------------------------------------


def echo(value: object) -> object:
  print('not part of the answer')
  return {'value': value, 'platforms': os.environ['JAX_PLATFORMS']}


def fail(message: str) -> None:
  raise ValueError(message)


def refuse(message: str) -> None:
  raise UserError(message)


def die(number: int) -> None:
  os.kill(os.getpid(), number)


def sleep(seconds: float) -> None:
  time.sleep(seconds)


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(ROOT)  # children import this module by its name


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', [*chips.CHIPS, *chips.ALIASES])
def test_every_name_is_found(name: str) -> None:
  assert chips.find(f' {name.upper()} ') is chips.CHIPS[chips.ALIASES.get(name, name)]


@pytest.mark.parametrize(('given', 'meant'), [('rtx409', 'rtx4090'), ('v5', 'v5p'), ('h10', 'h100')])
def test_a_misspelt_chip_is_refused_with_the_nearest(given: str, meant: str) -> None:
  with pytest.raises(UserError, match=f'no chip {given!r}; did you mean {meant!r}'):
    chips.find(given)


def test_another_name_lists_them_all() -> None:
  with pytest.raises(UserError, match='there are v5e, .*rtx4090.*cpu'):
    chips.find('abacus')


def test_the_table_is_whole() -> None:
  for name, chip in chips.CHIPS.items():
    assert chip.name == name
    if chip.kind != 'cpu':
      assert chip.memory_bytes > 2**33 and chip.bandwidth > 1e11 and chip.target
      assert chip.flops['bfloat16'] > 1e13
      assert chip.flops['float32'] < chip.flops['bfloat16'] <= chip.flops['int8']
  assert chips.find('rtx4090').capability == 89
  assert chips.find('v5e').capability == 0


def test_a_gpu_is_described_to_the_compiler() -> None:
  text = chips.gpu_config(chips.find('h100'))
  assert 'major: 9 minor: 0' in text
  assert f'device_memory_size: {80 * 2**30}' in text


# ---- children ----------------------------------------------------------------------------------------------


def test_a_child_answers() -> None:
  answer = chips.call('tests.test_chips:echo', {'value': [1, 'two', None]})
  assert answer == {'value': [1, 'two', None], 'platforms': 'cpu'}


def test_what_a_child_raises_is_told_in_a_line() -> None:
  with pytest.raises(chips.CompileError, match='^ValueError: first second$'):
    chips.call('tests.test_chips:fail', {'message': 'first\nsecond'})


def test_a_users_error_stays_one() -> None:
  with pytest.raises(UserError, match='^use another$'):
    chips.call('tests.test_chips:refuse', {'message': 'use another'})


def test_a_child_that_is_killed_says_by_what() -> None:
  with pytest.raises(chips.CompileError, match='killed by SIGABRT'):
    chips.call('tests.test_chips:die', {'number': int(signal.SIGABRT)})


def test_a_slow_child_is_given_up() -> None:
  start = time.monotonic()
  with pytest.raises(chips.CompileError, match=r'took more than 0\.5 s'):
    chips.call('tests.test_chips:sleep', {'seconds': 60}, timeout=0.5)
  assert time.monotonic() - start < 30
