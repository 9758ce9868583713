from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.adapter import SerialGroup
from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.registered import pickle_envs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.shared.action_log import ActionLog, Segment
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.pipes import PoolStopped
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.specs import ArraySpec
from hts_torchrl.workers.executor import Executor
from tests import philox
from tests.fakes import SEED_RANGE, CoordinateEnv, CoordinateEnvs, UndeclaredEnv

STEPS = 4
OUTPUTS = {
    "action": ArraySpec((), np.dtype(np.int64)),
    "action_log_prob": ArraySpec((), np.dtype(np.float32)),
}


@pytest.fixture
def shared():
    spec = make_group(CoordinateEnvs(), [0]).spec
    config = CollectorSettings(
        num_envs=4, envs_per_executor=2, first_env=10, frames_per_batch=4 * STEPS
    )
    shared = SharedBuffers(spec, OUTPUTS, config, {})
    yield shared
    shared.close()


def make(shared, create, segments=None):
    segments = blank_stretches(shared) if segments is None else segments
    executor = Executor(shared, 1, pickle_envs(create), 5, segments)
    executor.restore()
    return executor


def blank_stretches(shared):
    blank = ActionLog.blank(shared.spec, 2, steps_per_seed=0)
    return [blank.segment(env) for env in range(2)]


@pytest.fixture
def executor(shared):
    """The second executor: local environments 2 and 3, global ones 12 and 13."""
    executor = make(shared, CoordinateEnvs())
    yield executor
    executor.close()


def play_round(shared, executor, number=0, action=3):
    executor.begin_round(number)
    for step in range(STEPS):
        executor.put_state(step)
        shared.actions.put(executor.envs, {"action": np.array([action] * 2)})
        executor.step(step)
    return shared.storages[number % 2].arrays


def test_environments_are_made_and_seeded_by_their_global_index(shared, executor):
    executor.begin_round(0)
    executor.put_state(0)
    observation = shared.state.observations["observation"]
    assert observation[2:, 0].tolist() == [12, 13]
    assert observation[2:, 4].tolist() == [philox.env_seed(5, env) % SEED_RANGE for env in (12, 13)]


def seeds_seen(shared, executor) -> list[int]:
    """The seeds of environment 12 at each step of two rounds, modulo 4096."""
    rounds = [play_round(shared, executor, number)["observation"][2, :, 4] for number in range(2)]
    return np.concatenate(rounds).astype(int).tolist()


@pytest.mark.parametrize("index", [0, 1])
def test_environments_that_are_others_than_in_the_learners_process_are_refused(shared, index):
    shared.spec = replace(shared.spec, action=replace(shared.spec.action, sizes=(7,)))
    executor = Executor(shared, index, pickle_envs(CoordinateEnvs()), 5, blank_stretches(shared))
    message = rf"environment 1{2 * index} has .*, but environment 10 has .* discrete \[7\]: one"
    with closing(executor), pytest.raises(ConfigurationError, match=message):
        executor.restore()


def test_each_game_has_a_seed_of_its_own(shared):
    executor = make(shared, CoordinateEnvs(lengths=(1,)))
    expected = [philox.env_seed(5, 12, number) % SEED_RANGE for number in range(2 * STEPS)]
    assert len(set(expected)) == 2 * STEPS
    assert seeds_seen(shared, executor) == expected


