"""QLoRA of a LLaMA of 65B in 24 GB: the 4-bit layers wait in host memory.

  python -m experiments.train --config=configs/qlora_65b_24gb.py --config.model.path=path/to/llama-65b
  python -m experiments.train --config=configs/qlora_65b_24gb.py:512 --config.model.path=path/to/llama-65b

The argument is the number of tokens of a row; 2,048 tokens are taken at a time. Compiled for a TPU v6e with
kernels = pallas: 12.9 GiB of the device (13.1 on a v5e), 30.2 GiB of host memory.
Compiled for an RTX 4090, where the compiler shows no host memory: 11.2 GiB and a layer's copy (0.4).
"""

from ml_collections import ConfigDict

from configs import common


def get_config(seq_len: str = '2048') -> ConfigDict:
  config = common.base()
  config.name = 'qlora_65b_24gb'
  config.method = 'qlora'
  config.batch_size = 16
  config.micro_batch = max(1, 2048 // int(seq_len))
  config.model.path = 'shapes:llama_65b'  # can be planned; weights are the user's
  config.model.remat = 'full'
  config.data.seq_len = int(seq_len)
  common.add_lora(config)
  config.optimizer.learning_rate = 1e-4
  config.storage.projections = 'nf4:block=64,dq'
  config.placement.rules = (('.*', 'host'),)
  return config
