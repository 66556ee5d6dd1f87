"""ConfigDict to objects: the only module that reads a config.

Every field is declared here once, with its type. A field that is missing, misspelt or of another type is
refused by name, and so is a value that cannot work, before any weight is loaded.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from pallas_kernels import dispatch
from qjax import (
  adapters,
  checkpoint,
  files,
  fused,
  optim,
  precision,
  quantize,
  records,
  sharding,
  storage,
  train,
)
from qjax import method as methods
from qjax.adapters import LoraSpec
from qjax.data import pipeline, plain
from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError, nearest
from qjax.io.source import Source, load_source
from qjax.method import Course, Method, Update
from qjax.models.attention import AttentionKernel
from qjax.models.config import parameter_shapes
from qjax.models.objective import Distillation
from qjax.models.transformer import Transformer
from qjax.ops import Backward, Numerics
from qjax.precision import Policy
from qjax.quant import calibrate, fake
from qjax.quant.calibration import Calibration
from qjax.quant.formats import FORMATS, parse_scheme
from qjax.quant.sensitivity import Sensitivity, worst_slices
from qjax.quant.verdict import Thresholds

T = TypeVar('T')

# Fields that may differ between a run and its resumption: they change no number, or (the mesh) only the
# order of sums.
COSMETIC = ('name', 'eval_every', 'checkpoint_every', 'max_skips', 'mesh', 'placement')


@dataclasses.dataclass(frozen=True)
class ModelFields:
  path: str
  remat: str
  attention: str
  loss_chunk: int
  mlp_chunk: int


@dataclasses.dataclass(frozen=True)
class DataFields:
  path: str
  eval_path: str | None
  held_out: float
  seq_len: int
  pack: bool
  template: str
  too_long: str


@dataclasses.dataclass(frozen=True)
class PrecisionFields:
  param: str
  compute: str
  accum: str
  output: str
  rounding: str
  loss_scale: str
  loss_scale_initial: float
  loss_scale_period: int


@dataclasses.dataclass(frozen=True)
class OptimizerFields:
  name: str
  kind: str
  learning_rate: float
  schedule: str
  warmup_steps: int
  weight_decay: float
  beta1: float
  beta2: float
  eps: float
  clip_norm: float


@dataclasses.dataclass(frozen=True)
class LoraFields:
  rank: int
  alpha: float
  scale_rule: str
  dropout: float
  targets: str
  init: str


@dataclasses.dataclass(frozen=True)
class StorageFields:
  projections: str
  embeddings: str
  rules: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class PlacementFields:
  rules: tuple[tuple[str, str], ...]
  resident_gib: float


@dataclasses.dataclass(frozen=True)
class BackwardFields:
  dx: str
  dw: str
  rounding: str


@dataclasses.dataclass(frozen=True)
class QatFields:
  weights: str
  rules: tuple[tuple[str, str], ...]
  activations: tuple[tuple[str, str], ...]
  weight_gradient: str
  weight_rounding: str
  activation_gradient: str
  range_rate: float
  momentum: float
  start_step: int
  freeze_step: int
  observer: str
  calibration_batches: int
  ranges: str
  backward: BackwardFields


@dataclasses.dataclass(frozen=True)
class DistillFields:
  weight: float
  temperature: float


@dataclasses.dataclass(frozen=True)
class TargetedFields:
  record: str
  budget: float
  train: str


@dataclasses.dataclass(frozen=True)
class MeshFields:
  data: int
  fsdp: int
  tensor: int
  distributed: bool


@dataclasses.dataclass(frozen=True)
class Fields:
  """The whole config. The sections with a default are there for the methods that take them."""

  name: str
  method: str
  seed: int
  num_steps: int
  batch_size: int
  micro_batch: int
  eval_every: int
  checkpoint_every: int
  max_skips: int
  kernels: str
  model: ModelFields
  data: DataFields
  precision: PrecisionFields
  optimizer: OptimizerFields
  mesh: MeshFields
  lora: LoraFields | None = None
  storage: StorageFields | None = None
  placement: PlacementFields | None = None
  qat: QatFields | None = None
  targeted: TargetedFields | None = None
  distill: DistillFields | None = None


# Where a run keeps the ranges of inputs that it began with.
INPUT_RANGES = 'input_ranges.json'

# What may move the ranges of static activation schemes.
INPUT_GRADIENTS = (*fake.GRADIENTS, 'average')

# The sections that a method needs, and those that it may have.
SECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  'full': ((), ('placement',)),
  'lora': (('lora', 'storage'), ('placement',)),
  'qlora': (('lora', 'storage'), ('placement',)),
  'qat': (('qat',), ('placement', 'distill')),
  'qat_lora': (('lora', 'storage', 'qat'), ('placement', 'distill')),
  'targeted': (('storage', 'qat', 'targeted'), ('placement', 'lora', 'distill')),
}


def _is_of(value: Any, kind: Any) -> bool:
  origin = typing.get_origin(kind)
  if origin is types.UnionType:
    return any(_is_of(value, option) for option in typing.get_args(kind))
  if origin is tuple:
    args = typing.get_args(kind)
    if not isinstance(value, tuple):
      return False
    if args[-1] is Ellipsis:
      return all(_is_of(item, args[0]) for item in value)
    return len(value) == len(args) and all(map(_is_of, value, args))
  if kind is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  if kind is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, kind)


def _kind_name(kind: Any) -> str:
  if typing.get_args(kind):
    return str(kind).replace('NoneType', 'None')
  return getattr(kind, '__name__', str(kind))


def fields_from(kind: type[T], given: Mapping[str, Any], where: str = 'config') -> T:
  """A dataclass from nested mappings, field by field.

  Raises:
    UserError: an unknown field (with the nearest), a missing one, or a value of another type.
  """
  declared = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
  hints = typing.get_type_hints(kind)
  for name in given:
    if name not in declared:
      raise UserError(f'{where}.{name} is not a field{nearest(str(name), declared)}')
  values: dict[str, Any] = {}
  for name, field in declared.items():
    hint = hints[name]
    if name not in given:
      if field.default is dataclasses.MISSING:
        raise UserError(f'{where}.{name} is missing; it is {_kind_name(hint)}')
      continue
    value = given[name]
    options: tuple[Any, ...] = (hint, *typing.get_args(hint))
    nested: Any = next((option for option in options if dataclasses.is_dataclass(option)), None)
    if nested is not None and isinstance(value, Mapping):
      values[name] = fields_from(nested, value, f'{where}.{name}')
    elif not _is_of(value, hint):
      raise UserError(f'{where}.{name} = {value!r} ({type(value).__name__}) must be {_kind_name(hint)}')
    elif hint is float and not math.isfinite(value):
      raise UserError(f'{where}.{name} = {value} must be a finite number')
    else:
      values[name] = float(value) if hint is float else value
  return kind(**values)


def read(config: ConfigDict) -> Fields:
  """The typed config, each value checked as far as it can be without the model.

  Raises:
    UserError: naming the field.
  """
  fields = fields_from(Fields, json_ready(config.to_dict()))
  for name in ('num_steps', 'batch_size', 'micro_batch', 'eval_every', 'checkpoint_every', 'max_skips'):
    if getattr(fields, name) < 1:
      raise UserError(f'config.{name} = {getattr(fields, name)} must be at least 1')
  if not 0 < fields.data.held_out < 1:
    raise UserError(f'config.data.held_out = {fields.data.held_out} must lie between 0 and 1, such as 0.2')
  if fields.model.loss_chunk < 1:
    raise UserError(f'config.model.loss_chunk = {fields.model.loss_chunk} must be at least 1')
  if fields.precision.loss_scale_initial > 2.0**127:
    initial = fields.precision.loss_scale_initial
    raise UserError(f'config.precision.loss_scale_initial = {initial:g} is beyond float32; 2**15 is usual')
  if fields.qat is not None:
    if fields.qat.calibration_batches < 1:
      raise UserError(
        f'config.qat.calibration_batches = {fields.qat.calibration_batches} must be at least 1'
      )
    if fields.qat.freeze_step < 0:
      raise UserError(f'config.qat.freeze_step = {fields.qat.freeze_step} must be at least 0; 0 is never')
    if not 0 <= fields.qat.momentum < 1:
      raise UserError(f'config.qat.momentum = {fields.qat.momentum} must be at least 0 and below 1')
    if fields.qat.start_step >= fields.num_steps:
      raise UserError(
        f'config.qat.start_step = {fields.qat.start_step}: nothing would be trained through a quantizer in '
        f'{fields.num_steps} steps (config.num_steps)'
      )
    calibrate.observer(fields.qat.observer)
  if fields.targeted is not None and not 0 < fields.targeted.budget <= 1:
    raise UserError(f'config.targeted.budget = {fields.targeted.budget} must be above 0 and at most 1')
  if not 0 <= fields.seed < 2**31:
    raise UserError(f'config.seed = {fields.seed} must be from 0 to {2**31 - 1}')
  return fields


def json_ready(value: Any) -> Any:
  """Lists as tuples all the way down, so that a config is the same before and after JSON."""
  if isinstance(value, Mapping):
    return {key: json_ready(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return tuple(json_ready(item) for item in value)
  return value


def _check_sections(fields: Fields) -> None:
  if fields.method not in SECTIONS:
    raise UserError(f'config.method = {fields.method!r} is not known{nearest(fields.method, SECTIONS)}')
  needed, allowed = SECTIONS[fields.method]
  for name in ('lora', 'storage', 'placement', 'qat', 'targeted', 'distill'):
    is_there = getattr(fields, name) is not None
    if name in needed and not is_there:
      raise UserError(
        f'config.method = {fields.method!r} needs the section {name}; see configs/{fields.method}*.py'
      )
    if is_there and name not in needed + allowed:
      raise UserError(f'config.method = {fields.method!r} takes no section {name}; remove it')


def _numerics(fields: Fields) -> Numerics:
  p, q = fields.precision, fields.qat
  policy = precision.policy(p.param, p.compute, p.accum, p.output)
  if q is None:
    return Numerics(policy, fields.kernels)
  weights = q.rules + (() if q.weights == 'none' else (('.*', q.weights),))
  if q.activation_gradient not in INPUT_GRADIENTS:
    raise UserError(
      f'config.qat.activation_gradient = {q.activation_gradient!r} is not known'
      f'{nearest(q.activation_gradient, INPUT_GRADIENTS)}'
    )
  inputs = 'ste' if q.activation_gradient == 'average' else q.activation_gradient
  return Numerics(
    policy,
    fields.kernels,
    q.activations,
    weights=weights,
    weight_gradient=q.weight_gradient,
    weight_rounding=q.weight_rounding,
    activation_gradient=inputs,
    backward=Backward(**dataclasses.asdict(q.backward)),
  )


def _course(q: QatFields) -> Course:
  momentum = q.momentum if q.activation_gradient == 'average' else None
  return Course(q.start_step, q.freeze_step or None, momentum)


def _slices(fields: TargetedFields, scheme: str, source: Source) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """The matrices that cost most in a scheme, within a share of the model's parameters."""
  found = Sensitivity.load(Path(fields.record))
  if found.about.get('fingerprint') != source.fingerprint:
    raise UserError(f'{fields.record} was measured on another model than {source.name}')
  budget = int(fields.budget * source.config.num_parameters)
  return worst_slices(found, str(parse_scheme(scheme)), parameter_shapes(source.config), budget)


