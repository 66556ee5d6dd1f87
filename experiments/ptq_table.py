"""What each way of quantizing a model costs, on one text, in one table.

  python -m experiments.ptq_table
  python -m experiments.ptq_table --only=fp32,bf16,int8-channel --max_tokens=8192

Every row is a recipe: the model is quantized, its loss on held-out text is compared token by token with that
of the float32 model, and the row is written to the working directory. The same command goes on where it
stopped. Products compute in bfloat16, but for the rows fp32 and fp16.
"""

import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cli
from qjax import files, quantize, records, report, storage, trees
from qjax.data import plain
from qjax.errors import UserError, nearest
from qjax.io import native
from qjax.io.source import Source, load_source
from qjax.models import transformer
from qjax.models.attention import AttentionKernel
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar
from qjax.quant.verify import clustered_error

_MODEL = flags.DEFINE_string('model', 'embedded', 'A .gguf file, a Hugging Face directory, or embedded.')
_TEXT = flags.DEFINE_string('text', plain.STATE_OF_THE_UNION, 'Held-out text: .txt or .jsonl.')
_MAX_TOKENS = flags.DEFINE_integer('max_tokens', 65536, 'Held-out tokens at most.', lower_bound=256)
_CALIBRATION = flags.DEFINE_integer('calibration_tokens', 16384, 'Calibration tokens.', lower_bound=256)
_ONLY = flags.DEFINE_list('only', [], 'Rows to measure; all if not given.')
_SENSITIVITY = flags.DEFINE_string(
  'sensitivity', None, 'Record of experiments.sensitivity, whose choice is the row mixed.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/ptq_table', 'Where rows and the table go.')

SEQ_LEN, BATCH = 256, 4
TOKEN, TENSOR, STATIC = 'int8:axis=token', 'int8:axis=tensor', 'int8:axis=tensor,static'


class Row(NamedTuple):
  """How a row's model is quantized and computes."""

  method: str
  weights: str
  activations: str = ''
  observer: str = 'absmax'
  compute: str = 'bfloat16'


ROWS: dict[str, Row] = {
  'fp32': Row('rtn', 'float32', compute='float32'),
  'bf16': Row('rtn', 'bfloat16'),
  'fp16': Row('rtn', 'float16', compute='float16'),
  'int8-tensor': Row('rtn', 'int8:axis=tensor'),
  'int8-channel': Row('rtn', 'int8:axis=channel'),
  'w8a8-token': Row('rtn', 'int8:axis=channel', TOKEN),
  'w8a8-tensor': Row('rtn', 'int8:axis=channel', TENSOR),
  'w8a8-static': Row('rtn', 'int8:axis=channel', STATIC),
  'w8a8-static-mse': Row('rtn', 'int8:axis=channel', STATIC, observer='mse'),
  'w8a8-tensor-decomposed': Row('decompose:share=0.01', 'int8:axis=channel', TENSOR),
  'w8a8-token-smooth': Row('smoothquant+rtn', 'int8:axis=channel', TOKEN),
  'w8a8-tensor-smooth': Row('smoothquant+rtn', 'int8:axis=channel', TENSOR),
  'w8a8-static-smooth': Row('smoothquant+rtn', 'int8:axis=channel', STATIC),
  'nf4': Row('rtn', 'nf4:block=64'),
  'int4': Row('rtn', 'int4:block=64'),
  'fp4': Row('rtn', 'fp4:block=64'),
  'mxfp4': Row('rtn', 'fp4:block=32,scale=e8m0'),
  'nvfp4': Row('rtn', 'fp4:block=16,scale=e4m3'),
  'fp8': Row('rtn', 'fp8_e4m3:axis=channel'),
  'nf3': Row('rtn', 'nf3:block=64'),
  'nf2': Row('rtn', 'nf2:block=64'),
  'int4-channel': Row('rtn', 'int4:axis=channel'),
  'int4-channel-clip-mse': Row('rtn:clip=weight_mse', 'int4:axis=channel'),
  'int4-channel-clip-act': Row('rtn:clip=activation_weighted', 'int4:axis=channel'),
  'int4-channel-clip-out': Row('rtn:clip=layer_output', 'int4:axis=channel'),
  'int4-awq': Row('awq+rtn', 'int4:block=64'),
  'int4-gptq': Row('gptq:act_order', 'int4:block=64'),
  'int4-loftq': Row('loftq:rank=16', 'int4:block=64'),
  'int4-asym': Row('rtn', 'int4:block=64,asym'),
  'int4-hqq': Row('hqq', 'int4:block=64,asym'),
  'w4a8': Row('rtn', 'int4:axis=channel', TOKEN),
}
MIXED, REFERENCE = 'mixed', 'fp32'
COLUMNS = {
  'row': 'row',
  'method': 'method',
  'weights': 'weights',
  'activations': 'activations',
  'bits': 'bits a weight',
  'difference': 'NLL difference [nats]',
  'error': 'standard error',
  'top1': 'same word',
  'seconds': 'quantizing [s]',
}


