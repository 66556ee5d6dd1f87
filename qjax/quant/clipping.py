"""How far to clip the range of each block of a weight before it is quantized.

A smaller range has finer steps for most weights and cuts off the largest. What that costs depends on what is
measured. e = w - Q(w) is the error of a weight [K, N], x [K] an input:

  weight_mse            Σ_k e_k²            every weight counts alike
  activation_weighted   Σ_k E[x_k²] e_k²    inputs that are large count more
  layer_output          e^T E[x x^T] e      the error of the layer's output itself, through the Gram matrix
  none                  no clipping

The least error of the weights is not the least error of the model: with a few hot inputs the first objective
gives up just the weights that matter. It is here for the contrast.

Both ways to find clips return what `quantize(w, scheme, clip)` takes. Both compare with no clipping under the
quantizer as it is used, so that by their objective, in float32, no column is ever worse off than unclipped;
where columns depend on each other (`dq`, `scale=e4m3`, tiles, `axis=tensor`), the matrix is not.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qjax.errors import UserError, nearest
from qjax.quant.formats import Scheme, parse_scheme
from qjax.quant.qtensor import dequantize, over_outputs, quantize, spread

OBJECTIVES = ('none', 'weight_mse', 'activation_weighted', 'layer_output')

# At 4 bits nothing is gained below half the range; fewer bits may want less.
GRID = tuple(np.linspace(1.0, 0.5, 20).tolist())


def search(
  w: jax.Array,
  scheme: str | Scheme,
  objective: str,
  stats: jax.Array | None = None,
  grid: Sequence[float] = GRID,
) -> jax.Array:
  """The best clip of a grid for each block.

  Each block is searched by itself. For 'layer_output' that means with the block of the Gram matrix on the
  diagonal: what the errors of two blocks do to each other is left out, and a column that ends up worse for it
  goes back to no clipping. With `axis=channel` a block is a column, and nothing is left out.

  The ratios are tried one after the other, so that memory is that of a few copies of w.

  Args:
    w: [..., K, N] of any floating dtype, finite.
    scheme: integers or a table.
    objective: a name in `OBJECTIVES`.
    stats: of the inputs: E[x²] [..., K] for 'activation_weighted', E[x x^T] [..., K, K] for 'layer_output',
      of any common factor; else None.
    grid: ratios in (0, 1]. 1 is always tried, and a tie goes to the largest.

  Returns:
    float32 in (0, 1], in the shape of the scales: [..., blocks, N], of tiles [..., blocks, tiles].

  Raises:
    UserError: an unknown objective, stats that are missing or of another shape, a ratio out of (0, 1], or a
      scheme without a scale.
  """
  scheme = _with_scale(scheme)
  if objective not in OBJECTIVES:
    raise UserError(f'clipping objective {objective!r} is not known{nearest(objective, OBJECTIVES)}')
  if bad := [ratio for ratio in grid if not 0 < ratio <= 1]:
    raise UserError(f'clipping ratios must be above 0 and at most 1, not {", ".join(map(str, bad))}')
  *lead, k, _ = w.shape
  expected = {'activation_weighted': (*lead, k), 'layer_output': (*lead, k, k)}.get(objective)
  if expected is None:
    stats = None
  elif stats is None or stats.shape != expected:
    given = 'nothing' if stats is None else stats.shape
    what = 'E[x x^T]' if objective == 'layer_output' else 'E[x²]'
    raise UserError(f'{objective} needs stats {what} of shape {expected} for this weight; {given} was given')
  if objective == 'none':
    return jnp.ones(_scales_shape(w, scheme), jnp.float32)
  return _search(w, scheme, stats, tuple(sorted({float(ratio) for ratio in grid} - {1.0}, reverse=True)))


def learned(
  w: jax.Array,
  scheme: str | Scheme,
  gram: jax.Array,
  steps: int = 100,
  learning_rate: float = 0.02,
  grid: Sequence[float] = GRID,
) -> jax.Array:
  """Clips learned by gradient descent on e^T E[x x^T] e, all blocks of a column together.

  The clip is the sigmoid of what Adam learns (Shao et al. 2024, "OmniQuant", §3.2), starting from the best of
  the grid. Rounding passes gradients straight through: with v = w clamped to the clipped range,
  Q(w) = v + clip · (Q(w) - v) / clip, where the fraction, an error in steps of a scale that is proportional
  to the clip, is held constant. The forward value is the quantizer's own. The best clips met, the start among
  them, are returned.

  Args:
    w: [..., K, N] of any floating dtype, finite.
    scheme: integers or a table.
    gram: E[x x^T] [..., K, K] of any factor.
    steps: of Adam.
    learning_rate: of Adam, on the logits of the clips.
    grid: as in `search`.

  Returns:
    float32 in (0, 1], in the shape of the scales: [..., blocks, N], of tiles [..., blocks, tiles].

  Raises:
    UserError: as `search` does.
  """
  scheme = _with_scale(scheme)
  start = search(w, scheme, 'layer_output', gram, grid)
  return _learned(w, scheme, gram, start, steps, learning_rate)


def _with_scale(scheme: str | Scheme) -> Scheme:
  scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
  if scheme.numbers.is_float:
    raise UserError(f'{scheme} has no scale to clip; clipping is for integers and tables such as int4 or nf4')
  return scheme


def _scales_shape(w: jax.Array, scheme: Scheme) -> tuple[int, ...]:
  *lead, k, n = w.shape
  return (*lead, *scheme.grid(k, n))


def _error(w: jax.Array, scheme: Scheme, clip: jax.Array) -> jax.Array:
  return w - dequantize(quantize(w, scheme, clip))


def _columns(error: jax.Array, stats: jax.Array | None, scheme: Scheme) -> jax.Array:
  """The objective of an error [..., K, N], [..., 1, N]; [..., 1, 1] where columns depend on each other.

  Which objective it is shows in the axes of stats: none, [..., K] or [..., K, K].
  """
  if stats is None:
    weighted = error
  elif stats.ndim == error.ndim:
    weighted = jnp.matmul(stats, error, precision=jax.lax.Precision.HIGHEST)
  else:
    weighted = stats[..., None] * error
  coupled = scheme.double_quantized or scheme.scale == 'e4m3' or scheme.width_of(error.shape[-1]) > 1
  return jnp.sum(error * weighted, axis=(-2, -1) if coupled else -2, keepdims=True)


def _per_scale(error: jax.Array, stats: jax.Array | None, scheme: Scheme) -> jax.Array:
  """The objective of an error [..., K, N] block by block, in the shape of the scales."""
  *lead, k, n = error.shape
  block = scheme.block_of(k)
  blocks = -(-k // block)
  rest = blocks * block - k
  blocked = jnp.pad(error, [(0, 0)] * len(lead) + [(0, rest), (0, 0)]).reshape(*lead, blocks, block, n)
  if stats is None:
    weighted = blocked
  elif stats.ndim == error.ndim:
    padded = jnp.pad(stats, [(0, 0)] * len(lead) + [(0, rest), (0, rest)])
    tiles = padded.reshape(*lead, blocks, block, blocks, block)
    diagonal = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
    weighted = jnp.matmul(diagonal, blocked, precision=jax.lax.Precision.HIGHEST)
  else:
    padded = jnp.pad(stats, [(0, 0)] * len(lead) + [(0, rest)])
    weighted = padded.reshape(*lead, blocks, block, 1) * blocked
  return over_outputs(jnp.sum(blocked * weighted, axis=-2), scheme, jnp.sum, 0.0)


@functools.partial(jax.jit, static_argnames=('scheme', 'ratios'))
def _search(w: jax.Array, scheme: Scheme, stats: jax.Array | None, ratios: tuple[float, ...]) -> jax.Array:
  w = w.astype(jnp.float32)
  stats = None if stats is None else stats.astype(jnp.float32)
  ones = jnp.ones(_scales_shape(w, scheme), jnp.float32)

  Best = tuple[jax.Array, jax.Array]

  def attempt(best: Best, ratio: jax.Array) -> tuple[Best, None]:
    least, clip = best
    found = _per_scale(_error(w, scheme, ratio * ones), stats, scheme)
    better = found < least
    return (jnp.where(better, found, least), jnp.where(better, ratio, clip)), None

  unclipped = _error(w, scheme, ones)
  start = (_per_scale(unclipped, stats, scheme), ones)
  (_, clip), _ = jax.lax.scan(attempt, start, jnp.asarray(ratios, jnp.float32))
  better = _columns(_error(w, scheme, clip), stats, scheme) < _columns(unclipped, stats, scheme)
  return jnp.where(better, clip, 1.0)


@functools.partial(jax.jit, static_argnames=('scheme', 'steps'))
def _learned(
  w: jax.Array, scheme: Scheme, gram: jax.Array, start: jax.Array, steps: int, learning_rate: float
) -> jax.Array:
  w, gram = w.astype(jnp.float32), gram.astype(jnp.float32)
  k, n = w.shape[-2:]
  block = scheme.block_of(k)
  optimizer = optax.adam(learning_rate)

  # What a clip multiplies: least and largest of each block, or their larger magnitude.
  def extreme(sign: float) -> jax.Array:
    signed = sign * w if scheme.asymmetric else jnp.abs(w)
    blocks = -(-k // block)
    pad = [(0, 0)] * (w.ndim - 2) + [(0, blocks * block - k), (0, 0)]
    padded = jnp.pad(signed, pad, constant_values=-np.inf)
    largest = jnp.max(padded.reshape(*w.shape[:-2], blocks, block, w.shape[-1]), axis=-2)
    return sign * spread(over_outputs(largest, scheme, jnp.max, -np.inf), scheme, k, n)

  low, high = extreme(-1.0), extreme(1.0)

  def objective(logit: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    clip = jax.nn.sigmoid(logit)
    wide = spread(clip, scheme, k, n)
    clamped = jnp.clip(w, wide * low, wide * high)
    quantized = dequantize(quantize(w, scheme, jax.lax.stop_gradient(clip)))
    held = jax.lax.stop_gradient((quantized - clamped) / wide)
    columns = _columns(w - (clamped + wide * held), gram, scheme)
    return jnp.sum(columns), (clip, _columns(w - quantized, gram, scheme))

  def step(carry: tuple, _: None) -> tuple[tuple, None]:
    logit, state, least, best = carry
    gradient, (clip, columns) = jax.grad(objective, has_aux=True)(logit)
    better = columns < least
    least, best = jnp.where(better, columns, least), jnp.where(better, clip, best)
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to its whole count of steps
      updates, state = optimizer.update(gradient, state)
    return (optax.apply_updates(logit, updates), state, least, best), None

  # A sigmoid reaches 1 nowhere; from too near it Adam would not come back in a hundred steps.
  inside = jnp.clip(start, 0.02, 0.98)
  logit = jnp.log(inside) - jnp.log1p(-inside)
  least = _columns(_error(w, scheme, start), gram, scheme)
  (_, _, _, best), _ = jax.lax.scan(step, (logit, optimizer.init(logit), least, start), None, length=steps)
  return best
