"""Full fine-tuning of Llama-2-7B in 16 GB: weights in bfloat16, each layer moved as soon as its gradient is there.

Rows of 2048 tokens, one at a time. Weights round at random, factored second moments are all of the optimizer's
state, and every layer's gradient is clipped by its own norm.
"""

from ml_collections import ConfigDict

from configs import bf16


def get_config() -> ConfigDict:
  config = bf16.get_config()
  config.name = 'full_7b_16gb'
  config.model.path = 'shapes:llama2_7b'
  config.model.remat = 'full'
  config.batch_size = config.micro_batch = 1
  config.data.seq_len = 2048
  config.optimizer.name = 'adafactor'
  config.optimizer.kind = 'fused'
  config.optimizer.learning_rate = 1e-5
  return config
