"""The one exception that a command shows to its user without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """Something given from outside cannot work: a config value, a file, a rule. The message says the remedy."""


def nearest(given: str, valid: Iterable[str]) -> str:
  """'; did you mean …?' for a near miss, else '; valid: …'."""
  names = sorted(valid)
  close = difflib.get_close_matches(given, names, n=1)
  return f'; did you mean {close[0]!r}?' if close else f'; valid: {", ".join(names)}'
