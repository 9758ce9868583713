"""``fit --seeds``: which commands run one after another, and how a signal ends them."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from hts_torchrl.cli import fit_commands
from hts_torchrl.cli.fit_commands import FitCommands, names_seeds, train_seeds
from tests.command_line import refused, run

NOTE = """
import sys
with open("arguments", "a") as file:
    print(*sys.argv[1:], file=file)
sys.exit({} if "--seed_everything=2" in sys.argv else 0)
"""
LOOP = """
import sys
from hts_torchrl.cli import fit_commands
fit_commands._COMMAND = [sys.executable, "-c", sys.argv[1]]
fit_commands.train_seeds(["fit", "--seeds", "1", "2"])
"""
TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
TRAINING = """
import signal, sys, time
def leave(number, _):
    print("left", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
print("trains", flush=True)
time.sleep(60)
"""
WATCHED = """
import signal
def tell(number, _):
    print(signal.Signals(number).name, flush=True)
signal.signal(signal.SIGTSTP, tell)
signal.signal(signal.SIGCONT, tell)
"""


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Trains with a command that only notes its arguments; the one of seed 2 ends as told."""

    def train(*arguments, status_of_2=0):
        command = [sys.executable, "-S", "-c", NOTE.format(status_of_2)]
        monkeypatch.setattr(fit_commands, "_COMMAND", command)
        run(*arguments)
        return (tmp_path / "arguments").read_text().splitlines()

    return train


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["fit", "--seeds", "1"], True),
        (["fit", "--name=x", "--seeds=1"], True),
        (["fit", "--seed_everything=1"], False),
        (["validate", "--seeds", "1"], False),
        ([], False),
    ],
)
def test_seeds_are_of_fit(arguments, given):
    assert names_seeds(arguments) is given


def test_each_seed_is_a_command_with_all_other_arguments_in_their_order(trained, capsys):
    arguments = ["--config", "a.yaml", "-c=b.yaml", "--seeds", "3", "1", "--data.num_envs", "-1"]
    kept = "fit --config a.yaml -c=b.yaml --data.num_envs -1"
    assert trained("fit", *arguments) == [
        f"{kept} --seed_everything=3",
        f"{kept} --seed_everything=1",
    ]
    assert capsys.readouterr().out == "seed 3, 1 of 2\nseed 1, 2 of 2\n"


def test_seeds_may_be_named_one_by_one(trained):
    commands = trained("fit", "--seeds", "3", "--name=x", "--seeds=1")
    assert commands == ["fit --name=x --seed_everything=3", "fit --name=x --seed_everything=1"]


def test_a_seed_that_fails_ends_the_loop_with_its_status(trained, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        trained("fit", "--seeds", "1", "2", "3", status_of_2=7)
    assert left.value.code == 7
    assert len((tmp_path / "arguments").read_text().splitlines()) == 2
    assert capsys.readouterr().err == (
        "hts-torchrl: stopped at seed 2 with status 7; done: 1; the others: --seeds 2 3\n"
    )


@pytest.mark.parametrize("here", [False, True])
def test_a_seed_takes_modules_of_the_working_folder_only_if_fit_would(here, monkeypatch, tmp_path):
    (tmp_path / "copy.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(fit_commands, "_COMMAND", [sys.executable, "-c", "import copy"])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    if here:
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) if here else contextlib.nullcontext() as left:
        run("fit", "--seeds", "1")
    assert (left.value.code if here else None) == (7 if here else None)


def test_a_seed_that_is_killed_ends_the_loop_as_a_shell_does(monkeypatch, capsys):
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(fit_commands, "_COMMAND", [sys.executable, "-S", "-c", kill])
    with pytest.raises(SystemExit) as left:
        train_seeds(["fit", "--seeds", "1", "2"])
    assert left.value.code == 128 + signal.SIGKILL
    assert "done: none" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGINT, os.kill), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C to all", "SIGINT to the parent alone", "SIGTERM to the parent alone"],
)
def test_a_signal_ends_the_seed_and_then_the_loop(number, send):
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, TRAINING],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell starts its background commands, and so these tests, with Ctrl-C ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["seed 1, 1 of 2\n", "trains\n"]
            send(process.pid, number)
            out, errors = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + number
    assert out == "left\n"
    assert "done: none; the others: --seeds 1 2" in errors


@pytest.mark.processes
@pytest.mark.timeout(60)  # with the terminal's input it would wait for ever
def test_a_seed_that_asks_at_the_keyboard_gets_no_answer_instead_of_waiting():
    ask = "try:\n    input()\nexcept EOFError:\n    print('no answer')"
    terminal, of_the_loop = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL + LOOP, ask],
        stdin=of_the_loop, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(timeout=30)
        finally:
            os.close(of_the_loop)
            os.close(terminal)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert out == "seed 1, 1 of 2\nno answer\nseed 2, 2 of 2\nno answer\n"


@pytest.mark.processes
@pytest.mark.timeout(20)  # without the signals it would wait for ever
def test_ctrl_z_stops_the_seed_too_until_the_loop_is_continued():
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, WATCHED + TRAINING],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    ) as process:  # fmt: skip
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["seed 1, 1 of 2\n", "trains\n"]
            os.killpg(process.pid, signal.SIGTSTP)
            assert process.stdout.readline() == "SIGTSTP\n"
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == "SIGCONT\n"
            process.terminate()
            out, _ = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + signal.SIGTERM
    assert out == "left\n"


def test_help_of_fit_lists_the_flag(capsys):
    with pytest.raises(SystemExit) as left:
        run("fit", "--help")
    assert left.value.code == 0
    assert "  --seeds SEED ...  " in capsys.readouterr().out


def test_a_config_file_does_not_have_it(capsys, tmp_path):
    (tmp_path / "seeds.yaml").write_text("seeds: [1, 2]\n")
    message = refused(capsys, "fit", f"--config={tmp_path / 'seeds.yaml'}")
    assert "seeds=[1, 2] in a config file; --seeds belongs on the command line" in message


def test_handlers_of_signals_are_put_back(trained):
    before = signal.getsignal(signal.SIGTERM)
    trained("fit", "--seeds", "1")
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_stays_ignored_where_a_shell_has_started_the_loop_in_the_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with FitCommands() as commands:
            signal.raise_signal(signal.SIGINT)
            status = commands.status
        assert (status, signal.getsignal(signal.SIGINT)) == (0, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds"], "--seeds: expected at least one argument"),
        (["--seeds", "a"], "--seeds: invalid int value: 'a'"),
        (["--seeds", "1", "1"], "--seeds: [1, 1] names a seed twice"),
        (["--seeds", "1", "-2"], "--seeds -2; 0 to 4294967295 is needed"),
        (["--seeds=1", f"--seeds={2**32}"], f"--seeds {2**32}; 0 to 4294967295 is needed"),
        (
            ["--seeds", "1", "--ckpt_path=x"],
            "--seeds trains several runs, and --ckpt_path belongs to one",
        ),
        (
            ["--seed_everything", "4", "--seeds=1"],
            "--seeds trains several runs, and --seed_everything belongs to one",
        ),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments, message, capsys):
    assert refused(capsys, "fit", *arguments) == message
