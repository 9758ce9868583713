"""The rules, on an engine that plays back what it is given."""

from dataclasses import replace

import numpy as np
import pytest

from hts_torchrl.envs.football.game import CheckpointRewards, Game, Pitch, draw_minimap

START = Pitch(
    left=[(-1.0, 0.0), (0.75, 0.0)],
    right=[(1.0, 0.0)],
    ball=(0.5, 0.0),
    active=[1],
    owner_team=0,
    owner=1,
    goals=(0, 0),
    mode=0,
    in_play=True,
    clock=0,
)
RIGHT, FREE_KICK = 5, 4


class Playback:
    """Shows the given pitches one after another, and keeps the buttons that were pressed."""

    max_steps = 50

    def __init__(self, *pitches: Pitch) -> None:
        self.pitches, self.place = [START, *pitches], 0
        self.pressed: list[int] = []
        self.resets: list[tuple[int, int]] = []

    def reset(self, *, episode, seed):
        self.place = 0
        self.resets.append((episode, seed))

    def act(self, action, player):
        self.pressed.append(action if player == 0 else (action, player))

    def step(self):
        self.place += 1

    def pitch(self):
        return self.pitches[self.place]


def ends(*pitches: Pitch, scenario: str = "academy_empty_goal") -> list[tuple[bool, bool]]:
    """What each step tells about the end."""
    game = Game(Playback(*pitches), scenario)
    game.reset(episode=1, seed=0)
    told = []
    for _ in pitches:
        game.step(RIGHT)
        told.append((game.terminated, game.truncated))
    return told


ON, OVER, TIME = (False, False), (True, False), (False, True)
OURS, THEIRS = replace(START, goals=(1, 0)), replace(START, goals=(0, 1))
OUT = replace(START, mode=FREE_KICK)
LOST, LOOSE = replace(START, owner_team=1, owner=0), replace(START, owner_team=-1, owner=-1)
LATE = replace(START, clock=50)


class TestEnds:
    @pytest.mark.parametrize("goal", [OURS, THEIRS])
    def test_a_goal_of_either_side_ends_an_academy_scenario(self, goal):
        assert ends(START, goal) == [ON, OVER]

    def test_a_ball_that_goes_out_ends_an_academy_scenario(self):
        assert ends(START, OUT) == [ON, OVER]

    def test_a_ball_that_was_out_from_the_beginning_does_not(self):
        assert ends(OUT, OUT) == [ON, ON]

    def test_a_ball_that_they_win_ends_an_academy_scenario(self):
        assert ends(START, LOOSE, LOST) == [ON, ON, OVER]

    def test_whose_ball_it_was_before_the_first_step_does_not_count(self):
        assert ends(LOST, LOST) == [ON, ON]

    def test_a_corner_goes_on_when_they_win_the_ball(self):
        assert ends(START, LOST, scenario="academy_corner") == [ON, ON]

    def test_a_match_is_ended_by_the_clock_alone(self):
        pitches = (START, OURS, OUT, LOST, LATE)
        assert ends(*pitches, scenario="5_vs_5") == [ON, ON, ON, ON, TIME]

    def test_a_goal_in_the_last_step_terminates_and_does_not_truncate(self):
        assert ends(START, replace(OURS, clock=50)) == [ON, OVER]


class TestSteps:
    def test_the_score_is_the_change_of_the_lead(self):
        both = replace(START, goals=(1, 1))
        game = Game(Playback(OURS, OURS, both), "5_vs_5")
        game.reset(episode=1, seed=0)
        assert [game.step(RIGHT) for _ in range(3)] == [1.0, 0.0, -1.0]

    def test_steps_in_which_actions_do_not_count_are_passed_over(self):
        paused = replace(START, in_play=False)
        engine = Playback(paused, paused, OURS)
        game = Game(engine, "5_vs_5")
        game.reset(episode=1, seed=0)
        assert game.step(RIGHT) == 1.0
        assert engine.pressed == [RIGHT]

    def test_actions_are_those_of_the_engine(self):
        engine = Playback(*[START] * 19)
        game = Game(engine, "5_vs_5")
        game.reset(episode=1, seed=0)
        for action in range(19):
            game.step(action)
        assert engine.pressed == [*range(13), 18, 20, 30, 14, 19, 31]

    def test_a_game_that_is_held_up_is_resumed_after_twenty_steps(self):
        engine = Playback(*[OUT] * 35)
        game = Game(engine, "5_vs_5")
        game.reset(episode=1, seed=0)
        for _ in range(35):
            game.step(2)
        assert engine.pressed == [2] * 20 + [11] + [5] * 9 + [1] * 5

    def test_who_holds_no_ball_waits_meanwhile(self):
        engine = Playback(*[replace(OUT, owner_team=-1)] * 25)
        game = Game(engine, "5_vs_5")
        game.reset(episode=1, seed=0)
        for _ in range(25):
            game.step(2)
        assert engine.pressed == [2] * 20 + [11] + [0] * 4

    def test_each_player_has_an_action_of_its_own_and_who_has_the_ball_resumes_the_game(self):
        engine = Playback(*[replace(OUT, active=[0, 1])] * 25)
        game = Game(engine, "5_vs_5")
        game.reset(episode=1, seed=0)
        for _ in range(22):
            game.step(2, 3)
        assert engine.pressed == [2, (3, 1)] * 20 + [11, (11, 1)] + [0, (5, 1)]

    def test_number_and_seed_of_an_episode_are_given_to_the_engine(self):
        engine = Playback()
        game = Game(engine, "5_vs_5")
        for episode, seed in ((0, 7), (1, 9)):
            game.reset(episode=episode, seed=seed)
        assert engine.resets == [(0, 7), (1, 9)]

    def test_a_new_episode_knows_nothing_of_the_one_before(self):
        game = Game(Playback(OURS), "academy_empty_goal")
        for _ in range(2):
            game.reset(episode=1, seed=0)
            assert (game.terminated, game.truncated) == ON
            assert game.step(RIGHT) == 1.0


