"""In which bits each weight rests: rules over paths, and one weight put to rest."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import trees
from qjax.errors import UserError
from qjax.quant import qtensor
from qjax.quant.formats import Scheme, parse_scheme

PROJECTIONS = r'layers/.*/kernel'
Rules = tuple[tuple[str, str], ...]

_quantize = jax.jit(qtensor.quantize, static_argnums=1)


def rules(projections: str, embeddings: str, first: Rules = ()) -> Rules:
  """`first`, then projections, then embedding and head; vectors in float32."""
  return (
    *first,
    (PROJECTIONS, projections),
    ('(embed|head)/.*', embeddings),
    ('.*/(scale|bias)', 'float32'),
  )


def plan(given: Rules, paths: Sequence[str], other_kinds: Collection[str] = ()) -> dict[str, str]:
  """The kind of every parameter: a dtype, a scheme, or one of `other_kinds`.

  Raises:
    UserError: a rule that matches nothing or is never used, a parameter without a rule, a misspelt kind, or a
      scheme for what is no projection.
  """
  kinds = trees.match_rules(given, list(paths), 'storage rules')
  for path, kind in kinds.items():
    scheme = None if kind in other_kinds else scheme_of(kind, path)
    if scheme is not None and not scheme.numbers.is_float and not trees.is_match(PROJECTIONS, path):
      raise UserError(f'{path} is no projection (layers/…/kernel) and cannot rest as {kind!r}; use a dtype')
  return kinds


def scheme_of(kind: str, path: str) -> Scheme | None:
  """The scheme that a kind names, None for float32.

  Raises:
    UserError: with the path and the grammar.
  """
  if kind == 'float32':
    return None
  try:
    return parse_scheme(kind)
  except UserError as error:
    raise UserError(f'storage of {path}: {error}. A dtype (float32, bfloat16, float16) will do') from None


def checked(w: Any, path: str, dtype: jnp.dtype) -> jax.Array:
  """w in `dtype`, on the device.

  Raises:
    UserError: it holds a NaN or an infinity, or becomes infinite in `dtype`.
  """
  if isinstance(w, np.ndarray):
    if not np.isfinite(w).all():
      where = tuple(int(i) for i in np.argwhere(~np.isfinite(w))[0])
      raise UserError(
        f'{path} holds {w[where]} at {where}: the model file is damaged or was saved from a failed run'
      )
    if dtype == jnp.float16 and np.abs(w).max(initial=0) > np.finfo(np.float16).max:
      raise UserError(
        f'{path} holds {np.abs(w).max():g}, beyond the largest float16 (65504); use bfloat16 or float32'
      )
  return jnp.asarray(w, dtype)


def waiting_nbytes(shape: tuple[int, ...], kind: str, path: str) -> int:
  """Bytes of a stack of this kind that would wait in host memory: of its codes, or all of a plain one."""
  layer = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
  found = jax.eval_shape(lambda w: rest(w, kind, path), layer)
  return shape[0] * trees.nbytes(found.codes if isinstance(found, qtensor.QTensor) else found)


def rest(w: Any, kind: str, path: str) -> Any:
  """One weight, or one layer of it, at rest; a vector rests plain, in the dtype that a kind names.

  Raises:
    UserError: as `checked`.
  """
  scheme = scheme_of(kind, path)
  if scheme is None:
    return checked(w, path, jnp.dtype('float32'))
  # A weight beyond the largest float16 is refused by `checked`; other schemes quantize from float32.
  dtype = jnp.dtype(scheme.format if scheme.numbers.is_float else 'float32')
  plain = checked(w, path, dtype)
  return plain if w.ndim < 2 else _quantize(plain, scheme)
