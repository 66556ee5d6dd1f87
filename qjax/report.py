"""Tables, figures and pages of what was measured, drawn from records alone: nothing is measured here.

A record is plain values, as `json.load` gives them; a number that was not finite is None in it.
"""

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from qjax import files

Record = Mapping[str, Any]

# Okabe & Ito (2008), "Color Universal Design": told apart by colour-blind readers.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000', '#F0E442')
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
# KL below this is drawn at it: a logarithmic axis has no zero.
LEAST_KL = 1e-9
# What this exact was not quantized, and its line would press all others together.
EXACT_DB = 100.0
SHOWN_ANSWERS = 10
SHOWN_MATRICES = 20

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #bbb; padding: .25rem .6rem; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; }
"""


def _figure(width: float, height: float) -> tuple[Any, Any]:
  """A matplotlib figure that no window and no global state knows, and its axes."""
  figure = Figure(figsize=(width, height), layout='constrained')
  return figure, figure.subplots()


def _png(figure: Any) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=120, metadata={'Software': None})
  return buffer.getvalue()


def _finite(values: Iterable[Any]) -> list[float]:
  return [float(v) for v in values if v is not None and math.isfinite(v)]


# ---- tables ------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
  if value is None:
    return '–'
  if isinstance(value, bool):
    return 'yes' if value else 'no'
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def _markdown_cell(value: Any) -> str:
  """Text that stays inside its cell and is shown as it is, not read as Markdown or HTML."""
  text = html.escape(_text(value), quote=False)
  for character in '\\`*_|[]':
    text = text.replace(character, '\\' + character)
  return ' '.join(text.replace('\n', ' ⏎ ').split())


def markdown_table(rows: Iterable[Record], columns: Sequence[str] | Mapping[str, str]) -> str:
  """Rows as a Markdown table; what a row lacks, and None, is a dash.

  Args:
    rows: values by name.
    columns: the names in order, or names with headings.
  """
  headings = columns if isinstance(columns, Mapping) else {name: name for name in columns}
  lines = [[_markdown_cell(heading) for heading in headings.values()], ['---'] * len(headings)]
  lines += [[_markdown_cell(row.get(name)) for name in headings] for row in rows]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _html_table(rows: Iterable[Record], columns: Mapping[str, str]) -> str:
  head = ''.join(f'<th>{html.escape(heading)}</th>' for heading in columns.values())
  body = ''.join(
    '<tr>' + ''.join(f'<td>{html.escape(_text(row.get(name)))}</td>' for name in columns) + '</tr>\n'
    for row in rows
  )
  return f'<table>\n<tr>{head}</tr>\n{body}</table>\n'


# ---- figures -----------------------------------------------------------------------------------------------


def _short(path: str) -> str:
  """'layers/mlp/down/kernel' as 'mlp/down'."""
  return path.removeprefix('layers/').removesuffix('/kernel')


def _is_exact(row: Record) -> bool:
  return row['worst_sqnr'] is not None and row['worst_sqnr'] >= EXACT_DB


def _sqnr_figure(rows: Sequence[Record], what: str) -> Any:
  """A line over layers for each projection, with its worst channel below, thin and dashed; exact copies are
  left out.
  """
  figure, axes = _figure(9, 4.8)
  by_path: dict[str, list[Record]] = {}
  for row in rows:
    if row['layer'] is not None:
      by_path.setdefault(row['path'], []).append(row)
  shown = {path: found for path, found in by_path.items() if not all(_is_exact(row) for row in found)}
  for i, (path, found) in enumerate(shown.items()):
    style = {'color': COLOURS[i % len(COLOURS)], 'marker': MARKERS[i % len(MARKERS)]}
    layers = [row['layer'] for row in found]
    whole, worst = ([math.nan if row[n] is None else row[n] for row in found] for n in ('sqnr', 'worst_sqnr'))
    axes.plot(layers, whole, markersize=5, linewidth=1.8, label=_short(path), **style)
    axes.plot(layers, worst, markersize=3, linewidth=0.8, linestyle='--', alpha=0.8, **style)
  axes.set(
    xlabel='layer', ylabel='SQNR [dB]', title=f'{what}: solid the whole matrix, dashed its worst channel'
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
  if shown:
    figure.legend(loc='outside right upper', frameon=False)
  return figure


def _kl_figure(comparison: Record) -> Any:
  """Tokens over KL, both logarithmic, with mean and percentiles."""
  figure, axes = _figure(8, 4.5)
  values = [max(value, LEAST_KL) for value in _finite(comparison['token_kl'])]
  low = math.floor(math.log10(min(values, default=LEAST_KL)))
  high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
  axes.hist(values, bins=[10 ** (low + (high - low) * i / 60) for i in range(61)], color='#BBBBBB')
  names = (('kl_p50', 'median', ':'), ('kl_mean', 'mean', '-'), ('kl_p99', '99th percentile', '--'))
  for (name, label, line), colour in zip(names, (COLOURS[0], COLOURS[6], COLOURS[1]), strict=True):
    value = comparison[name]
    if value is not None and math.isfinite(value):
      axes.axvline(max(value, LEAST_KL), color=colour, linestyle=line, label=f'{label} {value:.2g}')
  axes.set(xscale='log', yscale='log', xlabel='KL(reference ‖ candidate) [nats]', ylabel='tokens')
  axes.set_title(f'{len(values)} tokens')
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes.legend()
  return figure


def _nll_figure(comparison: Record) -> Any:
  """The loss of each token in one model over that in the other."""
  figure, axes = _figure(6, 5.6)
  old, new = comparison['token_nll_reference'], comparison['token_nll_candidate']
  pairs = [(a, b) for a, b in zip(old, new, strict=True) if len(_finite((a, b))) == 2]
  top = 1.03 * max((value for pair in pairs for value in pair), default=0.0) or 1.0
  axes.scatter(
    [a for a, _ in pairs],
    [b for _, b in pairs],
    s=8,
    alpha=0.35,
    color=COLOURS[0],
    linewidths=0,
    rasterized=True,
  )
  axes.plot([0, top], [0, top], color=COLOURS[6], linewidth=1, label='equal')
  axes.set(xlim=(0, top), ylim=(0, top), aspect='equal')
  axes.set(xlabel='reference: loss of a token [nats]', ylabel='candidate: loss of the same token [nats]')
  axes.set_title(f'{len(pairs)} tokens; above the line the candidate is worse')
  axes.grid(alpha=0.3)
  axes.legend(loc='upper left')
  return figure


def sensitivity_heatmap(record: Record, path: Path) -> None:
  """Writes a PNG: KL by part and scheme, on a logarithmic colour scale, each cell with its number.

  Args:
    record: 'paths', 'schemes' and 'kl' [paths][schemes] in nats a token.
    path: of the PNG.
  """
  names = [_short(p) for p in record['paths']]
  _heatmap(names, record['schemes'], record['kl'], 'this part alone in this scheme', path)


def layers_heatmap(record: Record, scheme: str, path: Path) -> None:
  """Writes a PNG: KL in one scheme by layer and projection, of a record measured layer by layer.

  Args:
    record: as for `sensitivity_heatmap`, with paths such as 'layers/mlp/down/kernel[3]'.
    scheme: among those of the record.
    path: of the PNG.
  """
  column = record['schemes'].index(scheme)
  grid: dict[str, dict[str, Any]] = {}
  for item, row in zip(record['paths'], record['kl'], strict=True):
    name, _, layer = item.removesuffix(']').partition('[')
    grid.setdefault(layer, {})[_short(name)] = row[column]
  names = list(next(iter(grid.values())))
  values = [[row[name] for name in names] for row in grid.values()]
  _heatmap([f'layer {layer}' for layer in grid], names, values, f'this matrix alone in {scheme}', path)


def _heatmap(
  names: Sequence[str], columns: Sequence[str], kl: Sequence[Sequence[Any]], title: str, path: Path
) -> None:
  values = [[LEAST_KL if v is None else max(v, LEAST_KL) for v in row] for row in kl]
  figure, axes = _figure(3.2 + 1.2 * len(columns), 1.6 + 0.32 * len(names))
  flat = [value for row in values for value in row]
  low, high = min(flat), max(flat)
  norm = LogNorm(low, high if high > low else 10 * low)
  image = axes.imshow(values, norm=norm, cmap='cividis', aspect='auto')
  for i, row in enumerate(values):
    for j, value in enumerate(row):
      shade = 'black' if norm(value) > 0.5 else 'white'
      label = _text(None) if kl[i][j] is None else f'{kl[i][j]:.1e}'
      axes.text(j, i, label, ha='center', va='center', color=shade, fontsize=8)
  axes.set_xticks(range(len(columns)), columns, rotation=30, ha='right')
  axes.set_yticks(range(len(names)), names)
  axes.set_title(title)
  figure.colorbar(image, label='mean KL [nats a token]')
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(_png(figure))


# ---- verification ------------------------------------------------------------------------------------------

CHECKS = {'name': 'check', 'value': 'worst value', 'limit': 'limit', 'status': 'result', 'where': 'where'}
MATRICES = {
  'path': 'projection',
  'layer': 'layer',
  'sqnr': 'SQNR [dB]',
  'expected': 'its format gives [dB]',
  'worst_channel': 'worst channel',
  'worst_sqnr': 'its SQNR [dB]',
  'worst_drop': 'worse than its neighbours by [dB]',
}
PARTED = {
  'prompt': 'prompt',
  'position': 'part at character',
  'reference': 'reference',
  'candidate': 'candidate',
}
NUMBERS = {
  'tokens': 'tokens',
  'documents': 'documents',
  'nll_reference': 'NLL of the reference [nats a token]',
  'nll_candidate': 'NLL of the candidate [nats a token]',
  'nll_difference': 'difference of NLL [nats a token]',
  'nll_error': 'its standard error, over documents',
  'nll_interval': 'its 95 % interval',
  'perplexity_reference': 'perplexity of the reference',
  'perplexity_candidate': 'perplexity of the candidate',
  'kl_mean': 'KL, mean [nats a token]',
  'kl_p50': 'KL, median',
  'kl_p99': 'KL, 99th percentile',
  'kl_max': 'KL, largest',
  'top1': 'share of tokens with the same most likely word',
}


def _numbers(comparison: Record) -> list[dict[str, Any]]:
  rows = []
  for name, label in NUMBERS.items():
    value = comparison[name]
    if name == 'nll_interval':
      value = ' to '.join(_text(None if end is None else float(end)) for end in value)
    rows.append({'what': label, 'value': value})
  return rows


def _worst_first(rows: Sequence[Record]) -> list[Record]:
  """The matrices with the worst channels, those that are not finite first."""
  return sorted(rows, key=lambda row: -math.inf if row['worst_sqnr'] is None else row['worst_sqnr'])


def _sections(record: Record) -> list[tuple[str, str, list[Record], Mapping[str, str]]]:
  """(heading, remark, rows, columns) of every table of a verification."""
  result = record['verdict']
  sections: list[tuple[str, str, list[Record], Mapping[str, str]]] = []
  about: list[Record] = [
    {'what': name, 'value': value}
    for name, value in record.items()
    if isinstance(value, str | int | float) and not isinstance(value, bool)
  ]
  if about:
    sections.append(('What was compared', '', about, {'what': '', 'value': ''}))
  sections.append(('Checks', '', list(result['checks']), CHECKS))
  if result['failures']:
    rows: list[Record] = [{'failure': line} for line in result['failures']]
    sections.append(('Failures', '', rows, {'failure': 'failure'}))
  if record.get('comparison'):
    sections.append(('Tokens', '', list(_numbers(record['comparison'])), {'what': '', 'value': ''}))
  for name, heading in (('weights', 'Weights'), ('outputs', 'Outputs')):
    found = _worst_first(record.get(name) or [])
    if found:
      remark = f'{min(len(found), SHOWN_MATRICES)} of {len(found)} matrices, the worst channels first.'
      sections.append((heading, remark, found[:SHOWN_MATRICES], MATRICES))
  if record.get('answers') and record['answers']['count']:
    found = record['answers']
    remark = f'{_text(found["exact"])} of {found["count"]} answers are the same, character by character.'
    parted = list(found['disagreements'])[:SHOWN_ANSWERS]
    sections.append(('Answers', remark, parted, PARTED))
  if record.get('survival'):
    survived: list[Record] = []
    for path, share in record['survival'].items():
      shares = share if isinstance(share, list) else [share]
      known = _finite(shares)
      survived.append({'path': path, 'least': min(known) if len(known) == len(shares) else None})
    columns = {'path': 'projection', 'least': 'least share in any layer'}
    sections.append(('Adapter: what survived', '', survived, columns))
  return sections


def _headline(record: Record) -> str:
  passed = record['verdict']['passed']
  return (
    'The candidate may replace the reference' if passed else 'The candidate may NOT replace the reference'
  )


def verification_markdown(record: Record) -> str:
  """The verification as Markdown: verdict, checks, failures, then the numbers behind them."""
  parts = [f'# {_headline(record)}\n']
  for heading, remark, rows, columns in _sections(record):
    parts.append('\n'.join(part for part in (f'## {heading}\n', remark and f'{remark}\n') if part))
    if rows:
      parts.append(markdown_table(rows, columns))
  return '\n'.join(parts)


def _figures(record: Record) -> dict[str, tuple[str, bytes]]:
  """PNGs by file name, each with its caption."""
  found: dict[str, tuple[str, bytes]] = {}
  for name, what in (('weights', 'Weights'), ('outputs', 'Outputs')):
    rows = record.get(name) or []
    if any(row['layer'] is not None for row in rows):
      found[f'{name}.png'] = (
        f'{what}: signal to quantization noise by layer',
        _png(_sqnr_figure(rows, what)),
      )
  if record.get('comparison'):
    comparison = record['comparison']
    found['kl.png'] = ('How far the predictions part, token by token', _png(_kl_figure(comparison)))
    found['nll.png'] = ('The loss of each token in both models', _png(_nll_figure(comparison)))
  return found


def write_verification(record: Record, directory: Path) -> None:
  """Writes report.json (the record), report.md with figures beside it, and report.html, which holds all."""
  record = files.plain(record)
  figures = _figures(record)
  markdown = verification_markdown(record)
  page = [f'<h1>{_headline(record)}</h1>\n']
  for heading, remark, rows, columns in _sections(record):
    page.append(f'<h2>{html.escape(heading)}</h2>\n')
    page.append(f'<p>{html.escape(remark)}</p>\n' if remark else '')
    page.append(_html_table(rows, columns) if rows else '')
  if figures:
    markdown += '\n## Figures\n'
    page.append('<h2>Figures</h2>\n')
  directory.mkdir(parents=True, exist_ok=True)
  for name, (caption, png) in figures.items():
    (directory / name).write_bytes(png)
    markdown += f'\n![{caption}]({name})\n'
    data = base64.b64encode(png).decode()
    page.append(f'<p><img alt="{caption}" src="data:image/png;base64,{data}"></p>\n')
  files.write_json(directory / 'report.json', record)
  (directory / 'report.md').write_text(markdown, encoding='utf-8')
  (directory / 'report.html').write_text(
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    f'<title>{_headline(record)}</title>\n<style>{STYLE}</style>\n{"".join(page)}</html>\n',
    encoding='utf-8',
  )


def plan_picture(plans: Sequence[Record]) -> bytes:
  """A PNG of plans as `experiments.plan --json` prints them: what takes the room of each chip, as a stack.

  A line marks what the chip has.
  """
  figure, axes = _figure(2.5 + 1.3 * max(len(plans), 3), 4.8)
  bottoms = [0.0] * len(plans)
  parts = list(plans[0]['breakdown'])
  for part, colour in zip(parts, COLOURS, strict=False):
    sizes = [plan['breakdown'][part] for plan in plans]
    axes.bar(range(len(plans)), sizes, 0.6, bottoms, color=colour, label=part)
    bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
  for i, (plan, top) in enumerate(zip(plans, bottoms, strict=True)):
    label = 'there is' if i == 0 else None
    axes.hlines(plan['capacity_gib'], i - 0.4, i + 0.4, 'black', linestyles='dashed', label=label)
    axes.annotate(f'{plan["peak_gib"]:.1f}', (i, top), ha='center', va='bottom')
  names = [
    f'{plan["config"]}\n{plan["chip"]}\n{"fits" if plan["fits"] else "does not fit"}' for plan in plans
  ]
  axes.set_xticks(range(len(plans)), names)
  axes.set(ylabel='GiB of device memory', title=f'One training step, by the {plans[0]["source"]}')
  figure.legend(loc='outside right upper', frameon=False)
  return _png(figure)
