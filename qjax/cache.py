"""Where files that can be made again are kept between runs."""

import os
import pathlib


def cache_dir() -> pathlib.Path:
  """`$QJAX_CACHE`, else `$XDG_CACHE_HOME/qjax`, else `~/.cache/qjax`. The directory may not exist yet."""
  if own := os.environ.get('QJAX_CACHE'):
    return pathlib.Path(own).expanduser().absolute()
  if shared := os.environ.get('XDG_CACHE_HOME'):
    return pathlib.Path(shared).expanduser().absolute() / 'qjax'
  return pathlib.Path.home() / '.cache' / 'qjax'
