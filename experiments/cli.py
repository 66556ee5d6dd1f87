"""How every command here starts, refuses and stops."""

import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from qjax.errors import UserError


def run(main: Callable[[list[str]], Any]) -> None:
  """`app.run` for a command: what the user can mend is one message and exit status 2, without a traceback."""

  def guarded(argv: list[str]) -> Any:
    logging.set_verbosity(logging.WARNING)  # libraries tell of every file they write at INFO
    if len(argv) > 1:
      print(f'error: unexpected argument {argv[1]!r}; flags look like --config=configs/qlora.py', file=sys.stderr)
      return 2
    try:
      return main(argv)
    except UserError as error:
      print(f'error: {error}', file=sys.stderr)
      return 2

  def parse(argv: list[str]) -> list[str]:
    try:
      return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError, UserError, OSError) as error:
      # A misspelt or wrongly typed --config.field, or a config file that is not there.
      print(f'error: {error}', file=sys.stderr)
      sys.exit(2)

  app.run(guarded, flags_parser=parse)


def require(flag: flags.FlagHolder) -> Any:
  """The flag's value, refusing if it was not given."""
  if flag.value is None:
    raise UserError(f'--{flag.name} is missing; for instance --{flag.name}=configs/qlora.py. --help lists all flags')
  return flag.value
