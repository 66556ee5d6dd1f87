"""Text to token ids and back, with the character span of every token."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tokenizers


class Encoding(NamedTuple):
  """Token ids and, for each, the half-open character span of the text it came from."""

  ids: list[int]
  spans: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A `tokenizers` model with the special ids and the chat template that belong to it.

  Nothing is added on encoding: a template writes the beginning-of-text token itself where it wants one, so
  that training and inference cannot disagree about it. `pad_id` may equal `eos_id`; whoever masks padding
  goes by lengths, never by ids.
  """

  backend: tokenizers.Tokenizer
  eos_id: int
  pad_id: int
  bos_id: int | None = None
  chat_template: str | None = None

  def encode(self, text: str) -> Encoding:
    encoding = self.backend.encode(text, add_special_tokens=False)
    return Encoding(encoding.ids, encoding.offsets)

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    return self.backend.decode(list(ids), skip_special_tokens=skip_special)

  def token(self, token_id: int) -> str:
    """The token's own spelling, e.g. '<|im_end|>'."""
    spelling = self.backend.id_to_token(token_id)
    if spelling is None:
      raise ValueError(f'token id {token_id} is outside the vocabulary of {self.backend.get_vocab_size()}')
    return spelling
