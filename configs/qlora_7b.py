"""QLoRA of rank 16 over a 7B model in NormalFloat4 with double quantization; planned here, without weights.

  python -m experiments.plan --config=configs/qlora_7b.py --chip=rtx4090,v5e --compile
  python -m experiments.train --config=configs/qlora_7b.py --config.model.path=path/to/Llama-2-7b

"""

from ml_collections import ConfigDict

from configs import common
from configs.lora_7b import at_7b


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'qlora_7b'
  config.method = 'qlora'
  common.add_lora(config)
  config.storage.projections = 'nf4:block=64,dq'
  at_7b(config)
  return config
