"""A 4-bit model of which only the matrices that quantize worst are trained, through their quantizer.

  python -m experiments.sensitivity --each_layer --schemes=int4:axis=channel --workdir=runs/sensitivity
  python -m experiments.train --config=configs/targeted.py
  python -m experiments.convert --run=runs/targeted

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'targeted'
  config.method = 'targeted'
  config.optimizer.learning_rate = 2e-4
  common.add_storage(config)
  config.storage.projections = 'int4:axis=channel'
  common.add_qat(config)
  config.qat.weights = 'none'  # their scheme is that of storage
  config.qat.weight_gradient = 'lsq'
  config.targeted = ConfigDict()
  config.targeted.record = 'runs/sensitivity/sensitivity.json'
  config.targeted.budget = 0.15  # share of the model's parameters that may move
  config.targeted.train = 'weights'  # weights (with their ranges, if those learn) | ranges
  return config
