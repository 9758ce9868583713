"""What the advisor predicts, by hand, and that it measures what it says."""

import multiprocessing
import os
import re
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hts_torchrl import A2C, GymEnvs, advisor
from hts_torchrl.advisor import (
    Advisor,
    Costs,
    Settings,
    _busy,
    _random_action,
    _staleness,
    _suggestion,
    advice,
    best_settings,
    limits,
    speed,
)
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.envs.timed import TimedEnv, step_times
from tests.command_line import A2C as A2C_FLAGS
from tests.command_line import CARTPOLE, refused, run
from tests.fits import cartpole, quiet_trainer

COSTS = Costs(np.full(100, 0.004), visit_s=0.0005, pass_s={8: 0.002}, update_s=0.001)
SETTINGS = Settings(
    num_envs=16, envs_per_executor=1, inference_batch_size=8, num_actors=1, steps_per_round=5,
    delay=1, cores=4,
)  # fmt: skip


class TestLimits:
    def test_of_each_part(self):
        bounds = limits(COSTS, SETTINGS)
        assert bounds["cores"] == pytest.approx(4 / (0.0045 + 0.002 / 8 + 0.001))
        assert bounds["learner"] == pytest.approx(1000)
        assert bounds["actors"] == pytest.approx(8 / 0.002)
        # Without variance every round takes its 5 steps, each with one pass.
        assert bounds["rendezvous"] == pytest.approx(16 / (0.0045 + 0.002), rel=0.01)

    def test_an_executor_of_many_steps_them_one_after_another(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=4))
        assert bounds["rendezvous"] == pytest.approx(16 / (4 * 0.004 + 0.0025), rel=0.01)

    def test_what_an_executor_adds_is_shared_by_its_environments(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=4))
        assert bounds["cores"] == pytest.approx(4 / (0.004 + 0.0005 / 4 + 0.002 / 8 + 0.001))

    def test_an_executor_of_more_than_a_pass_holds_waits_for_several(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=16))
        assert bounds["rendezvous"] == pytest.approx(16 / (16 * 0.004 + 0.0045), rel=0.01)

    def test_a_pass_of_more_rows_than_environments_is_never_full(self):
        costs = replace(COSTS, pass_s={32: 0.004})
        bounds = limits(costs, replace(SETTINGS, inference_batch_size=32))
        assert bounds["actors"] == pytest.approx(16 / 0.004)

    def test_without_a_delay_the_round_waits_for_the_update(self):
        bounds = limits(COSTS, replace(SETTINGS, delay=0))
        assert bounds["rendezvous"] == pytest.approx(80 / (5 * 0.0065 + 80 * 0.001), rel=0.01)

    def test_variance_costs_at_the_rendezvous(self):
        random = np.random.default_rng(0)
        steps_s = random.exponential(0.004, 10_000)
        varying = replace(COSTS, step_s=steps_s, visit_s=0.0, pass_s={8: 1e-9})
        bounds = limits(varying, replace(SETTINGS, steps_per_round=1))
        harmonic = sum(1 / k for k in range(1, 17))
        assert bounds["rendezvous"] == pytest.approx(16 / (0.004 * harmonic), rel=0.05)

    def test_actors_share_the_passes(self):
        assert limits(COSTS, replace(SETTINGS, num_actors=3))["actors"] == pytest.approx(12_000)


class TestAdvice:
    def test_every_core_has_an_executor_and_no_more(self):
        assert advice(COSTS, SETTINGS).envs_per_executor == 4
        fast_learner = replace(COSTS, update_s=1e-6)
        assert advice(fast_learner, replace(SETTINGS, cores=64)).envs_per_executor == 1

    def test_environments_of_no_cost_share_an_executor(self):
        quick = replace(COSTS, step_s=np.full(100, 1e-5), pass_s={8: 1e-4}, update_s=5e-5)
        better = advice(quick, replace(SETTINGS, cores=2))
        assert better.envs_per_executor == 16
        assert speed(quick, better) > 5 * speed(quick, replace(SETTINGS, cores=2))

    def test_a_larger_pass_where_its_rows_are_cheaper(self):
        for large_s, rows in ((0.0021, 16), (0.008, 8)):
            costs = replace(COSTS, pass_s={8: 0.002, 16: large_s})
            assert advice(costs, SETTINGS).inference_batch_size == rows

    def test_actors_are_added_until_they_are_no_limit(self):
        slow = replace(COSTS, pass_s={8: 0.02}, update_s=1e-6)
        settings = replace(SETTINGS, cores=16)
        better = advice(slow, settings)
        assert limits(slow, settings)["actors"] < limits(slow, settings)["cores"]
        assert limits(slow, better)["actors"] >= 1.2 * limits(slow, better)["cores"]

    def test_environments_are_added_where_cores_wait_for_them(self):
        settings = replace(SETTINGS, cores=64)
        fast_learner = replace(COSTS, update_s=1e-6)
        assert (
            limits(fast_learner, settings)["rendezvous"] < limits(fast_learner, settings)["cores"]
        )
        assert advice(fast_learner, settings).num_envs == 128  # 1.37 times as fast as 64
        assert advice(COSTS, settings).num_envs == 16  # the learner is the limit
        assert advice(fast_learner, SETTINGS).num_envs == 16  # four for each core

    def test_a_crew_of_no_worker_gets_one(self):
        assert advice(COSTS, replace(SETTINGS, num_actors=0)).num_actors == 1

    def test_a_round_is_made_longer_only_where_that_is_faster(self):
        assert advice(COSTS, SETTINGS).steps_per_round == 5
        random = np.random.default_rng(0)
        varying = replace(COSTS, step_s=random.exponential(0.004, 10_000), update_s=1e-6)
        better = advice(varying, replace(SETTINGS, cores=16))
        assert better.steps_per_round > 5
        longest = replace(better, steps_per_round=4096)
        assert speed(varying, better) >= 0.95 * speed(varying, longest)


