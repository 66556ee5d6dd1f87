"""Says, in numbers, whether a quantized model may replace the original. Exit status 1: it may not.

  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/ptq_int8/model
  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/ptq_int4/model \\
      --config.prompts.path=my_prompts.txt --config.thresholds.top1=0.95

Compared on held-out text: the loss with its paired 95 % interval, KL of the next-word distributions, the word
found most likely; every projection's weights and outputs, channel by channel; greedy answers to prompts; and
that the candidate, saved and loaded once more, gives the same bits. The working directory receives
report.html, report.md with its figures, and report.json.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments import cli
from qjax import build, files, records, report, trees, verification
from qjax.data import plain
from qjax.io import native
from qjax.progress import Bar, stage
from qjax.quant import verdict, verify
from qjax.records import human_bytes

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Lab note to run, for instance configs/verify.py.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where the report goes; beside the candidate if not given.')


def main(argv: list[str]) -> int:
  del argv
  config = cli.config_of(_CONFIG)
  run = build.verification(config)
  fields = run.fields
  candidate = native.load(Path(fields.candidate))
  workdir = Path(_WORKDIR.value or Path(fields.candidate).parent / 'verify')
  prompts = plain.prompts(fields.prompts.path, fields.prompts.count)
  lora = build.adapters_of(Path(fields.adapters), run.reference) if fields.adapters else None

  with stage('reading the reference'):
    pair = verification.Pair.of(run.reference, candidate, run.policy)
  batches = list(run.rows.batches(fields.text.batch_size))
  with Bar('held-out text', len(batches)) as bar:
    comparison = verify.compare(pair.reference.logits, pair.candidate.logits, batches, progress=bar.advance)
  with stage('weights, channel by channel'):
    weights = list(pair.weight_errors())
  with stage('outputs, layer by layer'):
    outputs = list(pair.output_errors(batches[:1]))
  tokenizer = run.reference.require_tokenizer()
  with Bar('answers', 2 * len(prompts)) as bar:
    answers = pair.answers(prompts, tokenizer, fields.prompts.new_tokens, bar.advance)
  with stage('saving and loading again'):
    is_same = _reloads(candidate, pair, batches[0])

  survival = None if lora is None else pair.adapter_survival(lora)

  required = ['comparison', 'outputs', *(['survival'] if survival is not None else [])]
  if weights or 'run' not in candidate.origin:  # what was trained is other weights, which nothing compares
    required.append('weights')
  judged = verdict.judge(fields.thresholds, comparison, weights, outputs, answers, survival, required)
  if not is_same:
    message = 'reloading: the candidate, saved and loaded again, gives other logits'
    judged = verdict.Verdict(False, (*judged.failures, message), judged.checks)
  sizes = {
    'reference': 4 * run.reference.config.num_parameters,
    'candidate': trees.nbytes(candidate.variables),
  }
  record = verdict.record(
    judged, comparison, weights, outputs, answers, survival,
    reference=run.reference.name, candidate=str(fields.candidate), origin=dict(candidate.origin),
    text=fields.text.path, compute=fields.compute, bytes=sizes, reload_is_identical=is_same,
    environment=records.environment(),
  )  # fmt: skip
  report.write_verification(files.plain(record), workdir)
  low, high = comparison.nll_interval
  print(
    f'held-out nll {comparison.nll_reference:.4f} -> {comparison.nll_candidate:.4f}, difference '
    f'{comparison.nll_difference:+.4f} (95 %: {low:+.4f} to {high:+.4f}) on {comparison.tokens:,} tokens\n'
    f'KL mean {comparison.kl_mean:.5f}, p99 {comparison.kl_p99:.4f}, max {comparison.kl_max:.3f}; same word '
    f'{comparison.top1:.4f}; same answer {answers.exact:.2f} of {answers.count}\n'
    f'bytes {human_bytes(sizes["reference"])} in float32 -> {human_bytes(sizes["candidate"])}'
  )
  for check in judged.checks:
    value = '-' if check.value is None else f'{check.value:.4g}'
    print(f'  {check.status:<12} {check.name:<24} {value:>10}  {check.limit:<16} {check.where}')
  print(f'report: {workdir / "report.html"}')
  if not judged.passed:
    print('FAILED: it should not replace the original', *judged.failures, sep='\n  ')
    return 1
  print('PASSED: it may replace the original')
  return 0


def _reloads(candidate: native.QuantizedModel, pair: verification.Pair, batch: dict[str, np.ndarray]) -> bool:
  """Whether a saved and loaded copy gives the same bits."""
  with tempfile.TemporaryDirectory() as scratch:
    native.save(candidate, Path(scratch) / 'copy')
    copy: Any = native.load(Path(scratch) / 'copy').variables
  again = pair.candidate.with_variables(copy).logits(batch)
  return bool(jax.device_get(jnp.array_equal(pair.candidate.logits(batch), again)))


if __name__ == '__main__':
  cli.run(main)
