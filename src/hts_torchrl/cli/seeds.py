"""``hts-torchrl fit --seeds 1 2 3``: one training after another, each in a process of its own."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from hts_torchrl.errors import ConfigurationError

_COMMAND = [sys.executable, "-m", "hts_torchrl.cli"]


def names_seeds(arguments: Sequence[str]) -> bool:
    """Return whether arguments are those of ``fit`` with ``--seeds``."""
    flags = {argument.partition("=")[0] for argument in arguments[1:]}
    return list(arguments[:1]) == ["fit"] and "--seeds" in flags


def train_seeds(arguments: Sequence[str]) -> None:
    """Train each seed by the command without ``--seeds`` and with ``--seed_everything``.

    So seeds cannot influence one another, and each has the bits and the folder of that command.
    Ctrl-C and SIGTERM end the running seed as they end any ``fit``, and then the loop.

    Args:
        arguments: ``fit`` and all that follows it.

    Raises:
        ConfigurationError: if they name no seeds, one twice, or what belongs to one run alone.
        SystemExit: with the status of the first seed that failed or was stopped.
    """
    seeds, others = _parsed(arguments)
    with _Commands() as commands:
        for number, seed in enumerate(seeds):
            _tell(f"seed {seed}, {number + 1} of {len(seeds)}")
            failed = commands.run([*others, f"--seed_everything={seed}"])
            done = seeds[: number + (failed == 0)]
            status, left = failed or commands.status, seeds[len(done) :]
            if status and left:
                sys.stderr.write(
                    f"hts-torchrl: stopped at seed {seed} with status {status}; done: "
                    f"{_words(done) or 'none'}; the others: --seeds {_words(left)}\n"
                )
                raise SystemExit(status)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _words(seeds: list[int]) -> str:
    return " ".join(map(str, seeds))


def _parsed(arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the seeds and all other arguments, in their order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seeds", nargs="+", type=int)
    try:
        given, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"--seeds: {error.message}") from error
    if len(set(given.seeds)) < len(given.seeds):
        raise ConfigurationError(f"--seeds: {given.seeds} names a seed twice")
    for flag in ("--seed_everything", "--ckpt_path"):
        if any(other.partition("=")[0] == flag for other in others):
            raise ConfigurationError(f"--seeds trains several runs, and {flag} belongs to one")
    return given.seeds, others


class _Commands:
    """Runs one command after another; a signal ends the running one, and is remembered.

    A terminal sends Ctrl-C to the command as well. SIGTERM is passed on, because a scheduler may
    send it to this process alone.
    """

    def __init__(self) -> None:
        self.status = 0  # that a signal asks for
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, arguments: Sequence[str]) -> int:
        """Run ``hts-torchrl`` to its end, and return its exit status."""
        self._process = subprocess.Popen([*_COMMAND, *arguments])
        if self.status == 128 + signal.SIGTERM:  # it came before there was whom to pass it on to
            self._process.terminate()
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def _note(self, number: int, _: FrameType | None) -> None:
        self.status = 128 + number
        if number == signal.SIGTERM and self._process is not None:
            self._process.terminate()
