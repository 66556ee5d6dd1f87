"""Which kernel runs: one table of them all, and what stands in the way of each.

A name that the user gives (`KERNELS`) and the platform that a program is compiled for lead to a row of
`TABLE`, or to none, which means that XLA compiles the plain product. A new kernel is a new row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import backend

from pallas_kernels import target
from pallas_kernels.grouped_adapter import gpu as grouped_gpu
from pallas_kernels.grouped_adapter import tpu as grouped_tpu
from pallas_kernels.int8_matmul import gpu as int8_gpu
from pallas_kernels.int8_matmul import tpu as int8_tpu
from pallas_kernels.low_bit_matmul import gpu as low_bit_gpu
from pallas_kernels.low_bit_matmul import tpu as low_bit_tpu
from pallas_kernels.quantize import gpu as quantize_gpu
from pallas_kernels.quantize import tpu as quantize_tpu

# What a user may ask for. 'auto' is the platform's kernel where one serves, else 'xla'; every other name runs
# or raises.
KERNELS = {
  'xla': "XLA's own products; a weight in few bits is decoded first",
  'pallas': 'the kernel of the platform that the program is compiled for',
  'pallas_tpu': 'the TPU kernel, where a TPU is compiled for',
  'pallas_gpu': 'the Triton kernel, where an NVIDIA GPU is compiled for',
  'pallas_interpret': "the TPU's kernel, interpreted on a CPU, which is slow and for tests",
}
INTERPRETED = 'pallas_interpret'
# Where a name can run at all; the others can anywhere.
PLATFORMS = {'pallas': ('tpu', 'gpu'), 'pallas_tpu': ('tpu',), 'pallas_gpu': ('gpu',), INTERPRETED: ('cpu',)}


@dataclasses.dataclass(frozen=True)
class Implementation:
  """A kernel.

  Attributes:
    op: what it computes; those of one op share signatures and a reference.
    name: 'pallas_tpu' or 'pallas_gpu'.
    platform: 'tpu' or 'gpu'.
    dtypes: names of the dtypes of activations that it takes.
    obstacle: why it can't serve a layout on a kind of device, None if it can. What a layout is depends on
      the op; '' is a device of no known kind.
    products: its functions by name, for instance 'matmul' and 'matmul_transposed'.
  """

  op: str
  name: str
  platform: str
  dtypes: tuple[str, ...]
  obstacle: Callable[[Any, str], str | None]
  products: Mapping[str, Callable[..., Any]]

  def why_not(self, layout: Any, dtype: Any, device_kind: str = '') -> str | None:
    """Why it can't serve activations in `dtype` and a layout on a device of that kind, None if it can."""
    name = jnp.dtype(dtype).name
    if name not in self.dtypes:
      return f'a {self.platform.upper()} kernel has no products in {name}, only in {", ".join(self.dtypes)}'
    return self.obstacle(layout, device_kind)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A kernel and how it runs."""

  implementation: Implementation
  interpret: bool = False

  @property
  def told(self) -> str:
    """What runs, for records: 'pallas_tpu: int8_matmul'."""
    return f'{INTERPRETED if self.interpret else self.implementation.name}: {self.implementation.op}'

  def product(self, name: str) -> Callable[..., Any]:
    return self.implementation.products[name]


# Ops, and what their kernels take as a layout: that of a weight's bytes, nothing, the inputs of a token, and
# sizes.
LOW_BIT = 'low_bit_matmul'
INT8 = 'int8_matmul'
TOKENS = 'quantize_tokens'
GROUPED_ADAPTER = 'grouped_adapter'

TABLE = (
  Implementation(
    LOW_BIT, 'pallas_tpu', 'tpu', ('bfloat16', 'float32'), low_bit_tpu.obstacle,
    {'matmul': low_bit_tpu.matmul, 'matmul_transposed': low_bit_tpu.matmul_transposed},
  ),
  Implementation(
    LOW_BIT, 'pallas_gpu', 'gpu', ('bfloat16', 'float16', 'float32'),
    lambda layout, kind: low_bit_gpu.obstacle(layout),
    {'matmul': low_bit_gpu.matmul, 'matmul_transposed': low_bit_gpu.matmul_transposed},
  ),
  Implementation(
    INT8, 'pallas_tpu', 'tpu', ('int8',), lambda layout, kind: int8_tpu.obstacle(kind),
    {'matmul': int8_tpu.matmul},
  ),
  Implementation(
    INT8, 'pallas_gpu', 'gpu', ('int8',), lambda layout, kind: None, {'matmul': int8_gpu.matmul}
  ),
  Implementation(
    TOKENS, 'pallas_tpu', 'tpu', ('bfloat16', 'float32'),
    lambda inputs, kind: quantize_tpu.tokens_obstacle(inputs), {'tokens': quantize_tpu.tokens},
  ),
  Implementation(
    TOKENS, 'pallas_gpu', 'gpu', ('bfloat16', 'float16', 'float32'),
    lambda inputs, kind: quantize_gpu.tokens_obstacle(inputs), {'tokens': quantize_gpu.tokens},
  ),
  Implementation(
    GROUPED_ADAPTER, 'pallas_tpu', 'tpu', ('bfloat16', 'float32'),
    lambda sizes, kind: grouped_tpu.obstacle(sizes), {'add': grouped_tpu.add},
  ),
  Implementation(
    GROUPED_ADAPTER, 'pallas_gpu', 'gpu', ('bfloat16', 'float16', 'float32'),
    lambda sizes, kind: grouped_gpu.obstacle(sizes), {'add': grouped_gpu.add},
  ),
)  # fmt: skip


def target_platform() -> str:
  """What a program traced now is compiled for: 'tpu', 'gpu' (of NVIDIA), 'rocm' or 'cpu'.

  The devices of the ambient mesh decide (`jax.set_mesh`), so that a program compiled ahead of time for chips
  that are not there gets their kernels; without a mesh, JAX's default backend. JAX calls AMD's GPUs 'gpu',
  too, but no kernel here was written or compiled for them.
  """
  platform, kind = target.device().platform, target.device().device_kind.lower()
  if platform == 'gpu':
    is_here = jax.default_backend() == 'gpu'
    version = backend.get_backend().platform_version.lower() if is_here else ''
    is_amd = 'rocm' in version or any(word in kind for word in ('amd', 'instinct', 'radeon', 'gfx'))
    return 'rocm' if is_amd else 'gpu'
  return 'gpu' if platform == 'cuda' else platform


class Unserved(NotImplementedError):
  """A kernel was asked for by name and can't serve; says why, and what does."""


