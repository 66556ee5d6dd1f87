"""Chips that programs are compiled for without being there, and what their makers say of them.

Compilers for TPUs and NVIDIA GPUs run on any machine (`pip install 'qjax[plan]'`). They may abort on a
program that they can't compile, and some settings must be made before JAX starts, so each compilation runs in
a process of its own: `call` starts one and returns what a function gives back there.
"""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qjax.errors import UserError, nearest

GIB = 2**30
# Bytes a second between host memory and a chip over PCIe 4.0 x16, as measured copies reach it; of TPU hosts
# no figure is published.
HOST_BANDWIDTH = 25e9


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device, from data sheets; rates are peaks without sparsity.

  Attributes:
    name: as commands take it.
    kind: 'tpu', 'gpu' or 'cpu'.
    memory_bytes: what a program may use: the compiler's limit on a TPU, all of a GPU's.
    bandwidth: of that memory, bytes a second; 0 is unknown.
    flops: operations a second by dtype of the operands, sums in float32 or int32.
    target: a TPU topology ('v5e:1x1'), a GPU's compute capability ('9.0'), '' for a CPU.
    cores: streaming multiprocessors of a GPU.
    l2_bytes: a GPU's second-level cache.
    clock_ghz: a GPU's boost clock.
  """

  name: str
  kind: str
  memory_bytes: int
  bandwidth: float
  flops: Mapping[str, float]
  target: str = ''
  cores: int = 0
  l2_bytes: int = 0
  clock_ghz: float = 0.0

  @property
  def capability(self) -> int:
    """A GPU's compute capability as one number, 89 for 8.9; 0 for others."""
    return int(self.target.replace('.', '')) if self.kind == 'gpu' else 0


def _tpu(name: str, target: str, gib: float, bandwidth: float, bfloat16: float, int8: float) -> Chip:
  flops = {'bfloat16': bfloat16 * 1e12, 'float32': bfloat16 * 1e12 / 6, 'int8': int8 * 1e12}
  return Chip(name, 'tpu', int(gib * GIB), bandwidth * 1e9, flops, target)


def _gpu(
  name: str, capability: str, gib: float, bandwidth: float, half: float, single: float, int8: float,
  cores: int, l2_mib: int, clock: float,
) -> Chip:  # fmt: skip
  flops = {'bfloat16': half * 1e12, 'float16': half * 1e12, 'float32': single * 1e12, 'int8': int8 * 1e12}
  return Chip(
    name, 'gpu', int(gib * GIB), bandwidth * 1e9, flops, capability, cores, l2_mib * 2**20, clock
  )


# TPU: cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x), memory as libtpu enforces it; one of the two cores of
# a tpu7x chip is a device. float32 takes six passes of bfloat16. GPU: NVIDIA's data sheets; float32 is
# without TF32, half precision with float32 sums (a GeForce halves its rate for that).
CHIPS = {
  chip.name: chip
  for chip in (
    _tpu('v5e', 'v5e:1x1', 15.75, 819, 197, 394),
    _tpu('v5p', 'v5p:1x1x1', 95.74, 2765, 459, 918),
    _tpu('v6e', 'v6e:1x1', 31.25, 1640, 918, 1836),
    _tpu('tpu7x', 'tpu7x:1x1x1', 94.75, 3690, 1153, 1153),
    _tpu('v4', 'v4:1x1x1', 15.25, 614, 137.5, 137.5),  # one of two cores, with half of a chip's memory
    _gpu('a100', '8.0', 80, 2039, 312, 19.5, 624, 108, 40, 1.41),
    _gpu('a100_40gb', '8.0', 40, 1555, 312, 19.5, 624, 108, 40, 1.41),
    _gpu('l4', '8.9', 24, 300, 121, 30.3, 242, 58, 48, 2.04),
    _gpu('rtx4090', '8.9', 24, 1008, 165, 82.6, 661, 128, 72, 2.52),
    _gpu('l40s', '8.9', 48, 864, 362, 91.6, 733, 142, 96, 2.52),
    _gpu('h100', '9.0', 80, 3352, 989, 66.9, 1979, 132, 50, 1.98),
    _gpu('h200', '9.0', 141, 4800, 989, 66.9, 1979, 132, 50, 1.98),
    Chip('cpu', 'cpu', 0, 0.0, {}),
  )
}
ALIASES = {'sm80': 'a100', 'sm89': 'rtx4090', 'sm90': 'h100', 'v7x': 'tpu7x', 'a100_80gb': 'a100'}

