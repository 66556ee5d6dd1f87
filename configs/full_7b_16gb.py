"""Full fine-tuning of a 7B model in 16 GB: bfloat16 weights that move inside the backward pass.

  python -m experiments.plan --config=configs/full_7b_16gb.py --chip=v5e,rtx4090 --compile
  python -m experiments.train --config=configs/full_7b_16gb.py --config.model.path=path/to/Llama-2-7b

One row of 2,048 tokens. Weights round at random, factored second moments are all of the optimizer's state,
and each layer's gradient is clipped by its own norm. Compiled for v5e a step needs 14.7 GiB.
"""

from ml_collections import ConfigDict

from configs import bf16
from configs.lora_7b import at_7b


def get_config() -> ConfigDict:
  config = bf16.get_config()
  config.name = 'full_7b_16gb'
  at_7b(config)
  config.data.seq_len = 2048
  config.optimizer.name = 'adafactor'
  config.optimizer.kind = 'fused'
  config.optimizer.learning_rate = 1e-5
  return config
