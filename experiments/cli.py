"""How every command here starts, refuses and stops."""

import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from qjax.errors import UserError, nearest

NOTES = Path('configs')
# What ml_collections says of a value that does not fit, and what fits.
_KINDS = {
    'invalid literal for int': 'a whole number',
    'could not convert string to float': 'a number',
    'Non-boolean argument': 'true or false',
}


def run(main: Callable[[list[str]], Any]) -> None:
  """`app.run` for a command: what the user can mend is one message and exit status 2, without a traceback."""

  def guarded(argv: list[str]) -> Any:
    logging.set_verbosity(logging.WARNING)  # libraries tell of every file they write at INFO
    if len(argv) > 1:
      return _refuse(f'unexpected argument {argv[1]!r}; flags look like --config={NOTES}/qlora.py')
    try:
      return main(argv)
    except UserError as error:
      return _refuse(str(error))
    except KeyboardInterrupt:
      print('stopped at once; what was saved before is kept', file=sys.stderr)
      return 128 + signal.SIGINT

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except SystemExit:  # --help, after which absl exits with 1.
      sys.exit(0)
    except Exception as error:  # Of a flag, of an override, or anything that a config file raises.
      sys.exit(_refuse(_explain(error, argv)))

  app.run(guarded, flags_parser=parse)


def _refuse(message: str) -> int:
  print(f'error: {message}', file=sys.stderr)
  return 2


def config_of(flag: flags.FlagHolder) -> ConfigDict:
  """The ConfigDict that the lab note named by a flag returns, overrides applied.

  Raises:
    UserError: the flag was not given, there is no such file, or it returns something else.
  """
  if flag.value is None:
    raise UserError(
        f'--{flag.name} is missing; for instance --{flag.name}={NOTES}/qlora.py. --help lists all flags'
    )
  path = Path(config_flags.get_config_filename(flags.FLAGS[flag.name]).partition(':')[0])
  if not path.is_file():
    raise UserError(_no_file(path))
  if not isinstance(flag.value, ConfigDict):
    kind = type(flag.value).__name__
    raise UserError(f'get_config() of {path} returns {kind}; it must return a ConfigDict')
  return flag.value


def lab_note(name: str) -> ConfigDict:
  """The ConfigDict of a lab note ('configs/qlora.py', perhaps ':' and its argument), as it stands there.

  Raises:
    UserError: there is no such file, or it returns something else.
  """
  path, _, argument = name.partition(':')
  if not Path(path).is_file():
    raise UserError(_no_file(Path(path)))
  found = runpy.run_path(path)['get_config'](*([argument] if argument else []))
  if not isinstance(found, ConfigDict):
    raise UserError(f'get_config() of {path} returns {type(found).__name__}; it must return a ConfigDict')
  return found


def _no_file(path: Path) -> str:
  notes = [str(note) for note in NOTES.glob('*.py') if 'def get_config' in note.read_text()]
  return f'there is no config file {path}{nearest(str(path), notes) if notes else ""}'


def _explain(error: Exception, argv: list[str]) -> str:
  """One message for what `flags.FLAGS(argv)` raised."""
  given = re.match(r'flag --(\S+?)=(.*?): (.*)', str(error), re.DOTALL)
  if isinstance(error, flags.IllegalFlagValueError) and given:
    name, value, reason = given.groups()
    if 'Traceback' in reason:  # ml_collections passes on what a config file raises as text
      frames = re.findall(r'File "(.*?)", line (\d+)', reason)
      return _unusable(value.partition(':')[0], reason.strip().splitlines()[-1], frames)
    kind = next((kind for phrase, kind in _KINDS.items() if phrase in reason), None)
    return f'--{name}={value}: {f"it must be {kind}" if kind else reason}'
  if isinstance(error, flags.UnrecognizedFlagError):
    name = error.flagname
    owner, dot, _ = name.partition('.')
    if dot and owner in flags.FLAGS:
      return f'--{name} changes a config, and none was given: --{owner}={NOTES}/qlora.py goes before it'
    return f'there is no flag --{name}{nearest(name, flags.FLAGS)}; --help lists all'
  if isinstance(error, flags.Error):
    return str(error)
  paths = [arg.partition('=')[2].partition(':')[0] for arg in argv if re.match('--?config=', arg)]
  path = Path(paths[0]) if paths else None
  if path is not None and not path.is_file():
    return _no_file(path)
  named = re.search(r"^\W*(\w+)\\*'(?:(?:\\n|\n)Did you mean \"(\w+)\")?", str(error))
  override = named and next((arg for arg in argv if re.match(rf'--?config\.(.*\.)?{named[1]}\b', arg)), None)
  if named and override:
    meant = f'did you mean {named[2]!r}?' if named[2] else f'{path} and configs/common.py show them all'
    return f'{override}: there is no field {named[1]!r}; {meant}'
  if isinstance(error, SyntaxError):
    return _unusable(str(path), f'SyntaxError: {error.msg}', [(error.filename or str(path), error.lineno)])
  frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
  return _unusable(str(path), f'{type(error).__name__}: {error}', frames)


def _unusable(path: str, what: str, frames: list[Any]) -> str:
  """Names the innermost of (file, line) that the user wrote."""
  file, line = next((frame for frame in reversed(frames) if frame[0] == path), frames[-1])
  if 'get_config() takes 0 positional arguments' in what:
    return f'{path} takes no argument behind a colon'
  return f'{path} cannot be used: {what} ({file}, line {line})'
