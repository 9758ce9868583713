import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hts_torchrl.shared.action_log import ActionLog, Rows, Segment
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec

ENVS, STEPS = 2, 4
SPEC = EnvSpec(
    {"observation": ArraySpec((3,), np.dtype(np.float32))},
    ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (4,)),
)


def storage(ends=(), first_action=0, trajectory=0):
    """A round's arrays; environment 0's games end at the steps ``ends``."""
    cells = np.arange(ENVS * STEPS).reshape(ENVS, STEPS)
    episode_end = np.zeros((ENVS, STEPS, 1), bool)
    episode_end[0, list(ends)] = True
    begun = np.cumsum(episode_end[..., 0], 1) - episode_end[..., 0]
    return {
        "action": (cells + first_action) % 4,
        ("next", "reward"): cells[..., None].astype(np.float32),
        ("next", "observation"): np.repeat(cells[..., None], 3, 2).astype(np.float32),
        ("next", "episode_end"): episode_end,
        ("collector", "traj_ids"): np.arange(ENVS)[:, None] + ENVS * (trajectory + begun),
    }


def action_log(*rounds, steps_per_seed=0) -> ActionLog:
    written = ActionLog.blank(SPEC, ENVS, steps_per_seed=steps_per_seed)
    for arrays in rounds:
        written = written.after(SPEC, arrays)
    return written


def test_a_game_that_runs_on_keeps_all_its_actions():
    game = action_log(storage(), storage(first_action=1)).segment(0)
    assert (game.index, game.trajectory) == (0, 0)
    assert game.actions.tolist() == [0, 1, 2, 3, 1, 2, 3, 0]
    assert game.checks[:, 0].tolist() == [4, 8]


def test_a_game_that_begins_within_a_round_drops_those_before_it():
    game = action_log(storage(), storage(ends=(0, 2), trajectory=5)).segment(0)
    assert (game.index, game.trajectory) == (2, 7)
    assert game.actions.tolist() == [3]
    assert game.checks[:, 0].tolist() == [1]


def test_a_game_that_begins_with_the_next_round_has_no_action():
    game = action_log(storage(ends=(3,))).segment(0)
    assert (game.index, game.trajectory) == (1, 1)
    assert (len(game.actions), len(game.checks)) == (0, 0)


def test_other_environments_are_not_concerned():
    assert action_log(storage(ends=(1,))).segment(1).actions.tolist() == [0, 1, 2, 3]


def test_the_longest_replay_is_that_of_the_oldest_seed():
    assert action_log(storage(), storage(ends=(1,))).most_steps == 8


def test_without_seeds_for_games_the_whole_run_is_one_game():
    game = action_log(storage(ends=(1,)), storage(), steps_per_seed=None).segment(0)
    assert (game.index, game.trajectory, len(game.actions)) == (0, 0, 8)


def test_a_seed_lasts_for_the_steps_it_has_to():
    """The first game ends with step 2 of 5, the second with step 7."""
    written = action_log(storage(ends=(1,)), storage(ends=(2,), trajectory=1), steps_per_seed=5)
    game = written.segment(0)
    assert (game.index, game.trajectory) == (1, 2)
    assert game.actions.tolist() == [3]


@pytest.mark.parametrize(("steps_per_seed", "index"), [(3, 1), (4, 1), (5, 0)])
def test_a_game_that_ends_with_the_last_step_of_its_seed_ends_the_seed(steps_per_seed, index):
    game = action_log(storage(ends=(3,)), steps_per_seed=steps_per_seed).segment(0)
    assert (game.index, len(game.actions)) == (index, 0 if index else 4)


def test_a_seed_lasts_from_its_own_first_step_on():
    """Games of 3 and 2 steps, and a seed of 3: the second game's end does not end its seed."""
    game = action_log(storage(ends=(2,)), storage(ends=(0,)), steps_per_seed=3).segment(0)
    assert (game.index, game.actions.tolist()) == (1, [3, 0, 1, 2, 3])


def test_writing_a_round_leaves_the_action_log_before_it_as_it_was():
    before = action_log(storage())
    after = before.after(SPEC, storage(ends=(1,)))
    assert (before.round_index, after.round_index) == (1, 2)
    game = before.segment(0)
    assert (game.index, game.trajectory, len(game.actions)) == (0, 0, 4)


