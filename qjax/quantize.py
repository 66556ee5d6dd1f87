"""Turns a model into a quantized one, layer by layer, with calibration data that sees no held-out token."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import adapters, storage, trees
from qjax.data.plain import Rows
from qjax.errors import UserError
from qjax.models.config import ModelConfig, parameter_shapes
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant import activations, calibrate, ptq
from qjax.quant.calibration import Calibration
from qjax.quant.formats import FORMATS
from qjax.quant.ptq import LayerData
from qjax.walk import PATHS, PROJECTIONS, SHARED_INPUTS, Layer, Moments, Walk

Tree = Any
Reader = Callable[[str, int | None], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a model is quantized.

  Attributes:
    method: a spelling of `quant.ptq`, for instance 'rtn', 'smoothquant+gptq:act_order', 'awq'.
    storage: ordered rules from parameter path ('layers/mlp/down/kernel') to a scheme or a dtype.
    activations: ordered rules from projection path to a scheme of `quant.activations`, or none at all.
    observer: which ranges static activation schemes get.
    batch_size: rows of calibration text at a time.
    ranges: of static activation schemes, found before; None finds them on the way, layer by layer.
  """

  method: str
  storage: tuple[tuple[str, str], ...]
  activations: tuple[tuple[str, str], ...] = ()
  observer: str = 'absmax'
  batch_size: int = 8
  ranges: Calibration | None = None

  def check(self, config: ModelConfig) -> dict[str, str]:
    """The storage of every parameter.

    Raises:
      UserError: a rule, a scheme or the method cannot work for such a model.
    """
    kinds = storage.plan(self.storage, list(parameter_shapes(config)))
    ptq.make(self.method)
    activations.rules(self.activations)
    paths = [f'layers/{path}' for path in PATHS.values()]
    trees.match_rules(self.activations, paths, 'activations', is_partial=True)
    calibrate.observer(self.observer)
    return kinds


def quantize(
  config: ModelConfig,
  read: Reader,
  recipe: Recipe,
  rows: Rows | None,
  progress: Callable[[int], None] = lambda layer: None,
) -> Tree:
  """The variables of the quantized model: {'params': …} and perhaps 'lora' and 'act'.

  Each layer is calibrated on what the layers before it, already quantized, hand it. Memory: the packed model,
  one float32 layer, and the residual stream of the calibration rows. They may be None where neither the
  method nor a static activation scheme asks for data.

  Raises:
    UserError: a rule or the method is misspelt, or a weight holds a NaN.
  """
  kinds = recipe.check(config)
  schemes = {name: storage.scheme_of(kinds[f'layers/{path}'], path) for name, path in PATHS.items()}
  method = ptq.make(recipe.method)
  scheme_of = activations.rules(recipe.activations)
  static = [name for name in PROJECTIONS if scheme_of(f'layers/{PATHS[name]}').is_static]
  numerics = Numerics(policy(), activations=recipe.activations)
  needs_data = bool(method.needs) or (bool(static) and recipe.ranges is None)
  if needs_data and rows is None:
    raise ValueError(f'{recipe.method} with activations {recipe.activations} needs calibration rows')
  batches = list(rows.batches(recipe.batch_size)) if rows is not None and needs_data else []
  walk = Walk(config, numerics, _checked(read, kinds), batches)

  stacks: dict[str, list[Any]] = {}
  for layer in walk.layers():
    result = method(_layer_data(config, layer, walk, method.needs), lambda name: schemes[name])
    changed = {PATHS[name]: weight for name, weight in result.weights.items()}
    changed |= {f'{name}/scale': norm for name, norm in result.norms.items()}
    changed |= {f'attn/{name}/bias': bias for name, bias in result.biases.items()}
    flat = trees.flatten(layer.params) | changed
    params = trees.nest(flat)
    lora = {PATHS[name]: adapters.Adapter(*factors) for name, factors in result.adapters.items()}
    act = _ranges(walk, params, static, recipe, scheme_of, layer.index)
    if batches:
      walk.apply({'params': params, 'lora': trees.nest(lora), 'act': trees.nest(act)})
    for collection, leaves in (('params', flat), ('lora', lora), ('act', act)):
      for path, leaf in leaves.items():
        stacks.setdefault(f'{collection}/layers/{path}', []).append(leaf)
    progress(layer.index + 1)

  variables = {path: jax.tree.map(lambda *x: jnp.stack(x), *leaves) for path, leaves in stacks.items()}
  for path in parameter_shapes(config):
    if not path.startswith('layers/'):
      variables[f'params/{path}'] = storage.rest(walk.read(path, None), kinds[path], path)
  return trees.nest(variables)