@pytest.mark.parametrize(("steps_per_seed", "games"), [(3, 2), (4, 2), (5, 3)])
def test_a_seed_is_given_anew_where_a_game_ends_with_its_last_step_or_after(
    shared, monkeypatch, steps_per_seed, games
):
    """Games have 2 steps: 4 steps are just enough for a seed of 4."""
    monkeypatch.setattr(SerialGroup, "steps_per_seed", steps_per_seed)
    executor = make(shared, CoordinateEnvs(lengths=(2,)))
    numbers = [step // (2 * games) for step in range(2 * STEPS)]
    expected = [philox.env_seed(5, 12, number) % SEED_RANGE for number in numbers]
    assert seeds_seen(shared, executor) == expected


def test_steps_that_were_played_again_count_for_the_seed(shared, monkeypatch):
    """A game of 2 steps was played; with the next one the seed has lasted for 4."""
    monkeypatch.setattr(SerialGroup, "steps_per_seed", 4)
    played = Segment(0, 1, np.zeros(2, np.uint8), np.empty((0, 2), np.int64))
    executor = make(shared, CoordinateEnvs(lengths=(2,)), [played, played])
    expected = [philox.env_seed(5, 12, number) % SEED_RANGE for number in (0, 0, 1, 1, 1, 1, 2, 2)]
    assert seeds_seen(shared, executor) == expected


def test_what_an_environment_plays_before_its_segment_is_not_counted(shared):
    """Games of 2 steps: environment 12 has played two since its seed, environment 13 one."""
    none = np.empty((0, 2), np.int64)
    segments = [
        Segment(0, 0, np.zeros(4, np.uint8), none),
        Segment(0, 1, np.zeros(2, np.uint8), none),
    ]
    arrays = play_round(shared, make(shared, CoordinateEnvs(lengths=(2,)), segments))
    assert arrays["collector", "traj_ids"][2:, 0].tolist() == [2 + 2 * 4, 3 + 2 * 4]
    assert arrays["next", "step_count"][2:, 0, 0].tolist() == [1, 1]


def test_draws_continue_from_round_to_round(shared, executor):
    drawn = []
    for number in range(2):
        executor.begin_round(number)
        for step in range(STEPS):
            executor.put_state(step)
            drawn.append(shared.state.draws[3].copy())
    assert np.array_equal(drawn, [philox.uniform(5, 13, step, 1) for step in range(2 * STEPS)])


def test_only_the_executors_own_rows_are_written(shared, executor):
    arrays = play_round(shared, executor)
    assert not any(array[:2].any() for array in arrays.values())
    assert not shared.state.draws[:2].any()


def test_the_answer_is_stored_beside_the_observation_that_asked_for_it(shared, executor):
    executor.begin_round(0)
    for step in range(STEPS):
        executor.put_state(step)
        shared.actions.put(executor.envs, {"action": np.array([step % 4, 3 - step % 4])})
        executor.step(step)
    arrays = shared.storages[0].arrays
    assert arrays["action"][2:].tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert arrays["next", "observation"][2:, :, 3].tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_rounds_write_the_two_storages_in_turn(shared, executor):
    play_round(shared, executor, 0, action=1)
    play_round(shared, executor, 1, action=2)
    stored = [shared.storages[storage].arrays["action"][2:] for storage in (0, 1)]
    assert [set(actions.ravel().tolist()) for actions in stored] == [{1}, {2}]


def test_an_episode_runs_on_from_round_to_round(shared, executor):
    """Environment 13's first episode has 5 steps: it crosses the end of the round."""
    play_round(shared, executor, 0)
    arrays = play_round(shared, executor, 1)
    assert arrays["next", "step_count"][3, :, 0].tolist() == [5, 1, 2, 1]


def test_the_score_of_an_episode_is_summed_up_and_starts_anew(shared, executor):
    arrays = play_round(shared, executor)
    rewards, sums = (arrays["next", key][2, :, 0] for key in ("reward", "episode_reward"))
    assert arrays["next", "terminated"][2, :, 0].tolist() == [False, False, True, False]
    assert sums.tolist() == pytest.approx([*np.cumsum(rewards[:3]), rewards[3]])


def test_every_episode_has_a_number_of_its_own(shared, executor):
    arrays = play_round(shared, executor)
    assert arrays["collector", "traj_ids"][2:].tolist() == [[2, 2, 2, 6], [3, 3, 3, 3]]


def test_a_lost_life_begins_a_trajectory_and_no_game(shared, monkeypatch):
    """Environment 12's third step terminates, but the game goes on."""
    step = SerialGroup.step
    lost = {"episode_end": np.zeros(2, bool)}
    monkeypatch.setattr(SerialGroup, "step", lambda *args: replace(step(*args), **lost))
    arrays = play_round(shared, make(shared, CoordinateEnvs()))
    assert arrays["next", "terminated"][2, :, 0].tolist() == [False, False, True, False]
    assert arrays["collector", "traj_ids"][2].tolist() == [2, 2, 2, 6]
    assert arrays["next", "step_count"][2, :, 0].tolist() == [1, 2, 3, 4]


def test_an_observation_that_is_not_declared_is_refused_with_environment_round_and_step(shared):
    executor = make(shared, UndeclaredEnv(np.zeros(4, np.float32), index=13, at=STEPS + 2))
    play_round(shared, executor, 0)
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, executor, 1)
    assert str(raised.value) == (
        "round 1, step 2: step() of environment 13 returned what is not declared: "
        "'observation' is float32 [4], but float32 [5] is declared"
    )
    executor.close()


