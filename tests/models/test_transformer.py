"""Values and gradients are those of an independent decoder in NumPy; packing and remat change neither."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import trees
from qjax.data.templates import prompt_ids
from qjax.errors import UserError
from qjax.io.source import Source
from qjax.io.source import params as read_params
from qjax.models import loss, transformer
from qjax.models.config import ModelConfig, RopeScaling, parameter_shapes
from qjax.models.layers import silu_gate
from qjax.models.objective import loss_sums
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.remat import POLICIES
from tests import oracle

BASE = ModelConfig(
  vocab_size=97, num_layers=2, d_model=64, d_ff=96, num_heads=4, num_kv_heads=2, head_dim=16, rms_eps=1e-5
)
# Rotary wavelengths of BASE are 2π · 10^(i/2): of 128 tokens' context, 'llama3' keeps those below 32 (two),
# divides those above 128 (four) and blends the one between twice.
FAMILIES: dict[str, dict[str, Any]] = {
  'one key head': dict(num_kv_heads=1),
  'wide heads': dict(head_dim=24),
  'linear': dict(rope_scaling=RopeScaling('linear', 4.0)),
  'llama3': dict(rope_scaling=RopeScaling('llama3', 8.0, 1.0, 4.0, 128)),
  'theta': dict(rope_theta=100.0),
  'eps': dict(rms_eps=0.1),
  'bias': dict(qkv_bias=True),
  'qk_norm': dict(qk_norm=True),
  'untied': dict(tie_embeddings=False),
  'window': dict(sliding_window=3),
  'offset': dict(norm_offset=1.0),
  'embed_scale': dict(embed_scale=8.0),
  'gelu': dict(activation='gelu_tanh'),
}
GEMMA = dict(norm_offset=1.0, embed_scale=8.0, activation='gelu_tanh', qk_norm=True, sliding_window=5)
QWEN = dict(qkv_bias=True, tie_embeddings=False, rope_scaling=RopeScaling('linear', 2.0))
FIELDS = ('tokens', 'targets', 'weights', 'segments', 'positions')

Batch = dict[str, np.ndarray]


def make(config: ModelConfig, remat: str = 'none') -> Transformer:
  return Transformer(config, Numerics(policy()), remat)


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
  """Kernels that keep the size of what they multiply; norm scales that aren't 1 and biases that aren't 0."""
  rng = np.random.default_rng(seed)
  flat = {}
  for path, shape in parameter_shapes(config).items():
    leaf = path.split('/')[-1]
    mean = 1 - config.norm_offset if leaf == 'scale' else 0
    width = 0.3 if leaf in ('scale', 'bias') else (shape[-2] if leaf == 'kernel' else shape[-1]) ** -0.5
    flat[path] = rng.normal(mean, width, shape).astype(np.float32)
  return trees.nest(flat)


def widen(params: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def random_ids(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, BASE.vocab_size, shape).astype(np.int32)


def row_of(documents: list[np.ndarray], left: int = 0, right: int = 0, seed: int = 0) -> Batch:
  """One row [1, T] of documents between pads, whose tokens, targets and positions are anything."""
  rng = np.random.default_rng(seed)
  parts = []
  for segment, ids in enumerate(documents, 1):
    n = len(ids) - 1
    parts.append((ids[:-1], ids[1:], np.ones(n), np.full(n, segment), np.arange(n)))
  pads = [
    (*rng.integers(0, BASE.vocab_size, (2, n)), np.zeros(n), np.zeros(n), rng.integers(0, 99, n))
    for n in (left, right)
  ]
  columns = (np.concatenate(column) for column in zip(pads[0], *parts, pads[1], strict=True))
  batch = {name: x[None].astype(np.int32) for name, x in zip(FIELDS, columns, strict=True)}
  return batch | {'weights': batch['weights'].astype(np.float32)}


@functools.cache
def nll_of(config: ModelConfig) -> Callable[[Any, Mapping[str, Any]], jax.Array]:
  """(params, batch) → the loss of every slot, float32 [B, T], compiled."""
  model = make(config)

  def nll(params: Any, batch: Mapping[str, Any]) -> jax.Array:
    hidden = model.apply({'params': params}, batch['tokens'], batch['segments'], batch['positions'])
    head, transposed = transformer.head_of(config, params)
    return loss.token_losses(hidden, head, batch['targets'], policy(), transposed, 40).nll

  return jax.jit(nll)


def oracle_nll(config: ModelConfig, params: Any, ids: np.ndarray) -> np.ndarray:
  """The same of one document [n - 1], in the dtype of `params`."""
  logits = oracle.forward(config, params, ids[:-1])
  logits = logits - logits.max(axis=-1, keepdims=True)
  return np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(ids) - 1), ids[1:]]


# Against the oracle.


def test_init_params_are_those_of_the_config() -> None:
  config = dataclasses.replace(BASE, **GEMMA, qkv_bias=True, tie_embeddings=False)
  found = trees.flatten(jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0))))
  assert {path: x.shape for path, x in found.items()} == parameter_shapes(config)
  assert all(x.dtype == jnp.float32 for x in found.values())


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_are_the_oracles(name: str) -> None:
  config = dataclasses.replace(BASE, **FAMILIES[name])
  params, tokens = random_params(config), random_ids(1, 2, 40)
  model = make(config)
  ones, positions = np.ones_like(tokens), np.arange(40, dtype=np.int32)[None].repeat(2, 0)
  forward = jax.jit(lambda p, *a: transformer.logits(model, {'params': p}, *a))
  logits = forward(params, tokens, ones, positions)
  assert logits.dtype == jnp.float32 and logits.shape == (2, 40, 97)
  wide = widen(params)
  for row in range(2):
    exact = oracle.forward(config, wide, tokens[row])
    # Two float32 programs that round in another order err about equally. Angles are float32 here, exact in
    # the oracle, and off by up to 40 · 2⁻²⁴ radians: another few roundings.
    error = np.abs(oracle.forward(config, params, tokens[row]) - exact).max()
    np.testing.assert_allclose(logits[row], exact, rtol=0, atol=6 * error)
    if parameter_shapes(config) == parameter_shapes(BASE):
      # An option that did nothing would be seen: without it the answer is another.
      assert np.abs(oracle.forward(BASE, wide, tokens[row]) - exact).max() > 100 * error


@pytest.mark.parametrize(('options', 'remat'), [(GEMMA, 'none'), (QWEN, 'full')], ids=['gemma', 'qwen'])
def test_gradients_are_the_oracles(options: dict[str, Any], remat: str) -> None:
  config = dataclasses.replace(BASE, **options)
  params = random_params(config)
  documents = [random_ids(2, 14), random_ids(3, 9)]
  batch = row_of(documents, left=2, right=3)
  batch['weights'] = batch['weights'] * np.linspace(0.5, 2, batch['weights'].size, dtype=np.float32)
  weights = [batch['weights'][batch['segments'] == i + 1] for i in range(2)]
  model = make(config, remat)

  def total(params: Any) -> jax.Array:
    return loss_sums(model, {'params': params}, batch, chunk=40).nll

  value, gradient = jax.jit(jax.value_and_grad(total))(params)
  wide = widen(params)

  def exact(params: Any) -> float:
    return sum(
      float(w @ oracle_nll(config, params, ids)) for w, ids in zip(weights, documents, strict=True)
    )

  np.testing.assert_allclose(value, exact(wide), rtol=1e-5)
  # Leaf by leaf, the slope along two random directions. The central difference in float64 errs by h² and
  # by 2⁻⁵² / h, some 1e-8 of the loss; the gradient by float32's 2⁻²⁴ a product, some hundred of them.
  rng, h = np.random.default_rng(4), 1e-4
  flat = trees.flatten(wide)
  gradients = trees.flatten(gradient)
  assert gradients.keys() == flat.keys()
  for path, found in gradients.items():
    scale = float(np.linalg.norm(found))
    assert scale > 1e-3, path
    for _ in range(2):
      direction = rng.normal(size=found.shape)
      ahead, behind = (exact(trees.nest(flat | {path: flat[path] + s * direction})) for s in (h, -h))
      slope = (ahead - behind) / (2 * h)
      assert abs(float(np.vdot(found, direction)) - slope) < 1e-4 * scale, path


# Packing.


@pytest.mark.parametrize('options', [{}, GEMMA], ids=['llama', 'gemma'])
def test_packed_documents_have_the_losses_they_have_alone(options: dict[str, Any]) -> None:
  config = dataclasses.replace(BASE, **options)
  params, nll = random_params(config), nll_of(config)
  a, b = random_ids(5, 8), random_ids(6, 10)  # 7 and 9 slots.
  alone = [nll(params, row_of([ids], 0, 24 - len(ids) + 1))[0, : len(ids) - 1] for ids in (a, b)]
  for found, ids in zip(alone, (a, b), strict=True):
    # 2⁻²⁴ of logits of up to 20, some tens of times.
    np.testing.assert_allclose(found, oracle_nll(config, widen(params), ids), rtol=0, atol=1e-4)
  # 24 slots with pads on either side, and 16 without any.
  for turned, left, right in ((False, 0, 8), (False, 8, 0), (True, 3, 5), (False, 0, 0)):
    documents = [b, a] if turned else [a, b]
    batch = row_of(documents, left, right)
    found = nll(params, batch)
    for segment, ids in enumerate(documents, 1):
      here = batch['segments'] == segment
      np.testing.assert_allclose(found[here], alone[0 if ids is a else 1], rtol=0, atol=2e-5)
    assert np.isfinite(found).all()  # A pad's is weighted by zero, which would not silence a NaN.


def test_nobody_sees_another_document_or_a_pad() -> None:
  # In programs of one shape nothing rounds differently: other neighbours must not change a bit.
  params, nll = random_params(BASE), nll_of(BASE)
  a, b = random_ids(5, 8), random_ids(6, 10)
  batch = row_of([a, b], 3, 5)
  before = nll(params, batch)
  for segment in (1, 2, 0):
    other = dict(batch)
    here = batch['segments'] == segment
    other['tokens'] = np.where(here, (batch['tokens'] + 1) % BASE.vocab_size, batch['tokens'])
    after = nll(params, other)
    np.testing.assert_array_equal(after[~here], before[~here])
    assert (np.asarray(after) != before)[here].any()


@pytest.mark.parametrize('window', [None, 1, 2])
def test_who_sees_whom(window: int | None) -> None:
  # With one layer, slot i depends on the token at j just where the mask has (i, j).
  config = dataclasses.replace(BASE, num_layers=1, sliding_window=window)
  params, model = random_params(config), make(config)
  tokens = random_ids(7, 8)
  # Row 0 is as it is; row 1 + j has another token at j.
  changed = np.stack([tokens, *(np.where(np.arange(8) == j, (tokens + 1) % 97, tokens) for j in range(8))])
  changed = changed.astype(np.int32)
  positions = np.arange(8, dtype=np.int32)[None].repeat(9, 0)
  expected = np.array([[j <= i and (window is None or i - j < window) for j in range(8)] for i in range(8)])
  for segments in ([1] * 8, [1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 2, 0, 0]):
    s = np.array(segments, np.int32)
    hidden = np.asarray(jax.jit(model.apply)({'params': params}, changed, s[None].repeat(9, 0), positions))
    sees = (hidden[1:] != hidden[0]).any(axis=-1).T
    same = (s[:, None] == s[None, :]) & (s > 0)[:, None]
    np.testing.assert_array_equal(sees, expected & same | np.eye(8, dtype=bool))


def test_positions_are_those_of_the_batch() -> None:
  # Only position times frequency matters: twice the one and half the other is the same to the bit.
  half = dataclasses.replace(BASE, rope_scaling=RopeScaling('linear', 2.0))
  params, batch = random_params(BASE), row_of([random_ids(8, 25)])
  once = nll_of(BASE)(params, batch)
  twice = batch | {'positions': batch['positions'] * 2}
  np.testing.assert_array_equal(nll_of(half)(params, twice), once)
  assert np.abs(nll_of(BASE)(params, twice) - once).max() > 1e-3


# Remat.


class Measured(NamedTuple):
  """A loss, its gradient, and the bytes that computing them took beyond what goes in and comes out."""

  value: jax.Array
  gradient: Any
  temporary_bytes: int


DEEP = dataclasses.replace(BASE, **GEMMA, num_layers=8)


@functools.cache
def measure(remat: str) -> Measured:
  model, params = make(DEEP, remat), random_params(DEEP)
  row = row_of([random_ids(2, 40), random_ids(3, 19)], 2, 4)
  batch = {name: x.repeat(4, 0) for name, x in row.items()}
  total = lambda params, batch: loss_sums(model, {'params': params}, batch, chunk=40).nll
  compiled = jax.jit(jax.value_and_grad(total)).lower(params, batch).compile()
  return Measured(*compiled(params, batch), compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize('half', [jnp.float32, jnp.bfloat16])
def test_the_gate_has_the_gradient_of_its_float32_definition(half: Any) -> None:
  gate, up, g = (5 * jax.random.normal(jax.random.key(i), (3, 7, 131)).astype(half) for i in range(3))

  def plain(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up

  wide = [x.astype(jnp.float32) for x in (gate, up, g)]
  y, pull = jax.vjp(plain, *wide[:2])
  ours, ours_pull = jax.vjp(silu_gate, gate, up)
  for found, wanted in zip((ours, *ours_pull(g)), (y, *pull(wide[2])), strict=True):
    assert found.dtype == half
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=jnp.finfo(half).eps, atol=1e-4)


@pytest.mark.parametrize('remat', [name for name in POLICIES if name != 'none'])
def test_remat_changes_no_gradient(remat: str) -> None:
  found, wanted = measure(remat), measure('none')
  np.testing.assert_allclose(found.value, wanted.value, rtol=1e-6)
  for x, y in zip(jax.tree.leaves(found.gradient), jax.tree.leaves(wanted.gradient), strict=True):
    # Recomputed values may be fused, and so rounded, differently.
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


def test_remat_saves_the_memory_of_the_layers() -> None:
  # Plain autodiff keeps at least gate, up and their product of every layer; 'full' has them of one at a time.
  a_layer = 3 * 4 * 63 * DEEP.d_ff * 4
  assert measure('none').temporary_bytes - measure('full').temporary_bytes > (DEEP.num_layers - 1) * a_layer


def test_unknown_remat_is_refused() -> None:
  with pytest.raises(UserError, match=r"model\.remat = 'ful' is not known.*full"):
    make(BASE, 'ful')


# The embedded model.

TEXTS = {
  'english': 'The committee met on Tuesday, and nobody could agree on what the word "final" was to mean.',
  'code': 'def gcd(a, b):\n  while b:\n    a, b = b, a % b\n  return a\n\nassert gcd(8, 6) == 2',
  'bengali': 'ঢাকা বাংলাদেশের রাজধানী।',
}
LENGTH = 64


@pytest.fixture(scope='module')
def embedded(embedded_source: Source) -> tuple[Source, Any, Callable[[list[int]], np.ndarray]]:
  """The model, its parameters, and a function from ids to logits that is compiled once for all lengths."""
  model = make(embedded_source.config, 'full')
  params = jax.tree.map(jnp.asarray, read_params(embedded_source))
  positions = np.arange(LENGTH, dtype=np.int32)[None]
  forward = jax.jit(lambda p, *a: transformer.logits(model, {'params': p}, *a))

  def logits(ids: list[int]) -> np.ndarray:
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    segments = (np.arange(LENGTH) < len(ids)).astype(np.int32)[None]
    return np.asarray(forward(params, tokens, segments, positions)[0, : len(ids)])

  return embedded_source, params, logits


@pytest.mark.parametrize('name', TEXTS)
def test_the_embedded_model_is_the_oracle(embedded: Any, name: str) -> None:
  source, params, logits = embedded
  ids, _ = source.tokenizer.encode(TEXTS[name])
  assert source.tokenizer.decode(ids) == TEXTS[name]
  assert 16 < len(ids) <= LENGTH
  wanted = oracle.forward(source.config, jax.tree.map(np.asarray, params), np.asarray(ids))
  np.testing.assert_allclose(logits(ids), wanted, rtol=0, atol=1e-3)


def test_the_embedded_model_knows_the_capital(embedded: Any) -> None:
  source, _, logits = embedded
  question = [{'role': 'user', 'content': 'What is the capital of Bangladesh?'}]
  ids = prompt_ids(question, source.tokenizer)
  start = len(ids)
  while len(ids) < LENGTH and ids[-1] != source.tokenizer.eos_id:
    ids = [*ids, int(logits(ids)[-1].argmax())]
  assert source.tokenizer.decode(ids[start:]) == 'The capital of Bangladesh is Dhaka.'
  assert ids[-1] == source.tokenizer.eos_id


@pytest.mark.parametrize('remat', ['projections', 'none'])
@pytest.mark.parametrize('half', ['bfloat16', 'float16'])
def test_half_precision_gradients_point_where_float32_gradients_do(half: str, remat: str) -> None:
  """Every leaf has its gradient: one that is cut off somewhere is zero, or points elsewhere."""
  config = ModelConfig(61, 2, 32, 48, 4, 2, 8, tie_embeddings=True)
  params = jax.jit(lambda key: transformer.init_params(config, key))(jax.random.key(0))
  tokens = np.random.default_rng(0).integers(0, 61, (2, 16)).astype(np.int32)
  place = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)

  def gradient(compute: str, remat: str) -> dict[str, np.ndarray]:
    model = transformer.Transformer(config, Numerics(policy(compute=compute)), remat)

    def nll(params: Any) -> jax.Array:
      batch = {'tokens': tokens, 'targets': np.roll(tokens, -1, 1), 'segments': np.ones_like(tokens)}
      batch |= {'positions': place, 'weights': np.full(tokens.shape, 1 / 32, np.float32)}
      return loss_sums(model, {'params': params}, batch).nll

    found = trees.flatten(jax.jit(jax.grad(nll))(params))
    return {path: np.asarray(g, np.float64) for path, g in found.items()}

  wide, narrow = gradient('float32', 'none'), gradient(half, remat)
  for path, g in wide.items():
    cosine = np.sum(g * narrow[path]) / np.sqrt(np.sum(g**2) * np.sum(narrow[path] ** 2))
    assert cosine > 0.99, path
