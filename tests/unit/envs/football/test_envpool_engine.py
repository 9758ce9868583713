"""The engine below EnvPool's environments is the one that they play on, bit for bit."""

import subprocess
import sys

import envpool
import numpy as np
import pytest

from hts_torchrl.envs.football.envpool_engine import EnvPoolEngine
from hts_torchrl.envs.football.game import Game, Pitch, draw_minimap

STEPS = 150
FIRST = {"academy_empty_goal_close", "11_vs_11_kaggle"}
SCENARIOS = [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.thorough)
    for name in EnvPoolEngine.scenarios()
]


def minimap(pitch: Pitch) -> np.ndarray:
    planes = np.empty((4, 72, 96), np.uint8)
    draw_minimap(pitch, planes)
    return planes.transpose(1, 2, 0)


def begin(game: Game, info: dict) -> None:
    game.reset(episode=int(info["episode_number"][0]), seed=int(info["engine_seed"][0]))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_game_is_that_of_envpools_own_environment(scenario):
    theirs = envpool.make_gymnasium(f"gfootball/{scenario}-v1", num_envs=1, seed=3)
    game = Game(EnvPoolEngine(scenario), scenario)
    observation, info = theirs.reset()
    begin(game, info)
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        assert np.array_equal(minimap(game.pitch), observation[0])
        action = int(random.choice([5, 5, 4, 6, 12, random.integers(19)]))
        observation, score, terminated, truncated, info = theirs.step(np.array([action]))
        assert game.step(action) == score[0]
        assert (game.terminated, game.truncated) == (terminated[0], truncated[0])
        assert game.pitch.goals == tuple(info["score"][0])
        assert game.pitch.owner_team == info["ball_owned_team"][0]
        if game.terminated or game.truncated:
            assert np.array_equal(minimap(game.pitch), observation[0])
            observation, _, _, _, info = theirs.step(np.array([0]))  # which resets
            begin(game, info)
    game.close()


def positions(engine: EnvPoolEngine, seed: int = 7, steps: int = 40) -> list[Pitch]:
    engine.reset(episode=1, seed=seed)
    seen = []
    for _ in range(steps):
        engine.act(5)
        engine.step()
        seen.append(engine.pitch())
    return seen


def test_an_engine_that_was_given_back_plays_on_as_a_new_one():
    first = EnvPoolEngine("academy_3_vs_1_with_keeper")
    native, seen = first._engine, positions(first)
    first.close()
    other = EnvPoolEngine("academy_corner")
    assert other._engine is native
    positions(other, seed=8)
    other.close()
    again = EnvPoolEngine("academy_3_vs_1_with_keeper")
    assert again._engine is native
    assert positions(again) == seen
    again.close()


def test_an_engine_may_be_given_back_twice():
    engine = EnvPoolEngine("academy_corner")
    engine.close()
    engine.close()
    two = [EnvPoolEngine("academy_corner") for _ in range(2)]
    assert two[0]._engine is not two[1]._engine
    for engine in two:
        engine.close()


def test_another_seed_is_another_game():
    engine = EnvPoolEngine("academy_3_vs_1_with_keeper")
    assert positions(engine, seed=7) != positions(engine, seed=8)
    engine.close()


_HOLDS_ON = """
import gc, weakref

class Local: pass

def importing():
    local = Local()
    import hts_torchrl.envs.football.envpool_engine
    return weakref.ref(local)

reference = importing()
gc.collect()
assert reference() is None
"""


def test_whoever_imports_it_first_is_not_held_on_to():
    subprocess.run([sys.executable, "-c", _HOLDS_ON], check=True, timeout=50)
