"""Reports say what the record says, keep strangers' text as text, and draw what can be read."""

import html.parser
import json
import math

import matplotlib.image
import numpy as np
import pytest

from qjax import report
from qjax.quant import verdict, verify
from qjax.quant.verdict import Thresholds, judge
from qjax.quant.verify import MatrixError

ATTACK = '<script>alert(1)</script> & "x" | `y`\n# heading'


def _matrices(layers=6, level=40.0):
  random = np.random.default_rng(0)
  rows = []
  for path in ('attn/q', 'attn/o', 'mlp/gate', 'mlp/up', 'mlp/down'):
    for layer in range(layers):
      channels = (level + random.normal(0, 0.8, 32)).astype(np.float32)
      if (path, layer) == ('mlp/down', 3):
        channels[17] = 6.0
      drop = np.float32(np.median(channels)) - channels
      rows.append(
        MatrixError(f'layers/{path}/kernel', layer, level, level, channels, drop, drop / np.float32(0.8))
      )
  return rows


def _record(tokens=4000, broken=False):
  random = np.random.default_rng(1)
  old = random.gamma(1.2, 2.0, tokens).astype(np.float32)
  new = np.abs(old + random.normal(0.005, 0.15, tokens)).astype(np.float32)
  kl = np.exp(random.normal(-7, 1.8, tokens)).astype(np.float32)
  if broken:
    kl[3] = new[3] = np.nan
  comparison = verify.Comparison(
    tokens=tokens,
    documents=50,
    nll_reference=float(old.mean()),
    nll_candidate=float(new.mean()),
    nll_difference=float((new - old).mean()),
    nll_error=0.001,
    nll_interval=(0.003, math.inf if broken else 0.007),
    kl_mean=float(kl.mean()),
    kl_p50=float(np.median(kl)),
    kl_p99=float(np.quantile(kl, 0.99)),
    kl_max=float(kl.max()),
    top1=0.981,
    token_kl=kl,
    token_nll_reference=old,
    token_nll_candidate=new,
  )
  weights, outputs = _matrices(), _matrices(level=30.0)
  answers = verify.answers(['yes', ATTACK], ['yes', 'no'], ['really?', ATTACK])
  result = judge(Thresholds(), comparison, weights, outputs, answers)
  return verdict.record(
    result, comparison, weights, outputs, answers, {'mlp/down': np.array([0.9, 0.5])}, model=f'tiny {ATTACK}'
  )


class _Page(html.parser.HTMLParser):
  def __init__(self, text):
    super().__init__()
    self.tags, self.texts, self.sources = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.sources += [value for name, value in attrs if name in ('src', 'href')]

  def handle_data(self, data):
    self.texts.append(data)


def test_markdown_table_keeps_cells_apart():
  table = report.markdown_table(
    [{'a': 'x|y\nz', 'b': 1.23456789}, {'a': '<b>*_', 'c': 5}, {'b': True}], {'a': 'A', 'b': 'B [dB]'}
  )
  assert table.splitlines() == [
    '| A | B \\[dB\\] |',
    '| --- | --- |',
    '| x\\|y ⏎ z | 1.235 |',
    '| &lt;b&gt;\\*\\_ | – |',
    '| – | yes |',
  ]
  assert report.markdown_table([{'a': 1}], ['a']) == '| a |\n| --- |\n| 1 |\n'


def test_report_says_what_the_record_says(tmp_path):
  record = _record()
  assert not record['verdict']['passed']
  report.write_verification(record, tmp_path / 'report')
  files = {path.name for path in (tmp_path / 'report').iterdir()}
  images = {'weights.png', 'outputs.png', 'kl.png', 'nll.png'}
  assert files == {'report.json', 'report.md', 'report.html'} | images
  assert json.loads((tmp_path / 'report/report.json').read_text()) == record
  markdown = (tmp_path / 'report/report.md').read_text()
  assert markdown.startswith('# The candidate may NOT replace the reference\n')
  assert markdown.startswith(report.verification_markdown(record))
  for name in images:
    assert f']({name})' in markdown
  page = _Page((tmp_path / 'report/report.html').read_text())
  text = '\n'.join(page.texts)
  for line in record['verdict']['failures']:
    assert line in text
  assert any('layers/mlp/down/kernel layer 3 channel 17' in line for line in record['verdict']['failures'])
  for check in record['verdict']['checks']:
    assert check['name'] in page.texts
  assert 'not measured' in page.texts  # survival was not given to the verdict
  for number in (4000, 50, 0.981):
    assert f'{number}' in page.texts
  assert '0.5' in page.texts  # the least surviving share
  # Everything is inside, and the damaged matrix comes first.
  assert len(page.sources) == 4 and all(
    source.startswith('data:image/png;base64,') for source in page.sources
  )
  rows = [row for row in markdown.splitlines() if row.startswith('| layers/')]
  assert rows[0].startswith('| layers/mlp/down/kernel | 3 |')


