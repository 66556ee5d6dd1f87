"""Attention over prefixes of the keys is attention over all of them, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.models import attention


def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """The definition, differentiated by JAX."""
  group = q.shape[2] // k.shape[2]
  k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
  scores = jnp.einsum('bthc,bshc->bhts', q, k) / np.sqrt(q.shape[-1])
  p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
  return jnp.einsum('bhts,bshc->bthc', p, v)


@pytest.mark.parametrize('queries', [3, 4, 128])
@pytest.mark.parametrize('window', [None, 2])
def test_values_and_gradients_are_those_of_the_definition(
  queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(attention, '_QUERIES', queries)
  rng = np.random.default_rng(0)
  t = 11
  q = jnp.asarray(rng.normal(size=(2, t, 6, 8)), jnp.float32)
  k, v = (jnp.asarray(rng.normal(size=(2, t, 2, 8)), jnp.float32) for _ in range(2))
  g = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
  segments = jnp.asarray([[1] * 4 + [2] * 7, [1] * 9 + [0] * 2])
  mask = attention.attention_mask(segments, window)
  out, pull = jax.vjp(jax.jit(lambda *x: attention.attend(*x, mask, 'xla')), q, k, v)
  wanted, pull_plain = jax.vjp(lambda *x: plain(*x, mask), q, k, v)
  # Sums of at most 11 · 3 products of size about 3.
  np.testing.assert_allclose(out, wanted, rtol=0, atol=3e-6)
  for found, expected in zip(pull(g), pull_plain(g), strict=True):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(('t', 'wanted'), [(5, 1), (64, 1), (65, 2), (256, 4), (1024, 4), (2050, 4)])
def test_parts_cover_every_query_once(t: int, wanted: int) -> None:
  parts = attention._parts(t)
  assert len(parts) == wanted
  assert [i for start, stop in parts for i in range(start, stop)] == list(range(t))
