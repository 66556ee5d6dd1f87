"""Quantization-aware training: 4-bit weights with one scale an output, whose ranges learn.

  python -m experiments.train --config=configs/qat_int4.py
  python -m experiments.convert --run=runs/qat_int4

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'qat_int4'
  config.method = 'qat'
  config.micro_batch = config.batch_size  # as in configs/full.py
  config.optimizer.learning_rate = 1e-4
  common.add_qat(config)
  config.qat.weight_gradient = 'lsq'
  return config
