import dataclasses
import importlib
import random
import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from hts_torchrl import GymEnvs, PettingZooEnvs
from hts_torchrl.envs import own_generators
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.own_generators import OwnGenerators, making
from hts_torchrl.envs.registered import pickle_envs, unpickle_envs
from tests.fakes import Duel

STATES = {
    "random": random.getstate,
    "numpy": lambda: np.random.get_state()[1:],  # noqa: NPY002
    "torch": lambda: torch.get_rng_state().tolist(),
}


def torch_draw() -> float:
    return torch.rand((), dtype=torch.double).item()


def draw() -> list[float]:
    return [random.random(), np.random.random_sample(), torch_draw()]  # noqa: NPY002


def drawn_from(seed: int, count: int) -> list[list[float]]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    own = torch.Generator().manual_seed(seed)
    return [
        [
            python.random(),
            numpy.random_sample(),
            torch.rand((), dtype=torch.double, generator=own).item(),
        ]
        for _ in range(count)
    ]


class LotteryEnv(gymnasium.Env):
    """Observes what it draws from the global generators; a game has three steps."""

    observation_space = Box(0, 1, (3,), np.float64)
    action_space = Discrete(2)
    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.made_of = draw()

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return np.array(draw()), {}

    def step(self, _):
        self.steps += 1
        return np.array(draw()), 0.0, self.steps == 3, False, {}


class LateEnv(LotteryEnv):
    """Draws from numpy's for the first time in its 60th step."""

    def __init__(self) -> None:
        pass

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return np.zeros(3), {}

    def step(self, _):
        self.steps += 1
        drawn = np.random.random_sample() if self.steps == 60 else 0.0  # noqa: NPY002
        return np.full(3, drawn), 0.0, False, False, {}


class LotteryDuel(Duel):
    """A game whose agents observe what it draws."""

    def observation_space(self, _):
        return LotteryEnv.observation_space

    def reset(self, seed=None, options=None):
        drawn = np.array(draw())
        observations, infos = super().reset(seed, options)
        return dict.fromkeys(observations, drawn), infos

    def step(self, actions):
        drawn = np.array(draw())
        observations, *rest = super().step(actions)
        return dict.fromkeys(observations, drawn), *rest


@pytest.fixture(autouse=True)
def nobody_elses_generators_move():
    before = {name: state() for name, state in STATES.items()}
    yield
    for name, state in STATES.items():
        np.testing.assert_equal(state(), before[name], err_msg=name)


def observed(envs, seeds, steps):
    found = [envs.reset(seeds)["observation"].copy()]
    for _ in range(steps):
        transition = envs.step(np.zeros(envs.num_envs, np.int64))
        found.append(transition.next_observation["observation"].copy())
    return np.stack(found)


class TestGroups:
    def test_each_game_draws_what_its_seed_begins(self):
        envs = make_group(LotteryEnv, [0, 1])
        envs.next_seed = lambda row: 20 + row
        found = observed(envs, [7, 8], 4)
        for row, (first, second) in enumerate([(7, 20), (8, 21)]):
            assert found[:, row].tolist() == drawn_from(first, 3) + drawn_from(second, 2)

    def test_the_games_of_several_agents_too(self):
        envs = make_group(PettingZooEnvs(LotteryDuel, {"lengths": (3,)}), range(4))
        envs.next_seed = lambda row: 20 + row
        found = observed(envs, [7, 1, 8, 1], 4)
        for rows, (first, second) in {(0, 1): (7, 20), (2, 3): (8, 22)}.items():
            for row in rows:
                assert found[:, row].tolist() == drawn_from(first, 3) + drawn_from(second, 2)

    @pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
    def test_a_vector_environment_by_the_first_seed(self, mode):
        envs = make_group(lambda _: SyncVectorEnv([LotteryEnv] * 2, autoreset_mode=mode), [0, 1])
        found = observed(envs, [7, 8], 2)
        assert found.reshape(6, 3).tolist() == drawn_from(7, 6)
        envs.step(np.zeros(2, np.int64))  # which ends the games

    def test_numpys_may_be_drawn_from_late(self):
        found = observed(make_group(LateEnv, [0, 1]), [7, 8], 60)
        assert found[-1, :, 0].tolist() == [drawn_from(seed, 1)[0][1] for seed in (7, 8)]

    def test_it_is_made_of_what_its_index_begins(self):
        for index in (0, 5):
            envs = make_group(LotteryEnv, [index])
            assert [envs.envs[0].made_of] == drawn_from(index, 1)
        gymnasium.register("Lottery-v0", LotteryEnv)
        try:
            envs = GymEnvs("Lottery-v0").group([4, 5])
            assert [env.unwrapped.made_of for env in envs.envs] == [
                *drawn_from(4, 1),
                *drawn_from(5, 1),
            ]
        finally:
            del gymnasium.registry["Lottery-v0"]

    def test_a_failing_environment_leaves_the_others_alone(self, monkeypatch):
        def fail(*_, **__):
            draw()
            raise ArithmeticError

        envs = make_group(LotteryEnv, [0])
        monkeypatch.setattr(LotteryEnv, "reset", fail)
        with pytest.raises(ArithmeticError):
            envs.reset([7])


