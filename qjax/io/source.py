"""A model in somebody's file: its shape, its tokenizer, and its weights one tensor at a time."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError, nearest
from qjax.models.config import ModelConfig, parameter_shapes

EMBEDDED = 'embedded'
SHAPES = 'shapes:'
_ACCEPTED = (
  'a .gguf file, a Hugging Face directory (config.json and safetensors), a model that was saved here '
  f"(model.json and safetensors), '{EMBEDDED}', or a shape without weights, such as '{SHAPES}llama2_7b'"
)


@dataclasses.dataclass(frozen=True)
class Source:
  """What a model file offers. Nothing is read from the weights before `read` asks for it.

  `paths` are the parameters of `ModelConfig`, e.g. 'layers/attn/q/kernel'. `fingerprint` is 16 hex digits
  that change when the weights or their description do: sizes, headers and a few sampled ranges go into it,
  not every byte. `tokenizer` is None where the file has none that we can build, and `tokenizer_problem` then
  says why. `load(path, layer)` reads one tensor in our layout; call `read`, which checks.
  `stored(path, layer)` is the tensor as a `QTensor` where the file holds it in one of our schemes, else None.
  """

  name: str
  config: ModelConfig
  tokenizer: Tokenizer | None
  paths: tuple[str, ...]
  fingerprint: str
  load: Callable[[str, int | None], np.ndarray] = dataclasses.field(repr=False, compare=False)
  tokenizer_problem: str | None = None
  stored: Callable[[str, int | None], Any] = dataclasses.field(
    default=lambda path, layer: None, repr=False, compare=False
  )

  def read(self, path: str, layer: int | None = None) -> np.ndarray:
    """The parameter as a float32 array that the caller owns.

    For 'layers/…' a layer index gives that layer's array ([in, out] for a kernel) and None the stack
    [L, …]; other paths take no index. Raises `UserError` for a path that the model lacks or an index
    outside it.
    """
    if path not in self.paths:
      raise UserError(f'{self.name} has no parameter {path!r}{nearest(path, self.paths)}')
    if not path.startswith('layers/'):
      if layer is not None:
        raise UserError(f'{path!r} belongs to no layer, yet layer {layer} of it was asked for')
      return self._load(path, None)
    depth = self.config.num_layers
    if layer is not None:
      if not 0 <= layer < depth:
        raise UserError(f'layer {layer} of {path!r} was asked for; {self.name} has layers 0 to {depth - 1}')
      return self._load(path, layer)
    stack = np.empty(parameter_shapes(self.config)[path], np.float32)
    for index in range(depth):
      stack[index] = self._load(path, index)
    return stack

  def require_tokenizer(self) -> Tokenizer:
    """The tokenizer, or a `UserError` that says why there is none."""
    if self.tokenizer is None:
      raise UserError(f'{self.name} comes without a usable tokenizer: {self.tokenizer_problem}')
    return self.tokenizer

  def _load(self, path: str, layer: int | None) -> np.ndarray:
    # Copied where a reader hands out a view of a mapped file: the caller may write, and the file may go.
    return np.array(self.load(path, layer), dtype=np.float32, order='C')


def load_source(path: str | Path) -> Source:
  """The model at `path`: a `.gguf` file, a Hugging Face directory, one of `native.save`, or 'embedded'.

  'shapes:NAME' and 'shapes:DIRECTORY' (of a config.json) are models that can be planned, not read.

  Reads headers, configuration and tokenizer, not the weights. Raises `UserError` for anything else.
  """
  # The readers build a Source, so they import this module.
  from qjax.io import embedded, gguf, hf, native, shapes

  if str(path) == EMBEDDED:
    return gguf.load(embedded.fetch())
  if str(path).startswith(SHAPES):
    return shapes.load(str(path))
  path = Path(path).expanduser()
  if path.is_dir():
    if (path / 'config.json').is_file():
      return hf.load(path)
    if (path / native.MEANING).is_file():
      return native.source(path)
    files = sorted(path.glob('*.gguf'))
    hint = f' (it holds {", ".join(file.name for file in files)}; name the file)' if files else ''
    missing = f'no config.json and no {native.MEANING}'
    raise UserError(f'the directory {path} has {missing}{hint}; accepted: {_ACCEPTED}')
  if not path.exists():
    raise UserError(f'there is no model at {path}; accepted: {_ACCEPTED}')
  with open(path, 'rb') as file:
    is_gguf = file.read(4) == b'GGUF'
  if is_gguf or path.suffix == '.gguf':
    return gguf.load(path)
  if path.suffix == '.safetensors':
    raise UserError(f'{path} holds weights alone; give its directory, {path.parent}, which describes them')
  raise UserError(f'{path} is no kind of model file that is known; accepted: {_ACCEPTED}')


def params(source: Source) -> dict[str, Any]:
  """Every parameter as nested dicts of float32 arrays, layers stacked: `{'embed': {'embedding': …}, …}`."""
  tree: dict[str, Any] = {}
  for path in source.paths:
    *parents, leaf = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = source.read(path)
  return tree


def check_tensors(
  config: ModelConfig,
  names: Mapping[str, str],
  present: Mapping[str, tuple[int, ...]],
  where: str,
  ignored: str = '',
) -> None:
  """Raises `UserError` unless a file's tensors are exactly the parameters of `config`, in shape too.

  `names` maps each path to the tensor's name in the file, `{}` standing for the layer; `present` maps the
  names in the file to their shapes, kernels as [out, in]; `ignored` is a regular expression for names that
  may be there and mean nothing.
  """
  if config.num_layers > len(present):  # A damaged count, found before a list of that length is made.
    raise UserError(f'{where}: {config.num_layers} layers cannot lie in {len(present)} tensors')
  expected: dict[str, tuple[int, ...]] = {}
  for path, shape in parameter_shapes(config).items():
    in_layers = path.startswith('layers/')
    shape = shape[1:] if in_layers else shape
    shape = shape[::-1] if path.endswith('kernel') else shape
    for layer in range(config.num_layers) if in_layers else (0,):
      expected[names[path].format(layer)] = shape
  missing = [name for name in expected if name not in present]
  unexpected = [name for name in present if name not in expected and not re.fullmatch(ignored, name)]
  complaints = []
  if missing:
    complaints.append(f'{len(missing)} tensors are missing: {_some(missing)}')
  if unexpected:
    complaints.append(f'{len(unexpected)} tensors are not part of this kind of model: {_some(unexpected)}')
  for name in [name for name in expected if name in present and present[name] != expected[name]][:8]:
    complaints.append(f'{name} has shape {present[name]}, its configuration asks for {expected[name]}')
  if complaints:
    raise UserError(f'{where}: ' + '; '.join(complaints))


def fingerprint(
  parts: Iterable[bytes], files: Iterable[Path], samples: int = 16, sample_bytes: int = 65536
) -> str:
  """16 hex digits of `parts`, and of each file's size and `samples` ranges spread over it from end to end."""
  digest = hashlib.sha256()
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little') + part)
  for path in files:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, 'little'))
    with open(path, 'rb') as file:
      for index in range(samples):
        file.seek(max(0, size - sample_bytes) * index // (samples - 1))
        digest.update(file.read(sample_bytes))
  return digest.hexdigest()[:16]


def is_number(value: object) -> TypeGuard[int | float]:
  """Whether `value`, which a stranger's file gave, is a finite int or float (True and False are neither)."""
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _some(names: list[str], limit: int = 12) -> str:
  return ', '.join(names[:limit]) + (f' and {len(names) - limit} more' if len(names) > limit else '')
