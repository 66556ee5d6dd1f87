"""What the lab notes share: every field with the value it has unless a note says otherwise.

A config is complete: what `experiments.train` prints is what runs, and no default lives anywhere else.
"""

from ml_collections import ConfigDict, config_dict


def base() -> ConfigDict:
  """Fine-tuning of the embedded model on the embedded data, without a method."""
  config = ConfigDict()
  config.seed = 0  # data order, adapters, dropout, stochastic rounding
  config.num_steps = 20
  config.batch_size = 8  # rows a step, over all devices
  config.micro_batch = 2  # most rows that a device takes at a time; their gradients add up to the batch's
  config.eval_every = 10  # steps; there is also an evaluation before and after
  config.checkpoint_every = 10  # steps; the newest and the best are kept
  config.max_skips = 50  # give up after so many steps in a row without a finite gradient
  config.kernels = 'auto'  # matrix products: auto | xla | pallas | pallas_tpu | pallas_gpu | pallas_interpret

  config.model = ConfigDict()
  config.model.path = 'embedded'  # or a .gguf file, or a Hugging Face directory
  # What is kept of a layer for the backward pass: full remat (its input) | offload (that, in host memory) |
  # attention | projections | dots | dots_no_batch | none (everything).
  config.model.remat = 'projections'
  config.model.attention = 'auto'  # auto | xla | cudnn
  config.model.loss_chunk = 8192  # words of the vocabulary whose logits exist at a time
  # Tokens of a row that the MLP takes at a time, each chunk computed again in the backward pass; 0 takes all.
  config.model.mlp_chunk = 0

  config.data = ConfigDict()
  config.data.path = 'construction_faq'  # or a .jsonl file
  config.data.eval_path = config_dict.placeholder(str)  # a .jsonl file; then nothing of path is held out
  config.data.held_out = 0.2  # share of the questions
  config.data.seq_len = 256
  config.data.pack = True  # several documents a row, which do not see each other
  config.data.template = 'chat'  # chat: the model's own template | plain: prompt and completion as they are
  config.data.too_long = 'truncate'  # truncate | drop | error

  config.precision = ConfigDict()
  config.precision.param = 'float32'  # trained weights
  config.precision.compute = 'bfloat16'  # operands of matrix products, residual stream
  config.precision.accum = 'float32'  # results of matrix products before they are cast back
  config.precision.output = 'float32'  # logits
  config.precision.rounding = 'nearest'  # of updated weights: nearest | stochastic (bfloat16 weights)
  config.precision.loss_scale = 'none'  # none | static | dynamic
  config.precision.loss_scale_initial = 2.0**15
  config.precision.loss_scale_period = 2000  # finite steps before the scale doubles

  config.optimizer = ConfigDict()
  config.optimizer.name = 'adamw'  # adamw | adamw8bit | adafactor | lion | sgd
  # separate: after the backward pass | fused: inside it, layer by layer (method full) | fused_global: so, but
  # clipped by the norm of all layers, which takes a second backward pass. Both want model.remat = full and
  # micro_batch = batch_size.
  config.optimizer.kind = 'separate'
  config.optimizer.learning_rate = 1e-3
  config.optimizer.schedule = 'cosine'  # constant | linear | cosine, down to zero
  config.optimizer.warmup_steps = 5
  config.optimizer.weight_decay = 0.0
  config.optimizer.beta1 = 0.9  # of adamw, adamw8bit and lion; adafactor and sgd have none
  config.optimizer.beta2 = 0.999  # likewise; lion wants 0.99
  config.optimizer.eps = 1e-8  # of adamw and adamw8bit
  config.optimizer.clip_norm = 1.0  # 0: no clipping

  config.placement = ConfigDict()
  # ((pattern over projections, device | host), …): which stacks of layers wait in host memory, to be copied a
  # layer at a time. What no rule takes rests on the device. With optimizer.kind = fused,
  # 'optimizer/layers' are the moments of the layers.
  config.placement.rules = ()
  # Of the weights that go to the host, as many stacks stay on the device as fill no more than this.
  config.placement.resident_gib = 0.0

  config.mesh = ConfigDict()  # devices along each axis; -1: all that are left
  config.mesh.data = 1
  config.mesh.fsdp = 1
  config.mesh.tensor = 1
  config.mesh.distributed = False  # call jax.distributed.initialize() first
  return config


def add_lora(config: ConfigDict) -> None:
  """Low-rank adapters on every projection, over a base in the compute dtype."""
  config.optimizer.learning_rate = 2e-3
  config.lora = ConfigDict()
  config.lora.rank = 16
  config.lora.alpha = 16.0
  config.lora.scale_rule = 'standard'  # standard: alpha/r | rslora: alpha/sqrt(r)
  config.lora.dropout = 0.0
  config.lora.targets = '.*/(q|k|v|o|gate|up|down)/kernel'  # regular expression over whole parameter paths
  # zero | loftq:rounds=5,clip: from what rounding the base lost (clip: ranges of least squared error).
  config.lora.init = 'zero'
  add_storage(config)


def add_storage(config: ConfigDict) -> None:
  """How weights rest that are not trained."""
  config.storage = ConfigDict()
  config.storage.projections = 'bfloat16'  # a dtype, or a scheme such as nf4:block=64,dq
  config.storage.embeddings = 'bfloat16'
  config.storage.rules = ()  # ((pattern, dtype or scheme), …) that go first


def add_qat(config: ConfigDict) -> None:
  """Weights and inputs of projections trained through their quantizers."""
  config.qat = ConfigDict()
  config.qat.weights = 'int4:axis=channel'  # a scheme | none
  config.qat.rules = ()  # ((pattern over projections, scheme or none), …) that go first
  config.qat.activations = ()  # ((pattern over projections, scheme), …), such as (('.*', 'int8:axis=token'),)
  config.qat.weight_gradient = 'ste'  # ste | lsq | pact: straight through; ranges learn, in one of two ways
  config.qat.weight_rounding = 'nearest'  # in training: nearest | stochastic (integers)
  # Of static activation schemes: ste | lsq | pact | average (ranges follow a moving average of what is seen).
  config.qat.activation_gradient = 'ste'
  # Of ranges that learn: the share of itself by which one moves a step; it follows optimizer.schedule.
  config.qat.range_rate = 0.001
  config.qat.momentum = 0.9  # of that average
  config.qat.start_step = 0  # steps before nothing is quantized
  config.qat.freeze_step = 0  # the step from which ranges stay as they are; 0 is never
  config.qat.observer = 'absmax'  # where ranges of static activation schemes start
  config.qat.calibration_batches = 1  # of training data, for that
  config.qat.ranges = ''  # or calibration.json of experiments.calibrate
  config.qat.backward = ConfigDict()  # products of gradients
  config.qat.backward.dx = 'compute'  # of inputs: compute | int8 (needs integer weights, one scale an output)
  config.qat.backward.dw = 'compute'  # of weights: compute | int8 (needs activations too)
  config.qat.backward.rounding = 'stochastic'  # of gradients to integers: stochastic | nearest


def add_distillation(config: ConfigDict) -> None:
  """The model as it was, in bfloat16, as a teacher."""
  config.distill = ConfigDict()
  config.distill.weight = 0.5  # of the KL against the teacher; the rest is the loss of the data
  config.distill.temperature = 1.0
