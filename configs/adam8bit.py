"""Full fine-tuning with moments in 8 bits: a quarter of the memory that AdamW takes beside the weights.

  python -m experiments.train --config=configs/adam8bit.py
"""

from ml_collections import ConfigDict

from configs import full


def get_config() -> ConfigDict:
  config = full.get_config()
  config.name = 'adam8bit'
  config.optimizer.name = 'adamw8bit'
  return config