def test_text_of_strangers_stays_text(tmp_path):
  report.write_verification(_record(), tmp_path)
  page = _Page((tmp_path / 'report.html').read_text())
  assert set(page.tags) <= {
    'html',
    'meta',
    'title',
    'style',
    'h1',
    'h2',
    'p',
    'img',
    'table',
    'tr',
    'th',
    'td',
  }
  assert ATTACK in page.texts
  markdown = (tmp_path / 'report.md').read_text()
  assert '<script' not in markdown
  assert not any(line.startswith('# heading') for line in markdown.splitlines())
  assert 'alert(1)' in markdown


def test_numbers_that_are_none_are_dashes(tmp_path):
  record = _record(broken=True)
  assert math.isnan(record['comparison']['kl_mean'])
  report.write_verification(record, tmp_path)
  assert json.loads((tmp_path / 'report.json').read_text())['comparison']['kl_mean'] is None
  markdown = (tmp_path / 'report.md').read_text()
  assert '| KL, mean \\[nats a token\\] | – |' in markdown
  assert '0.003 to –' in markdown


def test_a_report_without_evidence_still_says_so(tmp_path):
  record = verdict.record(judge(Thresholds()))
  report.write_verification(record, tmp_path)
  assert 'required, but not measured' in (tmp_path / 'report.md').read_text()
  assert not list(tmp_path.glob('*.png'))
  kept = {'mlp/down': np.ones(2)}
  good = verdict.record(judge(Thresholds(), survival=kept, required=()), survival=kept)
  assert report.verification_markdown(good).startswith('# The candidate may replace the reference\n')


def test_exact_copies_do_not_press_the_lines_together():
  norms = [{'path': 'layers/norm/scale', 'layer': i, 'sqnr': 100.0, 'worst_sqnr': 100.0} for i in range(6)]
  broken = {'path': 'layers/bad/kernel', 'layer': 0, 'sqnr': None, 'worst_sqnr': None}
  rows = [error.as_dict() for error in _matrices()]
  axes = report._sqnr_figure([*norms, *rows, broken], 'Weights').axes[0]
  labels = [line.get_label() for line in axes.get_lines() if not line.get_label().startswith('_')]
  assert labels == ['attn/q', 'attn/o', 'mlp/gate', 'mlp/up', 'mlp/down', 'bad']
  assert axes.get_ylim()[1] < 60
  dashed = axes.get_lines()[2 * labels.index('mlp/down') + 1]
  assert dashed.get_ydata()[3] == 6.0


def test_equal_models_can_be_drawn(tmp_path):
  """All KL zero, all losses equal: logarithmic axes have nothing to show and must not fail."""
  record = _record(10)
  for name in ('token_kl', 'token_nll_reference', 'token_nll_candidate'):
    record['comparison'][name] = [0.0] * 10
  record['comparison'] |= {'kl_mean': 0.0, 'kl_p50': 0.0, 'kl_p99': 0.0}
  report.write_verification(record, tmp_path)
  assert (tmp_path / 'kl.png').stat().st_size > 1000


@pytest.mark.parametrize('value', [None, 0.0, -1e-6])
def test_sensitivity_heatmap(tmp_path, value):
  record = {
    'paths': [f'layers/{name}/kernel' for name in ('attn/q', 'attn/k', 'mlp/down')],
    'schemes': ['nf4:block=64,dq', 'int4:block=32,asym', 'int8:axis=channel'],
    'kl': [[0.03, 0.02, 1e-4], [0.01, 0.008, value], [0.2, 0.1, 1e-3]],
  }
  report.sensitivity_heatmap(record, tmp_path / 'deep' / 'heat.png')
  image = matplotlib.image.imread(tmp_path / 'deep' / 'heat.png')
  assert image.shape[0] > 200 and image.shape[1] > 400
  assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 20
