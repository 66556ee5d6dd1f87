"""A reference and its quantized candidate side by side: the evidence that `quant.verify` judges."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import generate, trees
from qjax.adapters import is_adapter
from qjax.data.templates import prompt_ids
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError
from qjax.io import native
from qjax.io.source import Source, params
from qjax.models import transformer
from qjax.models.attention import AttentionKernel
from qjax.models.transformer import Transformer
from qjax.ops import Numerics, dot
from qjax.precision import Policy
from qjax.quant import verify
from qjax.quant.activations import Decomposed
from qjax.quant.qtensor import QTensor, dequantize, quantize
from qjax.walk import PATHS, PROJECTIONS, SHARED_INPUTS, Walk

Tree = Any
Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
  """One of the two models."""

  model: Transformer
  variables: Tree
  _logits: Callable[[Tree, Batch], jax.Array] = dataclasses.field(repr=False)

  @classmethod
  def of(cls, model: Transformer, variables: Tree) -> 'Side':
    def run(variables: Tree, batch: Batch) -> jax.Array:
      found = transformer.logits(model, variables, batch['tokens'], batch['segments'], batch['positions'])
      return found.astype(jnp.float32)

    return cls(model, variables, jax.jit(run))

  def logits(self, batch: Batch) -> jax.Array:
    """float32 [B, T, V]."""
    return self._logits(self.variables, {name: batch[name] for name in ('tokens', 'segments', 'positions')})

  def with_variables(self, variables: Tree) -> 'Side':
    return dataclasses.replace(self, variables=variables)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """Both models, and whether their weights can be compared one by one.

  Attributes:
    reference: the original, weights in float32.
    candidate: the quantized model.
  """

  reference: Side
  candidate: Side

  @classmethod
  def of(cls, source: Source, candidate: native.QuantizedModel, policy: Policy) -> 'Pair':
    """Reads the reference.

    Raises:
      UserError: the candidate was made from another model, or has another shape.
    """
    if candidate.config != source.config:
      raise UserError(f'the candidate is a model of another shape than {source.name}: {candidate.config}')
    made_from = candidate.origin.get('fingerprint')
    if made_from != source.fingerprint:
      raise UserError(
        f'the candidate was made from {candidate.origin.get("name")} ({made_from}), not from {source.name} '
        f'({source.fingerprint}); give that as the reference'
      )
    kernel = AttentionKernel('xla')
    original = Transformer(source.config, Numerics(policy), 'none', kernel)
    numerics = Numerics(policy, activations=candidate.activations)
    quantized = Transformer(source.config, numerics, 'none', kernel)
    variables = {'params': jax.tree.map(jnp.asarray, params(source))}
    return cls(Side.of(original, variables), Side.of(quantized, candidate.variables))

  def weight_errors(self) -> Iterator[verify.MatrixError]:
    """Of every leaf that both have in one form; equalized or decomposed weights are left to the outputs."""
    old = trees.flatten(self.reference.variables['params'])
    new = trees.flatten(self.candidate.variables['params'], native.is_weight)
    moved = {path for path in new if path.endswith('scale') and not np.array_equal(old[path], new[path])}
    if moved:  # the scales of norms went into the weights beside them
      return
    fit = [path for path in old if isinstance(new[path], jax.Array | QTensor)]
    yield from verify.weight_sqnr(
      trees.nest({path: old[path] for path in fit}), trees.nest({path: new[path] for path in fit})
    )

  def output_errors(self, batches: list[dict[str, np.ndarray]]) -> Iterator[verify.MatrixError]:
    """Of every projection's outputs, each model fed with what its own layers before hand it."""
    yield from verify.output_sqnr(self._outputs(batches))

  def _outputs(
    self, batches: list[dict[str, np.ndarray]]
  ) -> Iterator[list[tuple[str, jax.Array, jax.Array]]]:
    config = self.reference.model.config
    walks = []
    for side in (self.reference, self.candidate):
      walk = Walk(config, side.model.numerics, _reader(side.variables), batches)
      walk.start()
      walks.append((side, walk))
    for index in range(config.num_layers):
      found: list[dict[str, jax.Array]] = []
      for side, walk in walks:
        layer = {name: _layer(tree, index) for name, tree in side.variables.items()}
        found.append(_products(walk, layer))
        walk.apply(layer)
      yield [(f'layers/{PATHS[name]}', found[0][name], found[1][name]) for name in PROJECTIONS]

  def adapter_survival(self, lora: Tree) -> dict[str, np.ndarray]:
    """What is left of adapters of the reference, by path and layer, once they are merged and the sum is
    rounded to nearest in the candidate's schemes. Projections that the candidate keeps plain lose nothing.
    """
    old = trees.flatten(self.reference.variables['params'])
    new = trees.flatten(self.candidate.variables['params'], native.is_weight)
    found: dict[str, np.ndarray] = {}
    for path, adapter in trees.flatten(lora, is_adapter).items():
      packed = new[path].rest if isinstance(new[path], Decomposed) else new[path]
      delta = adapter.delta()
      merged = old[path] + delta
      if isinstance(packed, QTensor):
        merged = quantize(merged, packed.scheme)
      found |= verify.adapter_survival({path: old[path]}, {path: delta}, {path: merged})
    return found

  def answers(
    self, prompts: Sequence[str], tokenizer: Tokenizer, new_tokens: int, progress: Callable[[int], None]
  ) -> verify.Answers:
    """Greedy answers of both to the prompts, each put through the model's chat template if there is one."""
    template = 'plain' if tokenizer.chat_template is None else 'chat'
    ids = [prompt_ids([{'role': 'user', 'content': prompt}], tokenizer, template) for prompt in prompts]
    found = []
    for turn, side in enumerate((self.reference, self.candidate)):
      before = turn * len(ids)
      tokens = generate.greedy(
        side.model, side.variables, ids, new_tokens, tokenizer.eos_id,
        progress=functools.partial(lambda before, done: progress(before + done), before),
      )  # fmt: skip
      found.append([tokenizer.decode(answer) for answer in tokens])
    return verify.answers(found[0], found[1], prompts)


def _reader(variables: Tree) -> Callable[[str, int | None], Any]:
  flat = trees.flatten(variables['params'], native.is_weight)

  def read(path: str, layer: int | None) -> Any:
    leaf = flat[path]
    whole = dequantize(leaf) if isinstance(leaf, QTensor) else leaf
    return np.asarray(whole if layer is None else whole[layer], np.float32)

  return read


def _layer(tree: Tree, index: int) -> Tree:
  """One layer's part of a collection."""
  return jax.tree.map(lambda leaf: leaf[index], tree.get('layers', {}))


def _products(walk: Walk, layer: dict[str, Tree]) -> dict[str, jax.Array]:
  """What each projection returns, [tokens, N], over the tokens that are no padding."""
  params = trees.flatten(layer['params'], native.is_weight)
  found: dict[str, list[jax.Array]] = {name: [] for name in PROJECTIONS}
  for inputs, valid in walk.inputs(layer, is_plain=False):
    for group in SHARED_INPUTS:
      x = inputs[group[0]][valid]
      for name in group:
        found[name].append(dot(x, params[PATHS[name]], walk.numerics, **_extras(layer, name)))
  return {name: jnp.concatenate(parts) for name, parts in found.items()}


def _extras(layer: dict[str, Tree], name: str) -> dict[str, Any]:
  lora = trees.flatten(layer.get('lora', {}), native.is_weight).get(PATHS[name])
  return {} if lora is None else {'adapter': lora}


