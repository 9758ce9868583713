"""What the advisor says of a prediction, and that it measures what it says."""

import multiprocessing
import re
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from benchmarks.timed_envs import TimedEnv, step_times

from hts_torchrl import A2C, PPO, EnvFactory, GymEnvs, HTSCollector
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.advise import Advisor, _staleness, _suggestion
from tests.command_line import A2C as A2C_FLAGS
from tests.command_line import CARTPOLE, refused, run
from tests.costs import COSTS, SETTINGS
from tests.fakes import MaskedEnvs
from tests.fits import cartpole, quiet_trainer


@pytest.mark.parametrize(
    ("group", "update_s", "lag"), [(1, 0.001, "5.3"), (4, 0.001, "10.7"), (4, 0.002, "more and")]
)
def test_asynchronous_data_is_as_old_as_the_learner_is_busy(group, update_s, lag):
    costs = replace(COSTS, update_s=update_s)
    line = _staleness(costs, replace(SETTINGS, envs_per_executor=group))
    assert line.startswith(f"age of the data   1 update; {lag} ")


WIDER = [
    *("--data.num_envs=32", "--data.inference_batch_size=8"),  # whose default depends on the former
    "--data.frames_per_batch=160",
]


class TestSuggestion:
    @pytest.mark.parametrize(
        ("changes", "precision", "flags", "learnt"),
        [
            ({}, "32-true", [], False),
            ({"envs_per_executor": 4}, "32-true", ["--data.envs_per_executor=4"], False),
            ({"num_actors": 2}, "32-true", ["--data.num_actors=2"], False),
            ({"inference_batch_size": 16}, "32-true", ["--data.inference_batch_size=16"], True),
            ({"steps_per_round": 10}, "32-true", ["--data.frames_per_batch=160"], True),
            ({"num_envs": 32}, "32-true", WIDER, True),
            ({}, "bf16-mixed", ["--trainer.precision=bf16-mixed"], True),
        ],
    )
    def test_names_the_flags_that_differ_and_no_others(self, changes, precision, flags, learnt):
        line = _suggestion(SETTINGS, "32-true", replace(SETTINGS, **changes), precision)
        assert re.findall(r"--\S+", line) == flags
        assert ("what is learnt" in line) == learnt
        assert (line == "keep the settings") == (not flags)


@pytest.mark.parametrize(
    ("cores", "speeds", "said"),
    [
        (8, {2: 130.0, 4: 131.0}, ["--model.num_threads=2", "keep 2"]),
        (8, {2: 130.0, 4: 150.0, 8: 164.0}, ["num_threads=2", "num_threads=4", "keep 4"]),
        (2, {2: 130.0}, ["--model.num_threads=2 (which also changes what is learnt)"]),
        (2, {2: 109.0}, ["2: 109 steps/s, 1.09 times as many as with 1: keep 1"]),
        (1, {}, []),
    ],
)
def test_threads_of_the_learner_are_tried_while_they_are_a_tenth_faster(
    monkeypatch, cores, speeds, said
):
    def train(*arguments):
        return SimpleNamespace(steps_per_s=speeds[arguments[-1].num_threads])

    advisor = Advisor(A2C(), cartpole(num_actors=1), quiet_trainer())
    monkeypatch.setattr(advisor, "_cores", cores)
    monkeypatch.setattr(advisor, "_train", train)
    with closing(advisor._group):
        lines = list(advisor._more_threads(advisor._settings(), "32-true", 1.0, 100.0))
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))
    assert advisor._learner.num_threads == 1


@pytest.mark.parametrize(
    ("num_envs", "precision", "chunks"),
    [(4, "bf16-mixed", 2), (5, "bf16-mixed", 1), (4, "32-true", 1)],
)
def test_a_thread_of_ppo_is_tried_with_a_chunk_of_its_own(monkeypatch, num_envs, precision, chunks):
    tried = []

    def train(*arguments):
        tried.append((arguments[-1].num_threads, arguments[-1].gradient_chunks))
        return SimpleNamespace(steps_per_s=120.0)

    data = cartpole(num_actors=1, num_envs=num_envs, frames_per_batch=8 * num_envs)
    advisor = Advisor(PPO(), data, quiet_trainer())
    monkeypatch.setattr(advisor, "_cores", 2)
    monkeypatch.setattr(advisor, "_train", train)
    with closing(advisor._group):
        (line,) = advisor._more_threads(advisor._settings(), precision, 1.0, 100.0)
    assert tried == [(2, chunks)]
    assert ("--model.num_threads=2 --model.gradient_chunks=2 (which" in line) == (chunks == 2)


