"""Moments of gradients in 8 bits, each block of 256 neighbours with a scale of its own.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", §2. Blocks run along the last axis, so
that layers of a stack and words of an embedding share none, and codes, which have the weight's shape, lie on
devices as it does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qjax.quant.formats import DYNAMIC8, DYNAMIC8_UNSIGNED, Format

BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moment:
  """Float32 values at rest.

  Attributes:
    codes: uint8 [..., N]; the level of a code times its block's scale is the value.
    scale: float32 [..., ceil(N / 256)], the largest magnitude of each block.
    signed: whether values may be below zero.
  """

  codes: jax.Array
  scale: jax.Array
  signed: bool = dataclasses.field(default=True, metadata={'static': True})

  def decode(self) -> jax.Array:
    """The values, float32 [..., N]."""
    spread = jnp.repeat(self.scale, BLOCK, axis=-1)[..., : self.codes.shape[-1]]
    return _numbers(self.signed).decode(self.codes) * spread


def _numbers(signed: bool) -> Format:
  return DYNAMIC8 if signed else DYNAMIC8_UNSIGNED


def encode(x: jax.Array, signed: bool = True) -> Moment:
  """Float32 x [..., N] in the nearest levels.

  An unsigned value above zero never rests as zero: a second moment would leave `eps` alone to divide by.
  """
  size = x.shape[-1]
  blocks = -(-size // BLOCK)
  padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - size)])
  scale = jnp.max(jnp.abs(padded.reshape(*x.shape[:-1], blocks, BLOCK)), axis=-1)
  spread = jnp.repeat(jnp.where(scale == 0, 1, scale), BLOCK, axis=-1)[..., :size]
  codes = _numbers(signed).encode(x / spread)
  if not signed:
    codes = jnp.where(x > 0, jnp.maximum(codes, np.uint8(1)), codes)
  return Moment(codes, scale, signed)


def zeros(shape: tuple[int, ...], signed: bool = True) -> Moment:
  """Zeros of a shape [..., N]."""
  zero = _numbers(signed).encode(jnp.zeros((), jnp.float32))
  blocks = -(-shape[-1] // BLOCK)
  return Moment(jnp.full(shape, zero, jnp.uint8), jnp.zeros((*shape[:-1], blocks), jnp.float32), signed)
