"""Greedy answers, and prompts of several adapters that share batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import adapters, generate, ops, precision, sharding, trees
from qjax.adapters import GroupedAdapter, LoraSpec, is_adapter
from qjax.errors import UserError
from qjax.models.config import parameter_shapes
from qjax.models.transformer import Transformer, init_params, logits
from qjax.quant.qtensor import quantize
from qjax.sharding import MeshSpec
from tests import small

NUMERICS = ops.Numerics(precision.policy())
PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 1, 4], [5, 9, 2], [6, 6], [5, 9, 2]]
OF = [1, 0, 2, 0, -1, 2]
# Ranks, scales and targets that differ.
SPECS = (
  LoraSpec(4, 16), LoraSpec(2, 3, 'rslora', targets='.*/(q|v|down)/kernel'),
  LoraSpec(1, 8, dropout=0.5, targets='.*/(o|up)/kernel'),
)  # fmt: skip
NO_END = -1


@pytest.fixture(scope='module')
def params():
  return init_params(small.CONFIG, jax.random.key(0))


@pytest.fixture(scope='module')
def loras():
  found = []
  for seed, spec in enumerate(SPECS):
    fresh = adapters.init(spec, parameter_shapes(small.CONFIG), jax.random.key(seed))

    def move(one, seed=seed):
      b = jax.random.normal(jax.random.key(seed), one.b.shape, one.b.dtype)
      return dataclasses.replace(one, b=b)

    found.append(jax.tree.map(move, fresh, is_leaf=is_adapter))
  return found


@pytest.mark.parametrize('kernels', ['xla', 'pallas_interpret'])
def test_prompts_of_several_adapters_share_a_batch_and_answer_as_alone(params, loras, kernels):
  numerics = dataclasses.replace(NUMERICS, kernels=kernels)
  steps = 4 if kernels == 'xla' else 1
  model, grouped = Transformer(small.CONFIG, numerics), adapters.group(loras)
  together = generate.greedy(
    model, {'params': params, 'lora': grouped}, PROMPTS, steps, NO_END, batch_size=4, adapter_of=OF
  )
  alone = []
  for prompt, index in zip(PROMPTS, OF, strict=True):
    lora = {} if index < 0 else {'lora': loras[index]}
    plain = Transformer(small.CONFIG, NUMERICS)
    alone += generate.greedy(plain, {'params': params} | lora, [prompt], steps, NO_END, batch_size=1)
  assert together == alone
  # The adapters matter: one prompt has three answers.
  if kernels == 'xla':
    assert len({tuple(together[index]) for index in (0, 3, 5)}) == 3


def test_several_devices_share_a_batch_of_several_adapters(params, loras):
  model = Transformer(small.CONFIG, dataclasses.replace(NUMERICS, kernels='pallas_interpret'))
  variables = {'params': params, 'lora': adapters.group(loras)}
  told = {'batch_size': 4, 'adapter_of': OF[:4]}
  wanted = generate.greedy(model, variables, PROMPTS[:4], 2, NO_END, **told)
  assert wanted[0] != wanted[3]  # the same prompt, with two adapters
  mesh = sharding.make_mesh(MeshSpec(2, 2, 2))
  placed = jax.device_put(variables, sharding.shardings(variables, mesh))
  with jax.set_mesh(mesh):
    assert generate.greedy(model, placed, PROMPTS[:4], 2, NO_END, **told) == wanted


def test_logits_are_those_of_each_adapter_alone(params, loras):
  model, grouped = Transformer(small.CONFIG, NUMERICS), adapters.group(loras)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 288, (4, 9)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), tokens.shape)
  of_row = jnp.asarray([2, -1, 0, 1], jnp.int32)
  variables = {'params': params, 'lora': adapters.assign(grouped, of_row)}
  found = logits(model, variables, tokens, jnp.ones_like(tokens), positions)
  for row, index in enumerate([2, -1, 0, 1]):
    one = {'params': params} | ({} if index < 0 else {'lora': loras[index]})
    wanted = logits(model, one, tokens, jnp.ones_like(tokens), positions)[row]
    # Sums in another order, through two layers.
    np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_with_weights_in_few_bits(loras):
  grouped = trees.flatten(adapters.group(loras), lambda v: isinstance(v, GroupedAdapter))
  rng = np.random.default_rng(0)
  w = quantize(jnp.asarray(rng.standard_normal((64, 128)), jnp.float32), 'nf4:block=32')
  x = jnp.asarray(rng.standard_normal((3, 5, 64)), jnp.float32)
  each = jax.tree.map(lambda leaf: leaf[1], grouped['layers/attn/q/kernel'])
  each = adapters.assign({'one': each}, jnp.asarray([1, -1, 0], jnp.int32))['one']
  found = ops.dot(x, w, NUMERICS, each)
  for row, index in ((0, 1), (2, 0)):
    own = trees.flatten(loras[index], is_adapter)['layers/attn/q/kernel']
    own = jax.tree.map(lambda leaf: leaf[1], own)
    np.testing.assert_allclose(found[row], ops.dot(x[row], w, NUMERICS, own), rtol=1e-5, atol=1e-4)
  np.testing.assert_array_equal(found[1], ops.dot(x, w, NUMERICS)[1])


def test_what_cannot_be_is_said(params, loras):
  model, grouped = Transformer(small.CONFIG, NUMERICS), adapters.group(loras)
  both = {'params': params, 'lora': grouped}
  for variables, of, says in (
    (both, [0], 'names 1 adapters for 2 prompts'),
    (both, [0, 3], 'there is no adapter 3; there are 3'),
    (both, [0, 1.7], 'no list of whole numbers'),
    (both, [True, False], 'no list of whole numbers'),
    (both, 0, 'no list of whole numbers'),
    ({'params': params, 'lora': loras[0]}, [0, 0], 'make it by adapters.group'),
    ({'params': params}, [0, 0], 'make it by adapters.group'),
  ):
    with pytest.raises(UserError, match=says):
      generate.greedy(model, variables, PROMPTS[:2], 1, NO_END, adapter_of=of)
  with pytest.raises(UserError, match='adapters are assigned to 0'):
    generate.greedy(model, both, PROMPTS[:2], 1, NO_END)
  for wrong in ([], loras[0]):
    with pytest.raises(UserError, match='a list of collections of adapters'):
      adapters.group(wrong)
  for wrong in (grouped, params, None):
    with pytest.raises(UserError, match='number 1 of what is grouped is no collection of adapters'):
      adapters.group([loras[0], wrong])
  for prompt in ([3, 288], [-1], [1.5]):
    with pytest.raises(UserError, match='prompt 1 holds what is no token: ids are 0 to 287'):
      generate.greedy(model, both, [[1, 2], prompt], 1, NO_END)
  with pytest.raises(UserError, match='batch_size = 0'):
    generate.greedy(model, both, PROMPTS, 1, NO_END, batch_size=0)
  other = adapters.init(SPECS[0], {'layers/attn/q/kernel': (2, 32, 32)}, jax.random.key(0))
  with pytest.raises(UserError, match='of different models'):
    adapters.group([loras[0], other])


def test_several_adapters_are_not_trained(params, loras):
  path = 'layers/attn/q/kernel'
  each = trees.flatten(adapters.group(loras), lambda v: isinstance(v, GroupedAdapter))[path]
  each = jax.tree.map(lambda leaf: leaf[0], each)
  each = adapters.assign({'one': each}, jnp.zeros(3, jnp.int32))['one']
  w, x = params['layers']['attn']['q']['kernel'][0], jnp.ones((3, 64))
  with pytest.raises(UserError, match='have no gradient'):
    jax.grad(lambda x: ops.dot(x, w, NUMERICS, each).sum())(x)
  trained = dataclasses.replace(NUMERICS, weights=(('.*', 'int8:axis=channel'),))
  with pytest.raises(UserError, match='inside the quantizer'):
    ops.dot(x, w, trained, each, path=path)
