"""The chunked loss is log_softmax in values and gradients for any vocabulary, and full logits never exist."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qjax.models.config import ModelConfig
from qjax.models.loss import TokenLosses, token_losses
from qjax.models.objective import loss_sums
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import Policy, policy
from tests import oracle
from tests.models.test_transformer import random_params, row_of

F32 = policy()
D = 24
# (vocabulary, chunk): not divisible, divisible, chunks made even, one chunk, a word a chunk, one word.
SIZES = [(37, 8), (64, 64), (100, 33), (10, 4096), (5, 1), (1, 8)]


def inputs(vocab: int, transposed: bool) -> tuple[np.ndarray, ...]:
  """hidden [1, N, D], head, targets [1, N] with every word at least once, weights of the losses [1, N]."""
  rng = np.random.default_rng(0)
  tokens = vocab + 3
  hidden = rng.normal(size=(1, tokens, D)).astype(np.float32)
  head = rng.normal(0, 0.5, (vocab, D) if transposed else (D, vocab)).astype(np.float32)
  targets = (rng.permutation(tokens) % vocab).astype(np.int32)[None]
  return hidden, head, targets, rng.normal(size=(1, tokens)).astype(np.float32)


def plain(
  hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, weights: np.ndarray, transposed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """In float64: nll and is_correct, and the gradients of sum(weights · nll) for hidden and head."""
  x, w = hidden[0].astype(np.float64), head.astype(np.float64)
  w = w.T if transposed else w
  logits = x @ w
  p = np.exp(logits - logits.max(axis=-1, keepdims=True))
  p /= p.sum(axis=-1, keepdims=True)
  rows = np.arange(len(x))
  largest = logits.max(axis=-1)
  log_total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
  d_logits = p.copy()
  d_logits[rows, targets[0]] -= 1
  d_logits *= weights[0][:, None]
  d_head = x.T @ d_logits
  target = logits[rows, targets[0]]
  return log_total - target, target >= largest, d_logits @ w.T, d_head.T if transposed else d_head


def weighted(
  hidden: Any, head: Any, targets: Any, weights: Any, transposed: bool, chunk: int, dtypes: Policy = F32
) -> tuple[jax.Array, TokenLosses]:
  losses = token_losses(hidden, head, targets, dtypes, transposed, chunk)
  return jnp.sum(losses.nll * weights), losses


def grad(argnums: Any) -> Any:
  """The compiled gradient of `weighted`; the losses come along."""
  return jax.jit(jax.grad(weighted, argnums, has_aux=True), static_argnums=(4, 5, 6))


@pytest.mark.parametrize('transposed', [False, True], ids=['head', 'tied'])
@pytest.mark.parametrize(('vocab', 'chunk'), SIZES)
def test_losses_and_gradients_are_those_of_log_softmax(vocab: int, chunk: int, transposed: bool) -> None:
  hidden, head, targets, weights = inputs(vocab, transposed)
  nll, is_correct, d_hidden, d_head = plain(hidden, head, targets, weights, transposed)
  (found_hidden, found_head), losses = grad((0, 1))(hidden, head, targets, weights, transposed, chunk)
  assert losses.nll.dtype == losses.is_correct.dtype == jnp.float32
  # A logit is a sum of 24 products of size 1, a gradient one of up to 103: 2⁻²⁴ · 103, and room.
  np.testing.assert_allclose(losses.nll[0], nll, rtol=0, atol=1e-5)
  np.testing.assert_array_equal(losses.is_correct[0], is_correct)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=1e-5)
  if chunk == 8:  # A gradient is the same whether or not the other is asked for.
    for argnum, wanted in ((0, found_hidden), (1, found_head)):
      found, _ = grad(argnum)(hidden, head, targets, weights, transposed, chunk)
      np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_tie_is_no_success() -> None:
  hidden, head, _, _ = inputs(12, False)
  best = (hidden[0] @ head).argmax(axis=-1)
  assert (best == 2).any()
  targets = np.full(hidden.shape[:2], 2, np.int32)
  np.testing.assert_array_equal(token_losses(hidden, head, targets, F32, False, 4).is_correct[0], best == 2)
  head[:, 9] = head[:, 2]  # Chunks of 4: the two lie in different ones.
  assert not token_losses(hidden, head, targets, F32, False, 4).is_correct.any()
  # A collapsed model, to which all words are alike, gets nothing right.
  losses = token_losses(np.zeros_like(hidden), head, targets, F32, False, 4)
  assert not losses.is_correct.any()
  np.testing.assert_allclose(losses.nll, np.log(12), rtol=1e-6)


@pytest.mark.parametrize('transposed', [False, True], ids=['head', 'tied'])
def test_huge_logits_are_finite(transposed: bool) -> None:
  hidden, head, targets, weights = inputs(37, transposed)
  hidden = hidden * np.float32(1e4 / np.abs(hidden[0] @ (head.T if transposed else head)).max())
  nll, _, d_hidden, d_head = plain(hidden, head, targets, weights, transposed)
  assert nll.max() > 1e4
  (found_hidden, found_head), losses = grad((0, 1))(hidden, head, targets, weights, transposed, 8)
  # A logit of 1e4 is known to 24 · 2⁻²⁴ · 1e4 at worst, and the softmax to as much of itself.
  doubt = 24 * 2**-24 * 1e4
  np.testing.assert_allclose(losses.nll[0], nll, rtol=0, atol=2 * doubt)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=doubt * np.abs(head).max() * 8)
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=doubt * np.abs(hidden).max() * 8)


def test_impossible_words_have_no_share() -> None:
  # In float16 a logit below −65504 is −inf: here all of the first chunk and the last, and most of another.
  dtypes = policy(output='float16')
  hidden, head, _, weights = inputs(20, False)
  hidden = np.abs(hidden) + 1
  impossible = np.isin(np.arange(20), [*range(5), 6, 7, 8, 9, *range(15, 20)])
  head[:, impossible] = -1e5
  possible = np.flatnonzero(~impossible)
  targets = np.random.default_rng(1).choice(possible, hidden.shape[:2]).astype(np.int32)
  gradients, losses = grad((0, 1))(hidden, head, targets, weights, False, 5, dtypes)
  # The rest alone is a smaller vocabulary.
  small = np.searchsorted(possible, targets).astype(np.int32)
  (d_hidden, d_head), wanted = grad((0, 1))(hidden, head[:, possible], small, weights, False, 5, dtypes)
  np.testing.assert_allclose(losses.nll, wanted.nll, rtol=1e-5)
  np.testing.assert_array_equal(losses.is_correct, wanted.is_correct)
  np.testing.assert_allclose(gradients[0], d_hidden, rtol=0, atol=1e-5)
  np.testing.assert_allclose(gradients[1][:, possible], d_head, rtol=0, atol=1e-4)
  assert (np.asarray(gradients[1])[:, impossible] == 0).all()
  # What cannot be was said: an infinite loss, and no NaN.
  losses = token_losses(hidden, head, np.zeros_like(targets), dtypes, False, 5)
  assert (losses.nll == np.inf).all() and (losses.is_correct == 0).all()


@pytest.mark.parametrize('transposed', [False, True], ids=['head', 'tied'])
def test_a_frozen_half_precision_head(transposed: bool) -> None:
  hidden, head, targets, weights = inputs(37, transposed)
  hidden, head = hidden.astype(ml_dtypes.bfloat16), head.astype(ml_dtypes.bfloat16)
  nll, is_correct, d_hidden, _ = plain(hidden, head, targets, weights, transposed)
  dtypes = policy(compute='bfloat16')
  found, losses = grad(0)(hidden, head, targets, weights, transposed, 8, dtypes)
  # Products of bfloat16 are exact in float32; the logits and so the losses err as little as float32's.
  np.testing.assert_allclose(losses.nll[0], nll, rtol=0, atol=1e-5)
  np.testing.assert_array_equal(losses.is_correct[0], is_correct)
  # Gradients pass a product in bfloat16, 2⁻⁹ of each term, whose sizes sum to 2 · |w| · max|head| at most,
  # and leave in bfloat16.
  assert found.dtype == jnp.bfloat16
  bound = 2**-9 * 2 * np.abs(weights[0])[:, None] * np.abs(head.astype(np.float32)).max()
  error = np.abs(found[0].astype(jnp.float32) - d_hidden)
  assert (error <= bound + 2**-8 * np.abs(d_hidden)).all()


# What the program holds.

TOKENS, VOCAB = 40, 101  # Primes and such, so that a shape in the program's text is one thing only.


def _text(argnums: Any, chunk: int, head_dtype: Any, dtypes: Policy) -> str:
  """The compiled program of a tied head's loss and gradients."""
  hidden, head, targets, weights = inputs(VOCAB, transposed=True)
  hidden, targets, weights = hidden[:, :TOKENS], targets[:, :TOKENS], weights[:, :TOKENS]
  hidden = hidden.astype(dtypes.compute)
  step = jax.jit(jax.value_and_grad(weighted, argnums, has_aux=True), static_argnums=(4, 5, 6))
  lowered = step.lower(hidden, head.astype(head_dtype), targets, weights, True, chunk, dtypes)
  return lowered.compile().as_text()


