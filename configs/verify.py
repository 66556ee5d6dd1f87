"""Whether a quantized model may replace the original: what is measured, and how much it may cost.

  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/ptq_int8/model
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.name = 'verify'
  config.reference = 'embedded'  # or a .gguf file, or a Hugging Face directory
  config.candidate = 'runs/ptq_int8/model'  # what experiments.quantize wrote
  config.adapters = ''  # a run of experiments.train: what of its adapters the candidate's bits would keep
  config.compute = 'float32'  # operands of both models' products

  config.text = ConfigDict()
  config.text.path = 'state_of_the_union'  # or a .txt file, or a .jsonl file with "text" in its lines
  config.text.seq_len = 256
  config.text.max_tokens = 16384
  config.text.batch_size = 4

  config.prompts = ConfigDict()
  config.prompts.path = 'construction_faq'  # or a .txt file with a prompt on each line
  config.prompts.count = 16
  config.prompts.new_tokens = 24

  config.thresholds = ConfigDict()  # what a replacement may cost at most; the field docs are in Thresholds
  config.thresholds.nll_difference = 0.01
  config.thresholds.kl_mean = 0.01
  config.thresholds.kl_p99 = 0.1
  config.thresholds.top1 = 0.95
  config.thresholds.weight_matrix_drop_db = 10.0
  config.thresholds.weight_channel_drop_db = 6.0
  config.thresholds.output_sqnr_db = 10.0
  config.thresholds.output_channel_drop_db = 20.0  # sound INT8 has channels 12 dB below the median
  config.thresholds.channel_z = 6.0
  config.thresholds.exact_match = 0.2  # a small model's greedy answers part after few words
  config.thresholds.adapter_survival = 0.9
  return config
