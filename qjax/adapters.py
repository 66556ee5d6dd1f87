"""Low-rank adapters (Hu et al. 2021, "LoRA"): y = x·W + s·(x·A)·B.

An adapter is data beside the weight it adapts: the collection 'lora' mirrors 'params' and holds an
`Adapter` where the weight has one. `ops.dot` applies it; nothing wraps a layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qjax import trees
from qjax.errors import UserError, nearest

SCALE_RULES = ('standard', 'rslora')
ZERO = 'zero'


@dataclasses.dataclass(frozen=True)
class LoraSpec:
  """What adapters are made.

  Attributes:
    rank: r of A [in, r] and B [r, out].
    alpha: numerator of the scale.
    scale_rule: 'standard' is alpha / r; 'rslora' is alpha / sqrt(r) (Kalajdzievski 2023).
    dropout: probability that an input of A is dropped, in training only.
    targets: regular expression over whole parameter paths.
    init: 'zero', so that training starts from the base as it rests; or a method of `quant.ptq` that leaves a
      low-rank correction ('loftq:rounds=5,clip'), so that it starts from nearer to the base as it was.
  """

  rank: int
  alpha: float
  scale_rule: Literal['standard', 'rslora'] = 'standard'
  dropout: float = 0.0
  targets: str = '.*/(q|k|v|o|gate|up|down)/kernel'
  init: str = ZERO

  def __post_init__(self) -> None:
    if self.rank < 1:
      raise UserError(f'lora.rank = {self.rank} must be at least 1')
    if not self.alpha > 0:
      raise UserError(f'lora.alpha = {self.alpha} must be above 0: at 0 the adapter could never act')
    if self.scale_rule not in SCALE_RULES:
      raise UserError(
        f'lora.scale_rule = {self.scale_rule!r} is not known{nearest(self.scale_rule, SCALE_RULES)}'
      )
    if not 0 <= self.dropout < 1:
      raise UserError(f'lora.dropout = {self.dropout} must be at least 0 and below 1')

  @property
  def scale(self) -> float:
    return self.alpha / (math.sqrt(self.rank) if self.scale_rule == 'rslora' else self.rank)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
  """One adapter or a stack of them.

  Both factors have the rank first, as the reference implementation stores A, because that is the layout in
  which their gradients are plain products.

  Attributes:
    a: Aᵀ [..., r, in].
    b: B [..., r, out].
    scale: s, static.
    dropout: probability, static.
  """

  a: jax.Array
  b: jax.Array
  scale: float = dataclasses.field(metadata={'static': True})
  dropout: float = dataclasses.field(default=0.0, metadata={'static': True})

  def delta(self) -> jax.Array:
    """s·A·B [..., in, out] in float32: what merging adds to the weight."""
    a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
    return self.scale * jnp.einsum('...rk,...rn->...kn', a, b, precision=jax.lax.Precision.HIGHEST)


def starting_at(spec: LoraSpec, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> Adapter:
  """The adapter whose s·A·B is the product of Aᵀ [..., r, in] and B [..., r, out]; s is shared by both."""
  share = 1 / math.sqrt(spec.scale)
  return Adapter((a * share).astype(dtype), (b * share).astype(dtype), spec.scale, spec.dropout)


def is_adapter(value: Any) -> bool:
  return isinstance(value, Adapter)


def targets(spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
  """The parameter paths that get an adapter.

  Raises:
    UserError: the pattern matches nothing, or something that is no matrix product.
  """
  found = trees.select(spec.targets, list(shapes), 'lora.targets')
  unfit = [path for path in found if not path.endswith('/kernel')]
  if unfit:
    raise UserError(
      f'lora.targets: {spec.targets!r} also matches {", ".join(unfit)}; only projections (…/kernel) take one'
    )
  for path in found:
    k, n = shapes[path][-2:]
    if spec.rank > min(k, n):
      raise UserError(f'lora.rank = {spec.rank} exceeds the rank {min(k, n)} of {path} [{k}, {n}]; lower it')
  return found


def init(
  spec: LoraSpec,
  shapes: Mapping[str, tuple[int, ...]],
  key: jax.Array,
  dtype: jnp.dtype = jnp.dtype('float32'),
) -> dict[str, Any]:
  """Fresh adapters for `targets(spec, shapes)`, an exact identity at the start.

  A is uniform in ±1/sqrt(in) (Kaiming with a = sqrt(5), as the reference implementation draws it), B is
  zero. Every path draws from its own key, so adding a target changes no other adapter.
  """
  flat = {}
  for path in targets(spec, shapes):
    *lead, k, n = shapes[path]
    # A stable hash: Python's own differs between processes.
    path_key = jax.random.fold_in(key, int.from_bytes(path.encode(), 'little') % (2**31 - 1))
    bound = 1 / math.sqrt(k)
    a = jax.random.uniform(path_key, (*lead, spec.rank, k), jnp.float32, -bound, bound).astype(dtype)
    flat[path] = Adapter(a, jnp.zeros((*lead, spec.rank, n), dtype), spec.scale, spec.dropout)
  return trees.nest(flat)
