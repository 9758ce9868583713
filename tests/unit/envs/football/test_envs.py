import itertools
import pickle
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from hts_torchrl import FootballEnvs
from hts_torchrl.envs.football.envpool_engine import EnvPoolEngine
from hts_torchrl.envs.football.game import ENGINE_ACTIONS
from hts_torchrl.envs.group import SeededGroup
from hts_torchrl.errors import ConfigurationError
from tests.unit.envs.football.test_game import START, Playback
from tests.unit.envs.played import column, played

CLOSE = FootballEnvs("empty_goal_close")
STEPS = 120  # several episodes


def actions(steps: int = STEPS, envs: int = 1, seed: int = 0) -> np.ndarray:
    """Mostly to the right, and shots."""
    random = np.random.default_rng(seed)
    return random.choice([5, 5, 5, 12, 0, 3, 7], (steps, envs))


def play(factory=CLOSE, seeds=(3,), plan=None, first_env: int = 0) -> list[dict]:
    plan = actions(envs=len(seeds)) if plan is None else plan
    return played(factory, plan, seeds, first_env)


@pytest.fixture(scope="module")
def games() -> list[dict]:
    return play()


@pytest.fixture
def short(monkeypatch):
    """Games of 8 steps: the engine's clock shows 0 after the first."""
    make = EnvPoolEngine.__init__

    def init(self, scenario, num_players):
        make(self, scenario, num_players)
        self.max_steps = 7

    monkeypatch.setattr(EnvPoolEngine, "__init__", init)


class TestEnds:
    def test_episodes_end_within_the_step(self, games):
        ends = column(games, "terminated")[:, 0]
        assert ends.sum() >= 3
        assert np.array_equal(column(games, "episode_end")[:, 0], ends)

    def test_what_a_step_leads_to_is_what_to_act_on_next_unless_an_episode_ends(self, games):
        after, following = column(games, "observation"), column(games, "next_observation")
        ends = column(games, "episode_end")[:, 0]
        same = (after == following).all((1, 2, 3, 4))
        assert np.array_equal(same, ~ends)

    def test_the_last_observation_of_an_episode_goes_on_from_the_one_before(self, games):
        for before, record in itertools.pairwise(games):
            moved = record["observation"][:, :-4]
            assert np.array_equal(moved, before["next_observation"][:, 4:])

    def test_the_first_observation_of_an_episode_shows_its_first_minimap_four_times(self, games):
        ends = np.flatnonzero(column(games, "episode_end")[:, 0])
        for place in ends:
            first = games[place + 1]["next_observation"][0]
            assert np.array_equal(first, np.tile(first[:4], (4, 1, 1)))
            ball = np.argwhere(first[2])[0]
            assert ball.tolist() == [36, 84]  # 0.77, where the scenario puts it

    @pytest.mark.usefixtures("short")
    def test_the_clock_truncates(self):
        records = play(plan=np.zeros((20, 1), np.int64))
        truncated = column(records, "truncated")[:, 0]
        assert np.flatnonzero(truncated).tolist() == [7, 15]
        assert not column(records, "terminated").any()
        assert np.array_equal(column(records, "episode_end")[:, 0], truncated)


class TestRewards:
    def test_the_score_is_in_goals(self, games):
        score = column(games, "score")[:, 0]
        assert set(score) == {0.0, 1.0}
        assert column(games, "terminated")[:, 0][score == 1].all()

    def test_an_episode_with_a_goal_is_worth_two_with_checkpoints(self, games):
        ends = np.flatnonzero(column(games, "episode_end")[:, 0])
        scores = np.split(column(games, "score")[:, 0], ends + 1)[:-1]
        rewards = np.split(column(games, "reward")[:, 0], ends + 1)[:-1]
        scored = [
            reward.sum() for score, reward in zip(scores, rewards, strict=True) if score.any()
        ]
        assert scored == pytest.approx([2.0] * len(scored))
        assert any(0 < reward.sum() < 1 for reward in rewards)

    def test_without_checkpoints_the_reward_is_the_score(self, games):
        records = play(FootballEnvs("empty_goal_close", rewards="scoring"))
        assert np.array_equal(column(records, "reward"), column(records, "score"))
        for name in ("score", "observation"):
            assert np.array_equal(column(records, name), column(games, name))

    def test_rewards_are_single_precision(self, games):
        assert {games[1][name].dtype for name in ("reward", "score")} == {np.dtype("float32")}


