import numpy as np
import pytest
from gymnasium import spaces

from hts_torchrl.envs.group import SeededGroup
from hts_torchrl.envs.make_group import env_spec_of
from hts_torchrl.envs.pettingzoo import PettingZooEnvs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.evaluation import image_of
from tests.fakes import Duel

DUELS = PettingZooEnvs("tests.fakes:Duel")
SEEDS = [100, 101, 200, 201]


def duels(**kwargs):
    group = PettingZooEnvs("tests.fakes:Duel", kwargs).group(range(4))
    group.reset(SEEDS)
    return group


class TestRows:
    def test_each_agent_is_an_environment_and_each_game_has_the_seed_of_its_first(self):
        observation = DUELS.group(range(4)).reset(SEEDS)["observation"]
        assert observation[:, [0, 4]].tolist() == [[0, 100], [1, 100], [0, 200], [1, 200]]

    def test_each_agent_gets_its_own_action_and_reward_and_sees_its_own_view(self):
        """The view has the action of the agent before, in the same game."""
        t = duels().step(np.array([3, 2, 1, 0]))
        assert t.reward.tolist() == [3.125, 2.125, 1.125, 0.125]
        assert t.score.tolist() == t.reward.tolist()
        assert t.observation["observation"][:, 3].tolist() == [2, 3, 0, 1]

    def test_an_end_is_told_to_each_agent_in_its_own_way(self):
        group = duels()
        steps = [group.step(np.zeros(4, int)) for _ in range(5)]
        ends = [(t.terminated.tolist(), t.truncated.tolist()) for t in steps]
        none, first, second = [False] * 4, [True, False] * 2, [False, True] * 2
        assert ends == [(none, none)] * 2 + [(first, second), (none, none), (first, second)]
        assert [t.episode_end.all() for t in steps] == [False, False, True, False, True]

    def test_the_last_observation_is_kept_and_the_first_of_the_next_game_is_acted_on(self):
        group = duels(lengths=(2,))
        group.step(np.array([3, 2, 1, 0]))
        t = group.step(np.array([3, 2, 1, 0]))
        last, first = t.observation["observation"], t.next_observation["observation"]
        assert last.tolist() == [
            [0, 0, 2, 2, 100], [1, 0, 2, 3, 100], [0, 0, 2, 0, 200], [1, 0, 2, 1, 200],
        ]  # fmt: skip
        assert first[:, 1:4].tolist() == [[1, 0, -1]] * 4

    def test_games_that_end_apart_do_not_disturb_each_other(self):
        group = duels()
        for _ in range(2):
            group.step(np.zeros(4, int))
        group.restart([2, 3], [300, 301])
        t = group.step(np.zeros(4, int))
        assert t.episode_end.tolist() == [True, True, False, False]
        assert t.observation["observation"][:, 2].tolist() == [3, 3, 1, 1]
        assert t.next_observation["observation"][:, 2].tolist() == [0, 0, 1, 1]


class TestSeeds:
    def test_a_game_is_begun_anew_by_its_first_agents_seed(self):
        group = duels()
        assert isinstance(group, SeededGroup)
        group.step(np.zeros(4, int))
        observation = group.restart([2, 3], [300, 301])["observation"]
        assert observation[:, [2, 4]].tolist() == [[1, 100], [1, 100], [0, 300], [0, 300]]

    def test_all_agents_are_given_a_seed_and_the_first_ones_is_used(self):
        group, asked = duels(), []

        def next_seed(row):
            asked.append(row)
            return 500 + row

        group.next_seed = next_seed
        for _ in range(3):
            t = group.step(np.zeros(4, int))
        assert asked == [0, 1, 2, 3]
        assert t.next_observation["observation"][:, 4].tolist() == [500, 500, 502, 502]

    @pytest.mark.parametrize("count", [1, 3])
    def test_half_a_game_is_described_but_not_played(self, count):
        group = DUELS.group(range(count))
        assert group.spec == env_spec_of(DUELS)
        with pytest.raises(ConfigurationError, match=rf"2 agents .* {count} env.* multiples of 2"):
            group.reset(range(count))


