"""Files that a reader, or a crash, finds whole: the old one or the new one."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
  """A file that takes the place of `path` when it is whole: a reader, or a crash, never finds half of it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_name(f'.{path.name}.new')
  with open(beside, 'w', encoding='utf-8') as file:
    yield file
    file.flush()
    os.fsync(file.fileno())
  os.replace(beside, path)


def write_json(path: Path, value: Any) -> None:
  """Writes `plain(value)` so that a reader, or a crash, finds the old file or the new one."""
  with replacing(path) as file:
    json.dump(plain(value), file, indent=2, allow_nan=False)
    file.write('\n')


def plain(value: Any) -> Any:
  """The value with None for infinities and NaN, which JSON does not have, all the way down."""
  if isinstance(value, Mapping):
    return {name: plain(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