class TestStreams:
    @pytest.mark.parametrize("scenario", ["empty_goal_close", "3_vs_1_with_keeper"])
    def test_the_same_seed_gives_the_same_stream_grouped_or_not(self, scenario):
        factory = FootballEnvs(scenario)
        seeds, plan = (3, 4, 5), actions(80, envs=3)
        together = play(factory, seeds, plan)
        for row, seed in enumerate(seeds):
            alone = play(factory, (seed,), plan[:, [row]], first_env=row)
            for name in together[1]:
                assert np.array_equal(column(together, name)[:, row], column(alone, name)[:, 0])

    def test_other_seeds_play_otherwise(self):
        plan = np.full((40, 4), 5)
        frames = column(play(FootballEnvs("3_vs_1_with_keeper"), range(4), plan), "observation")
        assert len({frames[:, row].tobytes() for row in range(4)}) == 4

    def test_no_episode_is_like_the_one_before(self):
        """The engine draws its randomness from a seed that is another in each episode."""
        records = play(FootballEnvs("3_vs_1_with_keeper"), plan=np.full((150, 1), 5))
        ends = np.flatnonzero(column(records, "episode_end")[:, 0])
        episodes = np.split(column(records, "observation")[:, 0, -4:], ends + 1)
        assert len(episodes) >= 3
        assert episodes[0].tobytes() != episodes[1].tobytes()


class TestSeededGames:
    """What resuming needs: a game depends on its seed and its actions alone."""

    @pytest.mark.parametrize("scenario", ["3_vs_1_with_keeper", "5_vs_5"])
    def test_a_game_that_is_begun_again_has_the_same_course(self, scenario):
        plan = actions(60)
        alone = FootballEnvs(scenario).group([0])
        first = [alone.reset([9])["observation"][0].copy()]
        later = FootballEnvs(scenario).group([0, 1])
        later.reset([1, 2])
        for row in actions(37, envs=2, seed=5):
            later.step(row)
        again = [later.restart([1], [9])["observation"][1].copy()]
        for row in plan:
            first.append(alone.step(row).observation["observation"][0].copy())
            again.append(later.step(np.array([0, row[0]])).observation["observation"][1].copy())
        assert np.array_equal(first[0], again[0])
        assert np.array_equal(first, again)
        alone.close()
        later.close()

    def test_games_begin_with_the_seeds_that_were_given(self):
        group = CLOSE.group([0, 1])
        assert isinstance(group, SeededGroup)
        group.reset([1, 2])
        group.next_seed = [7, 8].__getitem__
        for row in actions(envs=2):
            transition = group.step(row)
            if transition.episode_end.any():
                break
        ended = int(np.flatnonzero(transition.episode_end)[0])
        other = CLOSE.group([0])
        other.reset([[7, 8][ended]])
        for row in actions(20):
            mine = group.step(np.repeat(row, 2)).observation["observation"][ended]
            assert np.array_equal(mine, other.step(row).observation["observation"][0])
        group.close()
        other.close()

    def test_both_teams_kick_off(self):
        group = FootballEnvs("5_vs_5").group(range(8))
        first = group.reset(range(8))["observation"]
        assert len({frame.tobytes() for frame in first[:, -4:-2]}) > 1
        group.close()


class TestSettings:
    def test_observations_are_four_minimaps_channels_first(self):
        observation = CLOSE.group([0]).spec.observations["observation"]
        assert (observation.shape, observation.dtype) == ((16, 72, 96), np.uint8)

    def test_the_number_of_minimaps_may_be_chosen(self):
        group = FootballEnvs("empty_goal_close", frame_stack=1).group([0])
        assert group.reset([0])["observation"].shape == (1, 4, 72, 96)
        group.step(np.array([5]))
        group.close()

    def test_there_are_nineteen_actions(self):
        assert CLOSE.group([0]).spec.action.sizes == (len(ENGINE_ACTIONS),) == (19,)

    @pytest.mark.parametrize(
        ("name", "scenario"),
        [
            ("academy_corner", "academy_corner"),
            ("corner", "academy_corner"),
            ("Empty goal close", "academy_empty_goal_close"),
            ("3_vs_1", "academy_3_vs_1_with_keeper"),
            ("RSK", "academy_run_to_score_with_keeper"),
            ("PSK", "academy_pass_and_shoot_with_keeper"),
            ("RPSK", "academy_run_pass_and_shoot_with_keeper"),
            ("lazy", "academy_single_goal_versus_lazy"),
            ("11_vs_11_easy", "11_vs_11_easy_stochastic"),
            ("5_vs_5", "5_vs_5"),
        ],
    )
    def test_scenarios_are_known_by_the_names_of_the_engine_and_of_the_paper(self, name, scenario):
        (adapter,) = FootballEnvs(name).group([0]).adapters
        assert adapter.scenario == scenario

    def test_a_mistyped_scenario_is_refused_with_what_is_near(self):
        with pytest.raises(ConfigurationError, match=r"'emty_goal'; near to it: .*empty_goal"):
            FootballEnvs("emty_goal").group([0])

    def test_an_unknown_scenario_is_refused_with_all_there_are(self):
        with pytest.raises(ConfigurationError, match=r"'zzzz'; there are: .*academy_corner"):
            FootballEnvs("zzzz").group([0])

    def test_other_rewards_are_refused(self):
        with pytest.raises(ConfigurationError, match="'goals'; scoring or scoring,checkpoints is"):
            FootballEnvs("corner", rewards="goals")

    def test_a_stack_of_no_frames_is_refused(self):
        with pytest.raises(ConfigurationError, match="frame_stack=0; 1 or more"):
            FootballEnvs("corner", frame_stack=0)

    def test_a_number_of_another_type_is_refused(self):
        with pytest.raises(ConfigurationError, match="frame_stack='4'; a whole number is needed"):
            FootballEnvs("corner", frame_stack="4")

    def test_another_engine_is_refused(self):
        with pytest.raises(ConfigurationError, match="'unity'; envpool or gfootball is needed"):
            FootballEnvs("corner", engine="unity")

    def test_a_team_of_nobody_is_refused(self):
        with pytest.raises(ConfigurationError, match="num_players=0; 1 or more"):
            FootballEnvs("corner", num_players=0)

    def test_envpool_controls_one_player(self):
        with pytest.raises(ConfigurationError, match="engine='envpool' controls at most 1 in acad"):
            FootballEnvs("corner", num_players=2).group([0])

    def test_without_gfootball_the_script_that_installs_it_is_named(self, monkeypatch):
        monkeypatch.delitem(
            sys.modules, "hts_torchrl.envs.football.gfootball_engine", raising=False
        )
        monkeypatch.delattr("hts_torchrl.envs.football.gfootball_engine", raising=False)
        monkeypatch.setitem(sys.modules, "gfootball_engine", None)
        with pytest.raises(
            ConfigurationError, match=r"needs gfootball .*: bash scripts/install_gf"
        ):
            FootballEnvs("corner", engine="gfootball").group([0])

    @pytest.mark.parametrize("engine", ["envpool", "gfootball"])
    def test_a_fork_server_imports_the_engine(self, engine):
        (module,) = FootballEnvs("corner", engine=engine).preload
        assert module.endswith(f".{engine}_engine")
        assert find_spec(module) is not None  # a fork server says nothing of what it cannot import

    @pytest.mark.parametrize("missing", ["envpool", "envpool.gfootball.gfootball_envpool"])
    def test_without_envpool_the_extra_to_install_is_named(self, monkeypatch, missing):
        for module in ("compat.envpool", "envs.football.envpool_engine"):
            monkeypatch.delitem(sys.modules, f"hts_torchrl.{module}", raising=False)
        monkeypatch.delattr("hts_torchrl.envs.football.envpool_engine", raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ConfigurationError, match=r"pip install 'hts-torchrl\[football\]'"):
            CLOSE.group([0])

    def test_a_factory_travels_to_other_processes(self):
        assert pickle.loads(pickle.dumps(CLOSE)) == CLOSE


