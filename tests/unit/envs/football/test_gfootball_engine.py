"""gfootball's engine plays EnvPool's games bit for bit, and by gfootball's own rules.

Where gfootball is not installed (scripts/install_gfootball.sh) all this is skipped.
"""

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from hts_torchrl import FootballEnvs, make_actor_critic
from hts_torchrl.envs.football.envpool_engine import EnvPoolEngine
from hts_torchrl.envs.football.game import Game
from hts_torchrl.errors import ConfigurationError
from tests.unit.envs.football.test_envs import actions, column, play

pytest.importorskip("gfootball_engine", reason="scripts/install_gfootball.sh")
from hts_torchrl.envs.football.gfootball_engine import GFootballEngine

KEEPER = "academy_3_vs_1_with_keeper"
SCENARIOS = GFootballEngine.scenarios()


def test_both_engines_have_the_same_scenarios():
    assert EnvPoolEngine.scenarios() == SCENARIOS


class TestBothEngines:
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_they_tell_the_same_to_the_last_bit(self, scenario):
        """All that is on the pitch: the steps of our rules and all that they read."""
        games = [Game(engine(scenario), scenario) for engine in (EnvPoolEngine, GFootballEngine)]
        random, over = np.random.default_rng(5), True
        for _ in range(100):
            if over:
                start = {
                    "episode": int(random.integers(2)),
                    "seed": int(random.integers(2 * 10**9)),
                }
                for game in games:
                    game.reset(**start)
            action = int(random.choice([5, 5, 4, 6, 12, random.integers(19)]))
            scores = [game.step(action) for game in games]
            assert scores[0] == scores[1]
            assert games[0].pitch == games[1].pitch
            ends = [(game.terminated, game.truncated) for game in games]
            assert ends[0] == ends[1]
            over = any(ends[0])
        for game in games:
            game.close()

    @pytest.mark.parametrize("scenario", ["empty_goal_close", "3_vs_1_with_keeper", "5_vs_5"])
    def test_environments_give_the_same_streams(self, scenario):
        plan = actions(60, envs=3)
        theirs = play(FootballEnvs(scenario), (3, 4, 5), plan)
        ours = play(FootballEnvs(scenario, engine="gfootball"), (3, 4, 5), plan)
        for name in theirs[1]:
            assert np.array_equal(column(theirs, name), column(ours, name)), name


class TestOriginalRules:
    """The benchmark compares with gfootball's own environment, minimap and checkpoints."""

    @pytest.fixture
    def benchmark(self):
        for package in ("gym", "six", "absl", "cv2"):
            pytest.importorskip(package)
        return importlib.import_module("benchmarks.football_engines")

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_one_player(self, benchmark, scenario):
        self.check(benchmark, scenario, 1)

    @pytest.mark.parametrize("scenario", [KEEPER, "academy_corner", "5_vs_5"])
    def test_three_players(self, benchmark, scenario):
        self.check(benchmark, scenario, 3)

    @staticmethod
    def check(benchmark, scenario: str, num_players: int) -> None:
        sides = benchmark.sides_of(scenario, num_players)
        counts = benchmark.compare(sides, 60, 7, num_players)
        for side in sides:
            side.close()
        assert counts.agree, counts


class TestEngines:
    def test_an_engine_that_was_given_back_plays_on_as_a_new_one(self):
        first = GFootballEngine(KEEPER)
        native, seen = first._engine, self.pitches(first)
        first.close()
        first.close()
        other = GFootballEngine("academy_corner", 11)
        assert other._engine is native
        self.pitches(other, seed=8)
        other.close()
        again = GFootballEngine(KEEPER)
        assert again._engine is native
        assert self.pitches(again) == seen
        again.close()

    def test_another_seed_is_another_game(self):
        engine = GFootballEngine(KEEPER)
        assert self.pitches(engine, seed=7) != self.pitches(engine, seed=9)  # both odd
        engine.close()

    @staticmethod
    def pitches(engine: GFootballEngine, seed: int = 7) -> list:
        engine.reset(episode=1, seed=seed)
        seen = []
        for _ in range(40):
            engine.act(5)
            engine.step()
            seen.append(engine.pitch())
        return seen

    def test_neither_gym_nor_opencv_is_imported(self):
        source = (
            "import sys, hts_torchrl.envs.football.gfootball_engine\n"
            "assert not {'gym', 'cv2', 'gfootball'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", source], check=True, timeout=50)

    def test_without_its_scenarios_it_is_not_installed(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "hts_torchrl.envs.football.gfootball_engine")
        monkeypatch.delattr("hts_torchrl.envs.football.gfootball_engine")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ConfigurationError, match=r"bash scripts/install_gfootball\.sh"):
            FootballEnvs("corner", engine="gfootball").group([0])


class TestSeveralPlayers:
    TEAM = FootballEnvs("3_vs_1", engine="gfootball", num_players=3)

    def test_each_sees_itself_as_the_active_player(self):
        group = self.TEAM.group([0, 1])
        assert group.spec.observations["observation"].shape == (3, 16, 72, 96)
        assert (group.spec.action.kind, group.spec.action.sizes) == ("multi_discrete", (19,) * 3)
        first = group.reset([1, 2])["observation"]
        assert first.shape == (2, 3, 16, 72, 96)
        common, active = first.reshape(2, 3, 4, 4, 72, 96)[:, :, 0].transpose(2, 0, 1, 3, 4)[2:]
        assert (common == common[:, :1]).all()  # the ball
        places = {tuple(map(int, np.argwhere(plane)[0])) for plane in active[0]}
        assert len(places) == 3
        group.close()

    def test_each_does_what_it_is_told(self):
        """The same action of the first player, and other actions of the others."""
        group = self.TEAM.group([0, 1])
        group.reset([3, 3])
        for _ in range(12):
            seen = group.step(np.array([[0, 3, 7], [0, 7, 3]])).observation["observation"]
        moved = [[int(np.argwhere(plane)[0][0]) for plane in row[:, -1]] for row in seen]
        assert moved[0] != moved[1]
        assert len({frame.tobytes() for frame in seen[:, 0, -4]}) == 2
        group.close()

    def test_the_reward_is_the_mean_of_the_players_and_the_score_the_teams(self):
        plan = actions(200, envs=3)[:, None]
        records = play(self.TEAM, (3,), plan)
        reward, score = column(records, "reward")[:, 0], column(records, "score")[:, 0]
        assert set(score) <= {-1.0, 0.0, 1.0}
        collected = reward[(score == 0) & (reward != 0)]
        assert len(collected)
        tenths = collected * 3 / 0.1  # one of three players has the ball
        assert tenths == pytest.approx(np.round(tenths), abs=1e-4)

    def test_a_network_takes_each_player_for_a_row(self):
        group = self.TEAM.group([0, 1])
        seen = torch.from_numpy(group.reset([1, 2])["observation"])
        policy = make_actor_critic("nature", group.spec)
        parameters, value = policy.heads({"observation": seen})
        assert (parameters["logits"].shape, value.shape) == ((2, 57), (2, 1))
        assert policy.distribution(parameters).sample().shape == (2, 3)
        group.close()

    def test_no_more_than_the_team_has(self):
        message = (
            "num_players=5; engine='gfootball' controls at most 4 in academy_3_vs_1_with_keeper"
        )
        with pytest.raises(ConfigurationError, match=message):
            FootballEnvs("3_vs_1", engine="gfootball", num_players=5).group([0])
