"""The command line in a folder of its own, up to where it would run."""

import pytest

from hts_torchrl.cli.command_line import HTSCommandLine
from tests.command_line import run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(monkeypatch):
    """Calls the command line up to where it would run, and returns what it made."""
    lines = []
    monkeypatch.setattr(HTSCommandLine, "_run_subcommand", lambda line, _: lines.append(line))

    def make(*arguments):
        run(*arguments)
        return lines[-1]

    return make