# Shared memory of a core and of a block in bytes, threads of a core, float32 units of a core.
_SM = {80: (167936, 166912, 2048, 64), 89: (102400, 101376, 1536, 128), 90: (233472, 232448, 2048, 128)}


def find(name: str) -> Chip:
  """The chip of a name.

  Raises:
    UserError: there is none, with those there are.
  """
  name = name.strip().lower()
  found = CHIPS.get(ALIASES.get(name, name))
  if found is None:
    known = [*CHIPS, *ALIASES]
    raise UserError(f'there is no chip {name!r}{nearest(name, known)}; there are {", ".join(known)}')
  return found


def devices(chip: Chip) -> list[Any]:
  """Devices to put abstract arguments on; in a process that `call` started, for all but a CPU.

  Raises:
    UserError: the compiler is not installed.
  """
  import jax
  from jax.experimental import topologies

  if chip.kind == 'cpu':
    return jax.devices('cpu')[:1]
  try:
    if chip.kind == 'tpu':
      found = topologies.get_topology_desc(
        platform='tpu', topology_name=chip.target, chips_per_host_bounds=[1, 1, 1]
      )
    else:
      found = topologies.get_topology_desc(
        platform='cuda', target_config=gpu_config(chip), topology='1x1x1'
      )
  except Exception as error:
    raise UserError(
      f"the compiler for {chip.name} is not here ({str(error).splitlines()[0]}); pip install 'qjax[plan]'"
    ) from error
  return list(found.devices)[:1]


def gpu_config(chip: Chip) -> str:
  """XLA's description of a GPU (`GpuTargetConfigProto` as text)."""
  core, block, threads, units = _SM[chip.capability]
  major, minor = chip.target.split('.')
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {core} threads_per_core_limit: {threads} core_count: {chip.cores}
      fpus_per_core: {units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {chip.l2_bytes} clock_rate_ghz: {chip.clock_ghz}
      device_memory_size: {chip.memory_bytes} shared_memory_per_block_optin: {block}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 8 }}
    runtime_version {{ major: 12 minor: 8 }}
    device_description_str: "{chip.name}"
  """


# What a process must have in its environment before JAX starts, to compile for a chip that is not there.
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_ID': '0',
  'TF_CPP_MIN_LOG_LEVEL': '2',
}


class CompileError(Exception):
  """A child process found no result; the message is the reason in one line."""


def call(function: str, arguments: Mapping[str, Any], timeout: float = 1800) -> Any:
  """What `function` ('package.module:name') returns for keyword arguments, in a process of its own.

  Arguments and result pass through JSON. What the child writes to stdout is not shown.

  Raises:
    CompileError: it raised, was killed or took more than `timeout` seconds.
    UserError: it raised one.
  """
  with tempfile.TemporaryDirectory() as folder:
    result = Path(folder) / 'result.json'
    command = [sys.executable, '-m', 'qjax.chips', function, json.dumps(dict(arguments)), str(result)]
    try:
      done = subprocess.run(
        command, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
      )
    except subprocess.TimeoutExpired:
      raise CompileError(f'took more than {timeout:g} s') from None
    if not result.exists():
      raise CompileError(_why(done.returncode, done.stderr))
    found = json.loads(result.read_text(encoding='utf-8'))
  if 'user_error' in found:
    raise UserError(found['user_error'])
  if 'error' in found:
    raise CompileError(found['error'])
  return found['value']


def _why(status: int, stderr: str) -> str:
  """The reason of a process that left nothing behind."""
  fatal = [line for line in stderr.splitlines() if line.startswith(('F0', 'F1')) or 'error:' in line]
  last = (fatal or stderr.strip().splitlines() or ['it said nothing'])[-1 if not fatal else 0]
  ended = f'killed by {signal.Signals(-status).name}' if status < 0 else f'status {status}'
  return f'the compiler ended with {ended}: {last.strip()[:300]}'


def _main(function: str, arguments: str, where: str) -> None:
  """In the child: calls and leaves the result as JSON."""
  module, _, name = function.partition(':')
  found: dict[str, Any]
  try:
    found = {'value': getattr(importlib.import_module(module), name)(**json.loads(arguments))}
  except UserError as error:
    found = {'user_error': str(error)}
  except Exception as error:
    text = f'{type(error).__name__}: {error}'.splitlines()
    found = {'error': ' '.join(line.strip() for line in text[:3] if line.strip())[:500]}
  Path(where).write_text(json.dumps(found), encoding='utf-8')


if __name__ == '__main__':
  _main(*sys.argv[1:])
