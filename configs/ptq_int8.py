"""INT8 weights, one scale for each output, rounded to nearest: the safe step down from bfloat16.

  python -m experiments.quantize --config=configs/ptq_int8.py
  python -m experiments.verify --config=configs/verify.py --config.candidate=runs/ptq_int8/model
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.name = 'ptq_int8'
  config.method = 'rtn'  # or smoothquant+rtn, gptq, awq, hqq, …; the README has the list
  config.observer = 'absmax'  # of the ranges of static activation schemes
  config.activations = ()  # ((pattern over projections, scheme), …), such as (('.*', 'int8:axis=token'),)

  config.model = ConfigDict()
  config.model.path = 'embedded'  # or a .gguf file, or a Hugging Face directory

  config.storage = ConfigDict()
  config.storage.projections = 'int8:axis=channel'
  config.storage.embeddings = 'bfloat16'
  config.storage.rules = ()  # ((pattern, dtype or scheme), …) that go first

  config.calibration = ConfigDict()
  config.calibration.path = 'state_of_the_union'  # or a .txt file, or a .jsonl file with "text" in its lines
  config.calibration.seq_len = 256
  config.calibration.max_tokens = 16384
  config.calibration.batch_size = 8  # rows at a time
  config.calibration.ranges = ''  # calibration.json of experiments.calibrate; '' finds static ranges here
  return config
