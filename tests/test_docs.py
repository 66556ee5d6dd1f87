"""What the documents tell a reader to run exists, and nothing names a path of one machine."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ('README.md', 'CONTRIBUTING.md')

TEXT_SUFFIXES = {'', '.cfg', '.json', '.md', '.py', '.sh', '.toml', '.txt', '.yaml', '.yml'}
# A leading slash that continues a word, a URL or an expression is no absolute path.
MACHINE_PATH = re.compile(
  r'(?<![\w.}~$)/-])/(?:home|Users|root|tmp|work|workspace|scratch|mnt)/|\b[A-Z]:\\Users\\'
)


def _commands(markdown: str) -> list[str]:
  """The shell commands in code spans and fenced blocks, without prompts and comments."""
  fence = re.compile(r'^ *```.*?\n(.*?)^ *```', re.MULTILINE | re.DOTALL)
  lines = [line for block in fence.findall(markdown) for line in block.replace('\\\n', ' ').splitlines()]
  lines += re.findall(r'`([^`\n]+)`', fence.sub('', markdown))
  return [re.sub(r'(^|\s)#.*', '', line).strip().removeprefix('$ ') for line in lines]


def _make_targets(command: str) -> list[str]:
  """The targets of a make command; variables, flags and other programs are none."""
  found = []
  for part in re.split(r'&&|\|\||[;|]', re.sub(r"'[^']*'|\"[^\"]*\"", '', command)):
    words = part.split()
    if words and words[0] == 'make':
      found += [word for word in words[1:] if re.fullmatch(r'[a-z][\w-]*', word)]
  return found


def missing(markdown: str, makefile: str, root: pathlib.Path) -> list[str]:
  """What a document mentions and the tree lacks: experiments, configs, make targets."""
  found = []
  for name in re.findall(r'python3? -m (experiments(?:\.\w+)+)', markdown):
    if not (root / (name.replace('.', '/') + '.py')).is_file():
      found.append(f'python -m {name}')
  for name in re.findall(r'(?<![\w/])configs/[\w/]+\.py', markdown):
    if not (root / name).is_file():
      found.append(name)
  targets = set(re.findall(r'^([a-z][\w-]*):', makefile, re.MULTILINE))
  for command in _commands(markdown):
    found += [f'make {target}' for target in _make_targets(command) if target not in targets]
  return found


@pytest.mark.parametrize('document', DOCUMENTS)
def test_what_a_document_mentions_exists(document: str) -> None:
  path = ROOT / document
  if not path.exists():
    pytest.skip(f'{document} is not written yet')
  absent = missing(path.read_text(encoding='utf-8'), (ROOT / 'Makefile').read_text(encoding='utf-8'), ROOT)
  assert not absent, f'{document} mentions what does not exist: {absent}'


def test_missing_names_are_found(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs' / 'lora.py').touch()
  document = """
    We make sure of it: `make test ARGS=x`, `make bake`, `configs/lora.py:tiny`, configs/absent.py, `make`.

    ```sh
    $ make train ARGS='--steps=3 make' && make broil  # make nothing
    python -m experiments.vanish --config=configs/lora.py
    ```
  """
  assert missing(document, 'test: lint\ntrain:\n', tmp_path) == [
    'python -m experiments.vanish',
    'configs/absent.py',
    'make broil',
    'make bake',
  ]


def test_no_path_of_one_machine() -> None:
  """Files that git tracks, or would, name no absolute path that only exists where they were written."""
  try:
    listing = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
      cwd=ROOT,
      capture_output=True,
      check=True,
      text=True,
    ).stdout
  except (OSError, subprocess.CalledProcessError):
    pytest.skip('not a git checkout')
  found = []
  for name in filter(None, listing.split('\0')):
    path = ROOT / name
    if path.suffix in TEXT_SUFFIXES and path.is_file():
      lines = path.read_text(encoding='utf-8').splitlines()
      found += [f'{name}:{i}: {line.strip()}' for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
  assert not found, '\n'.join(found)


def test_machine_paths_are_told_from_others() -> None:
  for folder in ('home', 'tmp', 'Users'):
    assert MACHINE_PATH.search(f'--workdir=/{folder}/me/run')
  for text in ('https://example.org/home/x', 'a/home/b', "f'{root}/home/x'", '~/mnt/x', '/proc/meminfo'):
    assert not MACHINE_PATH.search(text)
