"""qjax beside torch, transformers and peft, in an environment that has them all: `make interop`.

The models are made on the spot, of the families of make_fixtures with other sizes, seeds and options. A test
that fails after an upgrade of those packages says what changed there; tests/fixtures/ has the earlier answer.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from interop import make_fixtures
from qjax import method, optim, trees
from qjax.adapters import Adapter, LoraSpec
from qjax.data import templates
from qjax.io import embedded, hf
from qjax.io.source import Source, load_source, params
from qjax.models import transformer
from qjax.models.config import ModelConfig
from qjax.models.objective import loss_sums
from qjax.models.transformer import Transformer
from qjax.ops import Numerics
from qjax.precision import policy
from tests import oracle

ALL_PROJECTIONS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
WINDOWED = dict(use_sliding_window=True, max_window_layers=0)


def our_logits(config: ModelConfig, weights: Any, ids: np.ndarray) -> np.ndarray:
  model = Transformer(config, Numerics(policy()))
  positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
  forward = jax.jit(lambda *a: transformer.logits(model, *a))
  return np.asarray(forward({'params': weights}, ids, np.ones_like(ids), positions))


def assert_same_logits(source: Source, ids: np.ndarray, wanted: np.ndarray) -> None:
  """Within six times the error that float32 makes of NumPy's own logits, and by that much alone."""
  weights = params(source)
  exact = oracle.forward(source.config, jax.tree.map(np.float64, weights), ids[0])
  error = np.abs(oracle.forward(source.config, weights, ids[0]) - exact).max()
  assert error < 1e-5 * np.abs(exact).max()
  np.testing.assert_allclose(our_logits(source.config, weights, ids), wanted, rtol=0, atol=6 * error)


# Models.


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('llama', dict(num_key_value_heads=1, rope_parameters=dict(rope_type='default', rope_theta=500_000.0))),
    ('llama', dict(num_key_value_heads=6, tie_word_embeddings=False)),
    ('llama_llama3', dict(max_position_embeddings=512)),
    ('llama_linear', dict()),
    ('mistral', dict(sliding_window=None)),
    ('mistral', dict(sliding_window=1)),
    ('mistral', dict(sliding_window=2, num_key_value_heads=2)),
    ('qwen2', dict(tie_word_embeddings=False)),
    ('qwen2', dict(sliding_window=3, **WINDOWED)),
    ('qwen3', dict(head_dim=24, tie_word_embeddings=False)),
    ('qwen3', dict(sliding_window=3, **WINDOWED)),
    ('gemma', dict(hidden_act='gelu', num_key_value_heads=3)),
  ],
)
def test_fresh_models_have_the_same_logits(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
  """Three layers of other sizes than the fixtures', in float32 shards with an index."""
  sizes = dict(
    vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3,
  )
  config = make_fixtures.MODELS[name](**(sizes | changes))
  model = make_fixtures.make_model(config, seed=100)
  model.save_pretrained(tmp_path, max_shard_size='40KB')
  assert len(list(tmp_path.glob('*.safetensors'))) > 1
  ids = make_fixtures.make_ids(config, 101, 2, 37)
  assert_same_logits(load_source(tmp_path), ids, make_fixtures.logits_of(model, ids))


@pytest.mark.parametrize('name', make_fixtures.MODELS)
def test_transformers_still_computes_the_fixtures(name: str) -> None:
  directory = make_fixtures.FIXTURES / name
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  )
  with np.load(directory / 'expected.npz') as expected:
    found = make_fixtures.logits_of(model.eval(), expected['ids'])
    np.testing.assert_allclose(found, expected['logits'], rtol=0, atol=1e-4)


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'qwen2', 'qwen3', 'gemma'])
@pytest.mark.parametrize('null', [(), ('num_key_value_heads',), ('head_dim',)])
def test_a_silent_configuration_has_the_defaults_of_transformers(kind: str, null: tuple[str, ...]) -> None:
  # Every family's default for key and value heads divides 64, and is none of it; 96 a head.
  described: dict[str, Any] = dict(
    vocab_size=100, hidden_size=6144, intermediate_size=64, num_hidden_layers=2, num_attention_heads=64
  )
  described |= dict.fromkeys(null)
  try:
    theirs = transformers.AutoConfig.for_model(kind, **described)
  except Exception as error:
    pytest.skip(f'transformers refuses it: {type(error).__name__}')
  ours = hf.config_from_hf(described | dict(model_type=kind))
  width = getattr(theirs, 'head_dim', None) or theirs.hidden_size // theirs.num_attention_heads
  window = getattr(theirs, 'sliding_window', None)
  assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, width)
  assert (ours.context_length, ours.rms_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
  assert (ours.tie_embeddings, ours.sliding_window) == (theirs.tie_word_embeddings, window)
  assert (ours.rope_theta, ours.rope_scaling) == (theirs.rope_parameters['rope_theta'], None)
  assert theirs.rope_parameters['rope_type'] == 'default'
  assert {'silu': 'silu', 'gelu_tanh': 'gelu_pytorch_tanh'}[ours.activation] == theirs.hidden_act


# The embedded model, which transformers reads from the same GGUF file with a reader of its own. That one does
# not split digits off, as the model's tokenizer does: ' ½' would give other tokens, so no text here has it.

TEXTS = [
  'The committee met on Tuesday, and nobody could agree on what the word "final" was to mean.',
  'def gcd(a, b):\n  while b:\n    a, b = b, a % b\n  return a\n\n\nassert gcd(1234, 5678) == 2',
  'ঢাকা বাংলাদেশের রাজধানী। Größe 漢字 😀🏳️‍🌈',
  " two  spaces\t\ttabs\r\n\n end ",
  "<|im_start|>user\nI'LL spell <|im_end|> out<|im_end|>\n",
]
QUESTION = {'role': 'user', 'content': 'Compare 3 < 4 & "5".\n\nঢাকা?  '}
ANSWER = {'role': 'assistant', 'content': ' They are numbers.\n'}
CONVERSATIONS = [
  [QUESTION],
  [QUESTION, ANSWER],
  [{'role': 'system', 'content': 'Be brief.'}, QUESTION, ANSWER, QUESTION],
]


class Embedded(NamedTuple):
  source: Source
  tokenizer: transformers.PreTrainedTokenizerBase


@pytest.fixture(scope='module')
def both() -> Embedded:
  path = embedded.fetch()
  theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  return Embedded(load_source(path), theirs)


def test_the_embedded_tokenizer_is_that_of_transformers(both: Embedded) -> None:
  ours, theirs = both.source.require_tokenizer(), both.tokenizer
  for text in TEXTS:
    ids = ours.encode(text).ids
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text
  assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)


