import struct
import zlib

import gymnasium
import numpy as np
import pytest

from hts_torchrl.envs.adapter import SerialGroup
from hts_torchrl.envs.group import Transition
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ReplayError
from hts_torchrl.shared.action_log import Segment, checksum
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from hts_torchrl.workers.replay import Replay

SPEC = EnvSpec(
    {"observation": ArraySpec((4,), np.dtype(np.float32))},
    ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,)),
)


def game(env: int, steps: int) -> Segment:
    """A CartPole's game of some steps, seeded by its environment, checked at each of them."""
    group = cartpoles(1)
    group.reset([env])
    actions, checks, known = np.arange(steps, dtype=np.uint8) % 2, [], 0
    for step, action in enumerate(actions, 1):
        transition = group.step(np.array([action]))
        known = checksum(known, [transition.reward, transition.observation["observation"][0]])
        checks.append((step, known))
    return Segment(3, 0, actions, np.array(checks, np.int64).reshape(-1, 2))


def cartpoles(count: int) -> SerialGroup:
    return make_group(lambda: gymnasium.make("CartPole-v1"), range(count))


def play_again(games, *, begin=True):
    """Play games again, as executors do."""
    replay, group = Replay(games, range(len(games)), SPEC), cartpoles(len(games))
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


def test_a_game_that_is_another_names_environment_seed_and_step():
    message = r"environment 1 does not replay: .* seed number 3 is another by step 1,"
    with pytest.raises(ReplayError, match=message):
        play_again([game(0, 5), game(1, 3)], begin=False)


def test_games_may_end_within_a_segment():
    play_again([Segment(0, 0, np.zeros(100, np.uint8), np.empty((0, 2), np.int64))])


def verify_one_step(reward: float, last: float) -> None:
    """Compare a step with one whose reward was 0.5 and whose observation was 0, 1, 2, 3."""
    known = zlib.crc32(struct.pack("<5f", 0.5, 0, 1, 2, 3))
    segment = Segment(0, 0, np.zeros(1, np.uint8), np.array([[1, known]]))
    seen = {"observation": np.array([[0, 1, 2, last]], np.float32)}
    ends, score = np.zeros(1, bool), np.array([7.0])
    transition = Transition(seen, seen, np.array([reward]), score, ends, ends, ends)
    Replay([segment], [0], SPEC).verify(0, transition)


def test_a_step_is_compared_by_its_reward_and_the_last_observation_of_a_round():
    verify_one_step(0.5, 3)
    for reward, last in ((0.25, 3), (0.5, 4)):
        with pytest.raises(ReplayError, match="by step 1,"):
            verify_one_step(reward, last)


def test_an_image_is_compared_in_whatever_order_its_pixels_lie_in_memory():
    """Batches of TorchRL's ``ToTensorImage`` are transposed views."""
    image = ArraySpec((2, 3), np.dtype(np.uint8))
    pixels = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    known = zlib.crc32(struct.pack("<f6B", 0.5, *range(6)))
    segment = Segment(0, 0, np.zeros(1, np.uint8), np.array([[1, known]]))
    seen = {"observation": np.asfortranarray(pixels)}
    ends, number = np.zeros(1, bool), np.array([0.5])
    transition = Transition(seen, seen, number, number, ends, ends, ends)
    Replay([segment], [0], EnvSpec({"observation": image}, SPEC.action)).verify(0, transition)
