"""Which kernel runs: one table of them all, and what stands in the way of each.

A name that the user gives (`KERNELS`) and the platform that a program is compiled for lead to a row of
`TABLE`, or to none, which means that XLA compiles the plain product. A new kernel is a new row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_adapter import gpu as grouped_gpu
from pallas_kernels.grouped_adapter import tpu as grouped_tpu
from pallas_kernels.low_bit_matmul import gpu as low_bit_gpu
from pallas_kernels.low_bit_matmul import tpu as low_bit_tpu

# What a user may ask for. 'auto' is the platform's kernel where one serves, else 'xla'; every other name runs
# or raises.
KERNELS = {
  'xla': 'dequantize, then multiply, compiled by XLA',
  'pallas': 'the kernel of the platform that the program is compiled for',
  'pallas_tpu': 'the TPU kernel, whatever the platform',
  'pallas_gpu': 'the Triton kernel for NVIDIA GPUs, whatever the platform',
  'pallas_interpret': "the platform's kernel, on a CPU the TPU's, interpreted, which is slow and for tests",
}
INTERPRETED = 'pallas_interpret'


@dataclasses.dataclass(frozen=True)
class Implementation:
  """A kernel.

  Attributes:
    op: the product that it computes; those of one op share signatures and a reference.
    name: 'pallas_tpu' or 'pallas_gpu'.
    platform: 'tpu' or 'gpu'.
    dtypes: names of the dtypes of activations that it takes.
    obstacle: why it can't serve a layout, None if it can.
    products: its functions by name, for instance 'matmul' and 'matmul_transposed'.
  """

  op: str
  name: str
  platform: str
  dtypes: tuple[str, ...]
  obstacle: Callable[[Any], str | None]
  products: Mapping[str, Callable[..., jax.Array]]

  def why_not(self, layout: Any, dtype: Any) -> str | None:
    """Why it can't multiply activations in `dtype` with a weight of this layout, None if it can."""
    name = jnp.dtype(dtype).name
    if name not in self.dtypes:
      return f'a {self.platform.upper()} kernel has no products in {name}, only in {", ".join(self.dtypes)}'
    return self.obstacle(layout)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A kernel and how it runs."""

  implementation: Implementation
  interpret: bool = False

  def product(self, name: str) -> Callable[..., jax.Array]:
    return self.implementation.products[name]


LOW_BIT, GROUPED_ADAPTER = 'low_bit_matmul', 'grouped_adapter'

TABLE = (
  Implementation(
    LOW_BIT, 'pallas_tpu', 'tpu', ('bfloat16', 'float32'), low_bit_tpu.obstacle,
    {'matmul': low_bit_tpu.matmul, 'matmul_transposed': low_bit_tpu.matmul_transposed},
  ),
  Implementation(
    LOW_BIT, 'pallas_gpu', 'gpu', ('bfloat16', 'float16', 'float32'), low_bit_gpu.obstacle,
    {'matmul': low_bit_gpu.matmul, 'matmul_transposed': low_bit_gpu.matmul_transposed},
  ),
  Implementation(
    GROUPED_ADAPTER, 'pallas_tpu', 'tpu', ('bfloat16', 'float32'), grouped_tpu.obstacle,
    {'add': grouped_tpu.add},
  ),
  Implementation(
    GROUPED_ADAPTER, 'pallas_gpu', 'gpu', ('bfloat16', 'float16', 'float32'), grouped_gpu.obstacle,
    {'add': grouped_gpu.add},
  ),
)  # fmt: skip


def target_platform() -> str:
  """What a program traced now is compiled for: 'tpu', 'gpu' or 'cpu'.

  The devices of the ambient mesh decide (`jax.set_mesh`), so that a program compiled ahead of time for chips
  that are not there gets their kernels; without a mesh, JAX's default backend.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = jax.default_backend() if device is None else device.platform
  return 'gpu' if platform in ('cuda', 'rocm') else platform


def choose(
  op: str, kernels: str, layout: Any, dtype: Any, obstacle: str | None = None, platform: str | None = None
) -> Choice | None:
  """The kernel that computes `op`, or None where XLA does.

  Args:
    op: of a row of the table.
    kernels: 'auto' or a name in `KERNELS`.
    layout: what the op's kernels take as the static part of a weight.
    dtype: of the activations.
    obstacle: what the caller knows to stand in every kernel's way.
    platform: what is compiled for; None is `target_platform()`.

  Raises:
    NotImplementedError: a kernel was asked for by name and can't serve; says why, and what does.
  """
  if kernels == 'xla':
    return None
  platform = platform or target_platform()
  rows = [row for row in TABLE if row.op == op]
  if kernels in ('pallas_tpu', 'pallas_gpu'):
    rows = [row for row in rows if row.name == kernels]
  else:
    is_simulated = kernels == INTERPRETED and platform == 'cpu'
    rows = [row for row in rows if row.platform == ('tpu' if is_simulated else platform)]
  reasons = []
  for row in rows:
    reason = obstacle or row.why_not(layout, dtype)
    if reason is None:
      return Choice(row, kernels == INTERPRETED)
    reasons.append(reason)
  if kernels == 'auto':
    return None
  others = ', '.join(sorted({row.name for row in TABLE if row.op == op}))
  why = '; '.join(reasons) or (
    f'no kernel of {op} runs on a {platform}; {others} compile for other platforms, {INTERPRETED} runs here'
  )
  raise NotImplementedError(
    f"kernels = {kernels!r}: {why}; use kernels = 'auto' or 'xla', which multiply by XLA's own product"
  )