class TestRefusals:
    def test_an_agent_that_leaves_early_is_named_with_the_remedy(self):
        group = duels(lengths=(5,), leaves=1)
        named = r"environments \[0, 1\] .*'player_0' left the game before 'player_1'.*black_death"
        with pytest.raises(ConfigurationError, match=named):
            group.step(np.zeros(4, int))

    def test_an_agent_that_comes_late_is_named(self):
        class Late(Duel):
            def reset(self, seed=None, options=None):
                observations, infos = super().reset(seed, options)
                return {"player_0": observations["player_0"]}, infos

        with pytest.raises(ConfigurationError, match=r"reset\(\) of .*'player_1' observes nothing"):
            PettingZooEnvs(Late).group([0, 1]).reset([1, 2])

    def test_an_agent_that_nobody_acts_for_is_named(self):
        class Guest(Duel):
            def _observations(self):
                observations = super()._observations()
                return observations | {"guest": observations["player_0"]}

        with pytest.raises(ConfigurationError, match=r"reset\(\) of .*'guest' .*possible_agents"):
            PettingZooEnvs(Guest).group([0, 1]).reset([1, 2])

    def test_agents_that_act_differently_are_named(self):
        class Unlike(Duel):
            def action_space(self, agent):
                return spaces.Discrete(3 if agent == "player_1" else 4)

        with pytest.raises(ConfigurationError, match=r"'player_1' has .*'player_0' has .*pad_act"):
            PettingZooEnvs(Unlike).group([0, 1])

    def test_a_game_unlike_the_first_is_named(self):
        class Unlike(Duel):
            def action_space(self, _):
                return spaces.Discrete(3)

        games = iter([Duel(), Unlike()])
        with pytest.raises(ConfigurationError, match=r"environment 2 has .*environment 0 has"):
            PettingZooEnvs(lambda: next(games)).group(range(4))

    def test_a_function_that_returns_the_same_game_is_refused(self):
        game = Duel()
        with pytest.raises(ConfigurationError, match="environments 0 and 2 are the same Duel"):
            PettingZooEnvs(lambda: game).group([0, 1, 2, 3])

    def test_an_observation_that_is_not_declared_is_refused(self):
        class Wide(Duel):
            def _observations(self):
                return {name: np.zeros(6, np.float32) for name in self.agents}

        with pytest.raises(ConfigurationError, match=r"reset\(\) of .*float32 \[6\]"):
            PettingZooEnvs(Wide).group([0, 1]).reset([1, 2])

    @pytest.mark.parametrize(
        "name", ["no_such_module", "tests.fakes", "tests.fakes:NoGame", "tests.fakes:SEED_RANGE"]
    )
    def test_a_game_that_is_not_there_is_refused(self, name):
        with pytest.raises(ConfigurationError, match=f"game '{name}'"):
            PettingZooEnvs(name).group([0])

    def test_a_game_without_agents_is_refused(self):
        def make():
            game = Duel()
            game.possible_agents = []
            return game

        with pytest.raises(ConfigurationError, match=r"possible_agents=\[\]; one agent or more"):
            PettingZooEnvs(make).group(range(2))

    def test_a_game_in_which_agents_take_turns_is_refused(self, tmp_path, monkeypatch):
        tmp_path.joinpath("turns.py").write_text("def env(): ...\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigurationError, match="game 'turns': its agents take turns"):
            PettingZooEnvs("turns").group([0])


def test_the_first_game_is_filmed_and_all_are_closed():
    group = DUELS.group([0], render=True)
    group.reset([1, 2])
    group.step(np.zeros(2, int))
    assert group.render().tolist() == np.full((4, 6, 3), 1).tolist()
    group.close()
    assert [game.closed for game in group.envs] == [True]


def test_a_game_that_draws_no_pictures_says_so():
    group = DUELS.group([0], render=True)
    group.adapters[0].env = object()
    with pytest.raises(ConfigurationError, match=r"no image: .* has no attribute 'render'"):
        image_of(group)


def test_a_game_of_pettingzoo_is_played():
    rps = pytest.importorskip("pettingzoo.classic.rps_v2", reason="hts-torchrl[pettingzoo]")
    group = PettingZooEnvs("pettingzoo.classic.rps_v2", {"max_cycles": 3}).group([0, 1])
    assert (group.num_envs, group.spec.action.sizes) == (2, (3,))
    game = rps.parallel_env(max_cycles=3)
    first, _ = game.reset(seed=1)
    assert group.reset([1, 2])["observation"].tolist() == [int(each) for each in first.values()]
    plan = np.random.default_rng(0).integers(0, 3, (9, 2))
    ends = 0
    for actions in plan:
        t = group.step(actions)
        seen, rewards, _, truncated, _ = game.step(dict(zip(game.agents, actions, strict=True)))
        assert t.observation["observation"].tolist() == [int(each) for each in seen.values()]
        assert t.reward.tolist() == list(rewards.values())
        assert t.truncated.tolist() == list(truncated.values())
        if not game.agents:
            ends += 1
            game.reset()
    assert ends == 3
    group.close()


def test_games_that_are_refused_are_closed():
    """Whatever is raised, as here where the second game is made."""
    games = []

    def make():
        if games:
            raise OSError
        games.append(Duel())
        return games[0]

    with pytest.raises(OSError):  # noqa: PT011 - it says nothing
        PettingZooEnvs(make).group(range(4))
    assert games[0].closed


def test_a_bare_assertion_is_shown_with_its_traceback():
    def broken():
        raise AssertionError

    with pytest.raises(AssertionError) as raised:
        PettingZooEnvs(broken).group(range(2))
    assert raised.traceback[-1].name == "broken"
