"""What each part of a model costs when it alone is quantized, and the best schemes for a budget of bytes.

  python -m experiments.sensitivity
  python -m experiments.sensitivity --schemes=nf2:block=64+nf3:block=64+int8:axis=channel --bits=3.5
  python -m experiments.sensitivity --each_layer --schemes=int4:axis=channel --bits=4.1

For every projection (all of its layers share one scheme), or with --each_layer for every single matrix, and
every scheme: the KL of the next-word distribution against the float32 model and the difference of loss, on
calibration text. The working directory receives sensitivity.json, heatmap.png (a heatmap a scheme with
--each_layer) and rules.json; the flags that give experiments.quantize the choice are printed. Schemes are
separated by '+'.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cli
from qjax import files, records, report, trees
from qjax.data import plain
from qjax.errors import UserError
from qjax.io.source import load_source, params
from qjax.models import transformer
from qjax.models.attention import AttentionKernel
from qjax.models.config import parameter_shapes
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar, stage
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import dequantize, expected_nbytes, quantize
from qjax.quant.sensitivity import Sensitivity, allocate, by_path, layer_item, rules, with_default
from qjax.quant.verify import kl_divergence
from qjax.walk import PATHS, PROJECTIONS

_MODEL = flags.DEFINE_string('model', 'embedded', 'A .gguf file, a Hugging Face directory, or embedded.')
_SCHEMES = flags.DEFINE_string(
  'schemes', 'nf2:block=64+nf3:block=64+nf4:block=64+int8:axis=channel', "Schemes, separated by '+'."
)
_BITS = flags.DEFINE_float('bits', 3.5, 'Budget: bits a projection weight, scales included.')
_MAX_TOKENS = flags.DEFINE_integer('max_tokens', 4096, 'Tokens of calibration text.', lower_bound=256)
_TEXT = flags.DEFINE_string('text', plain.STATE_OF_THE_UNION, 'Calibration text: .txt or .jsonl.')
_EACH = flags.DEFINE_bool('each_layer', False, 'Measure every layer of a projection by itself.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/sensitivity', 'Where results go.')

SEQ_LEN, BATCH = 256, 4


def main(argv: list[str]) -> int:
  del argv
  schemes = tuple(str(parse_scheme(spelling)) for spelling in _SCHEMES.value.split('+'))
  source = load_source(_MODEL.value)
  rows = plain.rows(
    plain.read(_TEXT.value, 'calibration'), source.require_tokenizer(), SEQ_LEN, _MAX_TOKENS.value
  )
  shapes = parameter_shapes(source.config)
  paths = tuple(f'layers/{PATHS[name]}' for name in PROJECTIONS)
  sizes = {path: {scheme: expected_nbytes(shapes[path], scheme) for scheme in schemes} for path in paths}
  count = sum(int(np.prod(shapes[path])) for path in paths)
  budget = int(_BITS.value * count / 8)
  least = sum(min(size.values()) for size in sizes.values())
  if budget < least:
    lowest = 8 * least / count
    raise UserError(f'--bits={_BITS.value} is below the least that these schemes take, {lowest:.3f}')

  with stage('reading the model'):
    weights = jax.tree.map(jnp.asarray, params(source))
  flat = trees.flatten(weights)
  model = Transformer(source.config, Numerics(policy(compute='bfloat16')), 'none', AttentionKernel('xla'))

  @jax.jit
  def logits(weights: Any, batch: dict[str, jax.Array]) -> jax.Array:
    variables = {'params': weights}
    found = transformer.logits(model, variables, batch['tokens'], batch['segments'], batch['positions'])
    return found.astype(jnp.float32)

  @jax.jit
  def compare(old: jax.Array, changed: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    new = logits(changed, batch)

    def nll(found: jax.Array) -> jax.Array:
      own = jnp.take_along_axis(found, batch['targets'][..., None], axis=-1)[..., 0]
      return jax.nn.logsumexp(found, axis=-1) - own

    counted = batch['weights']
    kl = jax.lax.map(lambda pair: kl_divergence(*pair), (old, new))
    return jnp.sum(kl * counted), jnp.sum((nll(new) - nll(old)) * counted)

  rounded = jax.jit(lambda w, scheme: dequantize(quantize(w, scheme)), static_argnums=1)
  layers = range(source.config.num_layers)
  items = list(itertools.product(paths, layers if _EACH.value else (None,)))
  parts = list(itertools.product(enumerate(items), enumerate(schemes)))
  batches = list(rows.batches(BATCH))
  kl, difference = np.zeros((2, len(items), len(schemes)))
  with Bar('parts', len(batches) * len(parts)) as bar:
    for done, batch in enumerate(batches):
      old = logits(weights, batch)
      for index, ((i, (path, layer)), (j, scheme)) in enumerate(parts):
        w = flat[path]
        if layer is None:
          w = rounded(w, parse_scheme(scheme))
        else:
          w = w.at[layer].set(rounded(w[layer], parse_scheme(scheme)))
        changed = trees.nest(flat | {path: w})
        found = jax.device_get(compare(old, changed, batch))
        kl[i, j] += found[0] / rows.num_tokens
        difference[i, j] += found[1] / rows.num_tokens
        bar.advance(done * len(parts) + index + 1)
  about = {
    'model': source.name,
    'fingerprint': source.fingerprint,
    'text': _TEXT.value,
    'tokens': rows.num_tokens,
    'environment': records.environment(),
  }
  as_rows = lambda grid: tuple(tuple(row) for row in grid.tolist())
  share = {layer: len(layers) for layer in layers} | {None: 1}
  nbytes = tuple(tuple(sizes[path][scheme] // share[layer] for scheme in schemes) for path, layer in items)
  names = tuple(path if layer is None else layer_item(path, layer) for path, layer in items)
  found = Sensitivity(about, names, schemes, as_rows(kl), as_rows(difference), nbytes)
  workdir = Path(_WORKDIR.value)
  found.save(workdir / 'sensitivity.json')
  costs = found.costs('kl')
  if _EACH.value:
    for scheme in schemes:
      picture = workdir / f'heatmap-{re.sub("[^a-z0-9_]+", "-", scheme)}.png'
      report.layers_heatmap(found.as_dict(), scheme, picture)
    # A stack has one scheme; what its layers cost is taken to add up.
    costs = by_path({item: costs[name] for item, name in zip(items, names, strict=True)})
  else:
    report.sensitivity_heatmap(found.as_dict(), workdir / 'heatmap.png')
  chosen = allocate(costs, sizes, budget)
  default, others = with_default(rules(chosen))
  files.write_json(
    workdir / 'rules.json', {'bits': _BITS.value, 'projections': default, 'rules': others, 'gap': chosen.gap}
  )
  spelled = ', '.join(f'("{pattern}", "{scheme}")' for pattern, scheme in others)
  for path, scheme in chosen.schemes.items():
    print(f'  {path:<28} {scheme}')
  print(
    f'{8 * chosen.nbytes / count:.3f} bits a projection weight, sum of KL {chosen.cost:.5f} '
    f'(no choice can save more than {chosen.gap:.1e})\n'
    f"--config.storage.projections={default} --config.storage.rules='({spelled}{',' if others else ''})'\n"
    f'results: {workdir}'
  )
  return 0


if __name__ == '__main__':
  cli.run(main)