class TestCheckpoints:
    @staticmethod
    def at(x: float, **changes) -> Pitch:
        return replace(START, ball=(x, 0.0), **changes)

    def rewards(self, *pitches: Pitch) -> list[float]:
        checkpoints = CheckpointRewards()
        return [checkpoints.reward(0.0, pitch) for pitch in pitches]

    def test_each_circle_counts_once(self):
        assert self.rewards(self.at(0.0), self.at(0.02), self.at(0.02)) == [0.0, 0.1, 0.0]

    def test_the_radii_are_equally_spaced_between_those_of_gfootball(self):
        radii = np.linspace(0.99, 0.19, 10)
        inside = [self.at(1 - radius + 1e-6) for radius in radii]
        assert self.rewards(*inside) == pytest.approx([0.1] * 10)
        outside = [self.at(1 - radius - 1e-6) for radius in radii]
        assert self.rewards(*outside) == pytest.approx([0.0] + [0.1] * 9)

    def test_all_that_were_passed_at_once_count(self):
        assert self.rewards(self.at(0.99)) == [pytest.approx(1.0)]

    @pytest.mark.parametrize("change", [{"owner_team": 1}, {"owner_team": -1}, {"owner": 0}])
    def test_only_the_controlled_player_collects_them(self, change):
        assert self.rewards(self.at(0.9, **change)) == [0.0]

    def test_each_player_collects_its_own(self):
        pitch = replace(self.at(0.9), active=[0, 1])
        assert CheckpointRewards(0).reward(0.0, pitch) == 0.0
        assert CheckpointRewards(1).reward(0.0, pitch) > 0.0

    def test_a_goal_brings_those_that_are_left_and_no_more_come(self):
        checkpoints = CheckpointRewards()
        first = checkpoints.reward(0.0, self.at(0.02))
        assert first + checkpoints.reward(1.0, self.at(0.0)) == pytest.approx(2.0)
        assert checkpoints.reward(0.0, self.at(0.99)) == 0.0

    def test_their_goal_costs_what_it_costs(self):
        assert CheckpointRewards().reward(-1.0, self.at(-1.0)) == -1.0

    def test_an_episode_begins_with_none(self):
        checkpoints = CheckpointRewards()
        checkpoints.reward(0.0, self.at(0.99))
        checkpoints.reset()
        assert checkpoints.reward(0.0, self.at(0.02)) == 0.1


class TestMinimap:
    @staticmethod
    def drawn(pitch: Pitch) -> list[list[tuple[int, int]]]:
        planes = np.full((4, 72, 96), 7, np.uint8)
        draw_minimap(pitch, planes)
        assert set(np.unique(planes)) == {0, 255}
        return [list(zip(*map(np.ndarray.tolist, np.nonzero(p)), strict=True)) for p in planes]

    def test_the_planes_are_our_team_theirs_the_ball_and_the_active_player(self):
        ours, theirs, ball, active = self.drawn(START)
        assert ours == [(36, 0), (36, 84)]
        assert theirs == [(36, 95)]
        assert ball == [(36, 72)]
        assert active == [(36, 84)]

    def test_what_is_off_the_pitch_is_drawn_at_its_edge(self):
        far = replace(START, left=[(-1.2, -0.6), (1.2, 0.6)], ball=(0.0, 0.4444))
        ours, _, ball, _ = self.drawn(far)
        assert ours == [(0, 0), (71, 95)]
        assert ball == [(71, 48)]

    def test_each_player_is_the_active_one_on_its_own(self):
        planes = np.empty((4, 72, 96), np.uint8)
        draw_minimap(replace(START, active=[1, 0]), planes, 1)
        assert np.argwhere(planes[3]).tolist() == [[36, 0]]

    @pytest.mark.parametrize("pitch", [replace(START, active=[-1]), replace(START, right=[])])
    def test_planes_may_be_empty(self, pitch):
        assert [] in self.drawn(pitch)
