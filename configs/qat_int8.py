"""Quantization-aware training: INT8 weights, and INT8 inputs with one range a tensor.

  python -m experiments.train --config=configs/qat_int8.py
  python -m experiments.convert --run=runs/qat_int8

One range for a whole tensor of inputs is what breaks W8A8 most, and what is cheapest to run. The ranges start
at the largest magnitudes and learn: of 20 steps from a fine-tuned model, which rounding takes from 3.193 to
4.001 held-out nats, ranges that learn (lsq) lead back to 3.400, a moving average of what is seen to 3.560.
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
  config.qat.activation_gradient = 'lsq'
  config.qat.range_rate = 0.05
  return config
