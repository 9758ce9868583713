"""Commands that another one runs, each in a process of its own, as ``fit --seeds 1 2 3`` does."""

from __future__ import annotations

import argparse
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
from hts_torchrl.errors import ConfigurationError, require
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

    A command has a process group of its own, to which a terminal sends no Ctrl-C: each signal is
    passed on once, whoever sent it. Ctrl-Z stops both, until this process is continued. If this
    process is killed, the command is sent SIGTERM. The command reads no keyboard, as the terminal
    would stop it for that: its input is empty.
    """

    def __init__(self) -> None:
        self.status = 0
        """Exit status that a signal asks for: 130 or 143, or 0 if there was none."""
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Begin to note signals."""
        note, stop = self._note, self._stop
        answers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGTSTP: stop}
        # A shell lets its background commands ignore Ctrl-C; it stays so, for the command too.
        heeded = [number for number in answers if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, answers[number]) for number in heeded}
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
                    [*_command(), *arguments],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=keeps_open,
                    env={**os.environ, _PARENT: str(os.getpid())}, process_group=0,
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
        self._send(number)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._send(number)
        answer = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # which returns when this process is continued
        signal.signal(number, answer)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        """Send the running command a signal."""
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


def names_seeds(arguments: Sequence[str]) -> bool:
    """Return whether arguments are those of ``fit`` with ``--seeds``."""
    flags = {argument.partition("=")[0] for argument in arguments[1:]}
    return list(arguments[:1]) == ["fit"] and "--seeds" in flags


def train_seeds(arguments: Sequence[str]) -> None:
    """Train each seed by the command without ``--seeds`` and with ``--seed_everything``.

    So seeds cannot influence one another, and each has the bits and the folder of that command.
    Ctrl-C and SIGTERM end the running seed as they end any ``fit``, and then the loop.

    Raises:
        ConfigurationError: if they name no seeds, one twice, or what belongs to one run alone.
        SystemExit: with the status of the first seed that failed or was stopped.
    """
    seeds, others = _seeds_and_others(arguments)
    with FitCommands() as commands:
        for number, seed in enumerate(seeds):
            print(f"seed {seed}, {number + 1} of {len(seeds)}", flush=True)  # noqa: T201
            failed = commands.run([*others, f"--seed_everything={seed}"])
            done = seeds[: number + (failed == 0)]
            status, left = failed or commands.status, seeds[len(done) :]
            if status and left:
                sys.stderr.write(
                    f"hts-torchrl: stopped at seed {seed} with status {status}; done: "
                    f"{_words(done) or 'none'}; the others: --seeds {_words(left)}\n"
                )
                raise SystemExit(status)


def _words(seeds: list[int]) -> str:
    return " ".join(map(str, seeds))


def _seeds_and_others(arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the seeds and all other arguments, in their order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seeds", nargs="+", type=int, action="extend")
    try:
        given, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"--seeds: {error.message}") from error
    for seed in given.seeds:
        require(0 <= seed < 2**32, f"--seeds {seed}", f"0 to {2**32 - 1}")
    if len(set(given.seeds)) < len(given.seeds):
        raise ConfigurationError(f"--seeds: {given.seeds} names a seed twice")
    for flag in ("--seed_everything", "--ckpt_path"):
        if any(other.partition("=")[0] == flag for other in others):
            raise ConfigurationError(f"--seeds trains several runs, and {flag} belongs to one")
    return given.seeds, others