def main(argv: list[str]) -> int:
  del argv
  recipes = dict(ROWS)
  source = load_source(_MODEL.value)
  rules_of: dict[str, tuple[tuple[str, str], ...]] = {}
  if _SENSITIVITY.value is not None:
    default, rules_of[MIXED] = _allocation(Path(_SENSITIVITY.value))
    recipes[MIXED] = Row('rtn', default)
  wanted = _ONLY.value or list(recipes)
  for name in wanted:
    if name not in recipes:
      raise UserError(f'--only: there is no row {name!r}{nearest(name, recipes)}')
  tokenizer = source.require_tokenizer()
  held_out = plain.rows(plain.read(_TEXT.value, 'held_out'), tokenizer, SEQ_LEN, _MAX_TOKENS.value)
  calibration = plain.rows(
    plain.read(plain.STATE_OF_THE_UNION, 'calibration'), tokenizer, SEQ_LEN, _CALIBRATION.value
  )
  workdir = Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  settings = {
    'model': source.fingerprint,
    'text': _TEXT.value,
    'tokens': held_out.num_tokens,
    'calibration_tokens': calibration.num_tokens,
  }
  reference = _reference(workdir, settings, source, held_out)
  done = _rows_of(workdir, settings)
  for name in wanted:
    if name not in done:
      done[name] = _row(name, recipes[name], rules_of.get(name, ()), source, calibration, held_out, reference)
      record = {'settings': settings, 'rows': done, 'environment': records.environment()}
      files.write_json(workdir / 'table.json', record)
  table = report.markdown_table([done[name] for name in recipes if name in done], COLUMNS)
  (workdir / 'table.md').write_text(table, encoding='utf-8')
  mean = reference['nll'].mean()
  print(f'{held_out.num_tokens:,} tokens of {_TEXT.value}, float32 nll {mean:.4f}\n\n{table}')
  return 0


