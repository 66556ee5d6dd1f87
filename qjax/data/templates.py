"""Rows to messages, messages to token ids, and which of those ids are trained on.

What is trained on is decided by character spans of the rendered text, never by searching it for the reply:
an answer begins where the rendering of everything before it, with the generation prompt, ends, and it ends
with the end token of its own turn. So pad == eos, answers that quote the prompt, and messages that spell a
special token change nothing.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, get_args

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from qjax.data.tokenizer import Tokenizer
from qjax.errors import UserError, nearest

Template = Literal['chat', 'plain']
TEMPLATES: tuple[str, ...] = get_args(Template)

ROLES = ('system', 'user', 'assistant', 'tool')
_SHAREGPT_ROLES = {'human': 'user', 'gpt': 'assistant'}

ACCEPTED = (
  'accepted are {"instruction", "output"} with an optional "input", '
  '{"messages": [{"role", "content"}, …]}, {"conversations": [{"from", "value"}, …]} '
  'and {"prompt", "completion"}'
)


class Message(TypedDict):
  role: str
  content: str


Messages = list[Message]


class Tokenized(NamedTuple):
  """One document. `trained[i]`: token i is a target of the loss (an answer's token or its end token)."""

  ids: np.ndarray  # int32 [n]
  trained: np.ndarray  # bool [n]


# Rows to messages.


def parse_example(row: Any, where: str) -> Messages:
  """The row's conversation: at least one question, ending with a non-empty answer.

  `where` ('file:line') begins every error. Keys that belong to no shape are ignored.
  """
  if not isinstance(row, dict):
    raise UserError(f'{where}: a row must be a JSON object, not {_kind(row)}; {ACCEPTED}')
  if 'messages' in row:
    messages = _turns(row['messages'], 'role', 'content', f'{where}: "messages"')
  elif 'conversations' in row:
    messages = _turns(row['conversations'], 'from', 'value', f'{where}: "conversations"')
  elif 'instruction' in row and 'output' in row:
    question = _text(row['instruction'], f'{where}: "instruction"')
    if row.get('input') not in (None, ''):
      question += '\n\n' + _text(row['input'], f'{where}: "input"')
    messages = [_message('user', question), _message('assistant', _text(row['output'], f'{where}: "output"'))]
  elif 'prompt' in row and 'completion' in row:
    messages = _side(row, 'prompt', 'user', where) + _side(row, 'completion', 'assistant', where)
  else:
    found = ', '.join(map(json.dumps, row)) if row else 'nothing'
    raise UserError(f'{where}: the row has the keys {found}; {ACCEPTED}')
  _check(messages, where)
  return messages


def question(messages: Messages) -> str:
  """The first thing that the user says."""
  return next(message['content'] for message in messages if message['role'] == 'user')


def _check(messages: Messages, where: str) -> None:
  roles = [message['role'] for message in messages]
  if 'assistant' not in roles:
    raise UserError(f'{where}: no answer to train on: the roles are {roles}, and none is "assistant"')
  if 'user' not in roles[: roles.index('assistant')]:
    raise UserError(f'{where}: the assistant speaks before any user: the roles are {roles}')
  if roles[-1] != 'assistant':
    raise UserError(
      f"{where}: the last message must be the assistant's, not the {roles[-1]}'s: remove what follows the "
      'last answer'
    )
  if not question(messages).strip():
    raise UserError(f'{where}: the question is empty')
  for index, message in enumerate(messages):
    if message['role'] == 'assistant' and not message['content'].strip():
      raise UserError(f'{where}: message {index}, an answer, is empty')


def _turns(turns: Any, role_key: str, text_key: str, where: str) -> Messages:
  if not isinstance(turns, list) or not turns:
    raise UserError(f'{where} must be a list of messages, not {_kind(turns)}')
  messages = []
  for index, turn in enumerate(turns):
    here = f'{where}[{index}]'
    if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
      found = list(turn) if isinstance(turn, dict) else _kind(turn)
      raise UserError(f'{here} must be an object with "{role_key}" and "{text_key}", not {found}')
    role = turn[role_key]
    if role_key == 'from' and isinstance(role, str):
      role = _SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
      raise UserError(f'{here}: unknown role {turn[role_key]!r}{nearest(str(role), ROLES)}')
    messages.append(_message(role, _text(turn[text_key], f'{here}: "{text_key}"')))
  return messages


def _side(row: dict[str, Any], key: str, role: str, where: str) -> Messages:
  if isinstance(row[key], list):
    return _turns(row[key], 'role', 'content', f'{where}: "{key}"')
  return [_message(role, _text(row[key], f'{where}: "{key}"', 'a string or a list of messages'))]


def _message(role: str, content: str) -> Message:
  return {'role': role, 'content': content}


def _text(value: Any, where: str, wanted: str = 'a string') -> str:
  if not isinstance(value, str):
    raise UserError(f'{where} must be {wanted}, not {_kind(value)}')
  try:
    value.encode()
  except UnicodeEncodeError as e:
    raise UserError(f'{where} is not valid text: half a surrogate pair at character {e.start}') from None
  return value


def _kind(value: Any) -> str:
  names = {dict: 'an object', list: 'a list', str: 'a string', bool: 'a boolean', type(None): 'null'}
  return 'an empty list' if value == [] else names.get(type(value), 'a number')


# Messages to text.


def render(
  messages: Sequence[Message],
  tokenizer: Tokenizer,
  template: str = 'chat',
  add_generation_prompt: bool = False,
  where: str = 'chat template',
) -> str:
  """The conversation as the model reads it, special tokens spelled out.

  'chat' runs the tokenizer's own chat template in a sandbox. 'plain' is the messages' contents one after
  another, exactly as they stand: a prompt brings its own trailing newline or space. `strftime_now` is left
  undefined, so that what a template renders does not depend on the day.
  """
  if template == 'plain':
    return ''.join(message['content'] for message in messages)
  if template != 'chat':
    raise UserError(f'unknown template {template!r}{nearest(template, TEMPLATES)}')
  if tokenizer.chat_template is None:
    raise UserError("this model's tokenizer has no chat template; use template 'plain'")
  try:
    return _compiled(tokenizer.chat_template).render(
      messages=[dict(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      bos_token='' if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id),
      eos_token=tokenizer.token(tokenizer.eos_id),
      pad_token=tokenizer.token(tokenizer.pad_id),
      tools=None,
      documents=None,
    )
  except Exception as e:  # A template is a stranger's program: whatever it raises is about this text.
    raise UserError(f'{where}: the chat template refuses this conversation: {e}') from e


def prompt_ids(messages: Sequence[Message], tokenizer: Tokenizer, template: str = 'chat') -> list[int]:
  """What the model is given before it answers: the same text that training puts before an answer."""
  return tokenizer.encode(render(messages, tokenizer, template, add_generation_prompt=True)).ids


class _GenerationTag(jinja2.ext.Extension):
  """Lets `{% generation %}` … `{% endgeneration %}`, which some templates put round answers, pass through."""

  tags = {'generation'}  # noqa: RUF012 (Jinja reads it so)

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
  def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

  def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would put other text before the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = tojson
  environment.globals['raise_exception'] = raise_exception
  try:
    return environment.from_string(source)
  except jinja2.TemplateError as e:
    raise UserError(f'the chat template cannot be read: {e}') from e


# Text to ids, and what is trained on.


def tokenize_example(
  messages: Sequence[Message], tokenizer: Tokenizer, template: str = 'chat', where: str = 'example'
) -> Tokenized:
  """The conversation's ids, and which of them are trained on: every answer and the end token of its turn.

  A token that begins before an answer and reaches into it is not trained on: when the model generates, the
  prompt's tokens are given. What the template writes after a turn's end token (ChatML: a newline) is not
  trained on either. `messages` ends with an answer.
  """
  if template == 'plain':
    return _tokenize_plain(messages, tokenizer, where)
  text = render(messages, tokenizer, template, where=where)
  encoded, spans = tokenizer.encode(text)
  ids = np.asarray(encoded, np.int32)
  starts = np.fromiter((start for start, _ in spans), np.int64, len(spans))
  trained = np.zeros(len(ids), np.bool_)
  for turn, message in enumerate(messages):
    if message['role'] != 'assistant':
      continue
    prefix = render(messages[:turn], tokenizer, template, add_generation_prompt=True, where=where)
    through = text
    if turn + 1 < len(messages):
      through = render(messages[: turn + 1], tokenizer, template, where=where)
    if not (through.startswith(prefix) and text.startswith(through)):
      raise UserError(
        f'{where}: the chat template is not prefix-stable: what it writes before message {turn} changes when '
        'the conversation goes on, so the answer cannot be located'
      )
    answer = (starts >= len(prefix)) & (starts < len(through))
    ends = np.flatnonzero(answer & (ids == tokenizer.eos_id))
    if not len(ends) or through[spans[ends[-1]][1]:].strip():
      raise UserError(
        f'{where}: the chat template does not end message {turn} with the end token '
        f'{tokenizer.token(tokenizer.eos_id)!r}, so a model trained on it would not learn to stop'
      )
    answer[ends[-1] + 1 :] = False
    trained |= answer
  return Tokenized(ids, trained)


def _tokenize_plain(messages: Sequence[Message], tokenizer: Tokenizer, where: str) -> Tokenized:
  """Prompt, completion, end token."""
  if sum(message['role'] == 'assistant' for message in messages) != 1:
    raise UserError(
      f"{where}: template 'plain' takes one prompt and one completion, not a conversation; use 'chat'"
    )
  prompt = render(messages[:-1], tokenizer, 'plain')
  ids, spans = tokenizer.encode(prompt + messages[-1]['content'])
  trained = [start >= len(prompt) for start, _ in spans]
  return Tokenized(np.asarray([*ids, tokenizer.eos_id], np.int32), np.asarray([*trained, True], np.bool_))