class Refusing(CoordinateEnv):
    """Refuses something itself in the second step, as a policy that it loads might."""

    def step(self, action):
        if self.steps == 1:
            raise ConfigurationError("no such opponent")
        return super().step(action)


def test_what_an_environment_refuses_itself_is_told_in_its_own_words(shared):
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, make(shared, Refusing))
    assert str(raised.value) == "round 0, step 1: no such opponent"
    assert raised.value.__notes__ == ["raised by step() of environment 12"]


class NoChoiceEnv(CoordinateEnv):
    """Environment 13 allows nothing in its 7th step; ends of games do, too, and may."""

    action_space = spaces.MultiDiscrete([2, 1])
    observation_space = spaces.Dict(
        {"observation": CoordinateEnv.observation_space, "action_mask": spaces.MultiBinary(3)}
    )

    def __init__(self, index: int) -> None:
        super().__init__(index, lengths=(4,))
        self.made = 0

    def step(self, action):
        self.made += 1
        return super().step(action[0])

    def _observation(self):
        stuck = self.steps == 4 or (self.index == 13 and self.made == STEPS + 3)
        mask = np.array([1, 1, 0] if stuck else [0, 1, 1], np.int8)
        return {"observation": super()._observation(), "action_mask": mask}


def test_an_environment_that_allows_no_action_is_refused_with_round_and_step():
    spec = make_group(NoChoiceEnv, [0]).spec
    outputs = {**OUTPUTS, "action": ArraySpec((2,), np.dtype(np.int64))}
    config = CollectorSettings(
        num_envs=4, envs_per_executor=2, first_env=10, frames_per_batch=4 * STEPS
    )
    shared = SharedBuffers(spec, outputs, config, {})
    executor = make(shared, NoChoiceEnv)
    play_round(shared, executor, 0, action=(1, 0))
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, executor, 1, action=(1, 0))
    assert str(raised.value) == (
        "round 1, step 2: environment 13 allows no action by its 'action_mask', but has to be "
        "acted on: at least one element of each choice must be true"
    )
    executor.close()
    shared.close()


def vectors(observe):
    """A maker of one vector environment for both; ``observe`` changes what it observes."""

    class Changed(SyncVectorEnv):
        def step(self, actions):
            observation, *rest = super().step(actions)
            return observe(observation), *rest

    makers = [lambda index=index: CoordinateEnv(index) for index in (12, 13)]
    return lambda _: Changed(makers, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    ("observe", "found"),
    [
        (lambda seen: seen.astype(np.float64), "float64 [2, 5]"),
        (lambda seen: seen[:1], "float32 [1, 5]"),  # which both cells would take
    ],
    ids=["type", "shape"],
)
def test_what_a_group_observes_is_held_against_what_is_declared(shared, observe, found):
    executor = make(shared, vectors(observe))
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, executor)
    assert str(raised.value) == (
        "round 0, step 0: step() of environments [12, 13] returned what is not declared: "
        f"'observation' is {found}, but float32 [2, 5] is declared"
    )
    executor.close()


@dataclass(frozen=True)
class BareEnvs(EnvFactory):
    """A group of a user's own that returns an array in place of a dict from one of its calls."""

    call: str

    def group(self, indices, *, render=False):  # noqa: ARG002
        group = make_group(CoordinateEnvs(), indices)
        reset, step = group.reset, group.step
        if self.call == "reset":
            group.reset = lambda seeds: reset(seeds)["observation"]
        else:
            group.step = lambda actions: replace(step(actions), next_observation=np.zeros((2, 5)))
        return group


