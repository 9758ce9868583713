"""How workers begin: with what their parent has then, and without a trace in it."""

import os
import subprocess
import sys
import threading
import time

import pytest

from hts_torchrl.workers import pool
from tests.fakes import CoordinateEnv
from tests.protocol.small import collect
from tests.runs import play

pytestmark = pytest.mark.processes


class NotedEnv(CoordinateEnv):
    """Its index is what a variable of its process says."""

    def __init__(self, _: int) -> None:
        super().__init__(int(os.environ["HTS_TEST_NOTE"]))


def test_workers_have_the_variables_of_the_time_at_which_they_start(monkeypatch):
    """A fork server has those of its own start, and a notebook sets more of them later."""
    for note in ("3", "5"):
        monkeypatch.setenv("HTS_TEST_NOTE", note)
        (batch, *_) = play(collect(NotedEnv, rounds=2))
        assert batch["observation"][..., 0].unique().tolist() == [float(note)]


def test_threads_that_start_workers_leave_this_process_as_it_was(monkeypatch):
    """The second would take for the program's module what the first has put in its place."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main, start_one = sys.modules["__main__"], pool.start_process
    second_is_in, first_is_done = threading.Event(), threading.Event()

    def start_process(process):
        if threading.current_thread().name == "second":
            second_is_in.set()
            first_is_done.wait(0.3)
        else:
            second_is_in.wait(0.3)
        start_one(process)

    def run():
        play(collect(rounds=2))
        first_is_done.set()

    monkeypatch.setattr(pool, "start_process", start_process)
    threads = [threading.Thread(target=run, name=name) for name in ("first", "second")]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is main
    assert "OMP_NUM_THREADS" not in os.environ


SCRIPT = """
from hts_torchrl import GymEnvs, HTSCollector, env_spec_of, make_actor_critic

envs = GymEnvs("CartPole-v1")
policy = make_actor_critic("mlp", env_spec_of(envs))
collector = HTSCollector(envs, policy, num_envs=2, frames_per_batch=8, total_frames=8)
print([tuple(batch.shape) for batch in collector])
collector.shutdown()
"""


BASELINE = """
from hts_torchrl import GymEnvs, env_spec_of, make_actor_critic
from hts_torchrl.collectors.asynchronous import AsynchronousCollector
from hts_torchrl.config import CollectorSettings

if __name__ == "__main__":
    envs = GymEnvs("CartPole-v1")
    policy = make_actor_critic("mlp", env_spec_of(envs))
    settings = CollectorSettings(num_envs=2, frames_per_batch=8, total_frames=8)
    collector = AsynchronousCollector(
        envs, policy, form="FORM", settings=settings, precision="32-true"
    )
    print([tuple(batch.shape) for batch in collector])
"""


@pytest.mark.parametrize(
    ("script", "module"),
    [
        (SCRIPT, "random"),
        (BASELINE.replace("FORM", "actors"), "selectors"),
        pytest.param(BASELINE.replace("FORM", "server"), "selectors", marks=pytest.mark.thorough),
    ],
    ids=["rounds", "actors", "server"],
)
def test_a_file_of_the_working_folder_is_not_taken_for_a_module_of_pythons(
    tmp_path, script, module
):
    """``python -c``, with which a fork server and spawned processes begin, looks there first."""
    here, scripts = tmp_path / "here", tmp_path / "scripts"
    here.mkdir()
    scripts.mkdir()
    (here / f"{module}.py").write_text("raise RuntimeError('of the working folder')")
    (scripts / "train.py").write_text(script)
    program = subprocess.run(
        [sys.executable, str(scripts / "train.py")],
        cwd=here,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TORCHRL_CONSOLE_STREAM": "stderr",
        },
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stderr
    assert program.stdout == "[(2, 4)]\n"
