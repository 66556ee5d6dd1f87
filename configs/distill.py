"""Quantization-aware training with 4-bit weights that learns from the float model, too.

  python -m experiments.train --config=configs/distill.py
  python -m experiments.convert --run=runs/distill

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'distill'
  config.method = 'qat'
  config.micro_batch = config.batch_size  # as in configs/full.py
  config.optimizer.learning_rate = 1e-4
  common.add_qat(config)
  config.qat.weight_gradient = 'lsq'
  common.add_distillation(config)
  return config