class TestSeveralPlayers:
    """On an engine that plays back; test_football_gfootball.py has them on the true one."""

    @pytest.fixture
    def group(self, monkeypatch):
        class Team(Playback):
            scenarios = EnvPoolEngine.scenarios

            def __init__(self, scenario, num_players):  # noqa: ARG002
                players = list(range(num_players))
                super().__init__()
                self.pitches = [replace(START, ball=(0.9, 0.0), active=players)] * 3

            @staticmethod
            def most_players(scenario):  # noqa: ARG004
                return 2

            def close(self):
                pass

        monkeypatch.setattr("hts_torchrl.envs.football.envs._engine", lambda _: Team)
        return FootballEnvs("5_vs_5", num_players=2).group([0, 1])

    def test_each_sees_itself_as_the_active_player(self, group):
        assert group.spec.observations["observation"].shape == (2, 16, 72, 96)
        first = group.reset([0, 1])["observation"]
        assert first.shape == (2, 2, 16, 72, 96)
        then = group.step(np.zeros((2, 2), np.int64)).observation["observation"]
        for seen in (first, then):
            places = [np.argwhere(plane)[0].tolist() for plane in seen[0, :, -1]]
            assert places == [[36, 0], [36, 84]]
        assert np.array_equal(first[:, 0, :3], first[:, 1, :3])

    def test_each_acts(self, group):
        assert (group.spec.action.kind, group.spec.action.sizes) == ("multi_discrete", (19, 19))
        group.reset([0, 1])
        group.step(np.array([[5, 12], [3, 0]]))
        pressed = [game._engine.pressed for game in group.envs]
        assert pressed == [[5, (12, 1)], [3, (0, 1)]]

    def test_the_reward_is_the_mean_over_the_players(self, group):
        """One of two has the ball, within all ten circles."""
        group.reset([0, 1])
        transition = group.step(np.zeros((2, 2), np.int64))
        assert transition.reward == pytest.approx([0.5, 0.5])
        assert transition.score.tolist() == [0.0, 0.0]

    def test_the_picture_shows_all_of_them(self, group):
        group.reset([0, 1])
        picture = group.render()[::8, ::8]
        assert (picture == (255, 230, 60)).all(-1).sum() == 2


class TestPictures:
    def test_a_picture_is_the_minimap_in_colour(self):
        group = CLOSE.group([0], render=True)
        group.reset([3])
        before = group.render()
        assert (before.shape, before.dtype) == ((576, 768, 3), np.uint8)
        for _ in range(5):
            group.step(np.array([5]))
        assert not np.array_equal(group.render(), before)
        group.close()

    def test_there_is_none_before_the_reset(self):
        with pytest.raises(ConfigurationError, match="reset"):
            CLOSE.group([0], render=True).render()