def _shapes(text: str) -> set[tuple[str, tuple[int, ...]]]:
  """dtype and dimensions of every array in a compiled program."""
  found = re.findall(r'\b([a-z]+\d+)\[([\d,]+)\]', text)
  return {(dtype, tuple(map(int, sizes.split(',')))) for dtype, sizes in found}


def test_full_logits_never_exist() -> None:
  text = _text((0, 1), 16, np.float32, F32)
  assert {sizes for _, sizes in _shapes(text) if VOCAB in sizes} == {(VOCAB, D)}
  # With one chunk they do, so they would have been found.
  assert (TOKENS, VOCAB) in {sizes for _, sizes in _shapes(_text((0, 1), VOCAB, np.float32, F32))}


def test_no_gradient_is_formed_for_a_frozen_head() -> None:
  dtypes = policy(compute='bfloat16')
  frozen = _shapes(_text(0, 16, ml_dtypes.bfloat16, dtypes))
  # Nor is a half-precision head widened, which would take twice its memory.
  assert {dtype for dtype, sizes in frozen if sizes == (VOCAB, D)} <= {'bf16', 'u16'}
  trained = _shapes(_text((0, 1), 16, ml_dtypes.bfloat16, dtypes))
  assert ('f32', (VOCAB, D)) in trained


def test_sums_are_over_trained_targets() -> None:
  config = ModelConfig(
    vocab_size=97, num_layers=1, d_model=32, d_ff=48, num_heads=2, num_kv_heads=1, head_dim=16,
    tie_embeddings=False,
  )
  params = random_params(config)
  rng = np.random.default_rng(1)
  documents = [rng.integers(0, 97, n).astype(np.int32) for n in (9, 6)]
  batch = row_of(documents, 1, 2)
  trained = rng.random(batch['weights'].shape) < 0.5
  batch['weights'] = np.where(trained, batch['weights'], np.float32(0))
  model = Transformer(config, Numerics(F32), 'full')
  sums = loss_sums(model, {'params': params}, batch, chunk=20)
  nll = correct = 0.0
  for segment, ids in enumerate(documents, 1):
    here = batch['weights'][batch['segments'] == segment]
    logits = oracle.forward(config, params, ids[:-1])
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nll -= float((log_p[np.arange(len(ids) - 1), ids[1:]] * here).sum())
    correct += float(((logits.argmax(axis=-1) == ids[1:]) * here).sum())
  np.testing.assert_allclose(sums.nll, nll, rtol=1e-5)
  assert sums.correct == correct
  assert sums.tokens == batch['weights'].sum() > 0
