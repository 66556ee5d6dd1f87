"""Quantization-aware training: INT8 weights, and INT8 inputs with one range a tensor.

  python -m experiments.train --config=configs/qat_int8.py
  python -m experiments.convert --run=runs/qat_int8

One range for a whole tensor of inputs is what breaks W8A8 most, and what is cheapest to run. The ranges
follow a moving average: Adam moves a leaf by its learning rate a step, which is nothing for ranges of tens.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'qat_int8'
  config.method = 'qat'
  config.micro_batch = config.batch_size  # as in configs/full.py
  config.optimizer.learning_rate = 1e-4
  common.add_qat(config)
  config.qat.weights = 'int8:axis=channel'
  config.qat.activations = (('.*', 'int8:axis=tensor,static'),)
  config.qat.activation_gradient = 'average'
  return config
