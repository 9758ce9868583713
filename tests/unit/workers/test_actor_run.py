from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest

from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.pipes import PoolStopped
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.specs import ArraySpec
from hts_torchrl.workers.actor import Actor
from tests.fakes import CoordinateEnvs


class Doubler(Actor):
    """Answers each environment with twice its index."""

    batch_size = 8

    def __init__(self, shared: SharedBuffers) -> None:
        self._shared = shared

    def answer(self, envs):
        self._shared.actions.put(envs, {"action": 2 * envs})


@pytest.fixture
def shared():
    spec = make_group(CoordinateEnvs(), [0]).spec
    outputs = {"action": ArraySpec((), np.dtype(np.int64))}
    settings = CollectorSettings(num_envs=6, envs_per_executor=2, frames_per_batch=6)
    shared = SharedBuffers(spec, outputs, settings, {})
    yield shared
    shared.close()


@pytest.fixture
def rings(shared, monkeypatch):
    """Each ring (executor, number), with the actions that the executor then sees."""
    lifeline, parent_end = Pipe(duplex=False)
    rings = []

    def ring(executor, answers):
        actions = shared.actions.answers["action"]
        rings.append((executor, answers, actions[2 * executor : 2 * executor + 2].tolist()))
        parent_end.close()

    bells = {
        index: SimpleNamespace(ring=lambda answers, index=index: ring(index, answers))
        for index in shared.doorbells
    }
    shared.ready.put(np.array([5, 1, 4], np.int32))
    with monkeypatch.context() as patch, lifeline:
        patch.setattr(shared, "doorbells", bells)
        with pytest.raises(PoolStopped):
            Doubler(shared).run(lifeline, BusyTimer(shared.status, 3))
    return rings


def test_answers_are_whole_when_their_executor_is_rung(rings):
    assert [actions for _, _, actions in rings] == [[0, 2], [8, 10]]


def test_an_executor_is_rung_once_for_each_of_its_environments(rings):
    assert [(executor, answers) for executor, answers, _ in rings] == [(0, 1), (2, 2)]