def method_of(fields: Fields, source: Source | None = None) -> Method:
  """The point on the four axes that a config names; 'targeted' needs the model to choose on.

  Raises:
    UserError: an unknown method, or sections that do not belong to it.
  """
  _check_sections(fields)
  p, o, s, q = fields.precision, fields.optimizer, fields.storage, fields.qat
  numerics = _numerics(fields)
  update = Update(**dataclasses.asdict(o), rounding=p.rounding)
  if q is not None:
    update = dataclasses.replace(update, range_rate=q.range_rate)
  optim.check(update, fields.num_steps)
  if p.rounding == 'stochastic' and p.param == 'float16':
    raise UserError("config.precision.rounding = 'stochastic' is for bfloat16 weights, not for float16")
  spec = LoraSpec(**dataclasses.asdict(fields.lora)) if fields.lora else None
  course = _course(q) if q else Course()
  distillation = Distillation(**dataclasses.asdict(fields.distill)) if fields.distill else None
  match fields.method:
    case 'full':
      return methods.full(numerics, update)
    case 'lora' | 'qlora':
      assert s is not None and spec is not None
      constructor = methods.lora if fields.method == 'lora' else methods.qlora
      return constructor(numerics, update, spec, s.projections, s.embeddings, s.rules)
    case 'qat':
      return methods.qat(numerics, update, course, distillation)
    case 'qat_lora':
      assert s is not None and spec is not None
      return methods.qat_lora(
        numerics, update, spec, s.projections, s.embeddings, s.rules, course, distillation
      )
  assert fields.targeted is not None and s is not None and source is not None
  slices = _slices(fields.targeted, s.projections, source)
  train_what = fields.targeted.train
  return methods.targeted(
    numerics, update, slices, s.projections, s.embeddings, s.rules, train_what, spec, course, distillation
  )


