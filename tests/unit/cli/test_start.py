import subprocess
import sys

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


def test_ctrl_c_while_modules_are_loaded_ends_the_command_without_a_traceback(tmp_path):
    (tmp_path / "gymnasium.py").write_text("raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "doctor"],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_sigterm_while_modules_are_loaded_ends_the_first_process_of_a_container(tmp_path):
    """That process has no default action, so the command must end itself: a status, no signal."""
    sends = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "gymnasium.py").write_text(sends)
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "doctor"],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (143, "")
