"""MinAtar's games (Young and Tian, 2019), which its entry point registers."""

from functools import partial

import gymnasium
import numpy as np
import pytest

from hts_torchrl import GymEnvs
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.training.evaluation import image_of

minatar = pytest.importorskip("minatar")

BREAKOUT = GymEnvs("MinAtar/Breakout-v1")


@pytest.mark.parametrize(
    ("game", "channels", "actions"),
    [("Asterix", 4, 5), ("Breakout", 4, 3), ("Freeway", 7, 3), ("Seaquest", 10, 6)],
)
def test_a_game_shows_a_plane_of_cells_for_each_kind_of_thing(game, channels, actions):
    group = GymEnvs(f"MinAtar/{game}-v1").group([0])
    observed = group.spec.observations["observation"]
    assert (observed.shape, observed.dtype) == ((10, 10, channels), np.bool_)
    assert group.spec.action.sizes == (actions,)
    group.close()


def test_it_is_the_game_of_the_package():
    game = minatar.Environment("breakout")
    game.seed(5)
    game.reset()
    group = BREAKOUT.group([0])
    assert np.array_equal(group.reset([5])["observation"][0], game.state())
    ends = 0
    for action in np.random.default_rng(0).integers(0, 3, 200):
        t = group.step(np.array([action]))
        reward, ended = game.act(game.minimal_action_set()[action])
        assert np.array_equal(t.observation["observation"][0], game.state())
        assert (t.reward[0], t.terminated[0]) == (reward, ended)
        if ended:
            ends += 1
            game.reset()
    assert ends > 3
    group.close()


def test_a_game_is_the_same_in_a_group_of_any_size():
    together, alone = BREAKOUT.group([0, 1]), BREAKOUT.group([1])
    together.reset([5, 6])
    alone.reset([6])
    for action in np.random.default_rng(0).integers(0, 3, 100):
        both = together.step(np.array([0, action])).next_observation["observation"]
        single = alone.step(np.array([action])).next_observation["observation"]
        assert np.array_equal(both[[1]], single)
    together.close()
    alone.close()


@pytest.mark.parametrize("by_id", [True, False])
def test_a_seed_decides_whatever_was_played_before(by_id):
    """Half of all actions are those of the step before, which would be that of another game."""
    sticky = GymEnvs("MinAtar/Breakout-v1", {"sticky_action_prob": 0.5})
    used = sticky.group([0])  # which registers it
    if not by_id:
        sticky = partial(gymnasium.make, sticky.id, **sticky.kwargs)
        used = make_group(sticky, [0])
    new = make_group(sticky, [0])
    used.reset([0])
    for seed in range(20):
        for _ in range(5):
            used.step(np.array([2]))
        new.close()
        new = make_group(sticky, [0])
        assert np.array_equal(
            used.restart([0], [seed])["observation"], new.reset([seed])["observation"]
        )
        first = [group.step(np.array([1])).observation["observation"] for group in (used, new)]
        assert np.array_equal(*first)
    used.close()
    new.close()


@pytest.mark.filterwarnings("ignore:.*render")  # Gymnasium's, of floats and no rate
def test_its_small_pictures_are_enlarged():
    group = BREAKOUT.group([0], render=True)
    group.reset([0])
    drawn, picture = group.render(), image_of(group)
    group.close()
    assert drawn.shape == (10, 10, 3)
    assert np.abs(picture[::16, ::16] / 255 - drawn).max() < 1 / 255
