"""The environments of a run, shared by its ranks."""

import pytest

from hts_torchrl import ConfigurationError
from hts_torchrl.config import CollectorSettings
from hts_torchrl.training.rank_share import share_of

WHOLE = CollectorSettings(num_envs=12, frames_per_batch=120, total_frames=1000, num_actors=2)


def test_one_rank_has_all():
    assert share_of(WHOLE, 0, 1) is WHOLE


def test_each_rank_has_neighbours_and_the_same_rounds():
    shares = [share_of(WHOLE, rank, 3) for rank in range(3)]
    assert [share.num_envs for share in shares] == [4, 4, 4]
    assert [share.first_env for share in shares] == [0, 4, 8]
    assert {share.schedule.steps_per_round for share in shares} == {10}
    assert {share.schedule.num_rounds for share in shares} == {9}  # 1000 frames, rounded up


def test_the_rows_of_a_pass_are_those_of_the_whole_run():
    assert share_of(WHOLE, 0, 3).batch_size == 8 == WHOLE.batch_size


def test_ranks_must_divide_the_environments():
    with pytest.raises(ConfigurationError, match="num_envs=12 on 5 ranks; a multiple of 5"):
        share_of(WHOLE, 0, 5)


def test_a_share_must_be_enough_for_the_workers():
    with pytest.raises(ConfigurationError, match="on each of 12 ranks: num_actors=2 is more than"):
        share_of(WHOLE, 0, 12)
