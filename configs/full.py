"""Full fine-tuning: every weight moves, AdamW in float32, bfloat16 products.

  python -m experiments.train --config=configs/full.py

20 steps on two CPU cores, 175 s: held-out nll 4.0781 -> 3.1930, peak memory 4.94 GiB (host).
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'full'
  config.method = 'full'
  # Memory is what weights, moments and gradients take; a second sum of gradients would add to it.
  config.micro_batch = config.batch_size
  config.optimizer.learning_rate = 1e-4
  return config
