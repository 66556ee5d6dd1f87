"""A quantized model in a directory of our own: arrays as safetensors, their meaning as JSON, the tokenizer.

  model.safetensors   every array under its path, e.g. 'params/layers/attn/q/kernel/codes'
  model.json          shape of the model, the scheme of every quantized weight, where it came from
  tokenizer.json      as the `tokenizers` library writes it

Codes and scales are stored as they rest in memory, so a loaded model computes the same bits.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from qjax import trees
from qjax.adapters import Adapter
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError
from qjax.io.source import Source, fingerprint
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes
from qjax.quant import activations, qtensor
from qjax.quant.qtensor import QTensor

Tree = Any
VERSION = 1
MEANING, ARRAYS, TOKENIZER = 'model.json', 'model.safetensors', 'tokenizer.json'
# What safetensors calls the dtypes; others go by their own name.
_DTYPES = {
  'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'BOOL': 'bool',
  'I64': 'int64', 'I32': 'int32', 'I16': 'int16', 'I8': 'int8',
  'U64': 'uint64', 'U32': 'uint32', 'U16': 'uint16', 'U8': 'uint8',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
  """A model whose weights are what they are: nothing is left to decide.

  Attributes:
    config: shape of the model.
    variables: {'params': …} and perhaps 'lora' (corrections) and 'act' (activation ranges).
    activations: how the inputs of products are quantized, as `Numerics` takes it.
    tokenizer: None if the original had none.
    origin: what it was made from and how, as JSON.
  """

  config: ModelConfig
  variables: Tree
  activations: tuple[tuple[str, str], ...]
  tokenizer: Tokenizer | None
  origin: Mapping[str, Any]


def is_weight(value: Any) -> bool:
  """Whether a node is one weight or adapter, however many arrays it holds."""
  return isinstance(value, QTensor | activations.Decomposed | Adapter)


def _describe(leaf: Any) -> dict[str, Any]:
  """What is needed to build the structure of a leaf again."""
  if isinstance(leaf, QTensor):
    return {'kind': 'quantized', 'scheme': str(leaf.scheme), 'shape': list(leaf.shape)}
  if isinstance(leaf, activations.Decomposed):
    kept = list(leaf.kept.shape)
    return {'kind': 'decomposed', 'rest': _describe(leaf.rest), 'kept': kept, 'half': leaf.kept.scheme.format}
  if isinstance(leaf, Adapter):
    return {'kind': 'adapter', 'a': list(leaf.a.shape), 'b': list(leaf.b.shape), 'scale': leaf.scale}
  return {'kind': 'plain', 'shape': list(leaf.shape), 'dtype': leaf.dtype.name}


def _template(meaning: Mapping[str, Any]) -> Any:
  """The leaf that `_describe` described, as shapes and dtypes."""
  match meaning['kind']:
    case 'quantized':
      zeros = jax.ShapeDtypeStruct(tuple(meaning['shape']), jnp.float32)
      return jax.eval_shape(lambda w: qtensor.quantize(w, meaning['scheme']), zeros)
    case 'decomposed':
      rest = _template(meaning['rest'])
      kept = _template({'kind': 'quantized', 'scheme': meaning['half'], 'shape': meaning['kept']})
      rows: Any = jax.ShapeDtypeStruct(tuple(meaning['kept'][:-1]), jnp.int32)
      return activations.Decomposed(rest=rest, rows=rows, kept=kept)
    case 'adapter':
      factors: Any = [jax.ShapeDtypeStruct(tuple(meaning[name]), jnp.float32) for name in ('a', 'b')]
      return Adapter(a=factors[0], b=factors[1], scale=meaning['scale'])
    case 'plain':
      return jax.ShapeDtypeStruct(tuple(meaning['shape']), jnp.dtype(meaning['dtype']))
  raise UserError(f'{meaning["kind"]!r} is no kind of weight that this version knows')


def refuse_existing(directory: Path) -> None:
  if Path(directory).exists():
    raise UserError(f'{directory} exists; have the model written elsewhere, or move that away')


def save(model: QuantizedModel, directory: Path) -> int:
  """Writes the model; returns the bytes of its arrays. The directory appears when it is whole.

  Raises:
    UserError: the directory exists, or cannot be written.
  """
  directory = Path(directory)
  refuse_existing(directory)
  leaves = trees.flatten(model.variables, is_weight)
  arrays: dict[str, np.ndarray] = {}
  for path, leaf in leaves.items():
    for sub, array in trees.flatten(leaf).items():
      arrays[_name(path, sub)] = np.asarray(array)
  meaning: dict[str, Any] = {
    'version': VERSION,
    'config': dataclasses.asdict(model.config),
    'weights': {path: _describe(leaf) for path, leaf in leaves.items()},
    'activations': [list(rule) for rule in model.activations],
    'origin': dict(model.origin),
  }
  try:
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f'.{directory.name}.', dir=directory.parent))
  except OSError as error:
    raise UserError(f'{directory} cannot be made: {error.strerror}') from error
  try:
    if model.tokenizer is not None:
      t = model.tokenizer
      meaning['tokenizer'] = {
        name: getattr(t, name) for name in ('eos_id', 'pad_id', 'bos_id', 'chat_template')
      }
      (scratch / TOKENIZER).write_text(t.backend.to_str(), encoding='utf-8')
    safetensors.numpy.save_file(arrays, scratch / ARRAYS)
    os.chmod(scratch / ARRAYS, 0o644)
    (scratch / MEANING).write_text(json.dumps(meaning, indent=1) + '\n', encoding='utf-8')
    os.chmod(scratch, 0o755)
    os.rename(scratch, directory)
  except OSError as error:
    raise UserError(f'{directory} cannot be written: {error.strerror}') from error
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
  return sum(array.nbytes for array in arrays.values())


def load(directory: Path) -> QuantizedModel:
  """The model that `save` wrote.

  Raises:
    UserError: a file is missing or damaged, of another version, or an array is missing, superfluous, or not
      of the shape and dtype that its scheme asks for; by path.
  """
  directory = Path(directory)
  config, templates, rules, meaning = _description(directory)
  leaf = _reader(directory / ARRAYS, templates)
  flat = {path: jax.tree.map(jnp.asarray, leaf(path, None)) for path in templates}
  return QuantizedModel(config, trees.nest(flat), rules, _tokenizer(directory, meaning), meaning['origin'])


def source(directory: str | Path) -> Source:
  """The model that `save` wrote as a model to start from; weights stay in their file until they are read.

  A layer of a quantized weight is read as the float32 numbers that its codes stand for.

  Raises:
    UserError: as `load` of files that are missing or damaged (of the tokenizer `Source.require_tokenizer`
      says it), and for a model that is more than its weights: with corrections or quantized activations.
  """
  directory = Path(directory)
  config, templates, rules, meaning = _description(directory)
  _refuse_more_than_weights(directory, templates, rules, meaning['origin'])
  leaf = _reader(directory / ARRAYS, templates)
  problem: str | None = None
  try:
    tokenizer = _tokenizer(directory, meaning)
    if tokenizer is None:
      problem = f'{directory} was saved without one'
  except UserError as error:
    tokenizer, problem = None, str(error)

  def read(path: str, layer: int | None) -> np.ndarray:
    value = leaf(f'params/{path}', layer)
    if isinstance(value, np.ndarray):
      return value
    value = jax.tree.map(jnp.asarray, value)
    dtype = jnp.dtype('float32')
    return np.asarray(
      qtensor.dequantize(value, dtype) if isinstance(value, QTensor) else value.dequantize(dtype)
    )

  def stored(path: str, layer: int | None) -> QTensor | None:
    is_quantized = isinstance(templates[f'params/{path}'], QTensor)
    return jax.tree.map(jnp.asarray, leaf(f'params/{path}', layer)) if is_quantized else None

  mark = fingerprint([json.dumps(meaning, sort_keys=True).encode()], [directory / ARRAYS])
  paths = tuple(parameter_shapes(config))
  return Source(directory.resolve().name, config, tokenizer, paths, mark, read, problem, stored)


def _refuse_more_than_weights(
  directory: Path, templates: Mapping[str, Any], rules: tuple[tuple[str, str], ...], origin: Any
) -> None:
  collections = {path.split('/')[0] for path in templates} - {'params'}
  more = ['corrections (lora)'] if 'lora' in collections else []
  if 'act' in collections or any(spelling != 'none' for _, spelling in rules):
    more.append('quantized activations')
  more += sorted(collections - {'lora', 'act'})
  if not more:
    return
  match origin:
    case {'config': {'model': {'path': str(name)}}} | {'name': str(name)}:
      made_from = f', {name}'
    case _:
      made_from = ''
  raise UserError(
    f'{directory} is more than plain weights: its {" and ".join(more)} would be lost here; '
    f'give the model that it was made from{made_from}'
  )


class _Description(NamedTuple):
  """What model.json says, and all of it as it stands there."""

  config: ModelConfig
  templates: dict[str, Any]
  activations: tuple[tuple[str, str], ...]
  meaning: Mapping[str, Any]


def _description(directory: Path) -> _Description:
  """Parsed, and its weights held against its model."""
  try:
    meaning = json.loads((directory / MEANING).read_text(encoding='utf-8'))
    version = meaning['version']
    if version != VERSION:
      raise UserError(f'{directory} is of version {version}; this program reads version {VERSION}')
    described = dict(meaning['config'])
    scaling = described.pop('rope_scaling')
    config = ModelConfig(**described, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    templates = {path: _template(weight) for path, weight in meaning['weights'].items()}
    rules = tuple((pattern, spelling) for pattern, spelling in meaning['activations'])
    meaning['origin']
  except FileNotFoundError:
    raise UserError(f'{directory} holds no {MEANING}: it is no quantized model of ours') from None
  except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
    raise UserError(f'{directory / MEANING} is damaged: {type(error).__name__}: {error}') from error
  wanted = {f'params/{path}': shape for path, shape in parameter_shapes(config).items()}
  found = {path: tuple(leaf.shape) for path, leaf in templates.items() if path.startswith('params/')}
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) != found.get(path):
      raise UserError(f'{directory}: {path} is {found.get(path)}, its model asks for {wanted.get(path)}')
  return _Description(config, templates, rules, meaning)


def _reader(file: Path, templates: Mapping[str, Any]) -> Callable[[str, int | None], Any]:
  """What reads the leaf at a path, or one layer of a stack, as NumPy arrays.

  The file's header is held against the templates at once, its numbers when they are read.
  """
  try:
    arrays: Any = safetensors.safe_open(file, framework='numpy')
  except (OSError, safetensors.SafetensorError) as error:
    raise UserError(f'{file} cannot be read: {error}') from error
  left = set(arrays.keys())
  for path, template in templates.items():
    for sub, like in trees.flatten(template).items():
      name = _name(path, sub)
      if name not in left:
        raise UserError(f'{file}: {name} is missing')
      left.remove(name)
      view = arrays.get_slice(name)
      dtype, shape = _DTYPES.get(view.get_dtype(), view.get_dtype()), tuple(view.get_shape())
      if dtype != like.dtype.name or shape != like.shape:
        raise UserError(
          f'{file}: {name} is {dtype} {shape}, its scheme asks for {like.dtype} {like.shape}'
        )
  if left:
    raise UserError(f'{file}: {min(left)} belongs to no weight of the model')

  def leaf(path: str, layer: int | None) -> Any:
    def fill(sub: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
      del like
      name = _name(path, sub)
      array = arrays.get_tensor(name) if layer is None else arrays.get_slice(name)[layer]
      if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
        raise UserError(f'{file}: {name} holds a NaN or an infinity')
      return array

    return trees.map_with_path(fill, templates[path])

  return leaf


def _name(path: str, sub: str) -> str:
  """The array at `sub` of the leaf at `path`, as the file calls it."""
  return f'{path}/{sub}' if sub else path


def _tokenizer(directory: Path, meaning: Mapping[str, Any]) -> Tokenizer | None:
  if 'tokenizer' not in meaning:
    return None
  try:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(directory / TOKENIZER)), **meaning['tokenizer'])
  except Exception as error:  # the library raises plain Exception
    raise UserError(f'{directory / TOKENIZER} cannot be read: {error}') from error