@pytest.mark.parametrize('messages', CONVERSATIONS)
@pytest.mark.parametrize('prompt', [False, True])
def test_a_chat_is_rendered_as_transformers_renders_it(both: Embedded, messages: Any, prompt: bool) -> None:
  ours = both.source.require_tokenizer()
  text = both.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
  assert templates.render(messages, ours, add_generation_prompt=prompt) == text
  ids = both.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
  assert ours.encode(text).ids == ids


@pytest.mark.parametrize(
  'template',
  [
    '{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {%- endif %}\n'
    '{{ m.content | trim }}{{ eos_token }}{% endfor %}\n',
    '{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=1) }}{% endfor %}',
    '{% for m in messages %}{% if m.role == "system" %}{% continue %}{% endif %}{{ m.content }}{% endfor %}',
    '{% if tools %}tools{% endif %}{% if documents is defined and documents %}documents{% endif %}'
    '{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}',
  ],
  ids=['white space', 'json', 'loop control', 'generation'],
)
def test_a_strangers_template_is_rendered_as_transformers_renders_it(both: Embedded, template: str) -> None:
  ours = both.source.require_tokenizer()
  ours = type(ours)(ours.backend, ours.eos_id, ours.pad_id, ours.bos_id, template)
  for messages in CONVERSATIONS:
    text = both.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert templates.render(messages, ours) == text


@pytest.mark.slow
def test_the_embedded_model_has_the_logits_of_transformers(both: Embedded) -> None:
  path = embedded.fetch()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation='eager'
  )
  ids = np.array([both.source.require_tokenizer().encode(TEXTS[0]).ids], np.int32)
  found = our_logits(both.source.config, params(both.source), ids)
  # Logits of up to 30 or so, after 30 layers.
  np.testing.assert_allclose(found, make_fixtures.logits_of(model.eval(), ids), rtol=0, atol=1e-3)


# LoRA.


