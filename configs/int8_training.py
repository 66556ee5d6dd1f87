"""INT8 products forward and backward: weights, inputs and gradients in 8 bits, everything trained.

  python -m experiments.train --config=configs/int8_training.py

Gradients round at random, so that what they lose averages out.

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'int8_training'
  config.method = 'qat'
  config.micro_batch = config.batch_size  # as in configs/full.py
  config.optimizer.learning_rate = 1e-4
  common.add_qat(config)
  config.qat.weights = 'int8:axis=channel'
  config.qat.activations = (('.*', 'int8:axis=token'),)
  config.qat.backward.dx = 'int8'
  config.qat.backward.dw = 'int8'
  return config
