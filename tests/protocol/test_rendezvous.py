"""When published weights act, and how long a batch stays what it is."""

import threading
import time
from multiprocessing import forkserver

import pytest
import torch

from tests.fakes import GatedEnv, ModulesEnv
from tests.policies import VERSION_UNIT, echo_weights
from tests.protocol.small import ENVS, STEPS, collect
from tests.runs import digest, play

pytestmark = pytest.mark.processes


def marks(batch) -> list[float]:
    """Versions of the weights that answered, by the mark they leave in the values."""
    return (batch["state_value"] // VERSION_UNIT).unique().tolist()


def test_weights_published_in_the_middle_of_a_round_act_from_the_next_one_on(tmp_path):
    gate = tmp_path / "gate"
    collector = collect(GatedEnv(str(gate), at=STEPS + 1), rounds=3)  # closed in the second round
    iterator = iter(collector)
    next(iterator)
    collector.update_policy_weights_(echo_weights(1))
    gate.touch()
    assert [marks(batch) for batch in iterator] == [[0], [1]]


def test_a_batch_stays_what_it_is_while_the_next_round_is_collected():
    collector = collect(rounds=3, clone=False)
    iterator = iter(collector)
    batch = next(iterator)
    before = digest([batch])
    status = collector._runner.shared.status
    while (status.rounds[:ENVS] < 1).any() or (status.steps[:ENVS] < STEPS).any():
        time.sleep(0.001)
    assert digest([batch]) == before
    collector.shutdown()


def test_a_batch_waits_for_the_slowest_executor(tmp_path):
    """It may leave its last step only some time after the other one has finished."""
    gate, opened = tmp_path / "gate", threading.Event()
    collector = collect(GatedEnv(str(gate), at=STEPS - 1), rounds=1)
    collector.start()
    finished_s = collector._runner.shared.status.finished_s

    def open_late():
        while finished_s[0] == 0:
            time.sleep(0.001)
        time.sleep(0.5)
        opened.set()
        gate.touch()

    threading.Thread(target=open_late, daemon=True).start()
    next(iter(collector))
    waited = opened.is_set()
    collector.shutdown()
    assert waited


@pytest.fixture
def _fork_server_of_a_user(monkeypatch):
    """Start a fork server without what ``conftest.py`` lets it import."""
    server = forkserver._forkserver
    server._stop()
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    yield
    server._stop()


@pytest.mark.usefixtures("_fork_server_of_a_user")
@pytest.mark.thorough
def test_executors_import_no_torch():
    policy = torch.nn.Linear(len(ModulesEnv.modules), 4)
    (batch,) = play(collect(ModulesEnv, policy, rounds=1, envs_per_executor=2))
    imported = batch["observation"].amax((0, 1)).tolist()
    assert dict(zip(ModulesEnv.modules, imported, strict=True)) == dict.fromkeys(
        ModulesEnv.modules, 0.0
    )
