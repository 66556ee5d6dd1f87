"""What sizes of tiles go by: registers and vector memory of a TPU, programs and powers of two of a GPU."""

# Lanes of a register of a TPU; its rows are said by `sublanes`.
LANES = 128
# Bytes of a TPU's vector memory that tiles may take, of 64 MiB or more, and those that a kernel may then use.
VMEM_BYTES, VMEM_LIMIT = 40 * 2**20, 48 * 2**20
# What a step of a TPU's grid costs beside its work, in bytes that could be moved meanwhile: about a third of
# a microsecond.
STEP_BYTES = 2**18
# Rows of an adapter that a TPU's tile has at least: the compiler takes a product with one row for one with a
# vector, which it lacks in bfloat16.
FEWEST_RANK = 8
# Programs that keep every core of a large GPU busy.
PROGRAMS = 256


def is_before_v5(device_kind: str) -> bool:
  """Whether that is a TPU of a generation with 16 MiB of vector memory, and without products of int8."""
  return any(name in device_kind.lower() for name in ('v2', 'v3', 'v4'))


def sublanes(itemsize: int) -> int:
  """Rows of a register of a TPU, for elements of so many bytes: 8 of float32, 16 of bfloat16, 32 of int8."""
  return 32 // itemsize


def power_of_two(size: int, least: int = 1, most: int | None = None) -> int:
  """The least power of two that is not smaller than `size`, within bounds that are powers of two."""
  power = 1 << (size - 1).bit_length()
  return max(least, power if most is None else min(most, power))
