"""Checkpoints: what moves, how it moves, where the data stood, and what it all means.

One step is a directory with five items: `trainable` (adapters, or every weight), `state` (moments, loss
scale, counters), `data` (the iterator's position), `meaning` (configuration, method, model) and `score` (of
the held-out data, if known). The frozen base is not copied: it follows from the model file, whose
fingerprint is part of the meaning. Steps are written beside and renamed into place; one that cannot be read
is passed over with a warning.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from qjax import trees
from qjax.errors import UserError

Tree = Any
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
  """One step read back: two trees in the structure that was asked for, the data position, the step."""

  step: int
  trainable: Tree
  state: Tree
  data: dict[str, Any]


# Fields that configs did not always have, with the value that does what was done before there was the field.
ADDED: dict[str, Any] = {
  'config.optimizer.name': 'adamw',
  'config.optimizer.kind': 'separate',
  'config.lora.init': 'zero',
  'config.model.mlp_chunk': 0,
}


def _section(meaning: Any, path: str) -> tuple[Any, str]:
  """What holds the field at a path, None or no mapping where there is no such section; and its name there."""
  *sections, name = path.split('.')
  for section in sections:
    meaning = meaning.get(section) if isinstance(meaning, Mapping) else None
  return meaning, name


def complete(meaning: Mapping[str, Any], fields: Mapping[str, Any] = ADDED) -> dict[str, Any]:
  """A copy of a meaning, or of any part of one, with those of `fields` that its sections lack."""
  filled = json.loads(json.dumps(meaning))
  for path, value in fields.items():
    section, name = _section(filled, path)
    if isinstance(section, dict):
      section.setdefault(name, value)
  return filled


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """`differences` of two meanings, of which the older may be that of a version with fewer fields."""

  def filled(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    places = {path: _section(other, path) for path in ADDED}
    there = [path for path, (at, name) in places.items() if isinstance(at, Mapping) and name in at]
    return complete(one, {path: ADDED[path] for path in there})

  return differences(filled(then, now), filled(now, then))


def differences(then: Any, now: Any, path: str = '') -> list[str]:
  """Fields in which two nested JSON values differ, one line each: 'a.b was 1 and is 2'."""
  if isinstance(then, Mapping) and isinstance(now, Mapping):
    lines = []
    for key in sorted({*then, *now}):
      where = f'{path}.{key}' if path else str(key)
      if key not in then:
        lines.append(f'{where} was absent and is {now[key]!r}')
      elif key not in now:
        lines.append(f'{where} was {then[key]!r} and is absent')
      else:
        lines += differences(then[key], now[key], where)
    return lines
  return [] if then == now else [f'{path} was {then!r} and is {now!r}']


class _NewestAndBest:
  """Which steps orbax keeps: the last, and the best of those with a score (the first of equals)."""

  def __init__(self, nlls: Mapping[int, float]):
    self.nlls = nlls

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
    steps = [info.step for info in checkpoints]
    best = min((step for step in steps if step in self.nlls), key=self.nlls.__getitem__, default=None)
    return [step in (best, max(steps)) for step in steps]


class Checkpoints:
  """The checkpoints of one run. Keeps the newest and, by the held-out negative log-likelihood, the best."""

  def __init__(self, directory: Path, meaning: Mapping[str, Any]):
    self.directory = directory.absolute()
    self.meaning = json.loads(json.dumps(meaning))
    self._nlls: dict[int, float] = {}
    arrays = ('trainable', 'state')
    texts = ('data', 'meaning', 'score')
    # Saving is synchronous: on CPU an asynchronous save would read buffers that the next step has been given.
    # orbax's own record of metrics is not used: one damaged file of it stops every later run.
    self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(self._nlls),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        ),
        item_names=(*arrays, *texts),
        item_handlers={name: ocp.PyTreeCheckpointHandler() for name in arrays}
        | {name: ocp.JsonCheckpointHandler() for name in texts},
    )
    for step in self.steps:
      try:
        nll = self._read(step, 'score', ocp.args.JsonRestore())['nll']
      except Exception:  # A torn step, which `restore` reports, or a file of another program.
        continue
      if isinstance(nll, float) and math.isfinite(nll):
        self._nlls[step] = nll

  @property
  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def save(
      self, step: int, trainable: Tree, state: Tree, data: Mapping[str, Any], nll: float | None = None
  ) -> None:
    """Writes one step; a finite `nll` of the held-out data decides which is best.

    A step that is there already stays, unless it was saved before its `nll` was known.
    """
    if step in self.steps:
      if nll is None:
        return
      self._manager.delete(step)
    if nll is not None and math.isfinite(nll):
      self._nlls[step] = nll
    self._manager.save(
        step,
        args=ocp.args.Composite(
            trainable=ocp.args.PyTreeSave(trees.flatten(trainable)),
            state=ocp.args.PyTreeSave(trees.flatten(state)),
            data=ocp.args.JsonSave(dict(data)),
            meaning=ocp.args.JsonSave(self.meaning),
            score=ocp.args.JsonSave({'nll': nll}),
        ),
    )
    self._manager.wait_until_finished()

  def restore(self, trainable: Tree, state: Tree, step: int | None = None) -> Restored | None:
    """The newest step that can be read, or the one asked for; None where there is none at all.

    Args:
      trainable, state: arrays whose shapes, dtypes and shardings the result shall have.
      step: a particular one, which then must be readable.

    Raises:
      UserError: the checkpoint means something else (a field or leaf is named), or none is readable.
    """
    steps = self.steps[::-1] if step is None else [step]
    if step is not None and step not in self.steps:
      raise UserError(f'{self.directory} has no checkpoint of step {step}; there are {self.steps}')
    for candidate in steps:
      try:
        meaning = self._read(candidate, 'meaning', ocp.args.JsonRestore())
        data = self._read(candidate, 'data', ocp.args.JsonRestore())
      except Exception as error:
        self._pass_over(candidate, error, is_asked_for=step is not None)
        continue
      changed = changes(meaning, self.meaning)
      if changed:
        raise UserError(f'{self.directory}/{candidate} belongs to another run:\n  ' + '\n  '.join(changed))
      try:
        found = (self._tree(candidate, 'trainable', trainable), self._tree(candidate, 'state', state))
        return Restored(candidate, *found, data)
      except UserError:
        raise
      except Exception as error:
        self._pass_over(candidate, error, is_asked_for=step is not None)
    if steps:
      raise UserError(
          f'no checkpoint in {self.directory} can be read; start again with --restart (it is kept aside)'
      )
    return None

  @property
  def best_step(self) -> int:
    """The step with the best score, or the newest if none has one.

    Raises:
      UserError: there is no step.
    """
    if not self.steps:
      raise UserError(f'{self.directory} has no checkpoint')
    return min(self._nlls, key=self._nlls.__getitem__, default=self.steps[-1])

  def best(self, trainable: Tree) -> Tree:
    """What moved, at `best_step`, in the structure given.

    Raises:
      UserError: there is no step, or it holds something else.
    """
    step = self.best_step
    try:
      return self._tree(step, 'trainable', trainable)
    except UserError:
      raise
    except Exception as error:
      self._pass_over(step, error, is_asked_for=True)

  def forget_after(self, step: int) -> None:
    """Removes later steps, which a run that goes on from `step` will write anew."""
    for later in [s for s in self.steps if s > step]:
      self._manager.delete(later)
      self._nlls.pop(later, None)

  def close(self) -> None:
    self._manager.close()

  def _pass_over(self, step: int, error: Exception, is_asked_for: bool) -> None:
    # The first line is enough to recognize the trouble; tensorstore appends its whole configuration to it.
    lines = str(error).partition('[tensorstore_spec')[0].strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if is_asked_for:
      raise UserError(f'checkpoint {self.directory}/{step} cannot be read: {first}') from error
    _log.warning('checkpoint %s/%d cannot be read and is passed over: %s', self.directory, step, first)

  def _read(self, step: int, item: str, args: Any) -> Any:
    restored = self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    if restored is None:
      raise ValueError(f'item {item} is missing')
    return restored

  def _tree(self, step: int, item: str, like: Tree) -> Tree:
    wanted = trees.flatten(like)
    saved = self._manager.item_metadata(step)[item]
    if saved is None:
      raise ValueError(f'item {item} is missing')
    there = _described(dict(getattr(saved, 'tree', saved)))
    compare_leaves(there, _described(wanted), f'{item} of step {step}')
    args = ocp.checkpoint_utils.construct_restore_args(wanted)
    flat = self._read(step, item, ocp.args.PyTreeRestore(wanted, restore_args=args))
    return jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path in wanted])


def _described(leaves: Mapping[str, Any]) -> dict[str, str]:
  """'float32[2, 64]' by path."""
  return {path: f'{leaf.dtype}{list(leaf.shape)}' for path, leaf in leaves.items()}


def compare_leaves(saved: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
  """Refuses leaves that are missing, unexpected, or of another shape or dtype.

  Raises:
    UserError: naming each.
  """
  lines = [f'missing: {path}' for path in wanted if path not in saved]
  lines += [f'unexpected: {path}' for path in saved if path not in wanted]
  lines += [
      f'{path}: saved {saved[path]}, wanted {wanted[path]}'
      for path in wanted
      if path in saved and saved[path] != wanted[path]
  ]
  if lines:
    raise UserError(f'{what} does not fit this model and method:\n  ' + '\n  '.join(lines))
