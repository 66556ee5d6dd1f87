"""Runs JAX strict: eight host devices, and no silent promotion from one dtype to another."""

import os

# Both are read when jax is first imported, so they come before anything that imports it. Most of a test is
# compiling, which takes half as long where LLVM does not optimize.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '')
  + ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)

import jax
import pytest

from qjax.io import embedded, gguf
from qjax.io.source import Source

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_debug_nans', False)  # Some tests make infinities and NaNs on purpose.


@pytest.fixture(scope='session')
def embedded_source() -> Source:
  """SmolLM2-135M-Instruct, fetched into the user's cache by the first test run and offline afterwards."""
  return gguf.load(embedded.fetch())
