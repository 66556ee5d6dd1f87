"""An MLP that takes some tokens of a row at a time: the same numbers, and fewer of them at once."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qjax import build, chips, plan, trees
from qjax.errors import UserError
from tests import small

CHUNKED = {'model__mlp_chunk': 8}  # of rows of 32 tokens
EXACT = {'precision__compute': 'float32', 'model__remat': 'full'}
# So that the MLP is what a step holds most of.
WIDE = dataclasses.replace(small.CONFIG, d_ff=2048)


@pytest.fixture(scope='module')
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
  found = tmp_path_factory.mktemp('mlp_chunk')
  small.write(found, WIDE)
  return found


@pytest.mark.parametrize(
  ('method', 'more'),
  [
    ('qlora', {}),
    ('full', {}),
    ('full', {'optimizer__kind': 'fused', 'optimizer__name': 'sgd'}),
  ],
)
def test_it_has_the_numbers_of_all_tokens_at_once_in_less_memory(
  directory: Path, method: str, more: dict[str, Any]
):
  whole, chunked = (
    small.prepare(small.run(directory, method, **EXACT, **more, **chunk)) for chunk in ({}, CHUNKED)
  )
  rows, same = (small.take_steps(run, 3)[1] for run in (whole, chunked))
  # A weight's gradient is a sum over tokens, here in another order: within some roundings of float32.
  assert [row['loss'] for row in same] == pytest.approx([row['loss'] for row in rows], rel=2e-5)
  assert [row['gradient_norm'] for row in same] == pytest.approx(
    [row['gradient_norm'] for row in rows], rel=2e-4
  )
  assert rows[0]['loss'] == pytest.approx(same[0]['loss'], rel=1e-6)
  if method == 'full':  # the sum of a layer's gradients is one more array, here as large as what is saved
    return
  saved = whole.compiled.memory.temp_size_in_bytes - chunked.compiled.memory.temp_size_in_bytes
  # At least gate and up of the other three quarters: 4 rows of 24 tokens.
  assert saved > 2 * 4 * 24 * WIDE.d_ff * 4
  configs = (small.config(directory, method, **EXACT, **chunk) for chunk in ({}, CHUNKED))
  of_all, of_chunks = (plan.Traced(build.program(each)).plan(chips.find('v5e')) for each in configs)
  assert of_chunks.peak_bytes < of_all.peak_bytes


def test_adapters_drop_inputs_in_every_chunk(directory: Path):
  """Each chunk draws for itself: with one draw for all of them the rows would repeat."""
  prepared = small.prepare(small.run(directory, 'lora', **EXACT, **CHUNKED, lora__dropout=0.5))
  state, rows = small.take_steps(prepared, 6)
  assert rows[-1]['loss'] < rows[0]['loss']
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.trainable))


def test_a_layers_numbers_do_not_know_of_chunks(directory: Path):
  whole, chunked = (small.run(directory, 'full', **EXACT, **chunk) for chunk in ({}, CHUNKED))
  trainable, frozen = small.train.prepare(whole)
  batch = next(iter(small.train.train_iterator(whole.dataset.train, whole.data)))
  tokens = (batch['tokens'], batch['segments'], batch['positions'])
  variables = trees.combine(trainable, frozen)
  one, other = (np.asarray(run.model.apply(variables, *tokens)) for run in (whole, chunked))
  np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('method', 'more', 'message'),
  [
    ('lora', {'model__mlp_chunk': 5}, 'mlp_chunk = 5 must divide config.data.seq_len = 32'),
    ('lora', {'model__mlp_chunk': -1}, 'mlp_chunk = -1 must divide'),
    ('qlora', CHUNKED | {'placement__rules': (('.*', 'host'),)}, 'from the host for each chunk'),
  ],
)
def test_what_it_cannot_do_is_refused_by_name(
  directory: Path, method: str, more: dict[str, Any], message: str
):
  with pytest.raises(UserError, match=message):
    small.run(directory, method, **more)
