"""The environments of a run, shared by its ranks."""

from dataclasses import replace

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


def test_a_rank_has_no_more_workers_than_environments():
    share = share_of(replace(WHOLE, num_actors=3, envs_per_executor=12), 0, 6)
    assert (share.num_envs, share.num_actors, share.envs_per_executor) == (2, 2, 2)


def test_executors_must_divide_a_share():
    told = "on each of 3 ranks: num_envs=4 is no multiple of envs_per_executor=3"
    with pytest.raises(ConfigurationError, match=told):
        share_of(replace(WHOLE, envs_per_executor=3), 0, 3)
