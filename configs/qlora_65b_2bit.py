"""QLoRA of a LLaMA of 65B in 24 GB: 2-bit layers, all on the device.

  python -m experiments.train --config=configs/qlora_65b_2bit.py --config.model.path=path/to/llama-65b

The argument is the number of tokens of a row. 2.13 bits a weight of a projection. Adapters that start from
zero do not mend what rounding to 2 bits breaks: quantize with experiments.quantize first.
"""

from ml_collections import ConfigDict

from configs import qlora_65b_24gb


def get_config(seq_len: str = '2048') -> ConfigDict:
  config = qlora_65b_24gb.get_config(seq_len)
  config.name = 'qlora_65b_2bit'
  config.batch_size = config.micro_batch  # sums of gradients over micro-batches would take 0.7 GiB
  config.optimizer.name = 'adamw8bit'
  config.model.remat = 'offload'
  config.storage.projections = 'nf2:block=64,dq'
  config.placement.rules = ()
  return config
