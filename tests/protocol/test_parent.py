"""What becomes of the workers when the user's program ends, as whole programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

# No `if __name__ == "__main__"`: workers do not import the program, so it needs none.
PROGRAM = """
import pathlib, sys, time
import gymnasium, numpy as np, torch
from hts_torchrl import HTSCollector

with open(sys.argv[1], "a") as file:
    file.write("imported\\n")

class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        time.sleep(0.001)
        return np.zeros(3, np.float32), 1.0, False, False, {}

collector = HTSCollector(
    lambda index: Own(), torch.nn.Linear(3, 4), num_envs=2, frames_per_batch=8
)
for number, batch in enumerate(collector):
    if number == 1:
        print(*(process.pid for process in collector._runner.pool._processes), flush=True)
"""


def start(folder: Path, text: str = PROGRAM) -> subprocess.Popen:
    program = folder / "program.py"
    program.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(program), str(folder / "imports")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts its background commands, and so these tests, with Ctrl-C ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def worker_pids(process: subprocess.Popen) -> list[int]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return [int(pid) for pid in line.split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], most_s: float = 30.0) -> list[int]:
    deadline = time.monotonic() + most_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@dataclass
class Killed:
    """What was seen of a program that was killed in its second round."""

    left: list[int]
    imports: str
    errors: str


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    process = start(folder)
    pids = worker_pids(process)
    process.kill()
    _, errors = process.communicate()
    return Killed(wait_until_gone(pids), (folder / "imports").read_text(), errors)


def test_workers_leave_when_their_parent_is_killed(killed):
    assert killed.left == []


def test_workers_whose_parent_is_killed_leave_quietly(killed):
    assert killed.errors == ""


def test_workers_do_not_import_the_program_which_so_needs_no_main_guard(killed):
    assert killed.imports.count("imported") == 1


# The actor begins with an endless sleep.
STARTING = """
import time
import gymnasium, torch
from hts_torchrl import HTSCollector

def policy():
    time.sleep(3600)

collector = HTSCollector(
    lambda index: gymnasium.make("CartPole-v1"), torch.nn.Linear(4, 2), num_envs=2,
    frames_per_batch=8,
)
collector._policy_maker = lambda: policy
collector.start()
print(*(process.pid for process in collector._runner.pool._processes), flush=True)
time.sleep(3600)
"""


@pytest.mark.thorough
def test_workers_that_still_start_end_with_their_parent(tmp_path):
    """The actor has not begun to wait, so it does not look at its lifeline."""
    process = start(tmp_path, STARTING)
    pids = worker_pids(process)
    process.kill()
    process.communicate()
    assert wait_until_gone(pids) == []


def test_ctrl_c_ends_the_program_once_and_its_workers_quietly(tmp_path):
    process = start(tmp_path)
    pids = worker_pids(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert wait_until_gone(pids) == []


# A program with an answer of its own to SIGTERM: ten more rounds.
LASTING = f"""
import signal
told = []
signal.signal(signal.SIGNAL, lambda *_: told.append(number))
{PROGRAM}
    if told and number == told[0] + 10:
        break
collector.shutdown()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_is_left_to_the_program(tmp_path, method, number):
    text = LASTING.replace("frames_per_batch=8", f"frames_per_batch=8, start_method={method!r}")
    text = text.replace("SIGNAL", number.name)
    process = start(tmp_path, text)
    worker_pids(process)
    os.killpg(process.pid, number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


# Prints its workers and then a process that it forks, which outlives it.
FORKING = f"""
import os
{PROGRAM.replace("flush=True", "end=' '")}
        if child := os.fork():
            print(child, flush=True)
        else:
            time.sleep(3600)
"""


@pytest.mark.thorough
def test_workers_leave_when_their_parent_is_killed_also_where_it_has_forked(tmp_path):
    process = start(tmp_path, FORKING)
    *workers, child = worker_pids(process)
    process.kill()
    process.wait()
    left = wait_until_gone(workers)
    assert alive(child)
    os.kill(child, signal.SIGKILL)
    process.communicate()
    assert left == []


# Ends without a shutdown, in a process that multiprocessing started.
IN_A_CHILD = f"""
import multiprocessing
program = {PROGRAM + "    if number == 2: break"!r}
child = multiprocessing.get_context("fork").Process(target=exec, args=(program, globals()))
child.start()
child.join()
"""


@pytest.mark.thorough
def test_workers_do_not_keep_a_child_process_from_ending(tmp_path):
    process = start(tmp_path, IN_A_CHILD)
    pids = worker_pids(process)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert wait_until_gone(pids) == []


# Orphans come to it, as to the first process of a container (PR_SET_CHILD_SUBREAPER). It loses its
# fork server, and so its workers, and what environments have started. It prints which children wait
# to be asked for their status.
INHERITING = """
import ctypes, os, pathlib, signal, sys, time
from multiprocessing import forkserver
import torch
from hts_torchrl import HTSCollector
from tests.fakes import ParentalEnvs

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
collector = HTSCollector(
    ParentalEnvs(str(pathlib.Path(sys.argv[1]).parent), "program"), torch.nn.Linear(4, 2),
    num_envs=2, frames_per_batch=8, recover="replay",
)
for number, batch in enumerate(collector):
    if number == 1:
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)
        while pathlib.Path(f"/proc/{server}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
    if number == 4:
        break
collector.shutdown()

def stat(path):
    try:
        return path.read_text().rsplit(")", 1)
    except OSError:  # it has ended since
        return "", "- 0"

found = map(stat, pathlib.Path("/proc").glob("[0-9]*/stat"))
own = [name for name, rest in found if rest.split()[:2] == ["Z", str(os.getpid())]]
print("left:", *own)
"""


def test_the_first_process_of_a_container_keeps_no_zombies(tmp_path):
    process = start(tmp_path, INHERITING)
    told, errors = process.communicate()
    assert "their fork server was killed" in errors
    assert (process.returncode, told) == (0, "left:\n")
