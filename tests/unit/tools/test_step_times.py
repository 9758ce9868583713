"""Steps are measured with actions that the environment accepts, on a busy machine."""

import errno
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, synchronize
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hts_torchrl import ConfigurationError
from hts_torchrl.envs.action_maker import action_maker
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.pettingzoo import PettingZooEnvs
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.tools.step_times import _random_action, busy_cores, measured_step_times
from tests.fakes import MaskedEnvs, NestedActionEnv, ParentalEnvs
from tests.protocol.test_parent import wait_until_gone


@dataclass(frozen=True)
class Witnessed:
    """Leaves a file of its process where it makes an environment."""

    folder: str

    def __call__(self, index):  # noqa: ARG002
        (Path(self.folder) / str(os.getpid())).touch()
        return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 5]),
        spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
        spaces.Box(np.float32([[0.5, -np.inf]]), np.float32([[0.75, 0.0]])),
    ],
    ids=["discrete", "multi-discrete", "continuous", "bounded"],
)
def test_random_actions_are_actions(space):
    spec = env_spec(spaces.Box(0, 1, (1,)), space).action
    random = np.random.default_rng(0)
    actions = [_random_action(spec, random)[0] for _ in range(50)]
    assert all(space.contains(action) for action in actions)
    assert len({action.tobytes() for action in actions}) > 2


def test_a_random_action_of_choices_and_numbers_is_one():
    spec = env_spec(spaces.Box(0, 1, (1,)), NestedActionEnv.action_space).action
    to_env = action_maker(NestedActionEnv.action_space)
    env, random = NestedActionEnv(0), np.random.default_rng(0)
    for _ in range(50):
        env.step(to_env(_random_action(spec, random)[0]))  # raises for what is none


@pytest.mark.parametrize("sizes", [(4,), (3, 5)])
def test_no_step_takes_an_action_that_its_mask_forbids(sizes):
    group = make_group(MaskedEnvs(sizes), [0])
    assert len(list(measured_step_times(group, 0.05))) > 6  # raises for what is forbidden


def test_a_step_of_a_game_is_shared_by_its_agents(monkeypatch):
    clock = iter(np.arange(0.0, 100.0, 0.5))
    monkeypatch.setattr("hts_torchrl.tools.step_times.time.perf_counter", lambda: next(clock))
    group = make_group(PettingZooEnvs("tests.fakes:Duel", {"agents": 5}), [0])
    assert set(measured_step_times(group, 20.0)) == {0.1}  # 0.5 s for five of them


@pytest.mark.processes
def test_the_other_cores_are_busy_before_anything_is_measured(tmp_path):
    with busy_cores(Witnessed(str(tmp_path)), 2):
        assert len(list(tmp_path.iterdir())) == 2
    assert multiprocessing.active_children() == []


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fork", "program"])
def test_what_environments_start_meanwhile_ends_too(tmp_path, kind):
    envs = ParentalEnvs(str(tmp_path), kind)
    with busy_cores(envs, 1):
        children = envs.noted("children")
    assert len(children) == 1
    assert wait_until_gone(children) == []


BUSY = """
import multiprocessing, os, signal
from hts_torchrl import GymEnvs
from hts_torchrl.tools.step_times import busy_cores

with busy_cores(GymEnvs("CartPole-v1"), 1):
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_nobody_steps_on_where_the_measuring_process_is_killed():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as killed:
        stepping = int(killed.stdout.readline())
    assert wait_until_gone([stepping]) == []


@pytest.mark.processes
def test_a_machine_without_room_for_semaphores_can_be_measured(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(synchronize.SemLock, "__init__", refuse)
    with busy_cores(Witnessed(str(tmp_path)), 1):
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.processes
def test_a_limit_of_processes_is_told_and_leaves_none(tmp_path, monkeypatch):
    launch, launched = popen_spawn_posix.Popen._launch, []

    def launch_one(*arguments):
        if launched:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        launched.append(arguments)
        launch(*arguments)

    monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", launch_one)
    with (
        pytest.raises(ConfigurationError, match=r"^the limit on processes .* is reached"),
        busy_cores(Witnessed(str(tmp_path)), 2),
    ):
        pass
    assert len(launched) == 1
    assert multiprocessing.active_children() == []
