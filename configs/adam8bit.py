"""Full fine-tuning with moments in 8 bits: a quarter of the memory that AdamW takes beside the weights.

  python -m experiments.train --config=configs/adam8bit.py

20 steps on two CPU cores: held-out nll 4.0781 -> 3.1935, optimizer state 262 MiB (configs/full.py: 3.1934 and
1.00 GiB, on the same machine).
"""

from ml_collections import ConfigDict

from configs import full


def get_config() -> ConfigDict:
  config = full.get_config()
  config.name = 'adam8bit'
  config.optimizer.name = 'adamw8bit'
  return config
