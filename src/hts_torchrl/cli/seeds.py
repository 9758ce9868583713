"""``hts-torchrl fit --seeds 1 2 3``: one training after another, each in a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hts_torchrl.cli.fit_commands import FitCommands
from hts_torchrl.errors import ConfigurationError


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


def _parsed(arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the seeds and all other arguments, in their order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seeds", nargs="+", type=int, action="extend")
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
