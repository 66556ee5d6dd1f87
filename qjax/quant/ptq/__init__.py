"""Methods of post-training quantization by name.

  rtn                          rounding to nearest; rtn:clip=activation_weighted clips each channel first
  gptq:act_order,damp=0.01     hqq:rounds=20,p=0.7      loftq:rank=16,rounds=5,weighted,clip
  decompose:share=0.01         smoothquant:alpha=0.5+rtn       awq:grid=20+gptq

Reparametrizations (smoothquant, awq) come first, joined by '+'; the last one puts weights to rest.
"""

import dataclasses
from typing import Any

from qjax.errors import UserError, nearest
from qjax.quant.ptq.awq import AWQ
from qjax.quant.ptq.base import LayerData, LayerResult, Method
from qjax.quant.ptq.decompose import Decompose
from qjax.quant.ptq.gptq import GPTQ
from qjax.quant.ptq.hqq import HQQ
from qjax.quant.ptq.lowrank import LowRank
from qjax.quant.ptq.rtn import Nearest
from qjax.quant.ptq.smoothquant import SmoothQuant

__all__ = ['GRAMMAR', 'LayerData', 'LayerResult', 'Method', 'make']

REPARAMETRIZATIONS: dict[str, Any] = {'smoothquant': SmoothQuant, 'awq': AWQ}
QUANTIZERS: dict[str, Any] = {
  'rtn': Nearest,
  'gptq': GPTQ,
  'hqq': HQQ,
  'loftq': LowRank,
  'decompose': Decompose,
}
GRAMMAR = (
  f'a method is QUANTIZER or REPARAMETRIZATION+QUANTIZER with quantizers {", ".join(QUANTIZERS)} and '
  f"reparametrizations {', '.join(REPARAMETRIZATIONS)}; for instance 'smoothquant:alpha=0.5+rtn' or "
  "'gptq:act_order'"
)


def make(spelling: str) -> Method:
  """The method of a spelling.

  Raises:
    UserError: an unknown name or option, or a value out of range, with the grammar.
  """
  *before, last = spelling.split('+')
  steps = tuple(_step(part, REPARAMETRIZATIONS, spelling, 'reparametrization') for part in before)
  return Method(steps, _step(last, QUANTIZERS, spelling, 'quantizer'))


def _step(part: str, table: dict[str, Any], spelling: str, what: str) -> Any:
  def refuse(reason: str) -> UserError:
    return UserError(f'method {spelling!r}: {reason}. {GRAMMAR}')

  name, colon, tail = part.partition(':')
  if name not in table:
    raise refuse(f'{name!r} is no {what}{nearest(name, table)}')
  if colon and not tail:
    raise refuse('no option follows the colon')
  kinds: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(table[name])}
  values: dict[str, Any] = {}
  for option in tail.split(',') if tail else ():
    key, equals, value = option.partition('=')
    if key not in kinds:
      known = f'; it has {", ".join(kinds)}' if kinds else ''
      raise refuse(f'{name} has no option {key!r}{known}')
    if key in values:
      raise refuse(f'{key} is given twice')
    kind = kinds[key]
    try:
      values[key] = {'true': True, 'false': False, '': True}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
      raise refuse(f'{key}={value} is no {kind.__name__}') from None
    if kind is not bool and not equals:
      raise refuse(f'{key} wants a value, {key}=…')
  return table[name](**values)
