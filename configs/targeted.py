"""A 4-bit model of which only the matrices that quantize worst are trained, through their quantizer.

  python -m experiments.sensitivity --each_layer --schemes=int4:axis=channel --workdir=runs/sensitivity
  python -m experiments.train --config=configs/targeted.py
  python -m experiments.convert --run=runs/targeted

What moves of them is their weights; with --config=configs/targeted.py:adapters it is low-rank adapters inside
their quantizers, with --config=configs/targeted.py:ranges their ranges alone.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(train: str = 'weights') -> ConfigDict:
  config = common.base()
  config.name = 'targeted'
  config.method = 'targeted'
  if train == 'adapters':
    common.add_lora(config)
    config.lora.targets = '.*'  # all that is targeted
  else:
    common.add_storage(config)
    config.optimizer.learning_rate = 1e-3 if train == 'ranges' else 2e-4
  config.storage.projections = 'int4:axis=channel'
  common.add_qat(config)
  config.qat.weights = 'none'  # their scheme is that of storage
  config.qat.weight_gradient = 'lsq'
  config.targeted = ConfigDict()
  config.targeted.record = 'runs/sensitivity/sensitivity.json'
  config.targeted.budget = 0.15  # share of the model's parameters that are targeted
  config.targeted.train = train  # weights | adapters | ranges: what moves of them
  return config