@pytest.mark.parametrize(("call", "where"), [("reset", ""), ("step", "round 0, step 0: ")])
def test_a_group_that_observes_no_dict_is_refused(shared, call, where):
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, make(shared, BareEnvs(call)))
    assert str(raised.value) == (
        f"{where}{call}() of environments [12, 13] returned what is not declared: "
        "a ndarray came, but a dict of arrays by key is declared"
    )


@dataclass(frozen=True)
class ChangedNumbers(EnvFactory):
    """A group of a user's own whose transitions have something else under one name."""

    name: str
    value: object

    def group(self, indices, *, render=False):  # noqa: ARG002
        group = make_group(CoordinateEnvs(), indices)
        step = group.step
        group.step = lambda actions: replace(step(actions), **{self.name: self.value})
        return group


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("reward", np.zeros((2, 1), np.float32), "float32 [2, 1]; float32 [2] is needed"),
        ("score", np.zeros(1, np.float32), "float32 [1]; float32 [2] is needed"),
        ("reward", [0.0, 1.0], "a list; float32 [2] is needed"),
        ("terminated", np.array([0, 1]), "int64 [2]; bool [2] is needed"),
        ("episode_end", False, "a bool; bool [2] is needed"),
    ],
)
def test_numbers_of_a_group_that_are_not_one_for_each_environment_are_refused(
    shared, name, value, told
):
    """Some of them would be broadcast, and integers be taken for places."""
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, make(shared, ChangedNumbers(name, value)))
    assert str(raised.value) == (
        "round 0, step 0: step() of environments [12, 13] returned what is not declared: "
        f"{name} is {told}"
    )


def test_a_game_that_ends_without_ending_a_trajectory_is_refused(shared):
    """Returns would be taken from the next game."""
    with pytest.raises(ConfigurationError) as raised:
        play_round(shared, make(shared, ChangedNumbers("episode_end", np.array([False, True]))))
    assert str(raised.value) == (
        "round 0, step 0: environment 13 ends a game (episode_end) that is neither terminated nor "
        "truncated: one of the two is needed, as values would be taken from the next game"
    )


class TestAnnouncements:
    """Actor and collector look in the very moment of the announcement: no other order is faster."""

    @pytest.fixture
    def seen(self, shared, monkeypatch):
        """What they see of one round of the second executor."""
        lifeline, parent_end = Pipe(duplex=False)
        seen = {"states": [], "draws": [], "storage": {}}

        def answer(envs):
            seen["states"].append(shared.state.observations["observation"][envs])
            seen["draws"].append(shared.state.draws[envs])
            shared.actions.put(envs, {"action": np.full(2, 3)})
            shared.doorbells[1].ring(len(envs))

        def finish(executors):
            assert executors.tolist() == [1]
            arrays = shared.storages[0].arrays
            seen["storage"] = {key: array[2:].copy() for key, array in arrays.items()}
            seen["finished_s"] = shared.status.finished_s[1]
            parent_end.close()

        monkeypatch.setattr(shared, "ready", SimpleNamespace(put=answer))
        monkeypatch.setattr(shared, "finished", SimpleNamespace(put=finish))
        executor = Executor(shared, 1, pickle_envs(CoordinateEnvs()), 5, blank_stretches(shared))
        shared.doorbells[1].ring()
        with lifeline, pytest.raises(PoolStopped):
            executor.run(lifeline, BusyTimer(shared.status, 1))
        return seen

    def test_a_state_is_whole_when_it_is_announced(self, seen):
        assert np.array_equal(np.stack(seen["states"], 1), seen["storage"]["observation"])
        drawn = [[philox.uniform(5, env, step, 1) for step in range(STEPS)] for env in (12, 13)]
        assert np.array_equal(np.stack(seen["draws"], 1), drawn)

    def test_a_round_is_whole_when_it_is_reported(self, seen, shared):
        arrays = shared.storages[0].arrays
        for key, array in seen["storage"].items():
            assert np.array_equal(array, arrays[key][2:])
        assert seen["storage"]["next", "step_count"].all()
        assert seen["finished_s"] > 0
