import signal
import subprocess
import sys
from functools import partial

import pytest

REMOVED = "import os; os.rmdir(os.getcwd()); import hts_torchrl.cli.main"


def test_a_working_folder_that_was_removed_ends_the_command_before_torch_is_loaded(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", REMOVED],
        cwd=folder,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    told = "hts-torchrl: error: the working folder was removed: change to another\n"
    assert (ended.returncode, ended.stderr) == (2, told)


@pytest.mark.parametrize(
    ("loaded", "status"),
    [
        ("raise KeyboardInterrupt\n", 130),
        # A status and no signal: a container's first process has no default action for SIGTERM.
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n", 143),
    ],
    ids=["ctrl_c", "sigterm"],
)
def test_signals_while_modules_are_loaded_end_the_command_without_a_traceback(
    loaded, status, tmp_path
):
    (tmp_path / "gymnasium.py").write_text(loaded)
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "doctor"],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (status, "")


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "SLURM_PROCID"])
def test_a_variable_of_a_launcher_that_is_no_number_is_refused(name):
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "fit"],
        env={"PYTHONPATH": ":".join(sys.path), name: "two"},
        capture_output=True,
        text=True,
    )
    told = f"hts-torchrl: error: {name}=two; a whole number is needed\n"
    assert (ended.returncode, ended.stderr) == (2, told)


FAILING_CHILD = """
import subprocess, sys
from hts_torchrl.cli import main
fails = [sys.executable, "-S", "-c", "raise SystemExit(7)"]
main.main = lambda: sys.exit(subprocess.run(fails).returncode)
main.program()
"""


def test_a_command_that_another_one_runs_keeps_its_status_where_children_are_ignored():
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_CHILD],
        env={"PYTHONPATH": ":".join(sys.path)},
        preexec_fn=partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN),
    )
    assert ended.returncode == 7
