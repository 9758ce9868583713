import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from hts_torchrl.envs.atari import AtariEnvs
from hts_torchrl.errors import ConfigurationError
from tests.unit.envs.played import column, played

STEPS = 340  # more than a random game of Breakout


def actions(steps: int = STEPS, envs: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, (steps, envs))


def play(factory: AtariEnvs, seeds=(3,), plan=None, first_env: int = 0) -> list[dict]:
    plan = actions(envs=len(seeds)) if plan is None else plan
    return played(factory, plan, seeds, first_env)


@pytest.fixture(scope="module")
def games() -> list[dict]:
    """Whole games, lives counted as episodes."""
    return play(AtariEnvs("breakout"))


@pytest.fixture(scope="module")
def whole_games() -> list[dict]:
    """The same games, lives not counted."""
    return play(AtariEnvs("breakout", life_loss=False))


class TestEnds:
    def test_a_game_of_breakout_is_five_lives(self, games):
        terminated, ends = column(games, "terminated")[:, 0], column(games, "episode_end")[:, 0]
        games_over = np.flatnonzero(ends)
        assert len(games_over) >= 1
        assert terminated[: games_over[0] + 1].sum() == 5

    def test_a_lost_life_does_not_end_the_game(self, games, whole_games):
        assert np.array_equal(column(games, "episode_end"), column(whole_games, "episode_end"))

    def test_without_life_loss_only_the_end_of_a_game_terminates(self, whole_games):
        ends = column(whole_games, "episode_end")
        assert np.array_equal(column(whole_games, "terminated"), ends)

    def test_a_lost_life_leaves_frames_and_scores_alone(self, games, whole_games):
        for name in ("observation", "next_observation", "score"):
            assert np.array_equal(column(games, name), column(whole_games, name))

    def test_after_a_lost_life_the_game_goes_on_from_what_was_seen(self, games):
        lost = column(games, "terminated")[:, 0] & ~column(games, "episode_end")[:, 0]
        assert np.array_equal(
            column(games, "observation")[lost], column(games, "next_observation")[lost]
        )

    def test_the_last_observation_of_a_game_is_what_a_later_reset_would_have_shown(self, games):
        """With autoreset in the following step, the last observation comes as it is."""
        reference = AtariEnvs("breakout", life_loss=False).vector_env("breakout", 1)
        later = type(reference)(
            "breakout", 1, num_threads=1, autoreset_mode=AutoresetMode.NEXT_STEP,
            reward_clipping=False,
        )  # fmt: skip
        reference.close()
        later.reset(seed=np.array([3]))
        for row, record in zip(actions(), games[1:], strict=True):
            observation, _, terminated, _, _ = later.step(row)
            assert np.array_equal(observation, record["observation"])
            if terminated[0]:
                observation = later.step(row)[0]  # which resets
            assert np.array_equal(observation, record["next_observation"])
        later.close()

    @pytest.mark.parametrize("max_frames", [100, 12])
    def test_a_game_cut_short_is_truncated_and_ends(self, max_frames):
        records = play(AtariEnvs("breakout", max_frames=max_frames), plan=actions(60))
        truncated = column(records, "truncated")
        assert truncated.any()
        assert not column(records, "terminated")[truncated].any()
        assert column(records, "episode_end")[truncated].all()

    def test_a_game_cut_short_keeps_its_last_observation(self):
        """The last of 4 frames seen stays what it was, and the new game's is another."""
        records = play(AtariEnvs("breakout", max_frames=100), plan=actions(60))
        place = int(np.flatnonzero(column(records, "truncated"))[0]) + 1
        before, record = records[place - 1], records[place]
        assert np.array_equal(record["observation"][0, :3], before["next_observation"][0, 1:])
        assert not np.array_equal(record["next_observation"], record["observation"])


class TestRewards:
    def test_the_agent_learns_from_the_sign_and_the_score_is_the_games_own(self):
        records = play(AtariEnvs("ms_pacman"), plan=actions(130))
        score = column(records, "score")
        assert score.max() >= 10
        assert np.array_equal(column(records, "reward"), np.sign(score))

    def test_rewards_may_be_left_unclipped(self):
        records = play(AtariEnvs("ms_pacman", clip_reward=False), plan=actions(130))
        assert column(records, "reward").max() >= 10
        assert np.array_equal(column(records, "reward"), column(records, "score"))

    def test_rewards_are_single_precision(self, games):
        assert {games[1][name].dtype for name in ("reward", "score")} == {np.dtype("float32")}