@pytest.mark.parametrize(
    ("group", "update_s", "lag"), [(1, 0.001, "5.3"), (4, 0.001, "10.7"), (4, 0.002, "more and")]
)
def test_asynchronous_data_is_as_old_as_the_learner_is_busy(group, update_s, lag):
    costs = replace(COSTS, update_s=update_s)
    line = _staleness(costs, replace(SETTINGS, envs_per_executor=group))
    assert line.startswith(f"age of the data   1 update; {lag} ")


class TestPrecision:
    SUITED = advice(COSTS, SETTINGS)

    @pytest.mark.parametrize(("share", "best"), [(0.5, "bf16-mixed"), (0.95, "32-true")])
    def test_the_other_one_where_it_pays(self, share, best):
        cheaper = replace(COSTS, update_s=share * COSTS.update_s)
        costs = {"32-true": COSTS, "bf16-mixed": cheaper}
        assert best_settings(costs, self.SUITED, "32-true") == (self.SUITED, best)

    def test_what_is_the_best_is_kept(self):
        costs = {"32-true": COSTS, "bf16-mixed": replace(COSTS, update_s=COSTS.update_s / 2)}
        assert best_settings(costs, self.SUITED, "bf16-mixed") == (self.SUITED, "bf16-mixed")


class TestSuggestion:
    @pytest.mark.parametrize(
        ("changes", "precision", "flags", "learnt"),
        [
            ({}, "32-true", [], False),
            ({"envs_per_executor": 4}, "32-true", ["--data.envs_per_executor=4"], False),
            ({"num_actors": 2}, "32-true", ["--data.num_actors=2"], False),
            ({"inference_batch_size": 16}, "32-true", ["--data.inference_batch_size=16"], True),
            ({"steps_per_round": 10}, "32-true", ["--data.frames_per_batch=160"], True),
            ({}, "bf16-mixed", ["--trainer.precision=bf16-mixed"], True),
        ],
    )
    def test_names_the_flags_that_differ_and_no_others(self, changes, precision, flags, learnt):
        line = _suggestion(SETTINGS, "32-true", replace(SETTINGS, **changes), precision)
        assert re.findall(r"--\S+", line) == flags
        assert ("what is learnt" in line) == learnt
        assert (line == "keep the settings") == (not flags)


@pytest.mark.processes
def test_the_report_measures_predicts_and_checks(monkeypatch):
    other = {"envs_per_executor": 4}
    monkeypatch.setattr(advisor, "advice", lambda _, settings: replace(settings, **other))
    data = cartpole(3, env=GymEnvs("CartPole-v1"), num_actors=1)
    trainer = quiet_trainer()
    lines = list(Advisor(A2C(), data, trainer).report(seconds=3.0))
    labels = [re.split("  +", line)[0] for line in lines]
    assert labels[:8] == [
        "environment step", "sums of 100 steps", "in 32-true", "in bf16-mixed", "expected",
        "age of the data", "measured", "advice",
    ]  # fmt: skip
    assert "--data.envs_per_executor=4" in lines[7]
    assert labels[8:] == ["measured with it"]
    rows = {label: line.split() for label, line in zip(labels, lines, strict=True)}
    for figure in (rows["expected"][1], rows["measured"][1], rows["measured with it"][3]):
        assert float(figure) > 0
    assert multiprocessing.active_children() == []


@dataclass(frozen=True)
class Witnessed:
    """Leaves a file of its process where it makes an environment."""

    folder: str

    def __call__(self, index):  # noqa: ARG002
        (Path(self.folder) / str(os.getpid())).touch()
        return gymnasium.make("CartPole-v1")


def slow_cartpole(index):  # noqa: ARG001
    return TimedEnv(gymnasium.make("CartPole-v1"), step_times("constant", 0.01))


@pytest.mark.processes
def test_a_step_takes_what_it_is_known_to_take():
    data = cartpole(3, env=slow_cartpole, num_actors=1)
    with closing(Advisor(A2C(), data, quiet_trainer()).report(seconds=2.0)) as report:
        line = next(report)
    assert float(line.split()[2]) >= 10


@pytest.mark.processes
def test_the_command_line_advises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("advise", *CARTPOLE, *A2C_FLAGS, "--seconds=1")
    assert re.search(r"^measured +[0-9]+ steps/s in 0.5 s", capsys.readouterr().out, re.M)
    assert list(tmp_path.iterdir()) == []


def test_no_time_is_refused(capsys):
    message = refused(capsys, "advise", *CARTPOLE, *A2C_FLAGS, "--seconds=0")
    assert message == "--seconds=0; more than 0 is needed"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 5]),
        spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    ],
    ids=["discrete", "multi-discrete", "continuous"],
)
def test_random_actions_are_actions(space):
    spec = env_spec(spaces.Box(0, 1, (1,)), space).action
    random = np.random.default_rng(0)
    actions = [_random_action(spec, random)[0] for _ in range(50)]
    assert all(space.contains(action) for action in actions)
    assert len({action.tobytes() for action in actions}) > 2


@pytest.mark.processes
def test_the_other_cores_are_busy_before_anything_is_measured(tmp_path):
    with _busy(Witnessed(str(tmp_path)), 2):
        assert len(list(tmp_path.iterdir())) == 2
    assert multiprocessing.active_children() == []
