"""``report`` up to where it would read runs; tests/unit/tools/report has what it writes."""

import subprocess
import sys

import pytest

from tests.command_line import refused


def test_a_folder_that_is_no_run_ends_with_one_line(capsys):
    assert refused(capsys, "report", "there") == ("there: no run of fit is there (no config.yaml)")


@pytest.mark.parametrize("arguments", [[], ["--output=x"], ["a", "--outputs=x"]])
def test_wrong_arguments_end_with_one_line(arguments, capsys):
    refused(capsys, "report", *arguments)


def test_without_its_extra_it_ends_with_the_line_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rliable.library", None)
    message = refused(capsys, "report", "there")
    assert message.startswith("a report needs rliable: pip install 'hts-torchrl[report]' (")


@pytest.mark.thorough  # it imports everything once more
def test_no_other_command_imports_what_it_needs():
    extras = "{'rliable', 'pandas', 'optuna'}"
    ask = f"import sys, hts_torchrl.cli.main; print(sys.modules.keys() & {extras})"
    answer = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    assert answer.stdout == "set()\n"
