"""From what training holds to a model at rest that computes the same.

A weight that was trained through its quantizer becomes the codes that its products saw, an adapter inside the
quantizer goes into them, slices go into their stack, and ranges of inputs stay beside the weights. Adapters
that were not inside a quantizer stay adapters, unless they are merged, which costs what `merge` reports.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import adapters, storage, trees
from qjax.errors import UserError
from qjax.method import Method
from qjax.quant import verify
from qjax.quant.fake import FakeQuantized, Slices
from qjax.quant.formats import Scheme
from qjax.quant.qtensor import QTensor, dequantize, is_at_rest, is_qtensor
from qjax.sharding import fetch
from qjax.storage import Rules

Tree = Any

_quantized = jax.jit(FakeQuantized.quantized)
_slice_quantized = jax.jit(Slices.quantized, static_argnums=1)


def convert(
  method: Method,
  variables: Tree,
  shapes: Mapping[str, tuple[int, ...]],
  progress: Callable[[str], None] = lambda path: None,
) -> Tree:
  """{'params': …} and perhaps 'lora' and 'act' of the model at rest, one layer's weights in memory at a time.

  Args:
    method: that trained.
    variables: what moved and what rested, combined.
    shapes: of every parameter, by path.
    progress: called with each parameter's path before it is converted.
  """
  params = trees.flatten(variables['params'], is_qtensor)
  lora = trees.flatten(variables.get('lora', {}), adapters.is_adapter)
  ranges = trees.flatten(variables.get('ranges', {}))
  slices = trees.flatten(variables.get('slices', {}), adapters.is_adapter)
  layers_of = dict(method.trainable.slices)
  found: dict[str, Any] = {}
  for path in shapes:
    progress(path)
    is_projection = trees.is_match(storage.PROJECTIONS, path)
    leaf, adapter = params[path], lora.get(path)
    scheme = method.numerics.trained_scheme_of(
      path if is_projection else None, is_at_rest(leaf), adapter is not None
    )
    if path in layers_of:
      own: dict[str, Any] = {name: slices.get(f'{path}/{name}') for name in ('w', 'high', 'correction')}
      leaf = _patched(leaf, Slices(**own), layers_of[path])
    elif scheme is not None:
      leaf = _merged(leaf, ranges.get(path), adapter, scheme, method.numerics.weight_gradient)
      lora.pop(path, None)
    found[f'params/{path}'] = leaf
  found |= {f'lora/{path}': adapter for path, adapter in lora.items()}
  found |= {f'act/{path}': high for path, high in trees.flatten(variables.get('act', {})).items()}
  return trees.nest(found)


def merge(
  variables: Tree,
  rules: Rules,
  shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Tree, dict[str, np.ndarray]]:
  """{'params': …} with adapters added to their weights, which are then put to rest by rules.

  Adapters that were trained beside their weights do not survive this whole: what they change is often less
  than a step of the scheme.

  Args:
    variables: as `convert` gives them.
    rules: pattern over projections to a scheme or a dtype, for the weights that have an adapter.
    shapes: of every parameter, by path.

  Returns:
    The variables without 'lora', and how much of each adapter survived, [L] by path
    (`verify.adapter_survival`).

  Raises:
    UserError: a rule matches nothing, an adapter is left without one, or a scheme is misspelt.
  """
  params = trees.flatten(variables['params'], is_qtensor)
  lora = trees.flatten(variables.get('lora', {}), adapters.is_adapter)
  if not lora:
    raise UserError('there is no adapter to merge: those inside a quantizer are part of its codes already')
  kinds = trees.match_rules(rules, list(lora), 'merge')
  survived: dict[str, np.ndarray] = {}
  for path, adapter in lora.items():
    each, shares = [], []
    for layer in range(shapes[path][0]):
      base, own = _layer((params[path], adapter), layer)
      w = dequantize(base) if isinstance(base, QTensor) else base.astype(jnp.float32)
      delta = own.delta()
      each.append(storage.rest(np.asarray(w + delta), kinds[path], path))
      shares.append(verify.adapter_survival({path: w}, {path: delta}, {path: each[-1]})[path])
    params[path] = jax.tree.map(lambda *layers: jnp.stack(layers), *each)
    survived[path] = np.asarray(shares)
  rest = {name: tree for name, tree in variables.items() if name not in ('params', 'lora')}
  return rest | {'params': trees.nest(params)}, survived


def _layer(stacks: Tree, layer: int) -> Tree:
  """One layer of stacks, on the device also where they wait in host memory."""
  return fetch(jax.tree.map(lambda x: x[layer], stacks))


def _merged(
  stack: Any, high: jax.Array | None, adapter: adapters.Adapter | None, scheme: Scheme, gradient: str
) -> QTensor:
  """A stack of weights as the products saw them, layer by layer."""
  each = []
  for layer in range(stack.shape[0]):
    base, own_high, own = _layer((stack, high, adapter), layer)
    each.append(_quantized(FakeQuantized(base, own_high, own, None, scheme, gradient)))
  return jax.tree.map(lambda *layers: jnp.stack(layers), *each)


def _patched(rest: QTensor, slices: Slices, layers: tuple[int, ...]) -> QTensor:
  """A stack at rest with the slices that moved in their places."""
  for slot, layer in enumerate(layers):
    new = _slice_quantized(slices[slot], rest.scheme)
    rest = jax.tree.map(lambda stack, own, layer=layer: stack.at[layer].set(own), rest, new)
  return rest
