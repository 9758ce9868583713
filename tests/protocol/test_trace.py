"""The timeline of a round, from real processes."""

import itertools
import json
import time

import pytest

from hts_torchrl import A2C, GymEnvs, HTSCollector, ProtocolError
from hts_torchrl.training.callbacks import RoundTrace
from tests.fakes import CoordinateEnvs
from tests.fits import cartpole, quiet_trainer
from tests.policies import echo_policy

pytestmark = pytest.mark.processes

ENVS, STEPS, ROUNDS = 4, 3, 5


def make(**settings) -> HTSCollector:
    return HTSCollector(
        CoordinateEnvs(),
        echo_policy(),
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=ENVS * STEPS * ROUNDS,
        **settings,
    )


def test_every_step_and_every_pass_of_the_round_is_in_it():
    collector = make(envs_per_executor=2)
    collector.trace_round(2)
    seen = []
    for batch in collector:
        assert batch.numel() == ENVS * STEPS
        seen.append((time.perf_counter(), collector.trace))
    assert [trace is None for _, trace in seen] == [True, True, False, False, False]
    trace = seen[2][1]
    assert list(trace) == ["executor 0", "executor 1", "actor 0", "learner"]
    assert [len(trace[name]) for name in ("executor 0", "executor 1")] == [STEPS + 1] * 2
    assert STEPS <= len(trace["actor 0"]) <= ENVS * STEPS
    assert trace == seen[4][1]
    for spans in trace.values():
        times = list(itertools.chain.from_iterable(spans))
        assert times == sorted(times)
        assert seen[0][0] < times[-1] < seen[2][0]


def test_at_a_barrier_one_pass_a_step_answers_all_environments():
    collector = make(step_barrier=True)
    collector.trace_round(2)
    batches = iter(collector)
    for _ in range(3):
        next(batches)
    collector.shutdown()
    assert len(collector.trace["actor 0"]) == STEPS


def test_a_round_that_has_started_cannot_be_traced():
    collector = make()
    batches = iter(collector)
    next(batches)
    with pytest.raises(ProtocolError, match="round 1 cannot be traced: it has started"):
        collector.trace_round(1)
    collector.trace_round(2)
    collector.shutdown()


def test_the_skew_grows_by_the_time_between_the_first_and_the_last():
    collector = make(envs_per_executor=2, first_env=10)
    batches = iter(collector)
    for _ in range(2):
        before = collector.stats().get("rendezvous_skew_s", 0.0)
        next(batches)
    status = collector._runner.shared.status
    finished_s = status.finished_s
    assert (finished_s[:2] > 0).all()
    assert collector.stats()["rendezvous_skew_s"] > before
    finished_s[:2] = 50.0, 47.5
    collector._times.skew_s = 0.0
    collector._times.meet(1, status)
    stats = collector.stats()
    assert (stats["rendezvous_skew_s"], stats["slowest_env"]) == (2.5, 10)
    collector.shutdown()


def test_the_file_shows_every_worker_at_work(tmp_path):
    data = cartpole(5, env=GymEnvs("CartPole-v1"), num_actors=1, envs_per_executor=2)
    path = tmp_path / "folder" / "trace.json"
    trace = RoundTrace(3, path)
    quiet_trainer(callbacks=[trace], accumulate_grad_batches=2).fit(A2C(), data)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    workers = ["executor 0", "executor 1", "actor 0"]
    assert list(rows.values()) == [*workers, "learner", "parts of it"]
    bars = [event for event in events if event["ph"] == "X"]
    count = {name: sum(rows[bar["tid"]] == name for bar in bars) for name in rows.values()}
    assert count["executor 0"] == count["executor 1"] == 9
    assert count["actor 0"] >= 8
    assert (count["learner"], count["parts of it"]) == (1, 2)
    assert min(bar["ts"] for bar in bars) == 0
    assert all(bar["dur"] > 0 for bar in bars)
    (whole,) = (bar for bar in bars if rows[bar["tid"]] == "learner")
    parts = [bar for bar in bars if rows[bar["tid"]] == "parts of it"]
    assert all(whole["ts"] <= part["ts"] for part in parts)
    assert all(part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] for part in parts)


def test_a_run_that_is_resumed_behind_the_round_goes_on_without_its_trace(tmp_path):
    state = {"frames": 4 * 32, "policy_version": 4, "round": 4}
    data = cartpole(6)
    data.load_state_dict(state)
    trace = RoundTrace(3, tmp_path / "trace.json")
    learner = A2C()
    learner.updates = 4
    quiet_trainer(callbacks=[trace], limit_train_batches=2).fit(learner, data)
    assert not trace.written
    assert list(tmp_path.iterdir()) == []