@pytest.mark.parametrize(
    ("key", "cell"),
    [(("next", "reward"), (0, 0)), (("next", "reward"), (0, 3)), (("next", "observation"), (0, 3))],
)
def test_the_checksum_tells_rewards_and_the_last_observation_apart(key, cell):
    changed = storage()
    changed[key][cell] += 1
    one, other = (action_log(arrays).segment(0).checks[-1, 1] for arrays in (changed, storage()))
    assert one != other


def test_the_checksum_is_a_crc_of_rewards_and_each_rounds_last_observation():
    first, second = storage(), storage()
    second["next", "reward"] += 1
    written = action_log(first, second)
    played = struct.pack("<4f", 4, 5, 6, 7) + struct.pack("<3f", 7, 7, 7)
    sums = [zlib.crc32(played)]
    played += struct.pack("<4f", 5, 6, 7, 8) + struct.pack("<3f", 7, 7, 7)
    assert written.segment(1).checks[:, 1].tolist() == [*sums, zlib.crc32(played)]


def test_the_checksum_of_a_game_within_a_round_is_of_its_own_rewards():
    game = action_log(storage(ends=(1,))).segment(0)
    played = struct.pack("<2f", 2, 3) + struct.pack("<3f", 3, 3, 3)
    assert game.checks.tolist() == [[2, zlib.crc32(played)]]


def test_the_checksum_begins_with_the_seed():
    changed = storage(ends=(1,))
    changed["next", "reward"][0, 1] += 1
    one, other = (action_log(arrays).segment(0) for arrays in (changed, storage(ends=(1,))))
    assert same(one, other)


def test_a_seed_that_lasts_reserves_its_memory_with_the_first_round():
    """Else a run of days looks as if it lost memory, a little in each round."""
    first = action_log(storage(), steps_per_seed=800)
    assert len(first._actions._memory.array) == 900
    assert len(first._checks._memory.array) == 900 // STEPS


def test_actions_take_the_smallest_type_that_holds_them():
    wide = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (300,))
    real = ActionSpec("continuous", ArraySpec((2,), np.dtype(np.float32)))
    mixed = ActionSpec("mixed", ArraySpec((2,), np.dtype(np.float32)), (3,))
    dtypes = [
        ActionLog.blank(replace(SPEC, action=action), 1, steps_per_seed=0).segment(0).actions.dtype
        for action in (SPEC.action, wide, real, mixed)
    ]
    assert dtypes == [np.uint8, np.uint16, np.float32, np.float32]


class TestRows:
    def test_who_holds_fewer_rows_still_sees_those(self):
        short = Rows(np.array([1, 2]))
        long = short.plus(np.array([3])).plus(np.array([4, 5]))
        assert short.last(2).tolist() == [1, 2]
        assert long.last(5).tolist() == [1, 2, 3, 4, 5]

    def test_two_may_grow_from_one(self):
        first = Rows(np.array([1]))
        one, other = first.plus(np.array([2])), first.plus(np.array([3]))
        assert one.plus(np.array([4])).last(3).tolist() == [1, 2, 4]
        assert other.last(2).tolist() == [1, 3]

    def test_two_may_grow_from_one_that_has_room_left(self):
        first = Rows(np.array([1])).plus(np.array([2]))
        assert len(first._memory.array) == 4
        one, other = first.plus(np.array([3])), first.plus(np.array([4]))
        assert one.last(3).tolist() == [1, 2, 3]
        assert other.last(3).tolist() == [1, 2, 4]

    def test_the_type_stays(self):
        assert Rows(np.array([1], np.uint8)).plus(np.array([2])).last(2).dtype == np.uint8

    def test_rows_that_follow_lie_in_memory_that_was_reserved(self):
        rows = Rows(np.empty(0, np.uint8)).plus(np.array([1]), reserve=1000)
        longer = rows.plus(np.arange(999), reserve=1000)
        assert np.shares_memory(longer._memory.array, rows._memory.array)
        assert not np.shares_memory(longer.plus(np.array([1]))._memory.array, rows._memory.array)

    def test_only_rows_that_are_wanted_move_to_new_memory(self):
        rows = Rows(np.array([1, 2, 3])).plus(np.array([4]), keep=1)
        assert rows.last(2).tolist() == [3, 4]
        assert len(rows._memory.array) == 4

    def test_reserved_memory_goes_back_to_the_system(self):
        """In the heap, which keeps what is freed, each renewal of seeds could find it too small."""
        rows = Rows(np.empty(0, np.uint8)).plus(np.array([1]), reserve=10_000_000)
        place = f"{rows._memory.array.__array_interface__['data'][0]:x}-"
        assert place in Path("/proc/self/maps").read_text()
        del rows
        assert place not in Path("/proc/self/maps").read_text()