class TestStreams:
    def test_the_same_seed_gives_the_same_stream_grouped_or_not(self):
        seeds, plan = (3, 4, 5), actions(150, envs=3)
        together = play(AtariEnvs("breakout"), seeds, plan)
        for row, seed in enumerate(seeds):
            alone = play(AtariEnvs("breakout"), (seed,), plan[:, [row]], first_env=row)
            for name in ("observation", "next_observation", "score", "terminated"):
                assert np.array_equal(column(together, name)[:, row], column(alone, name)[:, 0])

    def test_other_seeds_start_differently(self):
        """By the number of no-ops, which decides where the ball goes."""
        plan = np.zeros((12, 6), np.int64)
        frames = column(play(AtariEnvs("breakout"), range(6), plan), "observation")
        assert len({frames[:, row].tobytes() for row in range(6)}) > 3

    def test_sticky_actions_are_repeated_whatever_is_asked_for(self):
        streams = [
            play(AtariEnvs("breakout", sticky_actions=1.0), plan=actions(40, seed=seed))
            for seed in (0, 1)
        ]
        assert np.array_equal(*(column(records, "observation") for records in streams))

    def test_without_sticky_actions_what_is_asked_for_happens(self):
        streams = [play(AtariEnvs("breakout"), plan=actions(40, seed=seed)) for seed in (0, 1)]
        assert not np.array_equal(*(column(records, "observation") for records in streams))


class TestSpec:
    def test_observations_are_four_grey_frames(self):
        group = AtariEnvs("pong").group([0])
        observation = group.spec.observations["observation"]
        assert (observation.shape, observation.dtype) == ((4, 84, 84), np.uint8)
        group.close()

    def test_the_number_of_frames_may_be_chosen(self):
        group = AtariEnvs("pong", frame_stack=2).group([0])
        assert group.reset([0])["observation"].shape == (1, 2, 84, 84)
        group.close()

    @pytest.mark.parametrize(("full", "size"), [(False, 4), (True, 18)])
    def test_the_action_set_is_the_games_or_all_eighteen(self, full, size):
        group = AtariEnvs("breakout", full_action_set=full).group([0])
        assert group.spec.action.sizes == (size,)
        group.close()

    @pytest.mark.parametrize("name", ["ms_pacman", "MsPacman", "ms-pacman"])
    def test_games_are_known_by_either_spelling(self, name):
        group = AtariEnvs(name).group([0])
        assert group.num_envs == 1
        group.close()

    def test_a_mistyped_game_is_refused_with_what_is_near(self):
        with pytest.raises(ConfigurationError, match="'brekout'; near to it: breakout"):
            AtariEnvs("brekout").group([0])

    @pytest.mark.parametrize("name", ["ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-ram-v4"])
    def test_gymnasiums_id_is_refused_with_the_game(self, name):
        with pytest.raises(ConfigurationError, match=f"'{name}'; near to it: pong$"):
            AtariEnvs(name).group([0])

    def test_an_unknown_game_is_refused(self):
        with pytest.raises(ConfigurationError, match="no game 'xyzzyxyzzy'"):
            AtariEnvs("xyzzyxyzzy").group([0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sticky_actions": 1.5}, "sticky_actions=1.5; 0 to 1"),
        ({"sticky_actions": float("nan")}, "sticky_actions=nan; 0 to 1"),
        ({"frame_skip": 0}, "frame_skip=0; 1 or more"),
        ({"frame_stack": -1}, "frame_stack=-1; 1 or more"),
        ({"max_frames": 0}, "max_frames=0; 1 or more"),
        ({"frame_skip": "4"}, "frame_skip='4'; a whole number"),
        ({"life_loss": "false"}, "life_loss='false'; True or False"),
    ],
)
def test_numbers_that_no_emulator_has_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        AtariEnvs("pong", **settings)


