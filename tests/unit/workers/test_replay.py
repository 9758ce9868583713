import gymnasium
import numpy as np
import pytest

from hts_torchrl.buffers.journal import Game
from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec
from hts_torchrl.envs.gym import SerialGroup
from hts_torchrl.errors import ReplayError
from hts_torchrl.workers.replay import Replay

SPEC = EnvSpec(
    {"observation": ArraySpec((4,), np.dtype(np.float32))},
    ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,)),
)


def game(env: int, steps: int) -> Game:
    """A CartPole's game of some steps, seeded by its environment, checked at the end."""
    group = cartpoles(1)
    group.reset([env])
    actions = np.arange(steps, dtype=np.uint8) % 2
    played = Game(3, 0, actions[:0])
    for action in actions:
        transition = group.step(np.array([action]))
        played = played.after(
            np.array([action]), transition.reward, [transition.observation["observation"][0]]
        )
    return played


def cartpoles(count: int) -> SerialGroup:
    return SerialGroup([gymnasium.make("CartPole-v1") for _ in range(count)], range(count))


def play_again(games, *, begin=True, by_game=True):
    """Play games again, as executors do."""
    replay, group = Replay(games, range(len(games)), SPEC, by_game=by_game), cartpoles(len(games))
    seen = group.reset(range(len(games)))
    for step in range(replay.longest + 1):
        late = replay.beginning(step)
        if late and begin:
            seen = group.restart(late, late)
        if step < replay.longest:
            transition = group.step(replay.actions(step))
            replay.verify(step, transition)
            seen = transition.next_observation
    return seen["observation"]


def test_games_of_unequal_length_end_together():
    lengths = [5, 0, 7, 3]
    found = play_again([game(env, steps) for env, steps in enumerate(lengths)])
    for env, steps in enumerate(lengths):
        alone = cartpoles(1)
        observation = alone.reset([env])
        for action in range(steps):
            observation = alone.step(np.array([action % 2])).next_observation
        assert np.array_equal(found[env], observation["observation"][0])


def test_a_game_that_is_another_names_environment_game_and_step():
    with pytest.raises(ReplayError, match=r"environment 1 does not replay: its game 3, .* step 1;"):
        play_again([game(0, 5), game(1, 3)], begin=False)


def test_a_game_that_ends_early_does_not_replay():
    played = game(0, 3)
    longer = Game(3, 0, np.zeros(100, np.uint8), played.checks[:0])
    with pytest.raises(ReplayError, match=r"environment 0 .* ended with its step \d+"):
        play_again([longer])


def test_games_may_end_where_the_whole_run_counts_as_one():
    play_again([Game(0, 0, np.zeros(100, np.uint8))], by_game=False)