def _placed(fields: Fields, method: Method, shapes: Mapping[str, tuple[int, ...]]) -> Method:
  """The method with its stacks where the config wants them."""
  if fields.placement is None:
    return method
  rules = fields.placement.rules
  if fields.model.remat == 'none' and any(memory == 'host' for _, memory in rules):
    raise UserError(
      "config.model.remat = 'none' would keep a device copy of every layer that rests on the host; use 'full'"
    )
  method = dataclasses.replace(method, placement=rules)
  budget = fields.placement.resident_gib
  if budget < 0:
    raise UserError(f'config.placement.resident_gib = {budget} must be at least 0')
  if not budget:
    return method
  kinds = method.plan(shapes)
  hosted = [path for path in shapes if method.memory_of(f'params/{path}') == 'host']
  if not hosted:
    raise UserError(
      f'config.placement.resident_gib = {budget} keeps weights on the device that placement.rules put on the '
      "host, but these put none there; use rules = (('.*', 'host'),), or resident_gib = 0.0"
    )
  sizes = {path: storage.waiting_nbytes(shapes[path], kinds[path], path) for path in hosted}
  kept = sharding.resident(sizes, int(budget * 2**30))
  return dataclasses.replace(method, placement=(*((path, 'device') for path in kept), *rules))


def model_of(fields: Fields, source: Source, numerics: Numerics) -> Transformer:
  attention, known = fields.model.attention, ('auto', 'xla', 'cudnn')
  if attention == 'cudnn' and jax.default_backend() != 'gpu':
    raise UserError("config.model.attention = 'cudnn' needs an NVIDIA GPU; use 'auto' or 'xla'")
  if attention not in known:
    raise UserError(f'config.model.attention = {attention!r} is not known{nearest(attention, known)}')
  _check_mlp_chunk(fields, numerics)
  chunk = fields.model.mlp_chunk
  return Transformer(source.config, numerics, fields.model.remat, AttentionKernel(attention), chunk)


