"""Seconds a step and peak memory of LoRA with PEFT, in the shapes of SmolLM2-135M with random weights.

  python interop/bench_peft.py [--json] [--steps=N] [--checkpointing] [--adapters=bfloat16]
  python -m experiments.bench_step --methods=lora --beside='path/to/python interop/bench_peft.py --turns'

Rank 16 on all seven projections, a bfloat16 base, 8 rows of 256 tokens that are all trained on, AdamW on the
adapters. They are float32 by default under autocast to bfloat16, which is what transformers' Trainer makes of
`bf16=True`. Peak memory is that of the process on a CPU, that of torch's allocator on a GPU. Needs torch,
transformers and peft only. Measure on an idle machine: torch's threads wait for each other at each product,
and another busy process can multiply the time by ten. With --turns each line of standard input is a step, and
its seconds are a line of the output: two programs can take steps in turn, and a machine whose speed drifts
slows both.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time

import peft
import torch
import transformers

SHAPE = dict(
  vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
  num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, rms_norm_eps=1e-5,
)
PROJECTIONS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']


def make_model(device: str, checkpointing: bool, adapters: str) -> torch.nn.Module:
  config = transformers.LlamaConfig(**SHAPE, use_cache=False)
  with torch.device(device):
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  if checkpointing:
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
  spec = peft.LoraConfig(
    r=16, lora_alpha=16, lora_dropout=0.0, target_modules=PROJECTIONS, task_type='CAUSAL_LM'
  )
  return peft.get_peft_model(base, spec, autocast_adapter_dtype=adapters == 'float32').train()


def peak_memory_bytes(device: str) -> int:
  if device == 'cuda':
    return torch.cuda.max_memory_allocated()
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(options: argparse.Namespace) -> dict[str, str | float]:
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  torch.manual_seed(0)
  model = make_model(device, options.checkpointing, options.adapters)
  optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-3)
  ids = torch.randint(0, SHAPE['vocab_size'], (options.batch, options.length), device=device)

  def step() -> float:
    with torch.autocast(device, torch.bfloat16, enabled=options.adapters == 'float32'):
      loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # waits for the device, too

  seconds = []
  turns = sys.stdin if options.turns else range(options.warmup + options.steps)
  for _turn in turns:
    start = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - start)
    if options.turns:
      print(seconds[-1], flush=True)
  return dict(
    program='peft', dtype='bfloat16', step_seconds=statistics.median(seconds[options.warmup:]),
    peak_memory_bytes=peak_memory_bytes(device),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--steps', type=int, default=5, help='steps whose median is taken')
  parser.add_argument('--warmup', type=int, default=2, help='steps before them')
  parser.add_argument('--batch', type=int, default=8, help='rows')
  parser.add_argument('--length', type=int, default=256, help='tokens a row')
  parser.add_argument('--checkpointing', action='store_true', help='compute activations again when needed')
  parser.add_argument('--adapters', choices=['float32', 'bfloat16'], default='float32')
  parser.add_argument('--turns', action='store_true', help='a step for each line of standard input')
  parser.add_argument('--json', action='store_true', help='print one line of JSON instead')
  options = parser.parse_args()
  found = measure(options)
  if options.turns:
    return
  if options.json:
    print(json.dumps(found))
  else:
    memory = found['peak_memory_bytes'] / 2**30
    print(f'peft {peft.__version__}, bfloat16: {found["step_seconds"]:.3f} s a step, peak {memory:.2f} GiB')


if __name__ == '__main__':
  main()
