"""What a long command shows while it works: a live bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

LINE_SECONDS = 5.0


def clock(seconds: float) -> str:
  """'0:07', '12:30', '3:05:00'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


class Bar:
  """Counts steps of one task: share done, free text, rate of the last steps and time left.

  Written to standard error; on a pipe or a file one plain line every few seconds, so that logs stay short.
  """

  def __init__(self, name: str, total: int, done: int = 0):
    self.name, self.total, self.done = name, total, done
    self._times: deque[float] = deque([time.monotonic()], maxlen=21)
    self._last_line = 0.0
    console = Console(stderr=True)
    self._live: Progress | None = None
    if console.is_terminal:
      self._live = Progress(
          TextColumn('{task.description}'),
          BarColumn(bar_width=24),
          TaskProgressColumn(),
          TextColumn('{task.fields[text]}'),
          console=console,
      )
      self._task = self._live.add_task(name, total=total, completed=done, text='')

  def __enter__(self) -> Self:
    if self._live:
      self._live.start()
    return self

  def __exit__(
      self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
  ) -> None:
    if self._live:
      self._live.stop()

  @property
  def seconds_a_step(self) -> float:
    """Mean over the last twenty steps; 0 before the first."""
    steps = len(self._times) - 1
    return (self._times[-1] - self._times[0]) / steps if steps else 0.0

  def restart_clock(self) -> None:
    """Forgets the time up to now, after something that is no step (an evaluation)."""
    rate = self.seconds_a_step
    self._times.clear()
    now = time.monotonic()
    self._times.extend([now - rate, now] if rate else [now])

  def advance(self, done: int, text: str = '') -> None:
    """Shows that `done` steps are done."""
    now = time.monotonic()
    self.done = done
    self._times.append(now)
    left = clock(self.seconds_a_step * (self.total - done))
    full_text = f'{done}/{self.total}  {text}  {left} left'
    if self._live:
      self._live.update(self._task, completed=done, text=full_text)
    elif now - self._last_line >= LINE_SECONDS or done == self.total:
      self._last_line = now
      print(f'{self.name} {full_text}', file=sys.stderr, flush=True)


@contextmanager
def stage(text: str) -> Iterator[None]:
  """Says what is being done and how long it took."""
  print(f'{text} …', file=sys.stderr, flush=True)
  start = time.monotonic()
  yield
  seconds = time.monotonic() - start
  if seconds >= 1:
    print(f'  done in {clock(seconds)}', file=sys.stderr, flush=True)
