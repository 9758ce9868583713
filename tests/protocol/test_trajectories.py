"""TorchRL's asynchronous collectors as the baselines use them, with real processes.

Nothing here depends on who is first: only on what must hold in every order.
"""

import errno
import multiprocessing
import tempfile
import threading
import time
from collections import defaultdict
from itertools import chain, pairwise
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from hts_torchrl import (
    ConfigurationError,
    HTSCollector,
    Impala,
    RoundTrace,
    TrainingStatistics,
)
from hts_torchrl.collectors.asynchronous import ActingPolicy, AsynchronousCollector
from hts_torchrl.config import CollectorSettings
from tests.fakes import CoordinateEnv, CoordinateEnvs
from tests.fits import cartpole, quiet_trainer
from tests.policies import VERSION_UNIT, echo_policy

ENVS, STEPS = 4, 6
MOST_IN_FLIGHT = 8  # trajectories of two environments: both workers play one, and others wait


def make(form: str, rounds: int = 2, env=CoordinateEnvs()) -> AsynchronousCollector:  # noqa: B008
    frames = ENVS * STEPS
    return AsynchronousCollector(
        env, echo_policy(), form=form, precision="32-true",
        settings=CollectorSettings(
            num_envs=ENVS, envs_per_executor=2, frames_per_batch=frames,
            total_frames=rounds * frames, seed=3,
        ),
    )  # fmt: skip


def weights(version: float):
    policy = echo_policy()
    policy.load_state_dict({name: torch.tensor(version) for name in policy.state_dict()})
    return policy


@pytest.mark.processes
@pytest.mark.parametrize("form", ["actors", pytest.param("server", marks=pytest.mark.thorough)])
class TestTrajectories:
    def test_rows_are_consecutive_steps_acted_on_by_the_published_weights(self, form):
        collector = make(form)
        collector.start()
        collector.update_policy_weights_(weights(3.0))
        batch = next(iter(collector))
        collector.shutdown()
        assert batch.shape == (ENVS, STEPS)
        assert (batch["collector", "policy_version"] == 1).all()
        env, episode, step = batch["observation"][..., :3].unbind(-1)
        assert (env == env[:, :1]).all()
        place = env * 1024 + episode * 32 + step + 3 * VERSION_UNIT
        assert torch.equal(batch["state_value"].squeeze(-1), place)
        after, ends = batch["next"], batch["next", "done"].squeeze(-1)
        assert torch.equal(after["observation"][..., 2], step + 1)
        assert torch.equal(after["observation"][..., 3], batch["action"].float())
        goes_on = torch.where(ends, 0.0, step + 1)
        assert torch.equal(step[:, 1:], goes_on[:, :-1])

    def test_workers_leave_no_temporary_folder(self, form, tmp_path, monkeypatch):
        process = multiprocessing.current_process()
        config = {name: value for name, value in process._config.items() if name != "tempdir"}
        monkeypatch.setattr(process, "_config", config)  # as where no fork server was started
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        collector = make(form)
        next(iter(collector))
        collector.shutdown()
        assert [str(left) for left in tmp_path.iterdir()] == [config["tempdir"]]

    @pytest.mark.thorough
    def test_nothing_is_lost_while_the_learner_takes_its_time(self, form):
        collector = make(form, rounds=6)
        places = defaultdict(list)
        for batch in collector:
            time.sleep(1.3)  # TorchRL's workers throw away what has found no place for a second
            for row in batch["observation"]:
                places[int(row[0, 0])] += row[:, 1:3].int().tolist()
        assert sum(map(len, places.values())) == 6 * ENVS * STEPS
        for (episode, step), (after, first) in chain(*map(pairwise, places.values())):
            assert (after, first) in ((episode, step + 1), (episode + 1, 0))

    @pytest.mark.thorough
    def test_it_has_the_entries_of_a_round(self, form):
        collector = make(form)
        batch = next(iter(collector))
        collector.shutdown()
        rounds = HTSCollector(
            CoordinateEnvs(), echo_policy(), num_envs=ENVS, frames_per_batch=ENVS * STEPS,
            num_actors=0,
        )  # fmt: skip
        other = next(iter(rounds))
        rounds.shutdown()
        keys = batch.keys(include_nested=True, leaves_only=True)
        assert set(keys) >= {"action", "action_log_prob", "observation", ("next", "episode_end")}
        for key in keys:
            assert (batch[key].shape, batch[key].dtype) == (other[key].shape, other[key].dtype), key

    def test_newer_weights_act_on_all_but_what_was_in_flight(self, form):
        collector = make(form, rounds=MOST_IN_FLIGHT + 2)
        batches = iter(collector)
        first = next(batches)["collector", "policy_version"].clone()
        collector.update_policy_weights_(weights(1.0))
        later = torch.cat([batch["collector", "policy_version"] for batch in batches])
        assert first.max() == 0
        assert len(later) == ENVS * (MOST_IN_FLIGHT + 1)
        assert (later == 0).any(1).sum() <= 2 * MOST_IN_FLIGHT

    def test_impala_learns_from_it(self, form):
        trainer = quiet_trainer(log_every_n_steps=1, callbacks=[TrainingStatistics()])
        learner = Impala()
        trainer.fit(learner, cartpole(4, collection=form, envs_per_executor=2))
        assert learner.updates == 4
        assert 0 <= trainer.callback_metrics["staleness/max"] <= 3
        assert 0 < trainer.callback_metrics["wait/learner"] < 1


