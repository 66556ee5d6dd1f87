"""The table of measured tiles, who reads it, and the command that writes it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_times, tune_kernels
from experiments.kernel_cases import Case
from pallas_kernels import tuned
from pallas_kernels.low_bit_matmul import gpu, reference, tiling
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.low_bit_matmul.tiling import Tiling

LAYOUT = Layout(512, 64, 4, levels=tuple(range(16)))


def row(**changes: object) -> tuned.Row:
  key = tuned.key('low_bit_matmul', 20, 256, LAYOUT, 2)
  tiles = dataclasses.asdict(Tiling(32, 256, 128, True))
  return dataclasses.replace(tuned.Row(*key, tiles, 10.0, 12.0), **changes)


def use(monkeypatch: pytest.MonkeyPatch, *rows: tuned.Row) -> None:
  monkeypatch.setattr(tuned, '_table', lambda: {each.key: each for each in rows})


def test_the_table_that_comes_along_is_read():
  assert all(row.microseconds < row.heuristic_microseconds for row in tuned.read().values())


def test_a_row_goes_before_what_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch):
  own = tiling.choose(20, 256, LAYOUT, 2, False)
  use(monkeypatch, row())
  assert tiling.choose(20, 256, LAYOUT, 2, False) == Tiling(32, 256, 128, True) != own
  # Fewer rows of x than a tile of the row's number of them.
  assert tiling.choose(17, 256, LAYOUT, 2, False).tokens == 32
  for others in ((20, 256, LAYOUT, 2, True), (20, 384, LAYOUT, 2, False), (40, 256, LAYOUT, 2, False)):
    assert tiling.choose(*others) == tiling.candidates(*others)[0]
  use(monkeypatch, row(tiles={'tokens': 16}))
  with pytest.raises(ValueError, match=r"hold \['tokens'\], not \['columns'"):
    tiling.choose(20, 256, LAYOUT, 2, False)


def test_what_is_written_is_read_and_what_is_damaged_is_said(tmp_path: Path):
  path = tmp_path / 'tuned.json'
  tuned.write({row().key: row()}, path)
  assert tuned.read(path) == {row().key: row()}
  whole = json.loads(path.read_text())
  whole['rows'][0].pop('tiles')
  for damaged in ('{"version": 1', '{"version": 2, "rows": []}', '[]', json.dumps(whole)):
    path.write_text(damaged)
    with pytest.raises(ValueError, match='is no table of tuned tiles'):
      tuned.read(path)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_the_fastest_becomes_a_row(platform: str, monkeypatch: pytest.MonkeyPatch):
  case = Case('low_bit_matmul', 'nf4:block=64', (16, 128, 256), platform)

  def second_is_fastest(programs, repeats, together=1):
    return {name: 1.0 - 0.5 * (index == 1) for index, name in enumerate(programs)}

  monkeypatch.setattr(kernel_times, 'in_turn', second_is_fastest)
  found, told = tune_kernels.tune(case, platform, most=3, repeats=1, gain=0.1, interpret=True)
  assert found is not None and found.microseconds == found.heuristic_microseconds / 2 and '0 do not' in told
  use(monkeypatch, found)
  layout = Case(*dataclasses.astuple(case)).layout()
  if platform == 'tpu':
    assert tiling.choose(16, 256, layout, 2, False) == tiling.candidates(16, 256, layout, 2, False)[1]
  else:
    assert tiling.choose_gpu(16, 256, layout, 2, False) == tiling.candidates_gpu(16, 256, layout, 2, False)[1]
  found, _ = tune_kernels.tune(case, platform, most=3, repeats=1, gain=0.6, interpret=True)
  assert found is None


def test_without_an_accelerator_nothing_is_measured():
  command = [sys.executable, '-m', 'experiments.tune_kernels']
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
  assert ended.returncode == 2 and 'Traceback' not in ended.stderr
  assert 'nothing can be measured' in ended.stderr


def test_candidates_compute_the_same():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 512)), jnp.float32)
  codes = jnp.asarray(np.random.default_rng(1).integers(0, 256, (256, 300)), jnp.uint8)
  scale = jnp.full((8, 300), 0.1)
  wanted = reference.matmul(x, codes, scale, None, LAYOUT)
  for tiles in tiling.candidates_gpu(40, 300, LAYOUT, 4, False)[:6]:
    found = gpu.matmul(x, codes, scale, None, LAYOUT, interpret=True, tiles=tiles)
    # 512 products of numbers up to 6 in float32, added in another order.
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=512 * 6 * 2.0**-23)
