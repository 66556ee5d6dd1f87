"""Adapters inside the quantizer: products see Q(W + s·A·B), which is what the merged 4-bit model holds.

  python -m experiments.train --config=configs/qat_lora.py
  python -m experiments.convert --run=runs/qat_lora

The base rests in INT8, so that W is nearly what it was and memory stays near that of QLoRA.

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'qat_lora'
  config.method = 'qat_lora'
  common.add_lora(config)
  config.storage.projections = 'int8:axis=channel'
  common.add_qat(config)
  config.qat.weights = 'nf4:block=64'
  return config