def input_ranges(
  config: ModelConfig,
  read: Reader,
  rules: activations.Rules,
  observer: str,
  batches: list[dict[str, np.ndarray]],
  progress: Callable[[int], None] = lambda layer: None,
) -> dict[str, np.ndarray]:
  """The largest inputs, float32 [L] by path, of the projections to which rules give a static scheme.

  Found with plain weights and inputs, one layer's activations in memory at a time.

  Raises:
    UserError: an input holds a NaN, by path and layer.
  """
  scheme_of = activations.rules(rules)
  static = [name for name in PROJECTIONS if scheme_of(f'layers/{PATHS[name]}').is_static]
  recipe = Recipe('rtn', (), rules, observer)
  walk = Walk(config, Numerics(policy()), read, batches)
  found: dict[str, list[Any]] = {f'layers/{PATHS[name]}': [] for name in static}
  for layer in walk.layers() if static else ():
    for path, high in _ranges(walk, layer.params, static, recipe, scheme_of, layer.index).items():
      found[f'layers/{path}'].append(high)
    walk.apply({'params': layer.params})
    progress(layer.index + 1)
  return {path: np.asarray(each, np.float32) for path, each in found.items()}


def _checked(read: Reader, kinds: Mapping[str, str]) -> Reader:
  """Reads float32 that holds no NaN and fits the dtype in which it will rest."""

  def checked(path: str, layer: int | None) -> np.ndarray:
    w = read(path, layer)
    where = path if layer is None else f'{path}, layer {layer}'
    storage.checked(w, where, jnp.dtype('float16' if kinds[path] == 'float16' else 'float32'))
    return w

  return checked


def _layer_data(config: ModelConfig, layer: Layer, walk: Walk, needs: frozenset[str]) -> LayerData:
  flat = trees.flatten(layer.params)
  moments: Mapping[str, Moments] = walk.observe(layer.params) if needs else {}
  return LayerData(
    weights={name: flat[PATHS[name]] for name in PROJECTIONS},
    norms={name: flat[f'{name}/scale'] for name in ('attn_norm', 'mlp_norm')},
    norm_offset=config.norm_offset,
    biases={name: flat[f'attn/{name}/bias'] for name in 'qkv' if f'attn/{name}/bias' in flat},
    gram={name: m.gram / m.tokens.astype(jnp.float32) for name, m in moments.items()},
    absmax={name: m.absmax for name, m in moments.items()},
    num_heads=config.num_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )


def _ranges(
  walk: Walk,
  params: Tree,
  static: list[str],
  recipe: Recipe,
  scheme_of: Callable[[str], activations.ActivationScheme],
  index: int,
) -> dict[str, jax.Array]:
  """The largest input, float32 [], of each projection whose activation scheme is static."""
  bits = {name: FORMATS[scheme_of(f'layers/{PATHS[name]}').format].bits for name in static}
  if recipe.ranges is not None:
    known = {name: recipe.ranges.largest(f'layers/{PATHS[name]}', index, bits[name]) for name in static}
    return {PATHS[name]: jnp.asarray(high, jnp.float32) for name, high in known.items()}
  if not static:
    return {}
  watch = calibrate.observer(recipe.observer)
  states: dict[str, Any] = {}
  for inputs, valid in walk.inputs({'params': params}):
    for name, x in inputs.items():
      states[name] = watch.update(states.get(name, watch.init()), x, valid)
  found = {}
  for group in SHARED_INPUTS:
    for name in set(group) & set(static):
      try:
        seen = watch.range(states[group[0]], bits[name])
      except UserError as error:
        raise UserError(f'inputs of layers/{PATHS[name]}, layer {index}: {error}') from None
      found[PATHS[name]] = jnp.asarray(np.maximum(-seen.low, seen.high), jnp.float32)
  return found