def test_the_pass_is_measured_as_the_run_would_have_it(monkeypatch):
    class Seen(Exception):
        pass

    def collect(*_, **settings):
        raise Seen(settings["compile_policy"])

    monkeypatch.setattr("hts_torchrl.tools.advise.HTSCollector", collect)
    advisor = Advisor(A2C(), cartpole(compile_policy={"backend": "eager"}), quiet_trainer())
    with closing(advisor._group), pytest.raises(Seen) as seen:
        advisor._pool_s(8, "32-true", 0.1)
    assert seen.value.args == ({"backend": "eager"},)


class SlowToHandOut(HTSCollector):
    """Takes much longer between two rounds than for one, however busy the machine is."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.1)
            yield batch


@pytest.mark.processes
def test_the_report_measures_predicts_and_checks(monkeypatch):
    monkeypatch.setattr("hts_torchrl.tools.advise.HTSCollector", SlowToHandOut)
    other = {"envs_per_executor": 4}
    monkeypatch.setattr(
        "hts_torchrl.tools.speed.advice", lambda _, settings: replace(settings, **other)
    )
    # Counted, since how many steps half a second holds depends on the machine's load.
    steps_s = np.random.default_rng(0).gamma(9.0, 1e-5, 2000)
    monkeypatch.setattr("hts_torchrl.tools.advise.measured_step_times", lambda *_: steps_s)
    data = cartpole(3, env=GymEnvs("CartPole-v1"), num_actors=1)
    lines = list(Advisor(A2C(), data, quiet_trainer()).report(seconds=0.4))
    labels = [re.split("  +", line)[0] for line in lines]
    assert labels[:8] == [
        "environment step", "sums of 100 steps", "in 32-true", "in bf16-mixed", "expected",
        "age of the data", "measured", "advice",
    ]  # fmt: skip
    assert lines[0].endswith("2000 steps)")
    assert lines[1].endswith("20 sums)")
    assert all(float(line.split("between two rounds ")[1]) > 0 for line in lines[2:4])
    assert "--data.envs_per_executor=4" in lines[7]
    # Where the learner is the limit, its threads are tried then.
    assert labels[8] == "measured with it"
    assert set(labels[9:]) <= {"learner threads"}
    rows = {label: line.split() for label, line in zip(labels, lines, strict=True)}
    for figure in (rows["expected"][1], rows["measured"][1], rows["measured with it"][3]):
        assert float(figure) > 0
    assert multiprocessing.active_children() == []


def slow_cartpole(index):  # noqa: ARG001
    return TimedEnv(gymnasium.make("CartPole-v1"), step_times("constant", 0.01))


@pytest.mark.processes
@pytest.mark.thorough
def test_a_step_takes_what_it_is_known_to_take():
    data = cartpole(3, env=slow_cartpole, num_actors=1)
    with closing(Advisor(A2C(), data, quiet_trainer()).report(seconds=2.0)) as report:
        line = next(report)
    assert float(line.split()[2]) >= 10


class Masked(EnvFactory):
    """Environments that raise for an action that their mask forbids."""

    def group(self, indices, *, render=False):  # noqa: ARG002
        return make_group(MaskedEnvs(), indices)


@pytest.mark.processes
@pytest.mark.parametrize(
    "env",
    [
        [],
        [f"--data.env={__name__}.Masked"],
        [
            *("--data.env=PettingZooEnvs", "--data.env.id=tests.fakes:Duel"),
            "--data.envs_per_executor=2",
        ],
    ],
    ids=["CartPole", "masked actions", "two agents"],
)
def test_the_command_line_advises(env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = CARTPOLE if not env else [*env, *CARTPOLE[2:]]
    run("advise", *flags, *A2C_FLAGS, "--seconds=1")
    assert re.search(r"^measured +[0-9]+ steps/s in 0.5 s", capsys.readouterr().out, re.M)
    assert list(tmp_path.iterdir()) == []


def test_no_time_is_refused(capsys):
    message = refused(capsys, "advise", *CARTPOLE, *A2C_FLAGS, "--seconds=0")
    assert message == "--seconds=0; more than 0 is needed"


def test_too_little_time_for_two_steps_is_refused(monkeypatch):
    monkeypatch.setattr("hts_torchrl.tools.advise.busy_cores", lambda *_: nullcontext())
    monkeypatch.setattr("hts_torchrl.tools.advise.measured_step_times", lambda *_: [0.5])
    advisor = Advisor(A2C(), cartpole(num_actors=1), quiet_trainer())
    with pytest.raises(ConfigurationError) as raised:
        next(advisor.report(seconds=1.0))
    assert str(raised.value) == "--seconds=1; time for two steps is needed"
