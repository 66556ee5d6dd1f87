"""A byte-level tokenizer small enough to read: three special tokens, the bytes, and two merges."""

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qjax.data.tokenizer import Tokenizer

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system
Be kind<|im_end|>
' }}{% endif %}
{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


@pytest.fixture
def tokenizer() -> Tokenizer:
  """End of text is 2, and so is padding. 'b a' has a token ' a', '\\n\\n' is one token."""
  pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), 'Ġa', 'ĊĊ']
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[('Ġ', 'a'), ('Ċ', 'Ċ')]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
  return Tokenizer(backend, eos_id=2, pad_id=2, bos_id=1, chat_template=CHATML)


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[..., str]:
  """Writes rows (objects, or lines as they stand) to a .jsonl file and returns its path."""

  def to_file(rows: Iterable[Any], name: str = 'rows.jsonl') -> str:
    path = tmp_path / name
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(''.join(line + '\n' for line in lines), encoding='utf-8')
    return str(path)

  return to_file
