"""One step whose weights move inside the backward pass, so that one layer's gradient exists at a time.

The forward pass keeps each layer's input. Going back, a layer is computed again from it, its gradient is
found, and its weights and its part of the optimizer's state are overwritten before the layer below has a turn
(Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", §3). The loop
carries the stacks of weights and writes one slice of them: what a scan returns would be a second stack.

There are three groups, each with a state of `optim.make` of its own: 'top' (final norm, head), 'layers'
(stacked), and 'embed', which is last because a tied embedding has a gradient from both ends.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qjax import optim
from qjax.errors import UserError
from qjax.method import Method, Trainable, Update
from qjax.models.attention import attention_mask
from qjax.models.layers import Norm, rotary_table
from qjax.models.objective import nll_sums
from qjax.models.transformer import Block, Transformer, embed, head_of
from qjax.precision import LossScale, is_all_finite
from qjax.remat import as_bits, from_bits
from qjax.sharding import fetch, put_back
from qjax.step import Arrays, Loop, State, StepFunction, StepMetrics

Tree = Any


def check(method: Method, accumulate: int, is_scaled: bool, remat: str) -> None:
  """Refuses what an update inside the backward pass cannot do; any method passes whose update is separate.

  Args:
    method: what moves, and how.
    accumulate: micro-batches a step. A weight moves once a step, by the sum of their gradients, and that sum
      would have to be kept for all layers: what moving inside the backward pass is there to avoid.
    is_scaled: whether a loss scale is in use.
    remat: what is kept of a layer for the backward pass; here that is its input.

  Raises:
    UserError: naming the field.
  """
  kind, n = method.update.kind, method.numerics
  if kind == 'separate':
    return

  def refuse(reason: str, fix: str) -> UserError:
    return UserError(f"optimizer.kind = {kind!r} {reason}; {fix}, or use optimizer.kind = 'separate'")

  if method.trainable != Trainable('params/.*'):
    raise refuse(f'moves weights and all of them, not what {method.name!r} trains', "use method = 'full'")
  if method.distillation is not None:
    raise refuse('has no teacher', 'leave the section distill out')
  if n.draws or n.has_static_ranges:
    raise refuse(
      'knows no random rounding of gradients or weights and no static ranges',
      "round to nearest (qat.backward.rounding, qat.weight_rounding), with ranges found in each step",
    )
  if accumulate > 1:
    raise refuse(
      f'cannot add up the gradients of {accumulate} micro-batches, because it keeps those of one layer',
      'raise config.micro_batch to the rows of a device',
    )
  if is_scaled and kind == 'fused':
    raise refuse(
      'learns of an overflow when layers above have moved, which a loss scale must undo',
      "use precision.loss_scale = 'none' with bfloat16, or 'fused_global'",
    )
  if remat != 'full':
    raise refuse(
      f'keeps the input of each layer and computes the rest again, not what model.remat = {remat!r} keeps',
      "use model.remat = 'full'",
    )


class _Groups(NamedTuple):
  """The parameters, or what belongs to them, in the order in which they move."""

  top: Tree
  layers: Tree
  embed: Tree


def _split(params: Tree) -> _Groups:
  top = {name: tree for name, tree in params.items() if name not in ('layers', 'embed')}
  return _Groups(top, params['layers'], {'embed': params['embed']})


def _join(groups: _Groups) -> Tree:
  return {**groups.top, 'layers': groups.layers, **groups.embed}


def _make(update: Update, total_steps: int) -> optax.GradientTransformation:
  """Of one group. The norm over all of them is nothing that it could clip by."""
  is_global = update.kind == 'fused_global'
  return optim.make(dataclasses.replace(update, clip_norm=0.0) if is_global else update, total_steps)


def init_optimizer(
  update: Update, total_steps: int, trainable: Tree, set_aside: Callable[[Tree], Tree] | None = None
) -> Tree:
  """The optimizer's state before the first step: of each group, and of 'layers' a stack of one a layer.

  With `set_aside`, which moves a layer's state to where it waits, no more than that is made at a time.
  """
  tx = _make(update, total_steps)
  groups = _split(trainable['params'])
  if set_aside is not None:
    one = jax.jit(lambda layers, index: tx.init(_slice(layers, index)))
    depth = jax.tree.leaves(groups.layers)[0].shape[0]
    each = [set_aside(one(groups.layers, jnp.asarray(index))) for index in range(depth)]
    top, embed = (jax.jit(tx.init)(group) for group in (groups.top, groups.embed))
    return _Groups(top, jax.tree.map(lambda *x: np.stack(x), *each), embed)._asdict()
  # Compiled, because only shapes are read of the float32 views that moments start from.
  inits = _Groups(tx.init, jax.vmap(tx.init), tx.init)
  init = jax.jit(lambda groups: _Groups(*(f(group) for f, group in zip(inits, groups, strict=True))))
  return init(groups)._asdict()


class _Tally(NamedTuple):
  """Of the gradients so far: whether all were finite, and the sum of their squares."""

  is_finite: jax.Array
  squares: jax.Array

  def add(self, gradients: Tree) -> '_Tally':
    squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))
    return _Tally(self.is_finite & is_all_finite(gradients), self.squares + squares)


def _slice(stacks: Tree, index: jax.Array) -> Tree:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacks)


def _put(stacks: Tree, index: jax.Array, layer: Tree) -> Tree:
  put = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, put_back(x, stack), index, 0)
  return jax.tree.map(put, stacks, layer)


class _Pass:
  """The model's forward pass over one batch, and what its backward pass needs to begin."""

  def __init__(self, model: Transformer, params: Tree, batch: Arrays, loss_scale: LossScale, chunk: int):
    c, policy = model.config, model.numerics.policy
    self.loss_scale, self.batch, self.layers = loss_scale, batch, c.num_layers
    table = rotary_table(c, batch['positions'])
    mask = attention_mask(batch['segments'], c.sliding_window)
    block = Block(c, model.numerics, model.kernel, 'none', model.mlp_chunk)
    self.embed = lambda p: embed(c, model.numerics, p['embed']['embedding'], batch['tokens'])

    def layer(weights: Tree, x: jax.Array) -> jax.Array:
      out: Any = block.apply({'params': weights}, x, table, mask)
      return out[0]

    def head(top: Tree, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
      hidden: Any = Norm(c.rms_eps, c.norm_offset).apply({'params': top['final_norm']}, x)
      weight, transposed = head_of(c, top)
      nll, correct = nll_sums(hidden, weight, transposed, batch, policy, chunk)
      total = jnp.maximum(jnp.sum(batch['weights']), 1)
      return loss_scale.scale(nll / total), (nll, correct)

    self.layer = layer
    up = lambda x, weights: (layer(weights, x), as_bits(x))
    x, self.inputs = jax.lax.scan(up, self.embed(params), params['layers'])
    self.dtype = x.dtype
    last = {name: tree for name, tree in params.items() if name != 'layers'}
    if not c.tie_embeddings:
      del last['embed']
    (top, self.d_last), (self.nll, self.correct) = jax.grad(head, argnums=(0, 1), has_aux=True)(last, x)
    # Of a tied embedding this is one end's gradient; of another, nothing.
    self.top = {name: tree for name, tree in top.items() if name != 'embed'}
    self.from_head = {'embed': top['embed']} if c.tie_embeddings else None

  def back(
    self,
    carry: Tree,
    weights: Callable[[Tree, jax.Array], Tree],
    visit: Callable[[Tree, jax.Array, Tree], Tree],
  ) -> tuple[Tree, jax.Array]:
    """From the last layer to the first: `visit(carry, layer, gradients)` makes the next carry.

    Returns the last carry and the gradient of the first layer's input.
    """

    def body(step: jax.Array, state: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
      carry, d_out = state
      index = self.layers - 1 - step
      x = from_bits(_slice(self.inputs, index), jnp.zeros((), self.dtype))
      _, pull = jax.vjp(self.layer, weights(carry, index), x)
      gradients, d_in = pull(d_out)
      return visit(carry, index, self.unscale(gradients)), d_in

    return jax.lax.fori_loop(0, self.layers, body, (carry, self.d_last))

  def embedding(self, params: Tree, d_first: jax.Array) -> Tree:
    """The gradient of the embedding."""
    _, pull = jax.vjp(self.embed, params)
    (found,) = pull(d_first)
    both = found if self.from_head is None else jax.tree.map(jnp.add, self.from_head, found)
    return self.unscale(both)

  def unscale(self, gradients: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), self.loss_scale.unscale(gradients))


def make_step(model: Transformer, method: Method, loop: Loop) -> StepFunction:
  """The pure function of one step: (state, frozen, batch, key) to the next state and its metrics.

  A group whose gradient is not finite stays as it is, and so do those below it; a loss that is not finite
  keeps all of them. With 'fused_global' that is known of all before any moves.

  Raises:
    UserError: as `check`.
  """
  check(method, loop.accumulate, False, model.remat)
  update = method.update
  is_global = update.kind == 'fused_global'
  tx = _make(update, loop.num_steps)
  rate = optim.schedule(update, loop.num_steps)

  def measure(forward: _Pass, groups: _Groups, tally: _Tally) -> _Tally:
    tally = tally.add(forward.unscale(forward.top))
    tally, d_first = forward.back(
      tally, lambda _, index: _slice(groups.layers, index), lambda tally, _, gradients: tally.add(gradients)
    )
    return tally.add(forward.embedding(groups.embed, d_first))

  def step(state: State, frozen: Tree, batch: Arrays, key: jax.Array) -> tuple[State, StepMetrics]:
    assert not jax.tree.leaves(frozen), 'everything moves'
    _, rounding_key = jax.random.split(jax.random.fold_in(key, state.step))
    groups = _split(state.trainable['params'])
    micro = {name: x[0] for name, x in batch.items()}
    forward = _Pass(model, state.trainable['params'], micro, state.loss_scale, loop.loss_chunk)
    tally = _Tally(jnp.isfinite(forward.nll), jnp.zeros((), jnp.float32))
    if is_global:
      known = measure(forward, groups, tally)
      norm, tally = jnp.sqrt(known.squares), tally._replace(is_finite=known.is_finite)

    def clip(g: jax.Array) -> jax.Array:
      if not is_global or not update.clip_norm:
        return g
      return jnp.where(norm < update.clip_norm, g, g / norm * update.clip_norm)

    def move(
      number: Any, params: Tree, optimizer: Tree, gradients: Tree, tally: _Tally
    ) -> tuple[Tree, Tree, _Tally]:
      tally = tally.add(gradients)
      updates, after = tx.update(jax.tree.map(clip, gradients), optimizer, params)
      moved = optim.apply(params, updates, update.rounding, jax.random.fold_in(rounding_key, number))
      tally = tally._replace(is_finite=tally.is_finite & is_all_finite(moved))
      keep = lambda new, old: jnp.where(tally.is_finite, new, old)
      return jax.tree.map(keep, moved, params), jax.tree.map(keep, after, optimizer), tally

    def move_layer(carry: Tree, index: jax.Array, gradients: Tree) -> Tree:
      layers, optimizer, tally = carry
      moved, after, tally = move(
        index + 2, _slice(layers, index), fetch(_slice(optimizer, index)), gradients, tally
      )
      return _put(layers, index, moved), _put(optimizer, index, after), tally

    before: Mapping[str, Tree] = state.optimizer
    top, top_state, tally = move(0, groups.top, before['top'], forward.unscale(forward.top), tally)
    (layers, layers_state, tally), d_first = forward.back(
      (groups.layers, before['layers'], tally), lambda carry, index: _slice(carry[0], index), move_layer
    )
    embedding = forward.embedding(groups.embed, d_first)
    last, last_state, tally = move(1, groups.embed, before['embed'], embedding, tally)

    scale = state.loss_scale.adjust(tally.is_finite)
    optimizer = _Groups(top_state, layers_state, last_state)._asdict()
    moved = {'params': _join(_Groups(top, layers, last))}
    tokens = jnp.sum(batch['weights'])
    total = jnp.maximum(tokens, 1)
    metrics = StepMetrics(
      loss=forward.nll / total,
      accuracy=forward.correct / total,
      tokens=tokens,
      gradient_norm=jnp.sqrt(tally.squares),
      learning_rate=jnp.asarray(rate(optim.applied_steps(before)), jnp.float32),
      loss_scale=state.loss_scale.factor(),
      skipped=scale.skipped,
      consecutive_skips=scale.consecutive,
    )
    return State(state.step + 1, moved, optimizer, scale), metrics

  return step
