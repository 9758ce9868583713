"""Commands of ``hts-torchrl`` that another one runs, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hts_torchrl.compat.processes import end_with
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import process_limit

_COMMAND = [sys.executable, "-m", "hts_torchrl.cli"]
_PARENT = "HTS_TORCHRL_PARENT"
_LOOK_EVERY_S = 0.5


class FitCommands:
    """Runs one command after another; a signal ends the running one, and is remembered.

    Its caller's loop::

        with FitCommands() as commands:
            for arguments in several:
                failed = commands.run(arguments)
                if failed or commands.status:
                    break

    A command has a session of its own, where a terminal sends no Ctrl-C: each signal is passed on
    once, whoever sent it. If this process is killed, the command is sent SIGTERM.
    """

    def __init__(self) -> None:
        self.status = 0
        """Exit status that a signal asks for: 130 or 143, or 0 if there was none."""
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Begin to note signals."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what answered signals before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(
        self,
        arguments: Sequence[str],
        *,
        log: Path | None = None,
        is_enough: Callable[[], bool] | None = None,
        keeps_open: Sequence[int] = (),
    ) -> int:
        """Run ``hts-torchrl`` to its end, and return its exit status; 128 + n after signal n.

        Args:
            arguments: the subcommand and all that follows it.
            log: file for all that it prints; None lets it print where this process does.
            is_enough: asked twice a second; once it says so, the command is sent SIGTERM.
            keeps_open: file descriptors that the command inherits, such as that of a lock.

        Raises:
            ConfigurationError: if the system starts no further process.
        """
        with contextlib.nullcontext() if log is None else log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    [*_command(), *arguments], stdout=output, stderr=output, pass_fds=keeps_open,
                    env={**os.environ, _PARENT: str(os.getpid())}, start_new_session=True,
                )  # fmt: skip
            except BlockingIOError as error:
                raise ConfigurationError(process_limit()) from error
        if self.status:  # a signal came before there was whom to pass it on to
            self._process.send_signal(self.status - 128)
        status = self._awaited(self._process, is_enough)
        return status if status >= 0 else 128 - status

    @staticmethod
    def _awaited(process: subprocess.Popen[bytes], is_enough: Callable[[], bool] | None) -> int:
        while is_enough is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_EVERY_S)
            if is_enough():
                process.terminate()
                break
        return process.wait()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.status = 128 + number
        if self._process is not None:
            self._process.send_signal(number)


def _command() -> list[str]:
    """Return the program, which looks for modules in the working folder only if this one does."""
    python, *words = _COMMAND
    looks_here = not {"", str(Path.cwd())}.isdisjoint(sys.path)
    return [python, *([] if looks_here else ["-P"]), *words]


def end_with_parent() -> None:
    """End with the command that has started this one, if one has; called when it begins."""
    if (parent := os.environ.pop(_PARENT, None)) is not None:
        end_with(int(parent))
