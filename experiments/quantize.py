"""Turns a model into a quantized one, calibrated layer by layer.

  python -m experiments.quantize --config=configs/ptq_int8.py
  python -m experiments.quantize --config=configs/ptq_int4.py --config.method=awq --workdir=runs/awq
  python -m experiments.quantize --config=configs/ptq_int8.py --config.model.path=path/to/model

The working directory receives model/ (the quantized model: safetensors, its description, the tokenizer) and
record.json. `python -m experiments.verify` says whether it may replace the original.
"""

import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from experiments import cli
from qjax import build, files, quantize, records, trees
from qjax.io import native
from qjax.progress import Bar
from qjax.records import human_bytes

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Lab note to run, such as configs/ptq_int8.py.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where results go; runs/<name of the config> if not given.')


def main(argv: list[str]) -> int:
  del argv
  config = cli.config_of(_CONFIG)
  workdir = Path(_WORKDIR.value or f'runs/{config.get("name") or "unnamed"}')
  print(config, flush=True)
  run = build.quantization(config)
  native.refuse_existing(workdir / 'model')
  source, recipe = run.source, run.recipe

  start = time.monotonic()
  with Bar('layers', source.config.num_layers) as bar:
    variables = quantize.quantize(source.config, source.read, recipe, run.rows, bar.advance)
  origin = {
    'name': source.name,
    'fingerprint': source.fingerprint,
    'method': recipe.method,
    'calibration': {'path': run.fields.calibration.path, 'tokens': run.rows.num_tokens},
  }
  model = native.QuantizedModel(source.config, variables, recipe.activations, source.tokenizer, origin)
  nbytes = native.save(model, workdir / 'model')
  seconds = time.monotonic() - start

  projections = {
    path: leaf
    for path, leaf in trees.flatten(variables['params'], native.is_weight).items()
    if path.endswith('kernel')
  }
  count = sum(leaf.size for leaf in projections.values())
  results = {
    'bytes': nbytes,
    'bits_per_projection_weight': 8 * sum(trees.nbytes(leaf) for leaf in projections.values()) / count,
    'float32_bytes': 4 * source.config.num_parameters,
    'seconds': seconds,
    'peak_memory_bytes': records.peak_memory(),
  }
  what = {'config': build.json_ready(config.to_dict()), 'origin': origin} | records.environment()
  files.write_json(workdir / records.RECORD, what | {'results': results})
  print(
    f'{workdir / "model"}: {human_bytes(nbytes)} of {human_bytes(results["float32_bytes"])} in float32, '
    f'{results["bits_per_projection_weight"]:.3f} bits a projection weight, {seconds:.0f} s, '
    f'peak memory {human_bytes(results["peak_memory_bytes"]["host"])}'
  )
  return 0


if __name__ == '__main__':
  cli.run(main)