def adapters_from(model: torch.nn.Module, scale: float, gradients: bool = False) -> dict[str, Any]:
  """The 'lora' collection of a PEFT model, or its gradients: A [r, in] as it is, B [out, r] turned."""
  moving = {name: x for name, x in model.named_parameters() if 'lora_' in name}
  found = {name: x.grad if gradients else x.detach() for name, x in moving.items()}
  flat = {}
  depth = model.config.num_hidden_layers

  def stack(path: str, part: str) -> np.ndarray:
    module = hf.NAMES[path].removesuffix('.weight')
    names = [f'base_model.model.{module.format(layer)}.lora_{part}.default.weight' for layer in range(depth)]
    return np.stack([found.pop(name).numpy().copy() for name in names])

  for path in hf.NAMES:
    if path.startswith('layers/') and path.endswith('/kernel'):
      flat[path] = Adapter(stack(path, 'A'), stack(path, 'B').swapaxes(1, 2), scale)
  assert not found
  return trees.nest(flat)


# Peft still asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings('ignore:.is_gradient_checkpointing. is deprecated:FutureWarning')
@pytest.mark.parametrize('rule', ['standard', 'rslora'])
def test_lora_steps_are_those_of_peft(rule: Any, tmp_path: Path) -> None:
  """The same loss and gradient of every adapter; after four clipped steps of AdamW the same adapters."""
  base = make_fixtures.make_model(make_fixtures.MODELS['llama'](), seed=7)
  base.save_pretrained(tmp_path)
  source = load_source(tmp_path)
  spec = LoraSpec(rank=4, alpha=6.0, scale_rule=rule)
  wrapped = peft.LoraConfig(
    r=spec.rank, lora_alpha=spec.alpha, use_rslora=rule == 'rslora', lora_dropout=0.0,
    target_modules=ALL_PROJECTIONS, task_type='CAUSAL_LM',
  )
  model = peft.get_peft_model(base, wrapped)
  rng = np.random.default_rng(8)
  trained = [x for name, x in model.named_parameters() if x.requires_grad]
  with torch.no_grad():
    for x in trained:  # B too: at zero, no gradient would reach A.
      x.copy_(torch.tensor(0.2 * rng.standard_normal(x.shape)))
  lora = jax.tree.map(jnp.asarray, adapters_from(model, spec.scale))

  ids = make_fixtures.make_ids(base.config, 9, 2, 20)
  labels = ids.astype(np.int64)
  labels[0, :7] = labels[1, 12:] = -100  # a prompt, and padding on the right
  batch = dict(
    tokens=ids[:, :-1], targets=ids[:, 1:], weights=(labels[:, 1:] >= 0).astype(np.float32),
    segments=np.ones_like(ids[:, 1:]), positions=np.arange(19, dtype=np.int32)[None].repeat(2, 0),
  )
  weights = jax.tree.map(jnp.asarray, params(source))
  ours = Transformer(source.config, Numerics(policy()))

  @jax.jit
  def value_and_gradient(lora: Any) -> Any:
    def mean(lora: Any) -> jax.Array:
      sums = loss_sums(ours, {'params': weights, 'lora': lora}, batch, chunk=40)
      return sums.nll / sums.tokens

    return jax.value_and_grad(mean)(lora)

  rate, decay, clip, steps = 1e-2, 0.1, 0.5, 4
  theirs = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
  update = method.Update(rate, schedule='constant', weight_decay=decay, clip_norm=clip)
  adamw = optim.make(update, steps)
  state = adamw.init(lora)
  for step in range(steps):
    theirs.zero_grad()
    value = model(input_ids=torch.tensor(ids, dtype=torch.long), labels=torch.tensor(labels)).loss
    value.backward()
    found, gradient = value_and_gradient(lora)
    np.testing.assert_allclose(found, value.item(), rtol=1e-5)
    if step == 0:  # Later ones are taken at adapters that differ by roundings already.
      wanted = trees.flatten(adapters_from(model, spec.scale, gradients=True))
      for path, leaf in trees.flatten(gradient).items():
        # Some hundred roundings of 2⁻²⁴ each.
        largest = np.abs(wanted[path]).max()
        np.testing.assert_allclose(leaf, wanted[path], rtol=0, atol=2e-5 * largest, err_msg=path)
    norm = torch.nn.utils.clip_grad_norm_(trained, clip)
    assert norm > clip  # so that clipping is compared as well
    theirs.step()
    changes, state = adamw.update(gradient, state, lora)
    lora = optim.apply(lora, changes, 'nearest', jax.random.key(0))
  wanted = trees.flatten(adapters_from(model, spec.scale))
  for path, leaf in trees.flatten(lora).items():
    # Adam divides by the gradient's own size, so that a relative error of 1e-4 in it is one of its step.
    np.testing.assert_allclose(leaf, wanted[path], rtol=0, atol=steps * rate * 1e-3, err_msg=path)
