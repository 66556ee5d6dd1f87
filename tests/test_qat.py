"""Methods that train through quantizers, end to end on a tiny model: what they compute, move and become."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import common
from qjax import build, chips, convert, evaluate, plan, records, train, trees
from qjax.errors import UserError
from qjax.io import native
from qjax.io.source import load_source
from qjax.models import transformer
from qjax.models.objective import loss_sums
from qjax.ops import Numerics
from qjax.quant.formats import parse_scheme
from qjax.quant.qtensor import absmax, dequantize, is_qtensor, quantize
from qjax.quant.sensitivity import Sensitivity, layer_item, worst_slices
from tests import small

STATIC = (('.*', 'int8:axis=tensor,static'),)
TOKEN = (('.*', 'int8:axis=token'),)
DOWN, UP = 'layers/mlp/down/kernel', 'layers/mlp/up/kernel'


@pytest.fixture(scope='module')
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
  directory = tmp_path_factory.mktemp('qat')
  small.write(directory)
  record(directory, 'int4:axis=channel')
  return directory


def record(directory: Path, scheme: str) -> None:
  """A made-up record of sensitivities, layer by layer: down in layer 1 is worst, then up in layer 0."""
  source = load_source(str(directory / 'model'))
  paths = [path for path in source.paths if path.endswith('/kernel') and path.startswith('layers/')]
  items = [layer_item(path, layer) for path in paths for layer in range(small.CONFIG.num_layers)]
  costs = {layer_item(DOWN, 1): 3.0, layer_item(UP, 0): 2.0}
  kl = tuple((costs.get(item, 0.1),) for item in items)
  about = {'fingerprint': source.fingerprint}
  Sensitivity(about, tuple(items), (scheme,), kl, kl, tuple((1,) for _ in items)).save(directory / 's.json')


def config(home: Path, method: str, /, *, distill: bool = False, **more: Any) -> ConfigDict:
  """A config of the method; `more` sets fields with '__' between levels."""
  filled = small.config(home, 'lora' if method == 'qat_lora' else 'full')
  filled.name = filled.method = method
  common.add_qat(filled)
  if method == 'qat_lora':
    filled.storage.projections = 'int8:axis=channel'
  if method == 'targeted':
    common.add_storage(filled)
    filled.qat.weights = 'none'
    if more.get('targeted__train') == 'adapters':
      common.add_lora(filled)
      filled.lora.rank, filled.lora.targets = 4, '.*'
      filled.optimizer.learning_rate = 1e-2
    filled.storage.projections = 'int4:axis=channel'
    filled.targeted = ConfigDict({'record': str(home / 's.json'), 'budget': 0.145, 'train': 'weights'})
  if distill:
    common.add_distillation(filled)
  with filled.ignore_type():
    filled.update_from_flattened_dict({name.replace('__', '.'): value for name, value in more.items()})
  return filled


def prepared(home: Path, method: str, /, **more: Any) -> small.Prepared:
  return small.prepare(build.run(config(home, method, **more), home / 'run'))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
  'int4, learned steps': ('qat', dict(qat__weight_gradient='lsq')),
  'int4 blocks': ('qat', dict(qat__weights='int4:block=32,scale=bfloat16')),
  'W8A8 a token': ('qat', dict(qat__weights='int8:axis=channel', qat__activations=TOKEN)),
  'W8A8 static, learned': ('qat', dict(
    qat__weights='int8:axis=channel', qat__activations=STATIC, qat__activation_gradient='lsq')),
  'W8A8 static, PACT': ('qat', dict(
    qat__weights='int8:axis=channel', qat__activations=STATIC, qat__activation_gradient='pact',
    qat__weight_gradient='pact')),
  'inputs alone, averaged': ('qat', dict(
    qat__weights='none', qat__activations=STATIC, qat__activation_gradient='average')),
  'adapters inside nf4': ('qat_lora', dict(qat__weights='nf4:block=32')),
  'adapters inside int4, bfloat16 base': ('qat_lora', dict(
    qat__weights='int4:axis=channel', storage__projections='bfloat16', qat__weight_gradient='lsq')),
  'targeted': ('targeted', dict(qat__weight_gradient='lsq')),
  'adapters inside nf4, base on the host': ('qat_lora', dict(
    qat__weights='nf4:block=32', placement__rules=(('.*', 'host'),))),
  'targeted adapters': ('targeted', dict(qat__weight_gradient='lsq', targeted__train='adapters')),
  'ranges alone': ('targeted', dict(
    qat__weight_gradient='lsq', targeted__train='ranges', optimizer__learning_rate=1e-3)),
}  # fmt: skip


HALF = (
  'int4, learned steps', 'W8A8 static, learned', 'adapters inside nf4', 'targeted', 'targeted adapters',
)  # fmt: skip


@pytest.mark.parametrize(
  'case,compute', [(case, 'float32') for case in CASES] + [(case, 'bfloat16') for case in HALF]
)
def test_it_learns_and_becomes_what_it_computed(home: Path, tmp_path: Path, case: str, compute: str):
  method, more = CASES[case]
  ready = prepared(home, method, **more, precision__compute=compute, optimizer__weight_decay=0.1)
  before, start = jax.tree.map(np.asarray, (ready.frozen, ready.state.trainable))
  state, _ = small.take_steps(ready, 12)
  step, data = evaluate.make_step(ready.run.model, 64), itertools.islice(ready.batches(), 3)
  rows = [{name: x[0] for name, x in batch.items()} for batch in data]
  before_it, after_it = (
    evaluate.evaluate(step, trainable, ready.frozen, rows).nll for trainable in (start, state.trainable)
  )
  if case != 'ranges alone':  # random weights leave nothing for ranges to recover
    assert after_it < before_it - 0.1
  # What rests is untouched, and everything else moved.
  jax.tree.map(np.testing.assert_array_equal, before, ready.frozen)
  moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), state.trainable, start)
  assert all(trees.flatten(moved).values()), moved

  # Saved, read again, and run by itself, the converted model gives the logits of the training graph.
  run, variables = ready.run, trees.combine(state.trainable, ready.frozen)
  after = convert.convert(run.method, variables, run.shapes)
  model = native.QuantizedModel(small.CONFIG, after, run.method.numerics.activations, None, {})
  native.save(model, tmp_path / 'model')
  again = native.load(tmp_path / 'model')
  batch = next(ready.batches())
  inputs = [np.asarray(batch[name][0]) for name in ('tokens', 'segments', 'positions')]
  plain = run.model.clone(numerics=Numerics(run.method.numerics.policy, activations=again.activations))
  logits = jax.jit(transformer.logits, static_argnums=0)
  found, wanted = logits(plain, again.variables, *inputs), logits(run.model, variables, *inputs)
  np.testing.assert_array_equal(found, wanted)
  # The loss of a step, whose program also has gradients, is that of these logits: codes that depend on the
  # program would show in it, for the weights here are multiples of 1/64 and often halfway between two codes.

  def objective(trainable: Any) -> tuple[jax.Array, jax.Array]:
    sums = loss_sums(run.model, trees.combine(trainable, ready.frozen), rows[0], 64)
    return sums.objective, sums.nll

  with jax.set_mesh(run.mesh):
    _, with_gradients = jax.jit(jax.grad(objective, has_aux=True))(start)
    _, alone = jax.jit(objective)(start)
  np.testing.assert_allclose(with_gradients, alone, rtol=2e-3 if compute == 'bfloat16' else 1e-5)
  quantized = [leaf for leaf in trees.flatten(after, is_qtensor).values()
               if is_qtensor(leaf) and not leaf.scheme.numbers.is_float]  # fmt: skip
  assert len(quantized) == (0 if more.get('qat__weights') == 'none' else 7)


def test_targeted_moves_nothing_else(home: Path):
  ready = prepared(home, 'targeted')
  shapes, trainable = ready.run.method.trainable.slices, trees.flatten(ready.state.trainable)
  assert set(shapes) == {(DOWN, (1,)), (UP, (0,))}
  k, n = small.CONFIG.d_model, small.CONFIG.d_ff
  assert {path: leaf.shape for path, leaf in trainable.items()} == {
    f'slices/{DOWN}/w': (1, n, k),
    f'slices/{UP}/w': (1, k, n),
  }
  optimizer = trees.nbytes(ready.state.optimizer)
  assert optimizer <= 2 * trees.nbytes(ready.state.trainable) + 64
  state, _ = small.take_steps(ready, 3)
  run, variables = ready.run, trees.combine(state.trainable, ready.frozen)
  after = trees.flatten(convert.convert(run.method, variables, run.shapes)['params'], is_qtensor)
  rest = trees.flatten(ready.frozen['params'], is_qtensor)
  for path, leaf in rest.items():
    layers = dict(shapes).get(path, ())
    for layer in range(leaf.shape[0]) if path.startswith('layers/') else ():
      old, new = (jax.tree.map(lambda x, i=layer: np.asarray(x[i]), tree[path]) for tree in (rest, after))
      same = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), old, new)))
      assert same != (layer in layers), (path, layer)


def test_adapters_of_targeted_matrices_are_counted_as_adapters(home: Path):
  made = config(home, 'targeted', qat__weight_gradient='lsq', targeted__train='adapters')
  ready = small.prepare(build.run(made, home / 'run'))
  sizes = train.measure(ready.state.trainable, ready.frozen, ready.state)
  k, n = small.CONFIG.d_model, small.CONFIG.d_ff
  assert sizes['adapter_bytes'] == 2 * 4 * 4 * (k + n)  # two matrices, rank 4, four bytes
  held = trees.nbytes((ready.state.trainable, ready.frozen))
  assert sizes['weight_bytes'] + sizes['adapter_bytes'] == held
  parts = plan.Traced(build.program(made)).plan(chips.find('rtx4090')).breakdown
  assert (parts['adapters'], parts['weights']) == (sizes['adapter_bytes'], sizes['weight_bytes'])


def test_what_rests_already_stays_as_it_is(home: Path, tmp_path: Path):
  """Codes that leave room in their range are not those that rounding their values anew would give."""
  source = load_source(str(home / 'model'))
  ready = prepared(home, 'targeted')
  params = trees.flatten(ready.frozen['params'], is_qtensor)
  for path in [path for path in params if path.endswith('kernel')]:
    w, scheme = source.read(path), parse_scheme('int4:axis=channel')
    params[path] = quantize(w, scheme, high=1.7 * absmax(w, scheme))
  given = native.QuantizedModel(source.config, {'params': trees.nest(params)}, (), source.tokenizer, {})
  native.save(given, tmp_path / 'given')
  mark = load_source(str(tmp_path / 'given')).fingerprint
  costs = (home / 's.json').read_text().replace(source.fingerprint, mark)
  (tmp_path / 's.json').write_text(costs)
  ready = prepared(
    home, 'targeted', model__path=str(tmp_path / 'given'), targeted__record=str(tmp_path / 's.json')
  )
  for path, leaf in trees.flatten(ready.frozen['params'], is_qtensor).items():
    jax.tree.map(np.testing.assert_array_equal, leaf, params[path])


def test_ranges_learn_only_where_something_reads_them(home: Path):
  fields = dict(qat__weights='int4:axis=channel', qat__weight_gradient='lsq')
  ready = prepared(home, 'qat_lora', **fields, lora__targets='.*/down/kernel')
  assert list(trees.flatten(ready.state.trainable['ranges'])) == [DOWN]


def test_ranges_of_inputs_are_found_once(home: Path, tmp_path: Path):
  fields = dict(qat__weights='int8:axis=channel', qat__activations=STATIC)
  first = build.run(config(home, 'qat', **fields), tmp_path).input_ranges()
  kept = json.loads((tmp_path / build.INPUT_RANGES).read_text())
  kept['ranges'][DOWN] = [5.0, 6.0]
  (tmp_path / build.INPUT_RANGES).write_text(json.dumps(kept))
  again = build.run(config(home, 'qat', **fields), tmp_path).input_ranges()
  assert again == first | {DOWN: [5.0, 6.0]}
  other = build.run(config(home, 'qat', **fields, qat__observer='percentile'), tmp_path).input_ranges()
  assert other[DOWN] != [5.0, 6.0]
  (tmp_path / build.INPUT_RANGES).write_text('{')
  with pytest.raises(UserError, match='is damaged'):
    build.run(config(home, 'qat', **fields), tmp_path).input_ranges()


def test_an_adapter_inside_survives_whole(home: Path):
  ready = prepared(home, 'qat_lora', qat__weights='nf4:block=32')
  state, _ = small.take_steps(ready, 6)
  variables = trees.combine(state.trainable, ready.frozen)
  after = convert.convert(ready.run.method, variables, ready.run.shapes)
  assert 'lora' not in after
  adapter = variables['lora']['layers']['mlp']['down']['kernel']
  base = dequantize(variables['params']['layers']['mlp']['down']['kernel'])
  merged = base + adapter.delta()
  found = dequantize(after['params']['layers']['mlp']['down']['kernel'])
  blocks = np.abs(np.asarray(merged)).reshape(2, -1, 32, merged.shape[-1]).max(axis=2, keepdims=True)
  error = np.abs(np.asarray(found - merged)).reshape(2, -1, 32, merged.shape[-1])
  # Half the widest gap between levels of NormalFloat4, -1 and -0.696.
  assert np.all(error <= 0.1520 * blocks)


def test_warm_up_is_plain_training(home: Path):
  plain = small.prepare(small.run(home, 'full', workdir='plain'))
  warm = build.run(config(home, 'qat', qat__start_step=4), home / 'run')
  ready = small.prepare(warm)
  batch = next(ready.batches())
  early = train.compile_step(warm, ready.state, ready.frozen, batch, ready.key, False)
  expected, found = plain.fresh_state(), ready.fresh_state()
  for _ in range(2):
    expected, one = plain.compiled.call(expected, plain.frozen, batch, plain.key)
    found, other = early.call(found, ready.frozen, batch, ready.key)
    assert one.loss == other.loss
  quantized, _ = ready.compiled.call(ready.fresh_state(), ready.frozen, batch, ready.key)
  differs = jax.tree.map(lambda a, b: bool((a != b).any()), quantized.trainable, found.trainable)
  assert any(jax.tree.leaves(differs))


def test_a_run_with_warm_up_and_frozen_ranges_resumes_exactly(home: Path, tmp_path: Path):
  fields = dict(qat__weights='int8:axis=channel', qat__weight_gradient='lsq', qat__activations=STATIC,
                qat__activation_gradient='average', qat__start_step=3, qat__freeze_step=8)  # fmt: skip

  def losses(workdir: Path) -> list[float]:
    run = build.run(config(home, 'qat', **fields), workdir)
    train.train(run, records.Record(workdir / records.RECORD, {'meaning': run.meaning}))
    return [row['loss'] for row in records.read_metrics(workdir) if row['kind'] == 'train']

  whole = losses(tmp_path / 'whole')
  # What a crash leaves: the checkpoints up to a step within the warm-up, and metrics beyond it.
  shutil.copytree(tmp_path / 'whole', tmp_path / 'torn')
  steps = sorted(int(path.name) for path in (tmp_path / 'torn/checkpoints').iterdir() if path.name.isdigit())
  assert len(steps) > 1
  for step in steps[1:]:
    shutil.rmtree(tmp_path / f'torn/checkpoints/{step}')
  assert losses(tmp_path / 'torn') == whole


def test_frozen_ranges_stay(home: Path):
  ready = prepared(home, 'qat', qat__weight_gradient='lsq', qat__freeze_step=2)
  early, _ = small.take_steps(ready, 2)
  later, _ = small.take_steps(ready, 5)
  jax.tree.map(np.testing.assert_array_equal, early.trainable['ranges'], later.trainable['ranges'])
  moved = jax.tree.map(
    lambda a, b: bool((a != b).any()), early.trainable['ranges'], ready.state.trainable['ranges']
  )
  assert any(jax.tree.leaves(moved))


def test_moving_averages_follow_what_is_seen(home: Path):
  fields = dict(qat__weights='none', qat__activations=STATIC, qat__activation_gradient='average')
  ready = prepared(home, 'qat', **fields, qat__momentum=0.0, micro_batch=2)
  state, _ = small.take_steps(ready, 1)
  batch = next(ready.batches())
  seen = []
  model = ready.run.model
  for row in range(batch['tokens'].shape[0]):
    inputs = [np.asarray(batch[name][row]) for name in ('tokens', 'segments', 'positions')]
    variables = trees.combine(ready.state.trainable, ready.frozen)
    seen.append(jax.jit(lambda v, *x: model.apply(v, *x, mutable=['seen'])[1]['seen'])(variables, *inputs))
  expected = jax.tree.map(lambda *x: np.max(x, axis=0), *seen)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.trainable['act'], expected)


def test_float16_with_loss_scaling_skips_and_recovers(home: Path):
  ready = prepared(home, 'qat', precision__compute='float16', precision__loss_scale='dynamic',
                   precision__loss_scale_initial=2.0**40, qat__weight_gradient='lsq')  # fmt: skip
  _, metrics = small.take_steps(ready, 40)
  assert metrics[0]['skipped'] == 1
  assert metrics[-1]['consecutive_skips'] == 0
  assert metrics[-1]['loss'] < metrics[0]['loss']


def test_int8_forward_and_backward(home: Path):
  fields = dict(qat__weights='int8:axis=channel', qat__activations=TOKEN)
  both = prepared(home, 'qat', **fields, qat__backward__dx='int8', qat__backward__dw='int8')
  plain = prepared(home, 'qat', **fields)
  (_, found), (_, wanted) = small.take_steps(both, 12), small.take_steps(plain, 12)
  assert found[0]['loss'] == wanted[0]['loss']
  assert found[0]['gradient_norm'] != wanted[0]['gradient_norm']
  np.testing.assert_allclose(found[0]['gradient_norm'], wanted[0]['gradient_norm'], rtol=0.05)
  assert abs(found[-1]['loss'] - wanted[-1]['loss']) < 0.2
  text = both.compiled.call.as_text()
  assert 's32' in text


@pytest.mark.parametrize(
  'method,more',
  [
    ('qat', dict(
      qat__weights='int8:axis=channel', qat__activations=STATIC, qat__activation_gradient='average')),
    ('qat', dict(qat__weight_gradient='lsq')),
    ('qat_lora', dict(qat__weights='nf4:block=32')),
    ('targeted', dict(qat__weight_gradient='lsq')),
  ],
  ids=['inputs', 'weights', 'adapters', 'targeted'],
)  # fmt: skip
def test_devices_and_micro_batches_change_no_loss(home: Path, method: str, more: dict[str, Any]):
  def losses(**how: Any) -> list[float]:
    _, metrics = small.take_steps(prepared(home, method, **more, **how), 3)
    return [row['loss'] for row in metrics]

  one = losses()
  # Sums in another order move a weight by an ulp, and that may move a code by one: 0.2 % of the loss here.
  for found in (losses(mesh__data=2, mesh__fsdp=2), losses(micro_batch=1)):
    np.testing.assert_allclose(found[0], one[0], rtol=2e-5)
    np.testing.assert_allclose(found, one, rtol=5e-3)


def test_an_adapter_inside_a_quantizer_needs_little_more_than_one_beside(tmp_path: Path):
  shape = dataclasses.replace(
    small.CONFIG, num_layers=6, d_model=128, d_ff=512, num_heads=4, head_dim=32
  )  # fmt: skip
  small.write(tmp_path, shape)
  same = {'batch_size': 2, 'data__seq_len': 16, 'model__remat': 'full'}

  def need(given: ConfigDict) -> int:
    run = build.run(given, tmp_path / 'run')
    trainable, frozen = run.method.abstract(run.shapes)
    state = jax.eval_shape(lambda trainable: train.init_state(run, trainable), trainable)
    blank = train._blank(run.data, (0, 1))
    batch = {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in blank.items()}
    with jax.set_mesh(run.mesh):
      key = jax.eval_shape(lambda: jax.random.key(0))
      memory = train.compile_step(run, state, frozen, batch, key).memory
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes

  beside = small.config(tmp_path, 'qlora', **same)
  inside = config(tmp_path, 'qat_lora', **same, qat__weights='nf4:block=64')
  # The base rests in 8 bits in the place of 4, and the decoded weight of a layer is there in float32.
  layer = 4 * (4 * 128 * 128 + 3 * 128 * 512)
  base = sum(2 * np.prod(shape_) // 4 for shape_ in ((6, 4, 128, 128), (6, 3, 128, 512)))
  assert need(inside) < need(beside) + base + 3 * layer


def test_distillation_pulls_to_the_model_as_it_was(home: Path):
  alone = prepared(home, 'qat', distill=True, distill__weight=1.0)
  assert trees.nbytes(alone.frozen['teacher']) > 0
  sizes = train.measure(alone.state.trainable, alone.frozen, alone.state)
  assert sizes['teacher_bytes'] == trees.nbytes(alone.frozen['teacher'])
  # The teacher alone: the fit of the data, which it knows nothing of, does not improve as it does without.
  _, taught = small.take_steps(alone, 12)
  _, free = small.take_steps(prepared(home, 'qat'), 12)
  assert taught[-1]['loss'] > free[-1]['loss'] + 0.1


@pytest.mark.parametrize(
  'method,more,says',
  [
    ('qat', dict(qat__weights='none'), 'quantizes nothing'),
    ('qat', dict(qat__weights='int5'), 'int5'),
    ('qat', dict(qat__rules=(('.*/dwon/kernel', 'none'),)), 'matches none'),
    ('qat', dict(qat__activations=(('.*/dwon/kernel', 'int8:axis=token'),)), 'matches none'),
    ('qat', dict(qat__weight_gradient='lsk'), "mean 'lsq'"),
    ('qat', dict(qat__momentum=1.0, qat__activations=STATIC, qat__activation_gradient='average'), 'momentum'),
    ('qat', dict(qat__start_step=-1), 'start_step'),
    ('qat', dict(qat__start_step=12), 'nothing would be trained through a quantizer in 12 steps'),
    ('qat', dict(qat__momentum=2.0), 'momentum = 2.0 must be'),
    (
      'qat',
      dict(qat__backward__dw='int8', qat__weights='none', qat__activations=TOKEN),
      'no weight is quantized',
    ),
    ('qat', dict(qat__activation_gradient='lsq'), 'no activation has one'),
    ('qat', dict(qat__start_step=5, qat__freeze_step=5), 'no range would move'),
    ('qat_lora', dict(lora__dropout=0.1), 'set it to 0'),
    ('qat_lora', dict(distill=True, placement__rules=(('.*', 'host'),)), 'one or the other'),
    ('targeted', dict(qat__weights='int4:axis=channel'), "set qat.weights = 'none'"),
    ('targeted', dict(qat__start_step=1), 'from the first step'),
    ('qat', dict(qat__observer='absmaxx'), "mean 'absmax'"),
    ('qat', dict(qat__backward__dx='int4'), 'backward.dx'),
    ('qat', dict(qat__backward__dx='int8', qat__weights='int8:block=32'), 'several scales an output'),
    ('qat', dict(qat__backward__dw='int8', qat__weights='int8:axis=channel'), 'inputs are not quantized'),
    ('qat', dict(qat__activation_gradient='averages'), "mean 'average'"),
    ('targeted', dict(targeted__train='adapters', lora__targets='.*/down/kernel'), 'leaves out'),
    ('qat_lora', dict(qat__weights='none'), 'needs qat.weights'),
    ('targeted', dict(targeted__budget=1.5), 'at most 1'),
    ('targeted', dict(targeted__budget=1e-6), 'holds no matrix'),
    ('targeted', dict(targeted__train='everything'), "'everything' is not known"),
    ('targeted', dict(targeted__train='ranges'), "set qat.weight_gradient to 'lsq'"),
    ('targeted', dict(storage__projections='nf4:block=64'), 'no costs in nf4:block=64'),
    ('targeted', dict(targeted__record='nowhere.json'), 'no sensitivity record'),
  ],
)
def test_what_cannot_work_is_refused(home: Path, method: str, more: dict[str, Any], says: str):
  with pytest.raises(UserError, match=says):
    build.run(config(home, method, **more), home / 'run')


def test_sections_that_do_not_belong_are_refused(home: Path):
  given = small.config(home, 'lora')
  common.add_qat(given)
  with pytest.raises(UserError, match='takes no section qat'):
    build.run(given, home / 'run')
  given = small.config(home, 'full')
  given.method = 'qat'
  with pytest.raises(UserError, match='needs the section qat'):
    build.run(given, home / 'run')


def test_worst_slices_fill_the_budget_with_the_most_cost(home: Path):
  found = Sensitivity.load(home / 's.json')
  others = [f'layers/{name}/kernel' for name in ('attn/q', 'attn/k', 'attn/v', 'attn/o', 'mlp/gate')]
  shapes = dict.fromkeys((DOWN, UP), (2, 64, 128)) | dict.fromkeys(others, (2, 64, 64))
  chosen = worst_slices(found, 'int4:axis=channel', shapes, 64 * 128 * 2 + 64 * 64)
  assert dict(chosen)[DOWN] == (1,) and dict(chosen)[UP] == (0,)
  assert sum(len(layers) for _, layers in chosen) == 3
  whole = json.loads((home / 's.json').read_text())
  assert len(whole['paths']) == 14
