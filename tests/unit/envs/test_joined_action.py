"""Several actions of a step as one array: choices first, then numbers."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from hts_torchrl.envs.joined_action import joined, split
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, ArraySpec
from tests.fakes import NestedActionEnv, RecordingEnv

BOX = spaces.Box(-1.0, 1.0, (3,))
INTEGERS = np.dtype(np.int64)
CHOICE = ActionSpec("discrete", ArraySpec((), INTEGERS), (4,))
ONE_HOT = ActionSpec("one_hot", ArraySpec((3,), INTEGERS), (3,))
CHOICES = ActionSpec("multi_discrete", ArraySpec((2,), INTEGERS), (2, 5))
NUMBERS = ActionSpec(
    "continuous",
    ArraySpec((1, 2), np.dtype(np.float32)),
    low=np.array([[-1.0, 0.0]], np.float32),
    high=np.array([[1.0, 9.0]], np.float32),
)
FREE = ActionSpec("continuous", ArraySpec((2,), np.dtype(np.float32)))


def action_of(space) -> ActionSpec:
    return env_spec(BOX, space).action


class TestJoined:
    def test_choices_and_numbers_are_mixed(self):
        action = joined({"a": NUMBERS, "b": CHOICE, "c": FREE, "d": CHOICES})
        assert (action.kind, action.sizes) == ("mixed", (4, 2, 5))
        assert (action.array.shape, action.array.dtype) == ((3 + 4,), np.float32)
        assert action.low.tolist() == [-1, 0, -np.inf, -np.inf]
        assert action.high.tolist() == [1, 9, np.inf, np.inf]
        assert action.num_draws == 7

    def test_choices_alone_are_several_choices(self):
        action = joined({"a": ONE_HOT, "b": CHOICES})
        assert (action.kind, action.sizes) == ("multi_discrete", (3, 2, 5))
        assert (action.array, action.num_draws) == (ArraySpec((3,), INTEGERS), 3)

    def test_numbers_alone_are_several_numbers(self):
        action = joined({"a": NUMBERS, "b": NUMBERS})
        assert (action.kind, action.array.shape) == ("continuous", (4,))
        assert action.high.tolist() == [1, 9, 1, 9]

    def test_no_part_is_refused(self):
        with pytest.raises(ConfigurationError, match="no parts"):
            action_of(spaces.Tuple([]))

    def test_more_choices_than_a_float_can_tell_apart_are_refused(self):
        with pytest.raises(ConfigurationError, match=r"choice of 16777217 beside numbers"):
            action_of(spaces.Tuple([spaces.Discrete(2**24 + 1), BOX]))


class TestSplit:
    PARTS = (NUMBERS, ONE_HOT, CHOICE, CHOICES)

    @pytest.mark.parametrize("rows", [(), (2,)])
    def test_each_part_gets_its_own(self, rows):
        row = np.array([2, 3, 1, 4, 0.5, 8.5], np.float32)
        numbers, one_hot, choice, choices = split(np.broadcast_to(row, (*rows, 6)), self.PARTS)
        assert np.array_equal(numbers, np.broadcast_to(np.float32([[0.5, 8.5]]), (*rows, 1, 2)))
        assert np.array_equal(one_hot, np.broadcast_to([0, 0, 1], (*rows, 3)))
        assert np.array_equal(choice, np.broadcast_to(3, rows))
        assert np.array_equal(choices, np.broadcast_to([1, 4], (*rows, 2)))
        types = [part.dtype for part in (numbers, one_hot, choice, choices)]
        assert types == [np.float32, INTEGERS, INTEGERS, INTEGERS]

    def test_a_part_is_no_view_of_the_action(self):
        action = np.zeros(6, np.float32)
        numbers, *_ = split(action, self.PARTS)
        numbers += 1
        assert (action == 0).all()


class TestGymnasium:
    ACTIONS = np.array([[3, 2, 1, 0.25, 7.0], [0, 0, 0, -5.0, 1.5]], np.float32)

    def test_a_nested_space_is_described_in_its_order(self):
        action = action_of(NestedActionEnv.action_space)
        assert (action.kind, action.sizes) == ("mixed", (4, 3, 2))
        assert (action.low.tolist(), action.high.tolist()) == ([-1, -1], [1, 2])

    def test_an_environment_gets_the_form_of_its_space_clipped_and_shifted(self):
        maker = RecordingEnv(NestedActionEnv.action_space)
        group = make_group(maker, [0, 1])
        group.reset([1, 2])
        group.step(self.ACTIONS)
        (first, grip), gear = maker.actions[0]["arm"], maker.actions[0]["gear"]
        assert (first.tolist(), grip, gear.tolist()) == ([[0.25], [2.0]], 8, [2, 1])
        assert isinstance(maker.actions[0]["arm"], tuple)
        assert (grip.dtype, gear.dtype) == (np.int64, np.int32)
        (first, grip), gear = maker.actions[1]["arm"], maker.actions[1]["gear"]
        assert (first.tolist(), grip, gear.tolist()) == ([[-1.0], [1.5]], 5, [0, 0])

    def test_a_vector_environment_gets_the_same(self):
        makers = [lambda: NestedActionEnv(0), lambda: NestedActionEnv(1)]
        group = make_group(
            lambda _: SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), [0, 1]
        )
        group.reset([1, 2])
        seen = group.step(self.ACTIONS).observation["observation"]
        assert seen.tolist() == [[1, 0.25, 2.0, 8, 2, 1], [1, -1.0, 1.5, 5, 0, 0]]
