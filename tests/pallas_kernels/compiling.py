"""What child processes of test_compiled.py run: kernels and steps, compiled for a chip that is not here."""

import importlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.low_bit_matmul import tiling
from qjax import build, chips, kernels, method, optim, plan, sharding, train
from qjax.adapters import LoraSpec
from qjax.models.config import ModelConfig, parameter_shapes
from qjax.models.objective import loss_sums
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from qjax.quant.qtensor import per_column, quantize

# Projections have the shapes of a small model that exists; no activation below has one of them.
CONFIG = ModelConfig(
  vocab_size=1024, num_layers=3, d_model=576, d_ff=1536, num_heads=9, num_kv_heads=3, head_dim=64,
  context_length=256,
)  # fmt: skip
WEIGHTS = ((576, 576), (576, 192), (576, 1536), (1536, 576))


def _whole_weights(text: str) -> int:
  """How often a program names a float array in the shape of a projection, or of a stack of them."""
  return sum(
    len(re.findall(rf'\b(?:bf16|f16|f32)\[(?:\d+,)?(?:{k},{n}|{n},{k})\]', text)) for k, n in WEIGHTS
  )


def _placed(tree: Any, place: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def products(chip: str, cases: Sequence[tuple[str, str, int, int, int]]) -> dict[str, str]:
  """Compiles both products for each (scheme, dtype, M, K, N); what went wrong, by case."""
  mesh = sharding.make_mesh(sharding.MeshSpec(), chips.devices(chips.find(chip)))
  place = NamedSharding(mesh, PartitionSpec())
  wrong = {}
  with jax.set_mesh(mesh):
    for scheme, dtype, tokens, k, n in cases:
      plain = jax.ShapeDtypeStruct((k, n), jnp.float32)
      w = jax.eval_shape(lambda w, scheme=scheme: quantize(w, scheme), plain)
      scale = jax.eval_shape(lambda w: per_column(w.scales, w.scheme, w.shape[-1]), w)
      choice = kernels.explain(w, dtype, 'pallas')
      assert not isinstance(choice, str), choice
      for name, width in (('matmul', k), ('matmul_transposed', n)):
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        arrays = _placed((x, w.codes, scale, w.offset), place)
        try:
          choice.product(name).lower(*arrays, kernels.layout_of(w)).compile()  # type: ignore[attr-defined]
        except Exception as error:
          wrong[f'{name} {scheme} {dtype} {tokens}x{k}x{n}'] = str(error)[:300]
  return wrong


def gradient(chip: str, name: str) -> dict[str, int]:
  """How often the compiled gradient of a QLoRA model's loss names kernels and shapes of whole weights."""
  if hasattr(jax.config, 'jax_exec_time_optimization_effort'):
    jax.config.update('jax_exec_time_optimization_effort', -1.0)
  mesh = sharding.make_mesh(sharding.MeshSpec(), chips.devices(chips.find(chip)))
  numerics = Numerics(policy(compute='bfloat16'), name)
  recipe = method.qlora(numerics, optim.Update(1e-3), LoraSpec(rank=8, alpha=16))
  trainable, frozen = recipe.abstract(parameter_shapes(CONFIG))
  model = Transformer(CONFIG, numerics)

  def loss(lora: Any, frozen: Any, batch: Any) -> jax.Array:
    return loss_sums(model, {**frozen, 'lora': lora}, batch).objective

  ints = dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), jnp.int32)
  dtypes = {'weights': jnp.float32} | ints
  batch = {key: jax.ShapeDtypeStruct((2, 256), dtype) for key, dtype in dtypes.items()}
  arguments = _placed((trainable['lora'], frozen, batch), NamedSharding(mesh, PartitionSpec()))
  with jax.set_mesh(mesh):
    text = jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()
  calls = kernels.calls(text)
  return {
    'forward': calls.get(tiling.NAMES[0], 0),
    'transposed': calls.get(tiling.NAMES[1], 0),
    'weights': _whole_weights(text),
  }


def training(chip: str, name: str) -> dict[str, Any]:
  """The train step of configs/<name>.py, for the embedded model's shapes, compiled for a chip.

  Gives how often the program calls each kernel and names a whole weight in floats, and what was noted.
  """
  if hasattr(jax.config, 'jax_exec_time_optimization_effort'):
    jax.config.update('jax_exec_time_optimization_effort', plan.QUICK)
  config = importlib.import_module(f'configs.{name}').get_config()
  config.model.path = 'shapes:smollm2_135m'
  program = build.program(config, chips.devices(chips.find(chip)))
  arguments = plan.arguments(program)
  with jax.set_mesh(program.mesh):
    compiled = train.compile_step(program, *arguments)
  text = compiled.call.as_text()  # type: ignore[attr-defined]
  return {
    'calls': kernels.calls(text),
    'weights': _whole_weights(text),
    'products': compiled.products,
    'seconds': compiled.seconds,
  }