def _check_mlp_chunk(fields: Fields, numerics: Numerics) -> None:
  """Refuses chunks of the MLP that would change numbers, or copy weights once a chunk."""
  chunk, tokens = fields.model.mlp_chunk, fields.data.seq_len
  if chunk < 0 or (chunk and tokens % min(chunk, tokens)):
    raise UserError(
      f'config.model.mlp_chunk = {chunk} must divide config.data.seq_len = {tokens}; 0 takes all at once'
    )
  if chunk and (numerics.activations or 'int8' in (numerics.backward.dx, numerics.backward.dw)):
    raise UserError(
      f'config.model.mlp_chunk = {chunk}: ranges of inputs and gradients in integers would be those of a '
      'chunk; use 0, or no qat.activations'
    )
  rules = fields.placement.rules if fields.placement else ()
  if chunk and any(memory == 'host' and not pattern.startswith('optimizer') for pattern, memory in rules):
    raise UserError(
      f'config.model.mlp_chunk = {chunk} would copy the weights of an MLP from the host for each chunk; '
      'use 0, or placement.rules = ()'
    )


def meaning(fields: Fields, method: Method, source: Source, dataset: pipeline.Dataset) -> dict[str, Any]:
  """What a checkpoint stands for: everything that changes a number, and nothing else."""
  config = {key: value for key, value in dataclasses.asdict(fields).items() if key not in COSMETIC}
  config['model'].pop('path')
  config['data'].pop('path')
  config['data'].pop('eval_path')
  if fields.targeted is not None:
    config['targeted'].pop('record')  # the slices say what was chosen
  return json.loads(json.dumps({
      'config': config,
      'slices': method.trainable.slices,
      'model': dataclasses.asdict(source.config) | {'fingerprint': source.fingerprint},
      'data': {'train': dataset.train.fingerprint, 'held_out': dataset.eval.fingerprint},
  }))  # fmt: skip


