from tensordict import TensorDict

from hts_torchrl.training.round_slice import RoundSlice


def parts(count):
    return [RoundSlice(TensorDict({}, [2, 3]), index, count) for index in range(count)]


def test_one_part_begins_the_round():
    assert [part.is_first for part in parts(3)] == [True, False, False]


def test_one_part_ends_the_round():
    assert [part.is_last for part in parts(3)] == [False, False, True]


def test_a_lone_part_begins_and_ends_the_round():
    (part,) = parts(1)
    assert part.is_first
    assert part.is_last
