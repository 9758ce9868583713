"""The worker pool leaves whenever it is told to, at any time, and completely."""

import gc
import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tensordict import TensorDictBase

from hts_torchrl import ProtocolError
from tests.fakes import GatedEnv
from tests.policies import echo_weights
from tests.protocol.small import STEPS, collect
from tests.runs import digest, play

pytestmark = pytest.mark.processes


def workers(collector) -> list[int]:
    return [process.pid for process in collector._runner.pool._processes]


def gone(pids) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


@dataclass
class Interrupted:
    """What was seen of a run that was shut down, twice, in the middle of its second round."""

    pids: list[int]
    batch: TensorDictBase
    before: str
    too_early: list[str]
    too_late: str


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    gate = tmp_path_factory.mktemp("never") / "opened"
    collector = collect(GatedEnv(str(gate), at=STEPS + 1))
    iterator = iter(collector)
    batch = next(iterator)
    pids, before, too_early = workers(collector), digest([batch]), []
    for call in (collector._runner.pool.start_round, collector._runner.pool.wait_round):
        with pytest.raises(ProtocolError) as refused:
            call(2)
        too_early.append(str(refused.value))
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(ProtocolError) as late:
        next(iterator)
    return Interrupted(pids, batch, before, too_early, str(late.value))


def test_shutting_down_in_the_middle_of_a_round_ends_every_process(interrupted):
    assert gone(interrupted.pids)


def test_the_last_batch_is_valid_after_the_workers_are_gone(interrupted):
    gc.collect()
    assert digest([interrupted.batch]) == interrupted.before


def test_going_on_after_shutdown_is_refused(interrupted):
    assert "shut down" in interrupted.too_late


def test_rounds_out_of_order_are_refused(interrupted):
    assert interrupted.too_early == [
        "round 2 starts before 1 was waited for",
        "waiting for round 2, but 1 runs",
    ]


def test_breaking_off_and_going_on_continues_the_run():
    collector, batches = collect(), []
    while len(batches) < 4:
        for batch in collector:
            batches.append(batch.clone())
            collector.update_policy_weights_(echo_weights(len(batches)))
            break
    collector.shutdown()
    assert digest(batches) == digest(play(collect(num_actors=0), echo_weights))


def test_a_collector_that_is_dropped_ends_its_processes():
    collector = collect()
    next(iter(collector))
    pids = workers(collector)
    del collector
    gc.collect()
    assert gone(pids)


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_pool_that_cannot_start_completely_ends_what_has_started(monkeypatch, started):
    start, calls = BaseProcess.start, []

    def refuse(process):
        calls.append(process)
        if len(calls) > started:
            raise OSError("no more processes")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", refuse)
    collector = collect()
    with pytest.raises(OSError, match="no more"):
        next(iter(collector))
    assert not multiprocessing.active_children()
    collector.shutdown()


def test_a_round_that_is_shut_down_by_another_thread_ends_in_that_word(tmp_path):
    """So it does where the answer to a signal shuts the collector down, or a hook."""
    collector = collect(GatedEnv(str(tmp_path / "opened"), at=STEPS + 1))
    iterator = iter(collector)
    next(iterator)
    thread = threading.Timer(0.3, collector.shutdown)
    thread.start()
    with pytest.raises(ProtocolError, match="shut down: make a new one"):
        next(iterator)
    thread.join()


def test_two_threads_shut_down_one_after_the_other(monkeypatch):
    """A descriptor that both close may be another's by then."""
    collector = collect()
    iterator = iter(collector)
    next(iterator)
    pool, noted = collector._runner.pool, []
    shutdown = pool.shutdown

    def slow():
        noted.append("begins")
        time.sleep(0.2)
        shutdown()
        noted.append("ends")

    monkeypatch.setattr(pool, "shutdown", slow)
    threads = [threading.Thread(target=collector.shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert noted == ["begins", "ends"] * 2


def test_a_hook_that_shuts_the_collector_down_ends_the_run_in_that_word():
    collector = collect()
    collector.pre_collect_hook = collector.shutdown
    with pytest.raises(ProtocolError, match="shut down: make a new one"):
        list(collector)
