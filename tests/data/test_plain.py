"""Plain text: every token a target once, documents apart, what is no text refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from qjax.data import plain
from qjax.data.tokenizer import Encoding, Tokenizer
from qjax.errors import UserError


class Letters:
  """A tokenizer whose tokens are code points."""

  def encode(self, text: str) -> Encoding:
    return Encoding([ord(c) for c in text], [(i, i + 1) for i in range(len(text))])


TOKENIZER: Tokenizer = Letters()  # type: ignore[assignment]


def test_every_token_but_the_first_is_a_target_once() -> None:
  texts = [('a', 'abcdefghij'), ('b', 'xy'), ('c', 'q')]
  rows = plain.rows(texts, TOKENIZER, 4)
  found = {name: '' for name, _ in texts}
  for tokens, targets, weights, segments, document in zip(
    rows.tokens, rows.targets, rows.weights, rows.segments, rows.documents, strict=True
  ):
    length = int(weights.sum())
    np.testing.assert_array_equal(weights > 0, np.arange(4) < length)
    np.testing.assert_array_equal(segments, weights)
    assert ''.join(map(chr, tokens[1:length])) == ''.join(map(chr, targets[: length - 1]))
    found[rows.names[document]] += ''.join(map(chr, targets[:length]))
  assert found == {'a': 'bcdefghij', 'b': 'y', 'c': ''}
  assert rows.num_tokens == 10 and rows.tokens.dtype == np.int32 and rows.weights.dtype == np.float32


def test_batches_hold_every_row_and_end_in_padding() -> None:
  rows = plain.rows([('a', 'abcdefghij')], TOKENIZER, 2)
  batches = list(rows.batches(4))
  assert [batch['tokens'].shape for batch in batches] == [(4, 2), (4, 2)]
  np.testing.assert_array_equal(np.concatenate([b['tokens'] for b in batches])[:5], rows.tokens)
  assert not batches[-1]['segments'][1:].any() and not batches[-1]['weights'][1:].any()


def test_fewer_tokens_come_from_everywhere() -> None:
  rows = plain.rows([('a', 'a' * 41), ('b', 'b' * 41)], TOKENIZER, 4, max_tokens=16)
  assert len(rows) == 4 and rows.num_tokens == 16
  assert set(rows.documents.tolist()) == {0, 1}


def test_the_embedded_text_is_divided_between_calibration_and_judgement() -> None:
  early, late = (plain.read(plain.STATE_OF_THE_UNION, part) for part in ('calibration', 'held_out'))
  assert [name[:4] for name, _ in early] == [str(year) for year in range(2010, 2014)]
  assert [name[:4] for name, _ in late] == [str(year) for year in range(2014, 2022)]
  assert all(len(text) > 20_000 for _, text in early + late)


def test_a_file_is_taken_whole(tmp_path: Path) -> None:
  (tmp_path / 'a.txt').write_text('some text')
  assert plain.read(str(tmp_path / 'a.txt'), 'held_out') == [('a.txt', 'some text')]
  lines = (json.dumps({'text': 'one', 'id': 'x'}), '', json.dumps({'text': 'two'}))
  (tmp_path / 'b.jsonl').write_text('\n'.join(lines))
  assert plain.read(str(tmp_path / 'b.jsonl'), 'held_out') == [('x', 'one'), ('line 3', 'two')]


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.txt', b'  \n', 'is empty'),
    ('a.txt', b'\xff\xfe\xfa', 'not UTF-8'),
    ('a.jsonl', b'{"text": 5}', 'line 1: "text" must be text'),
    ('a.jsonl', b'{"txt": "a"}', 'line 1: expected'),
    ('a.jsonl', b'\n', 'holds no document'),
  ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=message):
    plain.read(str(tmp_path / name), 'held_out')


def test_a_missing_file_and_too_little_text_are_refused(tmp_path: Path) -> None:
  with pytest.raises(UserError, match='there is no text at'):
    plain.read(str(tmp_path / 'none.txt'), 'held_out')
  with pytest.raises(UserError, match='at least two tokens'):
    plain.rows([('a', 'x')], TOKENIZER, 4)


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
  (tmp_path / 'p.txt').write_text('\n'.join(f'p{i}' for i in range(9)) + '\n\n')
  assert plain.prompts(str(tmp_path / 'p.txt'), 3) == ['p0', 'p4', 'p8']
  assert len(plain.prompts(plain.CONSTRUCTION_FAQ, 5)) == 5
  (tmp_path / 'empty.txt').write_text('\n')
  with pytest.raises(UserError, match='holds no prompt'):
    plain.prompts(str(tmp_path / 'empty.txt'), 3)
  with pytest.raises(UserError, match='there are no prompts at'):
    plain.prompts(str(tmp_path / 'none.txt'), 3)