class TestPictures:
    def test_a_picture_is_the_screen_in_colour(self):
        group = AtariEnvs("breakout").group([0], render=True)
        group.reset([3])
        picture = group.render()
        assert (picture.shape, picture.dtype) == ((210, 160, 3), np.uint8)
        group.close()

    def test_pictures_follow_the_first_environment_through_the_end_of_a_game(self):
        group = AtariEnvs("breakout", max_frames=150).group([0, 1], render=True)
        group.reset([3, 4])
        brightness = []
        for row in actions(60, envs=2):
            transition = group.step(row)
            grey = group.render() @ np.array([0.299, 0.587, 0.114])
            seen = transition.next_observation["observation"][0, -1]
            brightness.append((grey.mean(), seen.mean()))
        theirs, ours = np.array(brightness).T
        assert np.abs(theirs - ours).max() < 1.0
        group.close()

    def test_pictures_follow_a_game_that_is_begun_anew(self):
        envs = AtariEnvs("breakout", sticky_actions=0.25)
        group, fresh = (envs.group([0, 1], render=True) for _ in range(2))
        group.reset([3, 4])
        for row in actions(30, envs=2):
            group.step(row)
        group.restart([1, 0], [6, 5])
        fresh.reset([5, 6])
        for row in actions(30, envs=2):
            assert np.array_equal(group.render(), fresh.render())
            for each in (group, fresh):
                each.step(row)
        for each in (group, fresh):
            each.close()

    def test_a_group_without_pictures_says_how_to_get_them(self):
        group = AtariEnvs("breakout").group([0])
        group.reset([3])
        with pytest.raises(ConfigurationError, match="render=True"):
            group.render()
        group.close()


class TestSeeds:
    """A game that is begun with a seed depends on it and on the actions alone."""

    envs = AtariEnvs("breakout", sticky_actions=0.25)
    random = np.random.default_rng(0)
    actions = random.integers(0, 4, (80, 3))

    def played(self, group, first, last, row=slice(None)):
        steps = [group.step(actions[row]) for actions in self.actions[first:last]]
        return np.stack([step.next_observation["observation"] for step in steps])

    def test_a_game_begun_within_a_run_is_that_of_a_fresh_environment(self):
        group, fresh = self.envs.group(range(3)), self.envs.group([1])
        group.reset([1, 2, 3])
        self.played(group, 0, 30)
        seen = group.restart([1], [77])["observation"][1]
        assert np.array_equal(seen, fresh.reset([77])["observation"][0])
        mine, other = self.played(group, 30, 80), self.played(fresh, 30, 80, [1])
        assert np.array_equal(mine[:, 1], other[:, 0])

    def test_the_other_environments_play_on(self):
        group, undisturbed = self.envs.group(range(3)), self.envs.group(range(3))
        for each in (group, undisturbed):
            each.reset([1, 2, 3])
            self.played(each, 0, 30)
        group.restart([1], [77])
        mine, other = self.played(group, 30, 80), self.played(undisturbed, 30, 80)
        assert np.array_equal(mine[:, [0, 2]], other[:, [0, 2]])

    def test_seeds_belong_to_their_rows_in_any_order(self):
        group = self.envs.group(range(3))
        group.reset([1, 2, 3])
        seen = group.restart([2, 0], [8, 9])["observation"]
        alone = [self.envs.group([0]).reset([seed])["observation"][0] for seed in (9, 8)]
        assert np.array_equal(seen[[0, 2]], np.stack(alone))

    def test_where_a_game_ends_its_next_seed_is_asked_for(self):
        envs = AtariEnvs("breakout", max_frames=100)
        group, asked = envs.group(range(2)), []
        group.reset([1, 2])
        group.next_seed = lambda row: asked.append(row) or 7
        while not asked:
            transition = group.step(np.zeros(2, np.int64))
        expected = envs.group([0]).reset([7])["observation"][0]
        assert np.array_equal(transition.next_observation["observation"][asked[0]], expected)


def test_threads_step_the_same_games():
    plan = actions(60, envs=4)
    one, two = (play(AtariEnvs("breakout", num_threads=n), (3, 4, 5, 6), plan) for n in (1, 2))
    for before, after in zip(one, two, strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