def _program(fields: Fields, source: Source, devices: list[jax.Device] | None = None) -> train.Program:
  """What a step is compiled from, each part checked against the others."""
  _check_sections(fields)
  p, d = fields.precision, fields.data
  scale = precision.loss_scale(p.loss_scale, p.loss_scale_initial, p.loss_scale_period)
  if p.compute == 'float16' and p.loss_scale == 'none':
    raise UserError(
        "config.precision.compute = 'float16' needs a loss scale, or small gradients vanish; use 'dynamic'"
    )
  spec = pipeline.DataSpec(fields.batch_size, d.seq_len, fields.seed, d.pack, d.template, d.too_long)  # type: ignore[arg-type]
  axes = sharding.MeshSpec(fields.mesh.data, fields.mesh.fsdp, fields.mesh.tensor)
  mesh = sharding.make_mesh(axes, devices)
  with jax.set_mesh(mesh):
    if reason := dispatch.unavailable(fields.kernels, dispatch.target_platform()):
      raise UserError(f"config.kernels = {fields.kernels!r}: {reason}; use 'auto' or 'xla'")
  shards = mesh.shape['data'] * mesh.shape['fsdp']
  rows, left = divmod(fields.batch_size, shards)
  if left:
    raise UserError(
        f'config.batch_size = {fields.batch_size} does not divide over data × fsdp = {shards} devices; '
        f'{max(rows, 1) * shards} would'
    )
  at_a_time = max(size for size in range(1, min(rows, fields.micro_batch) + 1) if rows % size == 0)
  shapes = parameter_shapes(source.config)
  method = _placed(fields, method_of(fields, source), shapes)
  fused.check(method, rows // at_a_time, p.loss_scale != 'none', fields.model.remat)
  method.plan(shapes)
  context = source.config.context_length
  if d.seq_len > context:
    raise UserError(f'config.data.seq_len = {d.seq_len} exceeds the context {context} of {source.name}')
  return train.Program(
      model=model_of(fields, source, method.numerics),
      method=method,
      shapes=shapes,
      loss_scale=scale,
      data=spec,
      mesh=mesh,
      loop=train.Loop(
          fields.num_steps,
          rows // at_a_time,
          fields.eval_every,
          fields.checkpoint_every,
          fields.max_skips,
          fields.model.loss_chunk,
          fields.seed,
      ),
  )


def run(config: ConfigDict, workdir: Path) -> train.Run:
  """Everything that training needs, each part checked against the others, no weight loaded yet.

  Raises:
    UserError: naming the field or the path that cannot work.
  """
  fields = read(config)
  if fields.mesh.distributed:
    try:
      jax.distributed.initialize()  # before anything asks for a device
    except (RuntimeError, ValueError) as error:
      raise UserError(f'config.mesh.distributed: {error}. Leave it off on a single machine') from error
  _check_sections(fields)
  source = load_source(fields.model.path)
  program = _program(fields, source)
  d, spec = fields.data, program.data
  dataset = pipeline.load(d.path, source.require_tokenizer(), spec, d.held_out, fields.seed, d.eval_path)
  meant = meaning(fields, program.method, source, dataset)
  numerics, static = program.method.numerics, program.method.static_inputs(program.shapes)

  def found_ranges() -> dict[str, Any]:
    return _input_ranges(fields.qat, numerics, static, source, dataset, spec) if fields.qat else {}

  return train.Run(
      **vars(program),
      workdir=workdir,
      config=config.to_dict(),
      meaning=meant,
      read=source.read,
      dataset=dataset,
      input_ranges=partial(_kept_ranges, workdir / INPUT_RANGES, meant, found_ranges) if static else dict,
      stored=source.stored,
  )


def program(config: ConfigDict, devices: list[jax.Device] | None = None) -> train.Program:
  """What a step of a config's training is compiled from; neither weights nor data need to be there.

  Args:
    config: as for `run`. `model.path` may be a shape without weights ('shapes:llama2_7b').
    devices: of the mesh; those of this process unless given.

  Raises:
    UserError: as `run`.
  """
  fields = read(config)
  _check_sections(fields)
  return _program(fields, load_source(fields.model.path), devices)


def _kept_ranges(file: Path, meant: Mapping[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """The ranges of inputs that a run began with: found once, so that it goes on with the same."""
  if file.exists():
    try:
      kept = json.loads(file.read_text(encoding='utf-8'))
      if not checkpoint.changes(kept['meaning'], meant):
        return kept['ranges']
    except (ValueError, KeyError, TypeError) as error:
      raise UserError(f'{file} is damaged ({type(error).__name__}: {error}); remove it') from None
  found = {path: [float(high) for high in each] for path, each in find().items()}
  files.write_json(file, {'meaning': meant, 'ranges': found})
  return found


def _input_ranges(
  q: QatFields,
  numerics: Numerics,
  static: list[str],
  source: Source,
  dataset: pipeline.Dataset,
  spec: pipeline.DataSpec,
) -> dict[str, Any]:
  """Of static activation schemes: from a file of experiments.calibrate, or from training batches."""
  if q.ranges:
    known = Calibration.load(Path(q.ranges), source.fingerprint)
    bits = {path: FORMATS[numerics.scheme_of(path).format].bits for path in static}
    layers = range(source.config.num_layers)
    return {path: [known.largest(path, layer, bits[path]) for layer in layers] for path in static}
  stream = pipeline.train_iterator(dataset.train, spec)
  batches = [dict(next(stream)) for _ in range(q.calibration_batches)]
  return quantize.input_ranges(source.config, source.read, q.activations, q.observer, batches)


# ---- quantization ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TextFields:
  path: str
  seq_len: int
  max_tokens: int
  batch_size: int


@dataclasses.dataclass(frozen=True)
class CalibrationFields(TextFields):
  ranges: str


@dataclasses.dataclass(frozen=True)
class PathFields:
  path: str


@dataclasses.dataclass(frozen=True)
class QuantizeFields:
  """The whole config of a quantization."""

  name: str
  method: str
  observer: str
  activations: tuple[tuple[str, str], ...]
  model: PathFields
  storage: StorageFields
  calibration: CalibrationFields


@dataclasses.dataclass(frozen=True)
class PromptFields:
  path: str
  count: int
  new_tokens: int


@dataclasses.dataclass(frozen=True)
class VerifyFields:
  """The whole config of a verification."""

  name: str
  reference: str
  candidate: str
  adapters: str
  compute: str
  text: TextFields
  prompts: PromptFields
  thresholds: Thresholds


@dataclasses.dataclass(frozen=True)
class Quantization:
  """What `quantize.quantize` needs, checked."""

  fields: QuantizeFields
  source: Source
  recipe: quantize.Recipe
  rows: plain.Rows


def _text(fields: TextFields, tokenizer: Tokenizer, part: str, where: str) -> plain.Rows:
  for name in ('seq_len', 'max_tokens', 'batch_size'):
    if getattr(fields, name) < 1:
      raise UserError(f'{where}.{name} = {getattr(fields, name)} must be at least 1')
  return plain.rows(plain.read(fields.path, part), tokenizer, fields.seq_len, fields.max_tokens)


def quantization(config: ConfigDict) -> Quantization:
  """A config as configs/ptq_int8.py has it, each part checked, no weight loaded yet.

  Raises:
    UserError: naming the field that cannot work.
  """
  fields = fields_from(QuantizeFields, json_ready(config.to_dict()))
  source = load_source(fields.model.path)
  rules = storage.rules(fields.storage.projections, fields.storage.embeddings, fields.storage.rules)
  ranges = fields.calibration.ranges
  recipe = quantize.Recipe(
    fields.method,
    rules,
    fields.activations,
    fields.observer,
    fields.calibration.batch_size,
    Calibration.load(Path(ranges), source.fingerprint) if ranges else None,
  )
  recipe.check(source.config)
  rows = _text(fields.calibration, source.require_tokenizer(), 'calibration', 'config.calibration')
  return Quantization(fields, source, recipe, rows)


def adapters_of(workdir: Path, source: Source) -> Any:
  """The best adapters of a run of experiments.train, as the collection 'lora'.

  Raises:
    UserError: there is no such run, it trained no adapters, or on another model.
  """
  record = records.read_record(workdir)
  if record is None:
    raise UserError(f'{workdir} holds no {records.RECORD}: it is no working directory of a run')
  meaning = record['meaning']
  if meaning['model']['fingerprint'] != source.fingerprint:
    raise UserError(f'{workdir} trained another model than {source.name}')
  config = checkpoint.complete(meaning)['config']
  lora, precise = config['lora'], config['precision']
  if meaning['config']['method'] in ('qat_lora', 'targeted'):
    raise UserError(f'the adapters of {workdir} act inside a quantizer; experiments.convert merges them')
  if lora is None:
    raise UserError(f'{workdir} trained no adapters, but by the method {meaning["config"]["method"]!r}')
  if lora['init'] != adapters.ZERO:
    raise UserError(
      f'the adapters of {workdir} belong to the weights that lora.init = {lora["init"]!r} rounded, and to no '
      'others; experiments.convert makes a model of both'
    )
  dtype = jnp.dtype(precise['param'])
  like = adapters.init(LoraSpec(**lora), parameter_shapes(source.config), jax.random.key(0), dtype)
  saved = checkpoint.Checkpoints(workdir / 'checkpoints', meaning)
  try:
    return saved.best({'lora': like})['lora']
  finally:
    saved.close()


@dataclasses.dataclass(frozen=True)
class Verification:
  """What a verification needs, checked: the models are not read yet, the text is."""

  fields: VerifyFields
  reference: Source
  policy: Policy
  rows: plain.Rows


def verification(config: ConfigDict) -> Verification:
  """A config as configs/verify.py has it.

  Raises:
    UserError: naming the field that cannot work.
  """
  fields = fields_from(VerifyFields, json_ready(config.to_dict()))
  for name in ('count', 'new_tokens'):
    if getattr(fields.prompts, name) < 1:
      raise UserError(f'config.prompts.{name} = {getattr(fields.prompts, name)} must be at least 1')
  source = load_source(fields.reference)
  rows = _text(fields.text, source.require_tokenizer(), 'held_out', 'config.text')
  return Verification(fields, source, precision.policy(compute=fields.compute), rows)
