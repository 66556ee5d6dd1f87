"""QLoRA of a LLaMA of 65B in 24 GB: 2-bit layers, all on the device.

  python -m experiments.train --config=configs/qlora_65b_2bit.py --config.model.path=path/to/llama-65b

The argument is the number of tokens of a row. 2.13 bits a weight of a projection. Compiled for a v6e with
kernels = pallas: 21.3 GiB of the device, and 2.5 of layer inputs in host memory. More rows than are taken
at a time would need their gradients' sum as well: 23.5 GiB.

Adapters start from what rounding lost (LoftQ), with the range of each block clipped to the least squared
error. On the example model, configs/qlora.py with this storage and this start goes from 9.57 to 4.42 nats in
20 steps; with adapters that start from zero from 21.57 to 13.57, and in 4 bits from 4.35 to 3.37. It was not
run on a 65B.
"""

from ml_collections import ConfigDict

from configs import qlora_65b_24gb


def get_config(seq_len: str = '2048') -> ConfigDict:
  config = qlora_65b_24gb.get_config(seq_len)
  config.name = 'qlora_65b_2bit'
  config.batch_size = config.micro_batch
  config.model.remat = 'offload'
  config.precision.param = 'bfloat16'
  config.precision.rounding = 'stochastic'
  config.storage.projections = 'nf2:block=64,dq'
  config.lora.init = 'loftq:rounds=3,clip'
  config.placement.rules = ()
  return config
