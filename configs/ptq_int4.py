"""Four-bit weights by GPTQ, one scale for 64 inputs of one output.

  python -m experiments.quantize --config=configs/ptq_int4.py
  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/ptq_int4/model
"""

from ml_collections import ConfigDict

from configs import ptq_int8


def get_config() -> ConfigDict:
  config = ptq_int8.get_config()
  config.name = 'ptq_int4'
  config.method = 'gptq:act_order'
  config.storage.projections = 'int4:block=64'
  return config
