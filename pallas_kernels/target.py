"""What a program that is traced now is compiled for."""

from typing import Any

import jax


def device() -> Any:
  """Of the ambient mesh (`jax.set_mesh`), perhaps of chips that are not there, or JAX's first device."""
  found = jax.sharding.get_abstract_mesh().abstract_device
  return jax.devices()[0] if found is None else found
