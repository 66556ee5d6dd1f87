"""Greedy continuations, for comparing two models answer by answer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import adapters
from qjax.errors import UserError
from qjax.models.transformer import Transformer, head_of
from qjax.ops import matmul

Tree = Any


def greedy(
  model: Transformer,
  variables: Tree,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  eos_id: int,
  batch_size: int = 8,
  progress: Callable[[int], None] = lambda done: None,
  adapter_of: Sequence[int] | None = None,
) -> list[list[int]]:
  """The most likely continuation of every prompt, up to and without `eos_id`.

  There is no cache of keys and values: every step computes all tokens again, by the very program that the
  other measurements run. Meant for tens of prompts and tokens.

  Args:
    model: the decoder.
    variables: its weights.
    prompts: token ids, each at least one.
    max_new_tokens: of each answer, at most.
    eos_id: ends an answer.
    batch_size: prompts at a time.
    progress: told how many prompts are done.
    adapter_of: which adapter each prompt has, -1 for none, where `variables['lora']` holds several of them
      (`adapters.group`). Prompts of different adapters share batches.

  Raises:
    UserError: a prompt is empty, holds what is no token of the model, or does not fit its context together
      with the answer; or the adapters named are not there; or a number of prompts or tokens is too small.
  """
  if batch_size < 1 or max_new_tokens < 0:
    raise UserError(f'batch_size = {batch_size}, max_new_tokens = {max_new_tokens}; 1 and 0 are the least')
  if empty := [index for index, prompt in enumerate(prompts) if not len(prompt)]:
    raise UserError(f'prompt {empty[0]} is empty')
  if not prompts:
    return []
  for index, prompt in enumerate(prompts):
    tokens_of = np.asarray(prompt)
    if tokens_of.dtype.kind not in 'iu' or tokens_of.min() < 0 or tokens_of.max() >= model.config.vocab_size:
      raise UserError(f'prompt {index} holds what is no token: ids are 0 to {model.config.vocab_size - 1}')
  width = max(map(len, prompts)) + max_new_tokens
  if width > model.config.context_length:
    raise UserError(
      f'the longest prompt and {max_new_tokens} new tokens take {width} of a context of '
      f'{model.config.context_length}; shorten the prompts'
    )
  if adapter_of is not None:
    _check_adapters(adapter_of, len(prompts), adapters.count(variables.get('lora', {})))

  @jax.jit
  def next_token(
    variables: Tree, tokens: jax.Array, lengths: jax.Array, of_row: jax.Array | None
  ) -> jax.Array:
    if of_row is not None:
      variables = {**variables, 'lora': adapters.assign(variables['lora'], of_row)}
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    segments = (places < lengths[:, None]).astype(jnp.int32)
    positions = jnp.broadcast_to(places, tokens.shape)
    hidden: Any = model.apply(variables, tokens, segments, positions)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    head, transposed = head_of(model.config, variables['params'])
    dtypes = model.numerics.policy
    return jnp.argmax(matmul(last, head, dtypes, transposed).astype(dtypes.output), axis=-1)

  answers: list[list[int]] = []
  for start in range(0, len(prompts), batch_size):
    chosen = list(prompts[start : start + batch_size])
    real = len(chosen)
    chosen += [chosen[0]] * (batch_size - real)
    of_row = None
    if adapter_of is not None:
      own = list(adapter_of[start : start + batch_size])
      of_row = np.asarray(own + own[:1] * (batch_size - real), np.int32)
    tokens = np.zeros((batch_size, width), np.int32)
    lengths = np.asarray([len(prompt) for prompt in chosen], np.int32)
    for row, prompt in enumerate(chosen):
      tokens[row, : len(prompt)] = prompt
    found: list[list[int]] = [[] for _ in chosen]
    is_done = np.arange(batch_size) >= real
    for _ in range(max_new_tokens):
      if is_done.all():
        break
      new = np.asarray(next_token(variables, tokens, lengths, of_row))
      for row in map(int, np.flatnonzero(~is_done)):
        if new[row] == eos_id:
          is_done[row] = True
        else:
          found[row].append(int(new[row]))
          tokens[row, lengths[row]] = new[row]
          lengths[row] += 1
    answers += found[:real]
    progress(len(answers))
  return answers


def _check_adapters(adapter_of: Sequence[int], prompts: int, count: int) -> None:
  if np.ndim(adapter_of) != 1 or np.asarray(adapter_of).dtype.kind not in 'iu':
    raise UserError(f'adapter_of = {adapter_of!r} is no list of whole numbers, one for each prompt')
  if len(adapter_of) != prompts:
    raise UserError(f'adapter_of names {len(adapter_of)} adapters for {prompts} prompts; give one for each')
  if wrong := [index for index in adapter_of if not -1 <= index < count]:
    raise UserError(
      f'adapter_of: there is no adapter {wrong[0]}; there are {count}, counted from 0, and -1 is none'
    )
