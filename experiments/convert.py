"""Turns a run of experiments.train into a model at rest that computes what training computed.

  python -m experiments.convert --run=runs/qat_int4
  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/qat_int4/model

Weights that were trained through their quantizer become its codes, with adapters inside the quantizer merged;
other weights and adapters stay as they are, unless --merge=nf4:block=64 (or another scheme, or a dtype) has
adapters added to their weights and rounded with them. The run's held-out questions are scored as it was
trained and as it is stored. <run>/model receives safetensors, their description with where they came from,
and the tokenizer. The checkpoint that scored best is converted. A run that has not finished is refused,
unless --unfinished says that what is there will do.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from experiments import cli
from qjax import build, checkpoint, convert, records, storage, train, trees
from qjax.errors import UserError
from qjax.evaluate import Score
from qjax.io import native
from qjax.io.source import load_source
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.progress import Bar, stage
from qjax.records import human_bytes

_RUN = flags.DEFINE_string('run', None, 'Working directory of a run of experiments.train.')
_MERGE = flags.DEFINE_string('merge', '', 'Scheme or dtype of weights to which adapters are added.')
_OUT = flags.DEFINE_string('out', None, 'Where the model goes; <run>/model if not given.')
_UNFINISHED = flags.DEFINE_bool('unfinished', False, 'Convert the best that a run has which is not finished.')


def main(argv: list[str]) -> int:
  del argv
  if _RUN.value is None:
    raise UserError('--run is missing; for instance --run=runs/qat_int4')
  workdir = Path(_RUN.value)
  out = Path(_OUT.value) if _OUT.value else workdir / 'model'
  native.refuse_existing(out)
  record = records.read_record(workdir)
  if record is None:
    raise UserError(f'{workdir} holds no {records.RECORD}: it is no working directory of a run')
  if record['status'] != 'finished' and not _UNFINISHED.value:
    raise UserError(
      f'{workdir} has not finished ({record["status"]}); go on with the command that began it, or give '
      '--unfinished to convert its best checkpoint so far'
    )
  run = build.run(ConfigDict(checkpoint.complete({'config': record['config']})['config']), workdir)
  if changed := checkpoint.changes(record['meaning'], run.meaning):
    raise UserError(f'{workdir} was trained on something else than is there now:\n  ' + '\n  '.join(changed))
  if _MERGE.value:
    storage.scheme_of(_MERGE.value, '--merge')
    if run.method.trainable.lora is None:
      raise UserError(f'--merge: there is no adapter to merge; {run.method.name} trained none')
  run = dataclasses.replace(run, method=dataclasses.replace(run.method, distillation=None))  # no teacher
  with stage('reading the model'):
    trainable, frozen = train.prepare(run)
  saved = checkpoint.Checkpoints(workdir / 'checkpoints', run.meaning)
  step = saved.best_step
  trainable = saved.best(trainable)
  saved.close()
  if step == 0:
    print('note: step 0 scored best, so what is converted has not been trained', file=sys.stderr)
  numerics = run.method.numerics
  with stage(f'converting step {step}'):
    variables = convert.convert(run.method, trees.combine(trainable, frozen), run.shapes)
  survived: dict[str, Any] = {}
  if _MERGE.value:
    with stage(f'merging adapters into {_MERGE.value}'):
      variables, survived = convert.merge(variables, (('.*', _MERGE.value),), run.shapes)
  at_rest = run.model.clone(numerics=Numerics(numerics.policy, numerics.kernels, numerics.activations))
  with jax.set_mesh(run.mesh):
    trained = _score('as it was trained', run, run.model, trainable, frozen)
    stored = _score('as it is stored', run, at_rest, {}, variables)
  source = load_source(record['config']['model']['path'])
  what = {'name': source.name, 'fingerprint': source.fingerprint, 'run': str(workdir), 'step': step}
  origin = what | {name: record.get(name) for name in ('config', 'meaning', 'trained')}
  origin |= {'nll': {'trained': trained.nll, 'stored': stored.nll}}
  if _MERGE.value:
    kept = {path: [float(share) for share in each] for path, each in survived.items()}
    origin |= {'merge': _MERGE.value, 'survived': kept}
  model = native.QuantizedModel(source.config, variables, numerics.activations, source.tokenizer, origin)
  nbytes = native.save(model, out)
  print(f'{out}: step {step}, {human_bytes(nbytes)} of {human_bytes(4 * source.config.num_parameters)}')
  print(f'held-out nll as trained {trained.nll:.4f}, as stored {stored.nll:.4f}, on {stored.tokens:,} tokens')
  if survived:
    shares = np.concatenate([each.ravel() for each in survived.values()])
    print(f'of the adapters survived {shares.mean():.0%} on average, {shares.min():.0%} in the worst matrix')
  return 0


def _score(what: str, run: train.Run, model: Transformer, trainable: Any, frozen: Any) -> Score:
  held_out = train.HeldOut(run, model)
  with Bar(f'scoring {what}', len(held_out)) as bar:
    return held_out.score(trainable, frozen, bar.advance)


if __name__ == '__main__':
  cli.run(main)
