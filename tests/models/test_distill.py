"""The chunked distillation loss is KL in values and gradients for any vocabulary; full logits never exist."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qjax.models.distill import token_kl
from qjax.precision import Policy, policy
from qjax.quant.qtensor import quantize

F32 = policy()
TOKENS, D, E, VOCAB, CHUNK = 7, 12, 17, 131, 37  # Four chunks of 33, of which the last overlaps by one.
LAYOUTS = pytest.mark.parametrize('transposed', [False, True], ids=['head', 'tied'])

# A logit sums at most 17 products whose sizes sum to 11 or less. Its roundings, 2⁻²⁴ of partial sums of about
# 2 and of either sign, come to √17 · 2⁻²⁴ · 2 or 5e-7. KL moves by T times as much for each unit of Σ|p − q|,
# 2 at most, for the student, and of |log(p/q) − KL|, 8 or so, for the teacher: 1e-5 for T = 2. Gradients are
# sums of shares, below 1 and known as well as the logits, times inputs or heads of size 3.
ATOL = 1e-5


def inputs(transposed: bool, seed: int = 0) -> tuple[np.ndarray, ...]:
  """hidden [1, N, D] and head of the student, then of a wider teacher, and weights of the losses [1, N]."""
  rng = np.random.default_rng(seed)
  models = []
  for width in (D, E):
    models.append(rng.normal(size=(1, TOKENS, width)).astype(np.float32))
    head = rng.normal(0, 0.5, (width, VOCAB)).astype(np.float32)
    models.append(head.T.copy() if transposed else head)
  return *models, rng.normal(size=(1, TOKENS)).astype(np.float32)


def plain(
  hidden: Any, head: Any, teacher_hidden: Any, teacher_head: Any, weights: Any, transposed: bool, t: float,
  output: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """From full logits in float64, rounded to `output`: losses [N], gradients of sum(weights · losses)."""

  def log_softmax(x: Any, w: Any) -> np.ndarray:
    x, w = x[0].astype(np.float64), w.astype(np.float64)
    z = (x @ (w.T if transposed else w)).astype(output).astype(np.float64) / t
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))

  s, q = log_softmax(hidden, head), log_softmax(teacher_hidden, teacher_head)
  kl = t**2 * (np.exp(q) * (q - s)).sum(axis=-1)
  d_logits = t * (np.exp(s) - np.exp(q)) * weights[0][:, None]
  w = head.astype(np.float64)
  d_head = hidden[0].astype(np.float64).T @ d_logits
  return kl, d_logits @ (w if transposed else w.T), d_head.T if transposed else d_head


def naive(
  hidden: Any, head: Any, teacher_hidden: Any, teacher_head: Any, weights: Any, transposed: bool, t: float
) -> jax.Array:
  """Σ weights · loss as one would write it."""
  z, z_teacher = (
    jnp.matmul(x, w.T if transposed else w, precision='highest') / t
    for x, w in ((hidden, head), (teacher_hidden, teacher_head))
  )
  q = jax.nn.softmax(z_teacher)
  kl = t**2 * jnp.sum(q * (jax.nn.log_softmax(z_teacher) - jax.nn.log_softmax(z)), axis=-1)
  return jnp.sum(kl * weights)


def weighted(
  hidden: Any, head: Any, teacher_hidden: Any, teacher_head: Any, weights: Any, transposed: bool,
  t: float = 1.0, chunk: int = CHUNK, dtypes: Policy = F32,
) -> tuple[jax.Array, jax.Array]:
  kl = token_kl(hidden, head, teacher_hidden, teacher_head, dtypes, transposed, t, chunk)
  return jnp.sum(kl * weights), kl


@functools.cache
def grad(argnums: Any) -> Any:
  """The compiled gradient of `weighted`; the losses come along."""
  return jax.jit(jax.grad(weighted, argnums, has_aux=True), static_argnums=(5, 6, 7, 8))


@LAYOUTS
@pytest.mark.parametrize(('t', 'chunk'), [(1.0, CHUNK), (2.0, CHUNK), (2.0, 4096), (0.5, 131)])
def test_losses_and_gradients_are_those_of_full_logits(t: float, chunk: int, transposed: bool) -> None:
  arrays = inputs(transposed)
  kl, d_hidden, d_head = plain(*arrays, transposed, t)
  assert kl.min() > 0.1
  (found_hidden, found_head), found = grad((0, 1))(*arrays, transposed, t, chunk)
  assert found.dtype == jnp.float32 and found.shape == (1, TOKENS)
  np.testing.assert_allclose(found[0], kl, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=ATOL)
  # Nor is it only our formula of the gradient.
  wanted = jax.jit(jax.grad(naive, (0, 1)), static_argnums=(5, 6))(*arrays, transposed, t)
  np.testing.assert_allclose(found_hidden, wanted[0], rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_head, wanted[1], rtol=0, atol=ATOL)


def test_a_word_a_chunk() -> None:
  hidden, head, teacher_hidden, teacher_head, weights = inputs(False)
  arrays = hidden, head[:, :5], teacher_hidden, teacher_head[:, :5], weights
  kl, d_hidden, d_head = plain(*arrays, False, 2.0)
  (found_hidden, found_head), found = grad((0, 1))(*arrays, False, 2.0, 1)
  np.testing.assert_allclose(found[0], kl, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=ATOL)


def test_each_gradient_is_the_same_alone() -> None:
  arrays = inputs(True)
  both, _ = grad((0, 1))(*arrays, True, 2.0)
  for argnum in (0, 1):
    alone, _ = grad(argnum)(*arrays, True, 2.0)
    np.testing.assert_allclose(alone, both[argnum], rtol=0, atol=1e-6)


def test_a_teacher_gets_no_gradient() -> None:
  arrays = inputs(False)
  (d_teacher, d_teacher_head), _ = grad((2, 3))(*arrays, False)
  assert not np.asarray(d_teacher).any() and not np.asarray(d_teacher_head).any()
  # Nor through a model that is its own teacher.
  hidden, head, _, teacher_head, weights = arrays
  twice = jax.jit(jax.grad(lambda x: weighted(x, head, x, teacher_head[:D], weights, False)[0]))
  wanted, _ = grad(0)(hidden, head, hidden, teacher_head[:D], weights, False)
  np.testing.assert_allclose(twice(hidden), wanted, rtol=0, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize('dtypes', [F32, policy(compute='bfloat16', output='bfloat16')], ids=['f32', 'bf16'])
def test_nothing_to_learn_from_an_equal(dtypes: Policy, transposed: bool) -> None:
  hidden, head, _, _, weights = inputs(transposed)
  hidden = 20 * hidden  # Sums of shares that are far from 1, and others that underflow.
  found, kl = grad((0, 1))(hidden, head, hidden, head, weights, transposed, 2.0, CHUNK, dtypes)
  np.testing.assert_array_equal(kl, 0)
  assert not any(np.asarray(d).any() for d in found)


def test_a_near_equal_keeps_its_gradient() -> None:
  hidden, head, _, _, weights = inputs(False)
  near = (hidden * np.float32(1 + 3e-5)).astype(np.float32)
  kl, d_hidden, _ = plain(near, head, hidden, head, weights, False, 1.0)
  assert kl.max() < 1e-7  # That is below what float32 tells from 0.
  found, losses = grad(0)(near, head, hidden, head, weights, False)
  # 2⁻²⁴ of a logarithm, a maximum and a mean difference below 4, a few times.
  np.testing.assert_allclose(losses[0], kl, rtol=0, atol=1e-6)
  assert (np.asarray(losses) >= 0).all() and (np.asarray(losses) == 0).any()
  # Shares below 1 that are known to 1e-6, times a head of size 2.
  np.testing.assert_allclose(found[0], d_hidden, rtol=0, atol=4e-6)
  assert (np.asarray(found)[np.asarray(losses) == 0] != 0).all()


@LAYOUTS
@pytest.mark.parametrize('t', [1.0, 2.0])
def test_huge_logits_are_finite(t: float, transposed: bool) -> None:
  arrays = list(inputs(transposed))
  for i in (0, 2):
    logits = arrays[i][0] @ (arrays[i + 1].T if transposed else arrays[i + 1])
    arrays[i] = arrays[i] * np.float32(1e4 / np.abs(logits).max())
  kl, d_hidden, d_head = plain(*arrays, transposed, t)
  assert kl.max() > 5e3
  (found_hidden, found_head), found = grad((0, 1))(*arrays, transposed, t)
  # A logit of 1e4 is known to 17 · 2⁻²⁴ · 1e4 at worst, 0.01. KL is a difference of two of each model, T
  # times; a share of nearly 1 is off by as much of itself, and a second word by what that leaves.
  doubt = 17 * 2**-24 * 1e4
  np.testing.assert_allclose(found[0], kl, rtol=1e-6, atol=4 * t * doubt)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=4 * t * doubt * np.abs(arrays[1]).max())
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=4 * t * doubt * np.abs(arrays[0]).max())


def test_a_common_shift_costs_no_digits() -> None:
  # A last input of 1 whose weights add 8192 to every logit of the student and −8192 to the teacher's.
  hidden, head, _, _, weights = inputs(False)
  hidden, head = np.round(hidden * 8) / 8, np.round(head * 8) / 8  # Sums of multiples of 1/64, so exact.
  hidden[..., -1] = 1
  teacher = head.copy()
  teacher[:-1] = np.roll(head[:-1], 1, axis=1)
  kl, d_hidden, _ = plain(hidden, head, hidden, teacher, weights, False, 1.0)
  head[-1] += 8192
  teacher[-1] -= 8192
  found, losses = grad(0)(hidden, head, hidden, teacher, weights, False)
  # All logits are multiples of 1/64 below 2¹⁴, and so exact: the loss is that of the logits as they were.
  np.testing.assert_allclose(losses[0], kl, rtol=0, atol=ATOL)
  # The shares sum to 1 within 2⁻¹¹, as a log-sum-exp of 8192 is rounded. Not the last one: its head is 8192.
  np.testing.assert_allclose(found[0, :, :-1], d_hidden[:, :-1], rtol=0, atol=2**-11 * 8)


@pytest.mark.parametrize('name', ['bfloat16', 'float16'])
@LAYOUTS
def test_half_precision(transposed: bool, name: str) -> None:
  dtype = {'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}[name]
  *arrays, weights = inputs(transposed)
  halves = [a.astype(dtype) for a in arrays]
  dtypes = policy(compute=name)
  kl, d_hidden, d_head = plain(*halves, weights, transposed, 2.0)
  (found_hidden, found_head), found = grad((0, 1))(*halves, weights, transposed, 2.0, CHUNK, dtypes)
  # Products of two halves are exact in float32, so losses err as little as float32's.
  np.testing.assert_allclose(found[0], kl, rtol=0, atol=ATOL)
  # d_logits are rounded to halves, 2⁻⁹ of each; their sizes sum to 2 · T · |weight| at most over words. The
  # gradients leave in halves, too.
  assert found_hidden.dtype == found_head.dtype == dtype
  bound = 2**-9 * 4 * np.abs(weights[0])[:, None] * np.abs(arrays[1]).max() + 2**-8 * np.abs(d_hidden)
  assert (np.abs(found_hidden[0].astype(jnp.float32) - d_hidden) <= bound).all()
  bound = 2**-9 * 4 * np.abs(weights[0]).sum() * np.abs(arrays[0]).max() + 2**-8 * np.abs(d_head)
  assert (np.abs(found_head.astype(jnp.float32) - d_head) <= bound).all()
  # Against the unrounded: products are off by 2⁻⁹ at most for each factor, half of that on average and of
  # either sign; 17 of size 0.5 make 0.005 a logit. KL moves by T · (2 + 8) times that at worst, as above.
  exact, _, _ = plain(*arrays, weights, transposed, 2.0)
  np.testing.assert_allclose(found[0], exact, rtol=0, atol=0.1)
  assert np.abs(found[0] - exact).mean() < 0.01


def test_logits_are_rounded_to_the_output_dtype() -> None:
  *arrays, weights = inputs(False)
  # Multiples of 1/8 with exact sums: no other rounding can tip that of a logit.
  arrays = [np.round(a * 8) / 8 for a in arrays]
  dtypes = policy(output='bfloat16')
  kl, d_hidden, d_head = plain(*arrays, weights, False, 2.0, ml_dtypes.bfloat16)
  unrounded, _, _ = plain(*arrays, weights, False, 2.0)
  assert np.abs(kl - unrounded).max() > 10 * ATOL
  (found_hidden, found_head), found = grad((0, 1))(*arrays, weights, False, 2.0, CHUNK, dtypes)
  np.testing.assert_allclose(found[0], kl, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_hidden[0], d_hidden, rtol=0, atol=ATOL)
  np.testing.assert_allclose(found_head, d_head, rtol=0, atol=ATOL)


def test_impossible_words_have_no_share() -> None:
  # In float16 a logit below −65504 is −inf: here of both models, in all of the first chunk and the last.
  hidden, head, teacher_hidden, teacher_head, weights = inputs(False)
  head, teacher_head = head[:, :20].copy(), teacher_head[:, :20].copy()
  hidden, teacher_hidden = np.abs(hidden) + 1, np.abs(teacher_hidden) + 1
  impossible = np.isin(np.arange(20), [*range(5), 6, 8, *range(15, 20)])
  head[:, impossible] = teacher_head[:, impossible] = -1e5
  dtypes = policy(output='float16')
  how = weights, False, 2.0, 5, dtypes
  (d_hidden, d_head), kl = grad((0, 1))(hidden, head, teacher_hidden, teacher_head, *how)
  # The rest alone is a smaller vocabulary.
  rest = hidden, head[:, ~impossible], teacher_hidden, teacher_head[:, ~impossible]
  (wanted_hidden, wanted_head), wanted = grad((0, 1))(*rest, *how)
  np.testing.assert_allclose(kl, wanted, rtol=0, atol=ATOL)
  np.testing.assert_allclose(d_hidden, wanted_hidden, rtol=0, atol=ATOL)
  np.testing.assert_allclose(d_head[:, ~impossible], wanted_head, rtol=0, atol=ATOL)
  assert not np.asarray(d_head)[:, impossible].any()
  # What the student rules out and the teacher may say costs everything, and the gradient is finite still.
  teacher_head[:, 2] = teacher_head[:, 9]
  found, kl = grad((0, 1))(hidden, head, teacher_hidden, teacher_head, *how)
  assert (kl == np.inf).all()
  assert all(np.isfinite(d).all() for d in found)


@LAYOUTS
def test_heads_in_16_bit_tensors(transposed: bool) -> None:
  hidden, head, teacher_hidden, teacher_head, weights = inputs(transposed)
  how = weights, transposed, 2.0, CHUNK, policy(compute='bfloat16')
  hidden, head, teacher_hidden, teacher_head = (
    a.astype(ml_dtypes.bfloat16) for a in (hidden, head, teacher_hidden, teacher_head)
  )
  stored, teacher_stored = (quantize(jnp.asarray(w), 'bfloat16') for w in (head, teacher_head))
  found, kl = grad(0)(hidden, stored, teacher_hidden, teacher_stored, *how)
  wanted, losses = grad(0)(hidden, head, teacher_hidden, teacher_head, *how)
  np.testing.assert_array_equal(kl, losses)
  np.testing.assert_array_equal(found, wanted)


def test_transformations() -> None:
  arrays = inputs(False)
  wanted, losses = grad((0, 1))(*arrays, False, 2.0)
  # Not compiled as a whole, and with all of it computed again in the backward pass.
  again = jax.checkpoint(weighted, static_argnums=(5, 6))
  found, kl = jax.grad(again, (0, 1), has_aux=True)(*arrays, False, 2.0)
  np.testing.assert_allclose(kl, losses, rtol=0, atol=1e-6)
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  # Three batches, each with a gradient of its own, and one model.
  pairs = [inputs(False, seed) for seed in range(3)]
  hidden, teacher_hidden, weights = (np.stack([pair[i] for pair in pairs]) for i in (0, 2, 4))
  both = jax.vmap(
    lambda x, y, w: jax.grad(weighted, (0, 1), has_aux=True)(x, arrays[1], y, arrays[3], w, False, 2.0)
  )
  found, kl = jax.jit(both)(hidden, teacher_hidden, weights)
  for i in range(3):
    own, losses = grad((0, 1))(hidden[i], arrays[1], teacher_hidden[i], arrays[3], weights[i], False, 2.0)
    np.testing.assert_allclose(kl[i], losses, rtol=0, atol=ATOL)
    for a, b in zip(found, own, strict=True):
      np.testing.assert_allclose(a[i], b, rtol=0, atol=ATOL)


def test_models_that_do_not_fit_are_refused() -> None:
  hidden, head, teacher_hidden, teacher_head, _ = inputs(False)
  with pytest.raises(ValueError, match='tokens or words'):
    token_kl(hidden, head, teacher_hidden, teacher_head[:, 1:], F32, False, 1.0)
  with pytest.raises(ValueError, match='tokens or words'):
    token_kl(hidden, head, teacher_hidden[:, 1:], teacher_head, F32, False, 1.0)


# What the program holds. The sizes of this file are primes and such: a shape is one thing only.


def _is_jaxpr(x: Any) -> bool:
  return hasattr(x, 'eqns') or hasattr(x, 'jaxpr')


def _steps(jaxpr: Any) -> Iterator[Any]:
  """Every equation of a jaxpr, inside loops and calls too."""
  for step in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
    yield step
    for inner in jax.tree.leaves(list(step.params.values()), is_leaf=_is_jaxpr):
      if _is_jaxpr(inner):
        yield from _steps(inner)


def _program(argnums: Any, chunk: int, transposed: bool, dtypes: Policy = F32) -> list[Any]:
  """The equations of the gradient."""
  *arrays, weights = inputs(transposed)
  arrays = [a.astype(dtypes.compute) for a in arrays]
  f = jax.grad(lambda *args: weighted(*args, weights, transposed, 2.0, chunk, dtypes)[0], argnums)
  return list(_steps(jax.make_jaxpr(f)(*arrays)))


def _arrays(steps: list[Any]) -> set[tuple[str, tuple[int, ...]]]:
  """dtype and shape of everything that is computed."""
  return {(str(out.aval.dtype), out.aval.shape) for step in steps for out in step.outvars}


@LAYOUTS
def test_full_logits_never_exist(transposed: bool) -> None:
  shapes = {shape for _, shape in _arrays(_program((0, 1), CHUNK, transposed))}
  assert (TOKENS, 33) in shapes  # The walk reached the loops.
  assert {shape for shape in shapes if VOCAB in shape} == {(VOCAB, D) if transposed else (D, VOCAB)}
  # With one chunk they do, so they would have been found.
  assert (TOKENS, VOCAB) in {shape for _, shape in _arrays(_program((0, 1), VOCAB, transposed))}


@LAYOUTS
def test_no_gradient_is_formed_of_what_is_frozen(transposed: bool) -> None:
  dtypes = policy(compute='bfloat16')
  heads = {(VOCAB, D), (D, VOCAB), (VOCAB, E), (E, VOCAB)}
  frozen = _program(0, CHUNK, transposed, dtypes)
  # Nor is a head widened, which would take twice its memory: it is sliced, as integers.
  assert {dtype for dtype, shape in _arrays(frozen) if shape in heads} == {'uint16'}
  trained = _program(1, CHUNK, transposed, dtypes)
  assert 'float32' in {dtype for dtype, shape in _arrays(trained) if shape in heads}
  # The chunks are gone through twice, but once where only the teacher's gradient is asked for, which is zero.
  loops = [sum(step.primitive.name == 'scan' for step in steps) for steps in (frozen, trained)]
  assert loops == [2, 2]
  idle = _program(2, CHUNK, transposed, dtypes)
  assert sum(step.primitive.name == 'scan' for step in idle) == 1