def _allocation(record: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
  """The default scheme and the rules that experiments.sensitivity chose beside its record.

  Raises:
    UserError: there is no such choice, or it is damaged.
  """
  path = record.with_name('rules.json')
  try:
    chosen = json.loads(path.read_text(encoding='utf-8'))
    return chosen['projections'], tuple((pattern, scheme) for pattern, scheme in chosen['rules'])
  except FileNotFoundError:
    raise UserError(f'there is no {path}; run experiments.sensitivity first') from None
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(f'{path} is damaged ({error}); run experiments.sensitivity again') from None


def _reference(
  workdir: Path, settings: dict[str, Any], source: Source, held_out: plain.Rows
) -> dict[str, np.ndarray]:
  """NLL and most likely word of the float32 model, one of each a token, [tokens]."""
  file = workdir / 'reference.npz'
  about = json.dumps(settings, sort_keys=True)
  if file.is_file():
    with np.load(file) as saved:
      if str(saved['about']) == about:
        return {'nll': saved['nll'], 'word': saved['word']}
    raise UserError(f'{workdir} holds rows of other settings; give another --workdir')
  recipe = quantize.Recipe('rtn', storage.rules('float32', 'float32'))
  variables = quantize.quantize(source.config, source.read, recipe, None)
  nll, word = _measure(source, variables, Numerics(policy()), held_out, 'fp32, the reference')
  np.savez(file, nll=nll, word=word, about=about)
  return {'nll': nll, 'word': word}


def _rows_of(workdir: Path, settings: dict[str, Any]) -> dict[str, Any]:
  file = workdir / 'table.json'
  if not file.is_file():
    return {}
  record = json.loads(file.read_text(encoding='utf-8'))
  return record['rows'] if record['settings'] == settings else {}


def _measure(
  source: Source, variables: Any, numerics: Numerics, held_out: plain.Rows, name: str
) -> tuple[np.ndarray, np.ndarray]:
  """NLL and most likely word of every token, [tokens] each."""
  model = Transformer(source.config, numerics, 'none', AttentionKernel('xla'))

  @jax.jit
  def step(variables: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    logits = transformer.logits(model, variables, batch['tokens'], batch['segments'], batch['positions'])
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, batch['targets'][..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - own, jnp.argmax(logits, axis=-1)

  nlls, words = [], []
  with Bar(name, math.ceil(len(held_out) / BATCH)) as bar:
    for index, batch in enumerate(held_out.batches(BATCH)):
      nll, word = jax.device_get(step(variables, batch))
      counted = batch['weights'] > 0
      nlls.append(nll[counted])
      words.append(word[counted])
      bar.advance(index + 1)
  return np.concatenate(nlls), np.concatenate(words)


def _row(
  name: str,
  recipe: Row,
  first: tuple[tuple[str, str], ...],
  source: Source,
  calibration: plain.Rows,
  held_out: plain.Rows,
  reference: dict[str, np.ndarray],
) -> dict[str, Any]:
  acts = (('.*', recipe.activations),) if recipe.activations else ()
  embeddings = recipe.compute if recipe.weights in ('float32', 'bfloat16', 'float16') else 'bfloat16'
  start = time.monotonic()
  stored = storage.rules(recipe.weights, embeddings, first)
  full = quantize.Recipe(recipe.method, stored, acts, recipe.observer)
  with Bar(f'{name}: quantizing', source.config.num_layers) as bar:
    variables = quantize.quantize(source.config, source.read, full, calibration, bar.advance)
  seconds = time.monotonic() - start
  if name == REFERENCE:
    nll, word = reference['nll'], reference['word']
  else:
    numerics = Numerics(policy(compute=recipe.compute), activations=acts)
    nll, word = _measure(source, variables, numerics, held_out, name)
  weights = trees.flatten(variables['params'], native.is_weight)
  kernels = [leaf for path, leaf in weights.items() if path.endswith('kernel')]
  owners = np.repeat(np.arange(len(held_out)), held_out.weights.sum(axis=1).astype(int))
  gap = (nll - reference['nll']).astype(np.float64)
  sums, counts = np.bincount(owners, gap), np.bincount(owners)
  row = {
    'row': name,
    'method': recipe.method,
    'weights': MIXED if name == MIXED else recipe.weights,
    'activations': recipe.activations or recipe.compute,
    'bits': round(8 * sum(map(trees.nbytes, kernels)) / sum(leaf.size for leaf in kernels), 3),
    'difference': round(float(gap.mean()), 4),
    'error': round(clustered_error(sums, counts), 4),
    'top1': round(float((word == reference['word']).mean()), 4),
    'seconds': round(seconds, 1),
  }
  gap_text = f'{row["difference"]:+.4f} ± {row["error"]:.4f} nats'
  print(f'{name}: {gap_text}, same word {row["top1"]:.4f}', flush=True)
  return row


if __name__ == '__main__':
  cli.run(main)
