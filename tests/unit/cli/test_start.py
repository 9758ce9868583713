import subprocess
import sys

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
