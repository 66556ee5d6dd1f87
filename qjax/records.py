"""What a run was and what it measured: a record as JSON, metrics as JSON lines and TensorBoard events.

Tables and figures are drawn from these files alone.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import psutil
import tensorboardX

from qjax import files
from qjax.errors import UserError

RECORD = 'record.json'
METRICS = 'metrics.jsonl'
EVENTS = 'tensorboard'
LIBRARIES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def environment() -> dict[str, Any]:
  """Versions, devices and the command: what someone needs to run it again."""
  devices = jax.devices()
  return {
      'command': [Path(sys.argv[0]).name, *sys.argv[1:]],
      'python': platform.python_version(),
      'machine': f'{platform.system()} {platform.machine()}, {os.cpu_count()} cores',
      'versions': {name: importlib.metadata.version(name) for name in LIBRARIES},
      'devices': {'platform': devices[0].platform, 'kind': devices[0].device_kind, 'count': len(devices)},
  }


def peak_memory() -> dict[str, int]:
  """Bytes: peak resident memory of this process and, where the device tells, peak device memory."""
  unit = 1 if sys.platform == 'darwin' else 1024
  peak = {'host': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    peak['device'] = stats['peak_bytes_in_use']
  return peak


def resident_bytes() -> int:
  """Bytes of this process in memory now."""
  return psutil.Process().memory_info().rss


@dataclasses.dataclass
class Record:
  """The record of one run, rewritten whole at every change of state."""

  path: Path
  fields: dict[str, Any]

  def update(self, **fields: Any) -> None:
    self.fields |= fields
    files.write_json(self.path, self.fields)


class Metrics:
  """Appends measurements by step to `metrics.jsonl` and to TensorBoard.

  On resume everything after the restored step is cut off first, because it will be measured again; so is
  that step's own evaluation if it is still to come (`is_scored` False). The events are then drawn anew: they
  are written some seconds late, so that a run that was killed has lost its last ones.
  """

  def __init__(self, directory: Path, after_step: int | None = None, is_scored: bool = True):

    def is_kept(row: Mapping[str, Any]) -> bool:
      assert after_step is not None
      return row['step'] < after_step or (row['step'] == after_step and (is_scored or row['kind'] != 'eval'))

    kept = [] if after_step is None else [row for row in read_metrics(directory) if is_kept(row)]
    with files.replacing(directory / METRICS) as file:
      file.writelines(json.dumps(row) + '\n' for row in kept)
    self._file = open(directory / METRICS, 'a')  # noqa: SIM115 (closed by `close`)
    shutil.rmtree(directory / EVENTS, ignore_errors=True)
    self._events = tensorboardX.SummaryWriter(str(directory / EVENTS), flush_secs=5)
    for row in kept:
      self._draw(row)

  def write(self, step: int, kind: str, values: Mapping[str, float | int]) -> None:
    """One line {'step', 'kind', …}, in the file when this returns; infinities and NaN are written as null."""
    row = {'step': step, 'kind': kind} | files.plain(values)
    self._file.write(json.dumps(row) + '\n')
    self._file.flush()
    self._draw(row)

  def _draw(self, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
      if name not in ('step', 'kind') and value is not None:
        self._events.add_scalar(f'{row["kind"]}/{name}', value, row['step'])

  def close(self) -> None:
    self._file.close()
    self._events.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
  """The rows of a run, without a last line that a crash cut short."""
  path = directory / METRICS
  rows = []
  if path.exists():
    for line in path.read_text().splitlines():
      try:
        rows.append(json.loads(line))
      except json.JSONDecodeError:
        break
  return rows


def read_record(directory: Path) -> dict[str, Any] | None:
  """The record in a run's directory, None if there is none."""
  path = directory / RECORD
  if not path.exists():
    return None
  try:
    record = json.loads(path.read_text())
    missing = {'meaning', 'status'} - set(record)
    if missing:
      raise ValueError(f'{", ".join(sorted(missing))} missing')
    return record
  except (TypeError, ValueError) as error:
    raise UserError(
      f'{path} is damaged ({error}); move it away, or train anew with --restart, which keeps it'
    ) from None


def human_bytes(count: float) -> str:
  """'512 B', '1.5 KiB', '128.3 MiB', '12.80 GiB'."""
  if count < 1024:
    return f'{int(count)} B'
  for unit, size in (('KiB', 2**10), ('MiB', 2**20)):
    if count < size * 1024:
      return f'{count / size:.1f} {unit}'
  return f'{count / 2**30:.2f} GiB'