def unavailable(kernels: str, platform: str) -> str | None:
  """Why no kernel of that name runs on a platform of `target_platform`, None if some may."""
  able = PLATFORMS.get(kernels, (platform,))
  if platform in able:
    return None
  devices = {'tpu': 'a TPU', 'gpu': 'an NVIDIA GPU', 'cpu': 'a CPU', 'rocm': 'a GPU of AMD'}
  return f'it runs on {" or ".join(devices[each] for each in able)}, not on {devices.get(platform, platform)}'


def explain(
  op: str, kernels: str, layout: Any, dtype: Any, obstacle: str | None = None, platform: str | None = None,
  is_demand: bool = True,
) -> Choice | str:  # fmt: skip
  """The kernel that computes `op`, or why XLA does.

  Args:
    op: of a row of the table.
    kernels: 'auto' or a name in `KERNELS`.
    layout: what the op's kernels take as the static part of a weight.
    dtype: of the activations.
    obstacle: what the caller knows to stand in every kernel's way.
    platform: what is compiled for; None is `target_platform()`.
    is_demand: whether a kernel that is asked for by name has to serve, rather than leave it to XLA.

  Raises:
    Unserved: a kernel was asked for by name and can't serve.
  """
  found = _found(op, kernels, layout, dtype, obstacle, platform)
  if isinstance(found, Choice) or kernels in ('auto', 'xla') or not is_demand:
    return found
  raise Unserved(
    f"kernels = {kernels!r}: {found}; use kernels = 'auto' or 'xla', which multiply by XLA's own product"
  )


def choose(
  op: str, kernels: str, layout: Any, dtype: Any, obstacle: str | None = None, platform: str | None = None
) -> Choice | None:
  """As `explain`, for callers that need no reason: None where XLA computes it."""
  found = explain(op, kernels, layout, dtype, obstacle, platform)
  return found if isinstance(found, Choice) else None


def _found(
  op: str, kernels: str, layout: Any, dtype: Any, obstacle: str | None, platform: str | None
) -> Choice | str:
  if kernels == 'xla':
    return "kernels = 'xla'"
  platform = platform or target_platform()
  rows = [row for row in TABLE if row.op == op]
  if kernels in ('pallas_tpu', 'pallas_gpu'):
    rows = [row for row in rows if row.name == kernels]
    if reason := unavailable(kernels, platform):
      return reason
  else:
    is_simulated = kernels == INTERPRETED and platform == 'cpu'
    rows = [row for row in rows if row.platform == ('tpu' if is_simulated else platform)]
  reasons = []
  for row in rows:
    reason = obstacle or row.why_not(layout, dtype, target.device().device_kind)
    if reason is None:
      return Choice(row, kernels == INTERPRETED)
    reasons.append(reason)
  others = ', '.join(sorted({row.name for row in TABLE if row.op == op}))
  here = f', {INTERPRETED} runs here' if platform == 'cpu' else ''
  device = 'GPU of AMD' if platform == 'rocm' else platform
  return '; '.join(reasons) or (
    f'no kernel of {op} runs on a {device}; {others} compile for other platforms{here}'
  )
