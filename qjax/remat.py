"""What the backward pass finds saved of a layer, and how it is kept."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The names under which a policy may keep a layer's input, what attention reads and returns, what a
# projection returns, and an adapter's x·A.
LAYER_IN = 'layer_in'
ATTENTION_IN = 'attention_in'
ATTENTION_OUT = 'attention_out'
PROJECTION_OUT = 'projection_out'
LOW_RANK = 'low_rank'

# Nothing but the layer's input ('full'), or that in host memory ('offload'); what attention returned too;
# what attention read and returned and projections returned, in the compute dtype ('projections'); or every
# product as it was accumulated.
POLICIES: dict[str, Callable[..., bool] | None] = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_IN],
    offload_src='device',
    offload_dst='pinned_host',
  ),
  'attention': jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT),
  'projections': jax.checkpoint_policies.save_only_these_names(
    ATTENTION_IN, ATTENTION_OUT, PROJECTION_OUT, LOW_RANK
  ),
  'dots': jax.checkpoint_policies.checkpoint_dots,
  'dots_no_batch': jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


def as_bits(x: jax.Array) -> jax.Array:
  """Half precision as its bits: XLA's CPU backend would stack it over layers in float32."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


@jax.custom_vjp
def from_bits(bits: jax.Array, x: jax.Array) -> jax.Array:
  """x, read from its bits; no gradient passes integers, so it goes to x, whose values nothing reads."""
  return bits if bits.dtype == x.dtype else jax.lax.bitcast_convert_type(bits, x.dtype)


def _from_bits_fwd(bits: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
  return from_bits(bits, x), None


def _from_bits_bwd(residual: None, g: jax.Array) -> tuple[None, jax.Array]:
  del residual
  return None, g


from_bits.defvjp(_from_bits_fwd, _from_bits_bwd)


def named(x: jax.Array, name: str) -> jax.Array:
  """x, which a remat policy may keep under `name`, as bits if it is half precision."""
  return from_bits(checkpoint_name(as_bits(x), name), x)
