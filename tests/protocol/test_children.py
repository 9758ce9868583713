"""Environments that start processes of their own: these end with their worker."""

import os
import signal

import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from hts_torchrl import GymEnvs, HTSCollector, WorkerError
from hts_torchrl.models import make_actor_critic
from tests.fakes import ParentalEnvs
from tests.protocol.test_parent import start, wait_until_gone, worker_pids
from tests.runs import digest, play

pytestmark = pytest.mark.processes

ENVS, STEPS = 2, 4


def policy():
    return make_actor_critic("mlp", GymEnvs("CartPole-v1").group([0]).spec)


def collect(create, acts=None, **settings) -> HTSCollector:
    frames = ENVS * STEPS
    return HTSCollector(
        create, acts or policy(), num_envs=ENVS, frames_per_batch=frames,
        total_frames=4 * frames, **settings,
    )  # fmt: skip


def kill_executor(collector: HTSCollector) -> None:
    os.kill(collector._runner.pool._processes[1].pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["fork", "program"])
def test_an_environment_that_closes_its_child_can_do_so(tmp_path, kind):
    """The child can be terminated, though its worker leaves that to the parent."""
    envs = ParentalEnvs(str(tmp_path), kind, tidy=True)
    play(collect(envs))
    assert sorted(envs.noted("closed")) == sorted(envs.noted("children"))
    assert len(envs.noted("closed")) == ENVS


def test_what_an_environment_does_not_close_ends_with_its_worker(tmp_path):
    envs = ParentalEnvs(str(tmp_path))
    play(collect(envs))
    assert len(envs.noted("children")) == ENVS
    assert wait_until_gone(envs.noted("children")) == []


def test_the_traceback_of_an_environment_whose_child_died_arrives_and_nothing_stays(tmp_path):
    envs = ParentalEnvs(str(tmp_path), breaks_at=STEPS)
    with pytest.raises(WorkerError) as raised:
        play(collect(envs))
    assert raised.value.place.step == 0
    assert raised.value.place.round_index == 1
    assert "BrokenPipeError: the emulator is gone\nraised by step() of" in raised.value.cause
    assert wait_until_gone(envs.noted("children")) == []


@pytest.mark.parametrize(
    "method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]
)
def test_a_killed_executor_leaves_no_child_and_is_replaced_with_the_same_bits(tmp_path, method):
    envs, acts = ParentalEnvs(str(tmp_path)), policy()
    collector = collect(envs, acts, recover="replay", start_method=method)
    batches = []
    for batch in collector:
        batches.append(batch.clone())
        if len(batches) == 2:
            kill_executor(collector)
    assert len(envs.noted("children")) == 2 * ENVS
    assert wait_until_gone(envs.noted("children")) == []
    alone = collect(envs, acts, num_actors=0)  # in this process they have no children
    assert digest(batches) == digest(play(alone))


# Killed, if that is asked for, in its second round.
PROGRAM = """
import os, pathlib, signal, sys, time
import torch
from hts_torchrl import HTSCollector
from tests.fakes import ParentalEnvs

envs = ParentalEnvs(str(pathlib.Path(sys.argv[1]).parent), {envs})
collector = HTSCollector(envs, torch.nn.Linear(4, 2), num_envs=2, frames_per_batch=8, {pool})
for number, batch in enumerate(collector):
    if number == 1:
        workers = [process.pid for process in getattr(collector._runner.pool, "_processes", [])]
        print(*envs.noted("children"), *workers, flush=True)
        {then}
"""


def run(folder, then: str, envs: str, pool: str) -> tuple[int, str, list[int]]:
    """Let a program end; returns its status, what it says, and which processes are left."""
    process = start(folder, PROGRAM.format(then=then, envs=envs, pool=pool))
    pids = worker_pids(process)
    assert len(pids) == (3 if "num_actors=0" in pool else 5)
    if then == "pass":
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    return process.returncode, errors, wait_until_gone(pids)


@pytest.mark.parametrize(
    ("victims", "method"),
    [
        ("(os.getpid(),)", "forkserver"),
        pytest.param("(workers[1], os.getpid())", "spawn", marks=pytest.mark.thorough),
    ],
)
def test_no_child_of_an_environment_outlives_a_killed_parent(tmp_path, victims, method):
    """Nor where an executor was killed before, and nobody has noticed."""
    then = f"for pid in {victims}: os.kill(pid, signal.SIGKILL)"
    status, errors, left = run(tmp_path, then, "'program'", f"start_method={method!r}")
    assert (status, errors, left) == (-signal.SIGKILL, "", [])


@pytest.mark.thorough
def test_ctrl_c_ends_a_program_whose_environments_have_children(tmp_path):
    status, errors, left = run(tmp_path, "pass", "", "")
    assert (status, errors.count("Traceback"), left) == (-signal.SIGINT, 1, [])


def test_a_serial_program_that_ends_without_a_shutdown_closes_its_environments(tmp_path):
    """Multiprocessing would wait for their children for ever."""
    assert run(tmp_path, "break", "tidy=True, asker=0", "num_actors=0") == (0, "", [])


def make_async(_: int) -> AsyncVectorEnv:
    makers = [lambda: gymnasium.make("CartPole-v1")] * ENVS
    return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def test_an_executor_may_have_an_asynchronous_vector_environment():
    acts = policy()
    batches = play(collect(make_async, acts, envs_per_executor=ENVS))
    alone = play(collect(make_async, acts, envs_per_executor=ENVS, num_actors=0))
    assert digest(batches) == digest(alone)