class NoRoomEnv(CoordinateEnv):
    """In a process of its own, what is put into a queue finds no room to be sent."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if multiprocessing.parent_process() is not None:
            send = ForkingPickler.dumps

            def refuse(sent, *_):
                if threading.current_thread().name == "QueueFeederThread":
                    raise RuntimeError("unable to write to file </torch_1_2>: No space left (28)")
                return send(sent)

            ForkingPickler.dumps = refuse


@pytest.mark.processes
@pytest.mark.parametrize("form", ["actors", pytest.param("server", marks=pytest.mark.thorough)])
def test_a_trajectory_that_finds_no_shared_memory_ends_the_run(form):
    """Python drops it, and TorchRL would wait for it without end."""
    collector = make(form, env=NoRoomEnv)
    told = rf"^collection={form} keeps its data in /dev/shm: .*ulimit -n.*No space left \(28\)\)$"
    with pytest.raises(ConfigurationError, match=told):
        next(iter(collector))
    collector.shutdown()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (OSError, (errno.ENOSPC, "No space left on device")),  # of a semaphore: it names no file
        (RuntimeError, ("unable to write to file </torch_1_2>: No space left on device (28)",)),
    ],
)
def test_what_finds_no_shared_memory_is_told_with_where_it_is(monkeypatch, kind, arguments):
    def refuse(*_):
        raise kind(*arguments)

    monkeypatch.setattr(AsynchronousCollector, "_make", refuse)
    with pytest.raises(ConfigurationError, match=r"^collection=actors keeps its data in /dev/shm"):
        make("actors").start()


@pytest.mark.processes
def test_newer_weights_are_not_handed_to_a_worker_that_was_killed():
    """TorchRL would wait without end for it to have them."""
    collector = make("actors")
    next(iter(collector))
    collector._collector.procs[1].kill()
    with pytest.raises(RuntimeError, match=r"worker 1 \(exit code -9\)"):  # noqa: PT012
        for version in range(100):  # it may yet have had the first
            collector.update_policy_weights_(weights(version))
    collector.shutdown()
    assert multiprocessing.active_children() == []


def test_other_errors_of_workers_are_raised_as_they_are(monkeypatch):
    def refuse(*_):
        raise RuntimeError("At least one process failed: worker 1 (exit code 1).")

    monkeypatch.setattr(AsynchronousCollector, "_make", refuse)
    with pytest.raises(RuntimeError, match=r"^At least one process failed"):
        make("actors").start()


def test_no_round_can_be_traced():
    data = SimpleNamespace(collector=make("actors"), collection="actors")
    with pytest.raises(ConfigurationError, match="trace=1: collection=actors has no rounds"):
        RoundTrace(1).on_train_start(SimpleNamespace(datamodule=data), None)


def test_a_run_is_as_long_as_its_rounds():
    assert len(make("actors", rounds=5)) == 5


def test_an_acting_policy_says_the_log_probability_of_what_it_chose():
    acting = ActingPolicy(echo_policy(), "32-true")
    observation = torch.zeros(3, 2, 5)
    answers = acting(TensorDict({"observation": observation}, [3, 2]))
    assert answers["action"].shape == (3, 2)
    torch.testing.assert_close(answers["action_log_prob"].exp(), torch.full((3, 2), 0.25))
