"""Ranges of the inputs of every projection, and what each way of finding them does to the same inputs.

  python -m experiments.calibrate
  python -m experiments.calibrate --observers=absmax,percentile,mse --keep=mse --bits=4

A float32 pass over calibration text, layer by layer. Each observer's range is judged on the inputs that it
was made from: the share of values cut off, the signal to quantization noise, the KL of the histograms. The
table is printed; the working directory receives scores.json (every projection and layer) and
calibration.json, the ranges of the observer named by --keep, which `experiments.quantize` takes as
--config.calibration.ranges.
"""

import collections
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import cli
from qjax import files, records, report
from qjax.data import plain
from qjax.errors import UserError
from qjax.io.source import load_source
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar
from qjax.quant import calibrate, calibration
from qjax.quant.calibrate import OBSERVERS, Range
from qjax.walk import PATHS, SHARED_INPUTS, Walk

_MODEL = flags.DEFINE_string('model', 'embedded', 'A .gguf file, a Hugging Face directory, or embedded.')
_TEXT = flags.DEFINE_string('text', plain.STATE_OF_THE_UNION, 'Calibration text: .txt or .jsonl.')
_MAX_TOKENS = flags.DEFINE_integer('max_tokens', 2048, 'Tokens of calibration text.', lower_bound=256)
_OBSERVERS = flags.DEFINE_list('observers', list(OBSERVERS), 'Observers to compare.')
_KEEP = flags.DEFINE_string('keep', 'mse', 'The observer whose ranges are saved.')
_BITS = flags.DEFINE_integer('bits', 8, 'Of the integers.', lower_bound=2, upper_bound=8)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/calibrate', 'Where results go.')

SEQ_LEN, BATCH = 256, 4
COLUMNS = {
  'observer': 'observer',
  'sqnr_db': 'SQNR [dB], mean',
  'worst_db': 'worst',
  'where': 'where',
  'clipped': 'cut off',
  'kl': 'KL [nats], mean',
}


def main(argv: list[str]) -> int:
  del argv
  if _KEEP.value not in _OBSERVERS.value:
    raise UserError(f'--keep={_KEEP.value} is not among --observers={",".join(_OBSERVERS.value)}')
  observers = {name: calibrate.observer(name) for name in _OBSERVERS.value}
  source = load_source(_MODEL.value)
  rows = plain.rows(
    plain.read(_TEXT.value, 'calibration'), source.require_tokenizer(), SEQ_LEN, _MAX_TOKENS.value
  )
  walk = Walk(source.config, Numerics(policy()), source.read, list(rows.batches(BATCH)))
  scores: list[dict[str, Any]] = []
  kept: dict[str, list[Range]] = collections.defaultdict(list)
  with Bar('inputs', source.config.num_layers * len(SHARED_INPUTS)) as bar:
    for layer in walk.layers():
      variables = {'params': layer.params}
      seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = collections.defaultdict(list)
      for inputs, valid in walk.inputs(variables):
        for name, x in inputs.items():
          seen[name].append((np.asarray(x), np.asarray(valid)))
      for group in SHARED_INPUTS:
        where = {'path': f'layers/{PATHS[group[0]]}', 'layer': layer.index}
        found = calibration.score(observers, seen[group[0]], _BITS.value)
        scores += [where | {name: value for name, value in row.items() if name != 'range'} for row in found]
        best = next(row['range'] for row in found if row['observer'] == _KEEP.value)
        for name in group:
          kept[f'layers/{PATHS[name]}'].append(best)
        bar.advance(layer.index * len(SHARED_INPUTS) + SHARED_INPUTS.index(group) + 1)
      walk.apply(variables)
  workdir = Path(_WORKDIR.value)
  about = {'model': source.name, 'text': _TEXT.value, 'tokens': rows.num_tokens, 'bits': _BITS.value}
  files.write_json(workdir / 'scores.json', about | records.environment() | {'scores': scores})
  calibration.Calibration(
    ranges={path: _stacked(each) for path, each in kept.items()},
    observer=_KEEP.value,
    options={},
    bits=_BITS.value,
    tokens=rows.num_tokens,
    fingerprint=source.fingerprint,
  ).save(workdir / 'calibration.json')
  print(f'one range a tensor, {_BITS.value} bits, {rows.num_tokens:,} tokens of {_TEXT.value}\n')
  print(report.markdown_table([_summary(name, scores) for name in observers], COLUMNS))
  print(f'ranges of {_KEEP.value}: {workdir / "calibration.json"}')
  return 0


def _stacked(ranges: list[Range]) -> Range:
  return Range(np.stack([found.low for found in ranges]), np.stack([found.high for found in ranges]))


def _summary(name: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
  own = [row for row in scores if row['observer'] == name and math.isfinite(row['sqnr_db'])]
  worst = min(own, key=lambda row: row['sqnr_db'])
  return {
    'observer': name,
    'sqnr_db': round(statistics.mean(row['sqnr_db'] for row in own), 2),
    'worst_db': round(worst['sqnr_db'], 2),
    'where': f'{worst["path"]} layer {worst["layer"]}',
    'clipped': f'{statistics.mean(row["clipped"] for row in own):.1e}',
    'kl': round(statistics.mean(row['kl'] for row in own), 4),
  }


if __name__ == '__main__':
  cli.run(main)
