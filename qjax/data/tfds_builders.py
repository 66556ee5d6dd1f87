"""The vendored question-answer set as a tensorflow-datasets builder that needs no TensorFlow.

Importing this module imports tensorflow_datasets, which takes a second: import it where it is needed.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from qjax.cache import cache_dir
from qjax.data.sources import JsonlSource, held_out_rows, question_key
from qjax.data.templates import parse_example, question

DATA_FILE = pathlib.Path(__file__).with_name('construction_faq.jsonl')
HELD_OUT = 0.2
SEED = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class SplitConfig(tfds.core.BuilderConfig):
  """Which part of the questions is held out, and the seed of that choice."""

  held_out: float = HELD_OUT
  seed: int = SEED


class ConstructionFaq(tfds.core.GeneratorBasedBuilder):
  """Questions and answers about the Swedish construction trade, in English.

  Splits 'train' and 'validation' are disjoint by question. Rows keep the file's order; `line` is the row's
  line there.
  """

  VERSION = tfds.core.Version('1.0.0')
  BUILDER_CONFIGS: ClassVar[list[SplitConfig]] = [SplitConfig(name='by_question')]

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description='503 questions and answers about the Swedish construction trade, in English.',
      features=tfds.features.FeaturesDict({
        'instruction': tfds.features.Text(),
        'input': tfds.features.Text(),
        'output': tfds.features.Text(),
        'line': tfds.features.Scalar(dtype=np.int32),
      }),
      homepage='https://github.com/zaragoza-ab/swedish-construction-faq-1000',
      citation='Swedish Construction FAQ by Zaragoza AB, CC BY 4.0. doi:10.5281/zenodo.19630803',
      license='CC-BY-4.0',
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
    source = JsonlSource(DATA_FILE)
    keys = [
      question_key(question(parse_example(source[i], source.where(i))), self.builder_config.seed)
      for i in range(len(source))
    ]
    held = held_out_rows(keys, self.builder_config.held_out, DATA_FILE.name)
    return {
      'train': self._generate_examples(source, (~held).nonzero()[0]),
      'validation': self._generate_examples(source, held.nonzero()[0]),
    }

  def _generate_examples(self, source: JsonlSource, rows: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for row in map(int, rows):
      fields = {key: source[row][key] for key in ('instruction', 'input', 'output')}
      yield row, fields | {'line': int(source.where(row).rpartition(':')[2])}


def prepare(
  directory: str | os.PathLike[str] | None = None, held_out: float = HELD_OUT, seed: int = SEED
) -> ConstructionFaq:
  """The builder, with its data written under `directory` (by default the user's cache). Works offline.

  The path carries the builder's version, the data's checksum and the split, so what is found there is what
  was asked for. Data are written aside and moved into place whole: a killed run leaves nothing that is
  mistaken for data, and of several runs at once one wins and the others use its result.
  """
  root = pathlib.Path(cache_dir() if directory is None else directory) / 'tfds'
  checksum = hashlib.sha256(DATA_FILE.read_bytes()).hexdigest()[:12]
  config = ConstructionFaq.BUILDER_CONFIGS[0]
  if (held_out, seed) != (config.held_out, config.seed):
    config = SplitConfig(name=f'by_question_{held_out}_seed_{seed}', held_out=held_out, seed=seed)
  home = root / f'construction_faq-{ConstructionFaq.VERSION}-{checksum}-{config.name}'
  if not home.exists():
    root.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(prefix='.unfinished-', dir=root)
    try:
      tfds.disable_progress_bar()
      with contextlib.redirect_stdout(io.StringIO()):  # It would name a directory that is about to move.
        _builder(aside, config).download_and_prepare(file_format='array_record')
      try:
        os.replace(aside, home)
      except OSError:
        if not home.exists():
          raise
    finally:
      shutil.rmtree(aside, ignore_errors=True)
  return _builder(home, config)


def _builder(directory: str | os.PathLike[str], config: SplitConfig) -> ConstructionFaq:
  return ConstructionFaq(data_dir=os.fspath(directory), config=config, file_format='array_record')


class SplitSource:
  """One split of the prepared set, as rows of text."""

  def __init__(self, builder: ConstructionFaq, split: str):
    self._rows = builder.as_data_source(split)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._rows[int(index)]
    return {key: row[key].decode() for key in ('instruction', 'input', 'output')}

  def where(self, index: int) -> str:
    return f'{DATA_FILE.name}:{int(self._rows[int(index)]["line"])}'
