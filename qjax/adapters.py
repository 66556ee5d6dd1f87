"""Low-rank adapters (Hu et al. 2021, "LoRA"): y = x·W + s·(x·A)·B.

An adapter is data beside the weight it adapts: the collection 'lora' mirrors 'params' and holds an
`Adapter` where the weight has one. `ops.dot` applies it; nothing wraps a layer.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedAdapter:
  """Several adapters of one weight, for batches whose rows each have their own; see `group`.

  It is for generation and has no gradient. Leading axes are those of a stack of weights.

  Attributes:
    a: Aᵀ [..., G, r, in]; an adapter of lower rank is filled up with zeros.
    b: B [..., G, r, out].
    scale: float32 [..., G].
    of_row: int32 [..., B], which adapter each row of a batch has, -1 for none; None before `assign`.
  """

  a: jax.Array
  b: jax.Array
  scale: jax.Array
  of_row: jax.Array | None = None


def _is_grouped(value: Any) -> bool:
  return isinstance(value, GroupedAdapter)


def _stacked(factors: Sequence[jax.Array | None], shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Factors [..., r, size] of any rank in one array of that shape, zeros where there is none."""
  whole = jnp.zeros(shape, dtype)
  for index, factor in enumerate(factors):
    if factor is not None:
      whole = whole.at[..., index, : factor.shape[-2], :].set(factor.astype(dtype))
  return whole


def group(collections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Several collections 'lora' of one model as one, of `GroupedAdapter`.

  They may differ in rank, scale, dtype and targets; where one has no adapter and another has, it adds zeros.

  Raises:
    UserError: there are none, or they are not of the same model, or no collections of `Adapter`.
  """
  if isinstance(collections, Mapping) or not collections:
    raise UserError(f'what is grouped is a list of collections of adapters, not {type(collections).__name__}')
  for index, each in enumerate(collections):
    leaves = jax.tree.leaves(each, is_leaf=is_adapter)
    if not leaves or not all(isinstance(leaf, Adapter) for leaf in leaves):
      raise UserError(f'number {index} of what is grouped is no collection of adapters, as a run trains them')
  flat = [trees.flatten(each, is_adapter) for each in collections]
  found = {}
  for path in sorted(set().union(*flat)):
    ones = [each.get(path) for each in flat]
    given = [one for one in ones if one is not None]
    sizes = {(*one.a.shape[:-2], one.a.shape[-1], one.b.shape[-1]) for one in given}
    if len(sizes) > 1:
      raise UserError(
        f'the adapters of {path} are of different models: they have [..., in, out] of'
        f' {" and ".join(map(str, sorted(sizes)))}; group adapters of one model'
      )
    dtypes = {one.a.dtype for one in given}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype('float32')
    rank = max(one.a.shape[-2] for one in given)
    (*lead, k, n) = sizes.pop()
    scale = jnp.asarray([0.0 if one is None else one.scale for one in ones], jnp.float32)
    found[path] = GroupedAdapter(
      _stacked([one and one.a for one in ones], (*lead, len(ones), rank, k), dtype),
      _stacked([one and one.b for one in ones], (*lead, len(ones), rank, n), dtype),
      jnp.broadcast_to(scale, (*lead, len(ones))),
    )
  return trees.nest(found)


def assign(lora: Mapping[str, Any], of_row: jax.Array) -> Any:
  """A collection of `group` for a batch: its row i has adapter `of_row[i]`, int32 [B] in -1…G-1."""

  def put(one: GroupedAdapter) -> GroupedAdapter:
    rows = jnp.broadcast_to(of_row.astype(jnp.int32), (*one.scale.shape[:-1], *of_row.shape))
    return dataclasses.replace(one, of_row=rows)

  return jax.tree.map(put, lora, is_leaf=_is_grouped)


def count(lora: Mapping[str, Any]) -> int:
  """How many adapters a collection of `group` holds.

  Raises:
    UserError: it is not one.
  """
  leaves = jax.tree.leaves(lora, is_leaf=lambda value: _is_grouped(value) or is_adapter(value))
  if not leaves or not all(map(_is_grouped, leaves)):
    raise UserError("the collection 'lora' holds no groups of adapters; make it by adapters.group")
  return leaves[0].scale.shape[-1]


def targets(spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
  """The parameter paths that get an adapter.

  Raises:
    UserError: the pattern matches nothing, or something that is no matrix product or of lower rank.
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

  Raises:
    UserError: as `targets`.
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