def test_memory_does_not_grow_with_games_that_were_played():
    written = action_log(*[storage(ends=(3,)) for _ in range(3)])
    size = len(written._actions._memory.array)
    for _ in range(100):
        written = written.after(SPEC, storage(ends=(3,)) | {
            ("next", "episode_end"): np.tile([[[False]] * 3 + [[True]]], (ENVS, 1, 1))
        })  # fmt: skip
    assert len(written._actions._memory.array) <= 4 * size


def same(one: Segment, other: Segment) -> bool:
    return (one.index, one.trajectory) == (other.index, other.trajectory) and all(
        np.array_equal(a, b) for a, b in ((one.actions, other.actions), (one.checks, other.checks))
    )


def rounds_of(lengths):
    """Rounds of unequal lengths, in which games of both environments end now and then."""
    dice = np.random.default_rng(0)
    for steps in lengths:
        ends = dice.random((ENVS, steps, 1)) < 0.2
        yield {
            "action": dice.integers(4, size=(ENVS, steps)),
            ("next", "reward"): dice.random((ENVS, steps, 1), np.float32),
            ("next", "observation"): dice.random((ENVS, steps, 3), np.float32),
            ("next", "episode_end"): ends,
            ("collector", "traj_ids"): np.zeros((ENVS, steps), np.int64),
        }


@pytest.mark.parametrize("steps_per_seed", [0, 7, None])
def test_each_environment_has_what_it_would_have_alone(steps_per_seed):
    """Rounds of other lengths too, as where a run goes on with another ``frames_per_batch``."""
    together = ActionLog.blank(SPEC, ENVS, steps_per_seed=steps_per_seed)
    alone = [ActionLog.blank(SPEC, 1, steps_per_seed=steps_per_seed) for _ in range(ENVS)]
    for arrays in rounds_of([4, 4, 3, 4, 1, 5, 5, 2] * 4):
        together = together.after(SPEC, arrays)
        for env in range(ENVS):
            mine = {key: array[env : env + 1] for key, array in arrays.items()}
            alone[env] = alone[env].after(SPEC, mine)
            assert same(together.segment(env), alone[env].segment(0))
        back = ActionLog.from_arrays(
            together.arrays(),
            slice(0, ENVS),
            SPEC.memory,
            steps_per_seed=steps_per_seed,
            round_index=0,
        )
        together = back if len(arrays["action"][0]) == 5 else together


def test_arrays_bring_back_the_games_of_any_part_of_the_environments():
    written = action_log(storage(ends=(1,)), storage(ends=(3,), trajectory=1))
    for envs in (slice(0, 2), slice(1, 2)):
        back = ActionLog.from_arrays(
            written.arrays(), envs, SPEC.memory, steps_per_seed=0, round_index=2
        )
        expected = range(ENVS)[envs]
        assert len(back.arrays()["seeds"]) == len(expected)
        assert all(same(back.segment(n), written.segment(env)) for n, env in enumerate(expected))


def test_arrays_of_several_ranks_can_be_concatenated():
    one, other = action_log(storage()), action_log(storage(ends=(2,)))
    arrays = {
        name: np.concatenate([array, other.arrays()[name]]) for name, array in one.arrays().items()
    }
    back = ActionLog.from_arrays(arrays, slice(2, 4), SPEC.memory, steps_per_seed=0, round_index=1)
    assert all(same(back.segment(env), other.segment(env)) for env in range(ENVS))
