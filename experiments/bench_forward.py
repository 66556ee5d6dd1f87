"""Times a forward pass in integers beside one in bfloat16 and one in float32, in turn, and says why.

  python -m experiments.bench_forward
  python -m experiments.bench_forward --logits=last
  python -m experiments.bench_forward --rows=1 --seq_len=1
  python -m experiments.bench_forward --weights=int4:axis=channel --json

Three programs take the same tokens to the logits of every position, or of the last one, which is all that an
answer needs of its prompt: float32 weights and products; bfloat16
weights and operands, products in float32; and weights and inputs of projections quantized, the rest as in the
second. Seconds are medians of passes taken in turn, so that a busy machine slows all alike. Below the times
stands which way each projection's product took.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import cli
from qjax import ops, quantize, storage, trees
from qjax.io import native
from qjax.io.source import Source, load_source
from qjax.models import transformer
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.progress import Bar, stage

_MODEL = flags.DEFINE_string('model', 'embedded', 'A .gguf file, a Hugging Face directory, or embedded.')
_ROWS = flags.DEFINE_integer('rows', 4, 'Rows of tokens.', lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer('seq_len', 256, 'Tokens a row.', lower_bound=1)
_REPEATS = flags.DEFINE_integer('repeats', 15, 'Timed passes of each program.', lower_bound=1)
_WEIGHTS = flags.DEFINE_string('weights', 'int8:axis=channel', 'Scheme of the third program.')
_ACTIVATIONS = flags.DEFINE_string('activations', 'int8:axis=token', 'How its projections read inputs.')
_LOGITS = flags.DEFINE_enum('logits', 'all', ['all', 'last'], 'Of which positions.')
_JSON = flags.DEFINE_bool('json', False, 'End with one line of JSON: seconds by program.')

Forward = Callable[[], jax.Array]


def main(argv: list[str]) -> int:
  del argv
  source = load_source(_MODEL.value)
  acts = (('.*', _ACTIVATIONS.value),)
  quantized = f'{_WEIGHTS.value}, {_ACTIVATIONS.value}'
  programs: dict[str, tuple[str, str, Numerics]] = {
    'float32': ('float32', 'float32', Numerics(policy())),
    'bfloat16': ('bfloat16', 'bfloat16', Numerics(policy(compute='bfloat16'))),
    quantized: (_WEIGHTS.value, 'bfloat16', Numerics(policy(compute='bfloat16'), activations=acts)),
  }
  running: dict[str, Forward] = {}
  for name, (projections, embeddings, numerics) in programs.items():
    with stage(f'{name}: preparing and compiling'):
      variables = _variables(source, projections, embeddings)
      running[name] = _compiled(source, variables, numerics)
  seconds = _time(running)
  baseline = list(seconds)[-1]
  which = {'all': 'all logits', 'last': "the last position's logits"}[_LOGITS.value]
  print(f'{_ROWS.value} x {_SEQ_LEN.value} tokens to {which}, medians of {_REPEATS.value} passes in turn')
  for name, median in seconds.items():
    print(f'{name:<36} {1e3 * median:>9.1f} ms {median / seconds[baseline]:>7.2f} x')
  for way, names in _ways(variables, programs[quantized][2]).items():
    print(f'{", ".join(names)}: {way}')
  if _JSON.value:
    print(json.dumps(seconds))
  return 0


def _variables(source: Source, projections: str, embeddings: str) -> Any:
  recipe = quantize.Recipe('rtn', storage.rules(projections, embeddings))
  return quantize.quantize(source.config, source.read, recipe, None)


def _compiled(source: Source, variables: Any, numerics: Numerics) -> Forward:
  model = Transformer(source.config, numerics, 'none')
  shape = (_ROWS.value, _SEQ_LEN.value)
  tokens = np.random.default_rng(0).integers(0, source.config.vocab_size, shape, np.int32)
  segments = np.ones(shape, np.int32)
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)

  def forward(variables: Any, *batch: jax.Array) -> jax.Array:
    hidden: Any = model.apply(variables, *batch)
    if _LOGITS.value == 'last':
      hidden = hidden[:, -1:]
    head, transposed = transformer.head_of(source.config, variables['params'])
    return ops.matmul(hidden, head, numerics.policy, transposed)

  compiled = jax.jit(forward).lower(variables, tokens, segments, positions).compile()
  return lambda: compiled(variables, tokens, segments, positions)


def _time(running: dict[str, Forward]) -> dict[str, float]:
  seconds: dict[str, list[float]] = {name: [] for name in running}
  with Bar('passes', _REPEATS.value + 1) as bar:
    for index in range(_REPEATS.value + 1):
      for name, forward in running.items():
        start = time.perf_counter()
        forward().block_until_ready()
        if index:  # the first round warms up
          seconds[name].append(time.perf_counter() - start)
      bar.advance(index + 1)
  return {name: statistics.median(each) for name, each in seconds.items()}


def _ways(variables: Any, numerics: Numerics) -> dict[str, list[str]]:
  """How the inputs of each projection meet its weight, and which projections do so."""
  ways: dict[str, list[str]] = {}
  for path, leaf in trees.flatten(variables['params'], native.is_weight).items():
    if path.endswith('kernel'):
      layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf)
      rows = (_ROWS.value, _SEQ_LEN.value, layer.shape[0])
      ways.setdefault(ops.explain(rows, layer, numerics, path), []).append(path.split('/')[-2])
  return ways


if __name__ == '__main__':
  cli.run(main)
