"""A tiny model, a tiny data set and a config for both, on disk: what tests of training and commands need."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tokenizers
from ml_collections import ConfigDict
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from configs import common
from qjax import build, train
from qjax.models.config import ModelConfig
from tests.io import model_files

# Three shapes of projections, because each is compiled for itself.
CONFIG = ModelConfig(
  vocab_size=288, num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=32,
  context_length=64,
)  # fmt: skip
TEMPLATE = '{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}'
ROWS = 12


def write_model(directory: Path, config: ModelConfig = CONFIG, seed: int = 0) -> Path:
  """A Hugging Face directory with random weights, a tokenizer of bytes and a chat template."""
  tensors = model_files.hf_tensors(config, model_files.random_params(config, seed))
  model_files.write_hf(directory, model_files.hf_config(config), tensors)
  pieces = [*model_files.SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
  backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in model_files.SPECIAL])
  backend.save(str(directory / 'tokenizer.json'))
  settings = {'eos_token': model_files.SPECIAL[1], 'chat_template': TEMPLATE}
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
  return directory


def write_data(path: Path, rows: int = ROWS) -> Path:
  """Questions with short answers; three fill a row of 32 slots, so an epoch is one batch of four rows."""
  lines = ({'prompt': f'q{i:02}', 'completion': 'abcdefg'[i % 7] * (1 + i % 5)} for i in range(rows))
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return path


def write(directory: Path, config: ModelConfig = CONFIG) -> None:
  """The model in `directory`/model and the data in `directory`/data.jsonl, which `config` below expects."""
  directory.mkdir(parents=True, exist_ok=True)
  write_model(directory / 'model', config)
  write_data(directory / 'data.jsonl')


def overrides(directory: Path, **more: Any) -> dict[str, Any]:
  """What differs from a lab note in configs/, by dotted path."""
  return {
    'model.path': str(directory / 'model'),
    'data.path': str(directory / 'data.jsonl'),
    'data.seq_len': 32,
    'batch_size': 4,
    'micro_batch': 8,
    'num_steps': 12,
    'eval_every': 6,
    'checkpoint_every': 3,
    'optimizer.warmup_steps': 2,
    'optimizer.learning_rate': 1e-2,
  } | {name.replace('__', '.'): value for name, value in more.items()}


def config(directory: Path, method: str = 'lora', /, **more: Any) -> ConfigDict:
  """A config of the method for what `write` wrote; `more` sets fields, with '__' between levels."""
  filled = common.base()
  filled.name = filled.method = method
  if method != 'full':
    common.add_lora(filled)
    filled.lora.rank = 4
  if method == 'qlora':
    filled.storage.projections = 'nf4:block=32,dq'
  with filled.ignore_type():
    filled.update_from_flattened_dict(overrides(directory, **more))
  return filled


def run(directory: Path, method: str = 'lora', /, *, workdir: str = 'run', **more: Any) -> train.Run:
  return build.run(config(directory, method, **more), directory / workdir)


class Prepared(NamedTuple):
  """A run with everything that a step takes."""

  run: train.Run
  state: train.State
  frozen: Any
  compiled: train.Compiled
  key: jax.Array

  def batches(self) -> Any:
    """The stream that `train.train` would see, placed."""
    stream = train.train_iterator(self.run.dataset.train, self.run.data)
    return (train.place_batch(batch, self.run.loop.accumulate, self.run.mesh) for batch in stream)

  def fresh_state(self) -> train.State:
    """A copy, because a step takes its state's buffers."""
    return jax.tree.map(lambda x: jax.device_put(x.copy(), x.sharding), self.state)


def prepare(run: train.Run) -> Prepared:
  """What `train.train` does before its first step."""
  with jax.set_mesh(run.mesh):
    trainable, frozen = train.prepare(run)
    state = train.init_state(run, trainable)
    state = jax.device_put(state, train.state_shardings(run, state))
    key = jax.random.key(run.loop.seed + 1)
    like = train.place_batch(train._blank(run.data, (0, 1)), run.loop.accumulate, run.mesh)
    return Prepared(run, state, frozen, train.compile_step(run, state, frozen, like, key), key)


def take_steps(prepared: Prepared, count: int) -> tuple[train.State, list[dict[str, Any]]]:
  """The state after `count` steps of a run, and the metrics of each as Python numbers."""
  state, batches, found = prepared.fresh_state(), prepared.batches(), []
  with jax.set_mesh(prepared.run.mesh):
    for _ in range(count):
      state, metrics = prepared.compiled.call(state, prepared.frozen, next(batches), prepared.key)
      found.append({name: x.item() for name, x in jax.device_get(metrics)._asdict().items()})
  return state, found

