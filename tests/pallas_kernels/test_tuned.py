"""The table of measured tiles, who reads it, and the command that writes it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments import kernel_cases, kernel_times, tune_kernels
from experiments.kernel_cases import Case
from pallas_kernels import tuned
from pallas_kernels.grouped_adapter import tiling as grouped
from pallas_kernels.grouped_adapter.tiling import Sizes
from pallas_kernels.int8_matmul import tiling as int8
from pallas_kernels.low_bit_matmul import tiling
from pallas_kernels.low_bit_matmul.layout import Layout
from pallas_kernels.low_bit_matmul.tiling import Tiling
from qjax import kernels
from qjax.errors import UserError
from qjax.quant.formats import parse_scheme

LAYOUT = Layout(512, 64, 4, levels=tuple(range(16)))
TILES = Tiling(32, 256, 128, True)


def row(product: tuned.Product | None = None, tiles: Any = TILES) -> tuned.Row:
  product = tiling.product(20, 256, LAYOUT, 2, False) if product is None else product
  return tuned.Row(*tuned.key(product), dataclasses.asdict(tiles), 10.0, 12.0)


def use(monkeypatch: pytest.MonkeyPatch, *rows: tuned.Row) -> None:
  monkeypatch.setattr(tuned, '_table', lambda: {each.key: each for each in rows})


def test_the_table_that_comes_along_is_read():
  assert tuned.TABLE.is_file()
  for each in tuned.read().values():
    assert each.microseconds < each.heuristic_microseconds


def test_a_row_goes_before_what_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch):
  own = tiling.choose(20, 256, LAYOUT, 2, False)
  use(monkeypatch, row())
  assert tiling.choose(20, 256, LAYOUT, 2, False) == TILES != own
  # Fewer rows of x than a tile of the row's number of them.
  assert tiling.choose(17, 256, LAYOUT, 2, False).tokens == 32
  for others in ((20, 256, LAYOUT, 2, True), (20, 384, LAYOUT, 2, False), (40, 256, LAYOUT, 2, False)):
    assert tiling.choose(*others) == tiling.candidates(*others)[0]
  use(monkeypatch, dataclasses.replace(row(), tiles={'tokens': 16}))
  with pytest.raises(ValueError, match=r"hold \['tokens'\], not \['columns'"):
    tiling.choose(20, 256, LAYOUT, 2, False)


def test_a_row_serves_no_weight_that_reads_other_arrays(monkeypatch: pytest.MonkeyPatch):
  # Offsets, or scales in 8 bits, are arrays of their own, which tiles hold and move, too.
  layouts = [kernels.layout_in(parse_scheme(f'int4:block=64{more}'), 1024) for more in ('', ',asym', ',dq')]
  found = [tuned.key(tiling.product(20, 256, layout, 2, False)) for layout in layouts]
  assert len(set(found)) == len(layouts)
  tried = tiling.candidates(20, 256, layouts[0], 2, False)
  use(monkeypatch, row(tiling.product(20, 256, layouts[0], 2, False), tried[1]))
  chosen = [tiling.choose(20, 256, layout, 2, False) for layout in layouts[:2]]
  assert chosen == [tried[1], tried[0]]


@pytest.mark.parametrize('form,size', [('nn', (20, 5, 7)), ('nt', (20, 7, 5)), ('tn', (7, 5, 20))])
def test_forms_of_a_product_of_integers_have_one_shape(form: str, size: tuple[int, int, int]):
  _, found = tuned.key(int8.product(form, *size, 4))
  assert found == ('int8_matmul', form, (32, 7, 5), 4)
  assert tuned.key(int8.product(form, *size, 4)) != tuned.key(int8.product(form, *size, 2))


def test_a_row_of_integers_serves_its_form_alone(monkeypatch: pytest.MonkeyPatch):
  size = (2048, 1024, 1024)
  for tried, choose in (
    (int8.candidates(*size, 4), int8.choose), (int8.candidates_gpu(*size), int8.choose_gpu)
  ):  # fmt: skip
    use(monkeypatch, row(int8.product('nt', *size, 4), tried[1]))
    assert choose('nt', *size, 4) == tried[1] != tried[0] == choose('nn', *size, 4)


def test_tiles_for_other_tokens_are_cut_or_passed_over(monkeypatch: pytest.MonkeyPatch):
  # In the gradient of a weight tokens are summed: cuts of 2,048 need not divide 1,500.
  product = int8.product('tn', 1024, 1024, 2048, 4)
  for measured, wanted in (
    (int8.Tiling(1024, 512, 2048), int8.Tiling(1024, 512, 1500)), (int8.Tiling(1024, 512, 512), None)
  ):  # fmt: skip
    use(monkeypatch, row(product, measured))
    assert int8.choose('tn', 1024, 1024, 2048, 4) == measured
    found = int8.choose('tn', 1024, 1024, 1500, 4)
    assert found == (wanted or int8.candidates(1024, 1024, 1500, 4)[0]) != measured
  sizes = Sizes(8, 16, 256, 256)
  use(monkeypatch, row(grouped.product(100, sizes, 2), grouped.Tiling(128)))
  assert grouped.choose(100, sizes, 2).rows == 112 and grouped.choose(128, sizes, 2).rows == 128


def test_what_is_written_is_read_and_what_is_damaged_is_said(tmp_path: Path):
  path = tmp_path / 'tuned.json'
  rows = [row(), row(int8.product('nt', 7, 17, 131, 4), int8.GpuTiling(16, 32, 32, 1, 4))]
  rows.append(row(grouped.product(7, Sizes(2, 8, 64, 64), 2), grouped.Tiling(16)))
  tuned.write({each.key: each for each in rows}, path)
  assert tuned.read(path) == {each.key: each for each in rows}
  damaged = ['{"version": 2', '{"version": 1, "rows": []}', '[]']
  for change in (
    lambda row: row.pop('tiles'), lambda row: row.pop('product'), lambda row: row['product'].pop('form'),
    lambda row: row['product'].update(form=[]), lambda row: row['product'].update(shape=[1, 2]),
    lambda row: row['product'].update(more=1),
  ):  # fmt: skip
    whole = json.loads(json.dumps({'version': 2, 'rows': json.loads(path.read_text())['rows']}))
    change(whole['rows'][0])
    damaged.append(json.dumps(whole))
  for text in damaged:
    (tmp_path / 'damaged.json').write_text(text)
    with pytest.raises(ValueError, match='is no table of tuned tiles'):
      tuned.read(tmp_path / 'damaged.json')


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('kernel,form,shape', [
  # More tokens than the kernels' least, or fewer for which they fill x up; and a sum for which a TPU's kernel
  # is given scales as floats.
  ('low_bit_matmul', 'nf4:block=64,dq', (9, 128, 256)),
  ('low_bit_matmul', 'nf4:block=64,dq', (256, 1024, 128)),
  ('low_bit_matmul_transposed', 'int4:block=64,asym', (9, 128, 256)),
  ('int8_matmul', 'nn', (9, 128, 256)), ('int8_matmul', 'nt', (9, 128, 256)),
  ('int8_matmul', 'tn', (9, 128, 256)), ('grouped_adapter', '3:16', (40, 128, 256)),
])  # fmt: skip
def test_the_fastest_becomes_a_row_that_the_kernel_takes(
  kernel: str, form: str, shape: tuple[int, int, int], platform: str, monkeypatch: pytest.MonkeyPatch
):
  case = Case(kernel, form, shape, platform)

  def second_is_fastest(programs, repeats, together=1):
    return {name: 1.0 - 0.5 * (index == 1) for index, name in enumerate(programs)}

  def spy(*arguments):
    chosen.append(choose(*arguments))
    return chosen[-1]

  chosen, choose = [], tuned.choose
  monkeypatch.setattr(tuned, 'choose', spy)
  monkeypatch.setattr(kernel_times, 'in_turn', second_is_fastest)
  monkeypatch.setattr(kernel_times, 'MOST_CALLS', 2)
  found = tune_kernels.tune(case, most=3, repeats=1, gain=0.1, interpret=True)
  new, others, rows = found.row, {row().key: row()}, {row().key: row()}
  assert new is not None and '0 do not' in found.told
  assert new.heuristic_microseconds == 5e5 == 2 * new.microseconds
  assert tune_kernels.put(found, rows) and rows == {new.key: new} | others
  # Where the kernel's own tiles are as good, a row of an earlier search goes, and no other.
  as_good = tune_kernels.tune(case, most=2, repeats=1, gain=0.6, interpret=True)
  assert as_good.row is None and tune_kernels.put(as_good, rows) and rows == others
  again = tune_kernels.tune(case, 2, 1, 0.1, {found.key}, interpret=True)
  assert again == ('has the row of a product above', None, None)
  assert not tune_kernels.put(as_good, rows)
  assert not chosen, 'tiles that are given were not taken'
  use(monkeypatch, new)
  jax.clear_caches()
  call, arguments = kernel_cases.program(case, interpret=True)
  jax.eval_shape(call, *arguments)
  assert [dataclasses.asdict(each) for each in chosen] == [new.tiles]


def test_tiles_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch):
  case, calls, cold = Case('int8_matmul', 'nn', (16, 128, 256), 'tpu'), [], kernel_times.cold

  def second_is_wrong(*arguments):
    program, is_wrong = cold(*arguments), bool(calls)
    calls.append(program)
    return lambda: [program()[0].at[0, 0].set(jnp.nan)] if is_wrong else program()

  monkeypatch.setattr(kernel_times, 'MOST_CALLS', 1)
  monkeypatch.setattr(kernel_times, 'cold', second_is_wrong)
  with pytest.raises(UserError, match='computes something else'):
    tune_kernels.tune(case, most=2, repeats=1, gain=0.1, interpret=True)


@pytest.mark.parametrize('flag,says', [
  ('--kernels=int8_matmul', 'nothing can be measured'),
  ('--kernels=quantize_tokens', "'quantize_tokens' has no tiles to tune; valid: grouped_adapter, "),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(flag: str, says: str):
  command = [sys.executable, '-m', 'experiments.tune_kernels', flag]
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
  assert ended.returncode == 2 and 'Traceback' not in ended.stderr
  assert says in ended.stderr


@pytest.mark.parametrize('case', [
  Case('low_bit_matmul', 'nf4:block=64', (40, 512, 300), 'gpu'),
  Case('int8_matmul', 'tn', (200, 64, 96), 'gpu'), Case('int8_matmul', 'tn', (256, 384, 130), 'tpu'),
  Case('grouped_adapter', '3:16', (40, 256, 96), 'gpu'),
])  # fmt: skip
def test_candidates_compute_the_same(case: Case):
  # `tune` compares them.
  found = tune_kernels.tune(case, most=6, repeats=1, gain=1.0, interpret=True)
  assert found.row is None and 'the fastest of 6 ' in found.told and found.told.endswith('0 do not compile')


def test_what_was_not_measured_leaves_its_row():
  case, rows = Case('low_bit_matmul', 'nf4:block=64 float16', (16, 128, 256), 'tpu'), {row().key: row()}
  found = tune_kernels.tune(case, most=2, repeats=1, gain=0.1, interpret=True)
  assert 'no products in float16' in found.told
  assert not tune_kernels.put(found, rows) and rows == {row().key: row()}