class TestWatching:
    def test_what_was_drawn_from_once_stays_its_own(self):
        own = OwnGenerators()
        with own:
            own.seed(5)
        drawn = []
        for call in range(400):
            with own:
                if call in (40, 350):
                    drawn.append(random.random())
        assert drawn == [numbers[0] for numbers in drawn_from(5, 2)]

    def test_what_nobody_draws_from_is_let_go_of(self, monkeypatch):
        reads, state = [], own_generators.PYTHON.state
        noting = dataclasses.replace(
            own_generators.PYTHON, state=lambda: reads.append(1) or state()
        )
        monkeypatch.setattr(own_generators, "PYTHON", noting)
        own = OwnGenerators()
        for _ in range(50):
            with own:
                pass
        assert reads
        reads.clear()
        for _ in range(50):
            with own:
                pass
        assert not reads

    @pytest.mark.parametrize("call", [10, 48])
    @pytest.mark.parametrize("generator", [0, 1, 2])
    def test_one_draw_is_enough(self, call, generator):
        """Call 20 seeds them anew, and the last that is watched is call 49."""
        own, draws = OwnGenerators(), [random.random, np.random.random_sample, torch_draw]
        with own:
            own.seed(5)
        for number in range(1, 60):
            with own:
                if number == 20:
                    own.seed(6)
                if number == call:
                    draws[generator]()
        with own:
            own.seed(7)
            assert draws[generator]() == drawn_from(7, 1)[0][generator]

    def test_a_bit_generator_of_the_users_stays(self):
        before, theirs = np.random.get_bit_generator(), np.random.PCG64(3)
        np.random.set_bit_generator(theirs)
        try:
            with OwnGenerators() as own:
                own.seed(5)
                assert np.random.random_sample() == drawn_from(5, 1)[0][1]  # noqa: NPY002
            assert np.random.get_bit_generator() is theirs
            assert theirs.random_raw() == np.random.PCG64(3).random_raw()
        finally:
            np.random.set_bit_generator(before)


MODULE = """
import gymnasium
import numpy as np
from tests.fakes import CoordinateEnv, Duel

DRAWN = np.random.random_sample()

def make():
    return CoordinateEnv(0)

gymnasium.registry.pop("Drawn-v0", None)
gymnasium.register("Drawn-v0", entry_point=make)
"""


def unpickled():
    with making(1):
        pickled = pickle_envs(importlib.import_module("drawing_module").make)
    del sys.modules["drawing_module"]
    unpickle_envs(pickled)


@pytest.mark.parametrize(
    "load",
    [
        lambda: GymEnvs("drawing_module:Drawn-v0").group([5]),
        lambda: GymEnvs("Drawn-v0", imports=["drawing_module"]).group([5]),
        lambda: PettingZooEnvs("drawing_module:Duel").group([4, 5]),
        unpickled,
    ],
    ids=["an id", "imports", "PettingZoo", "a function"],
)
def test_a_module_draws_the_same_whichever_environment_brings_it(tmp_path, monkeypatch, load):
    tmp_path.joinpath("drawing_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        load()
        assert drawn_from(0, 1)[0][1] == sys.modules["drawing_module"].DRAWN
    finally:
        sys.modules.pop("drawing_module", None)
        gymnasium.registry.pop("Drawn-v0", None)
