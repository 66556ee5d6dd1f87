"""LoRA of rank 16 on a 7B model in bfloat16, one row of 1,024 tokens; planned here, without weights.

  python -m experiments.plan --config=configs/lora_7b.py --chip=rtx4090,v5e --compile
  python -m experiments.train --config=configs/lora_7b.py --config.model.path=path/to/Llama-2-7b

"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  config = common.base()
  config.name = 'lora_7b'
  config.method = 'lora'
  common.add_lora(config)
  at_7b(config)
  return config


def at_7b(config: ConfigDict) -> None:
  """The shape of Llama 2 7B, and batches for cards of 16 to 24 GB."""
  config.model.path = 'shapes:llama2_7b'
  config.batch_size = config.micro_batch = 1
  config.data.seq_len = 1024
  # Activations of 32 layers would take 2.9 GiB with 'projections'.
  config.model.remat = 'full'
  config.optimizer.learning_rate = 2e-4
