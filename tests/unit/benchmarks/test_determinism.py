"""The same bits from every pool: nothing that was compared is not all the same."""

import sys

import pytest


@pytest.mark.parametrize(
    "arguments", [("--tasks", "Pendulum", "--algorithms", "PQN"), ("--tasks", "DQN", "--ranks")]
)
def test_no_comparison_is_refused(arguments, load, monkeypatch, capsys):
    program = load("determinism")
    monkeypatch.setattr(program, "quiet", lambda: None)
    monkeypatch.setattr(sys, "argv", ["determinism.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("none of these tasks has one of these algorithms")
