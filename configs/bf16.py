"""Everything in bfloat16: full fine-tuning of bfloat16 weights with stochastic rounding.

  python -m experiments.train --config=configs/bf16.py

20 steps on two CPU cores, 193 s: held-out nll 4.0781 -> 3.1795, peak memory 5.84 GiB (host).

The weights take half of what configs/full.py keeps. Rounded to nearest, updates smaller than half a unit
in the last place would vanish; stochastic rounding keeps them in the mean.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'bf16'
  config.method = 'full'
  config.precision.param = 'bfloat16'
  config.precision.rounding = 'stochastic'
  # Memory is what weights, moments and gradients take; a second sum of gradients would add to it.
  config.micro_batch = config.batch_size
  config.optimizer.learning_rate = 1e-4
  return config
