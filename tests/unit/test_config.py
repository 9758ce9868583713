from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError

RAY = {"backend": "ray", "num_envs": 8}


def made(num_envs=16, **settings):
    return CollectorSettings(num_envs=num_envs, frames_per_batch=num_envs, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_actors": -1}, "num_actors=-1"),
        ({"envs_per_executor": 0}, "envs_per_executor=0"),
        ({"num_envs": 4, "envs_per_executor": 8}, "envs_per_executor=8 is more"),
        ({"num_envs": 6, "envs_per_executor": 4}, "num_envs=6 is no multiple"),
        ({"inference_batch_size": 0}, "inference_batch_size=0"),
        ({"first_env": -1}, "first_env=-1; 0 or more"),
        ({"step_barrier": True, "num_actors": 2}, "step_barrier with num_actors=2"),
        ({"start_method": "fork"}, "start_method='fork'"),
        ({"recover": "try"}, "recover=.try.; .fail. or .replay. is needed"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"reward_discount": 1.5}, "reward_discount=1.5; None, or 0 to 1"),
        ({"timeout_s": "x"}, "timeout_s='x'; a number is needed"),
        ({"timeout_s": None}, "timeout_s=None; a number is needed"),
        ({"reward_discount": "x"}, "reward_discount='x'; a number is needed"),
        ({"debug": "false"}, "debug='false'; True or False is needed"),
        ({"step_barrier": []}, "step_barrier of type list; True or False is needed"),
        ({"num_envs": 65_537}, "num_envs=65537; at most 65536"),
        ({"inference_batch_size": 10**23}, "inference_batch_size=1000"),
        ({"num_envs": 4, "num_actors": 5}, "num_actors=5 is more than num_envs=4"),
        ({"backend": "rpc"}, "backend='rpc' is not supported, only None, 'direct' or 'ray'"),
        ({"num_collectors": 2}, "num_collectors=2: this is for rollout nodes.* processes step env"),
        ({"backend_options": {"a": 1}}, "this is for rollout nodes; give backend='ray'"),
        ({**RAY, "num_collectors": 0}, "num_collectors=0; a number of rollout nodes"),
        ({**RAY, "num_collectors": True}, "num_collectors=True; a number of rollout nodes"),
        ({**RAY, "num_collectors": 3}, "num_envs=8 is no multiple of num_collectors=3"),
        ({**RAY, "num_collectors": 4, "envs_per_executor": 4}, "no multiple of num_collectors=4"),
        ({**RAY, "num_collectors": 4, "num_actors": 3}, "num_actors=3 is more than the 2 env"),
        ({**RAY, "step_barrier": True}, "step_barrier with backend='ray'"),
        ({**RAY, "backend_options": {"address": 1}}, r"\['address'\]: backend='ray' knows"),
        ({**RAY, "backend_options": [1]}, "backend_options of type list; a dict"),
    ],
)
def test_counts_that_cannot_work_are_refused_by_name(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        made(**settings)


def test_nodes_share_out_all_environments():
    config = made(**RAY, num_collectors=4, envs_per_executor=2)
    assert (config.num_nodes, config.envs_per_node) == (4, 2)
    assert (made(**RAY).num_nodes, made(**RAY).envs_per_node) == (1, 8)
    assert (made().num_nodes, made().envs_per_node) == (0, 16)


def test_executors_share_out_all_environments_without_overlap():
    config = made(num_envs=6, envs_per_executor=2)
    shares = [config.envs_of(executor) for executor in range(config.num_executors)]
    assert shares == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(("num_envs", "rows"), [(2, 2), (8, 8), (64, 8)])
def test_a_pass_has_at_most_eight_rows_by_default(num_envs, rows):
    assert made(num_envs=num_envs).batch_size == rows


def test_as_many_environments_and_rows_as_there_can_be_are_not_refused():
    assert made(num_envs=65_536, inference_batch_size=65_536).batch_size == 65_536


def test_a_pass_has_as_many_rows_as_were_asked_for():
    assert made(num_envs=2, inference_batch_size=5).batch_size == 5


def test_whole_numbers_of_other_types_are_taken_as_integers():
    settings = CollectorSettings(frames_per_batch=np.int64(32), total_frames=1e6, seed=3.0)
    numbers = [settings.frames_per_batch, settings.total_frames, settings.seed]
    assert numbers == [32, 1_000_000, 3]
    assert {type(number) for number in numbers} == {int}
    assert type(settings.schedule.num_rounds) is int


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"total_frames": 1.5}, r"total_frames=1\.5; a whole number"),
        ({"total_frames": None}, "total_frames=None; a whole number"),
        ({"total_frames": float("inf")}, "total_frames=inf; a whole number"),
        ({"seed": None}, "seed=None; a whole number"),
        ({"num_envs": "4"}, "num_envs='4'; a whole number"),
        ({"inference_batch_size": 0.5}, r"inference_batch_size=0\.5; a whole number"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        CollectorSettings(**{"frames_per_batch": 32, **settings})


WHOLE = CollectorSettings(
    num_envs=12, frames_per_batch=120, total_frames=961, num_actors=2, first_env=20
)


class TestOfARank:
    def test_one_rank_has_all(self):
        assert WHOLE.of_rank(0, 1) is WHOLE

    def test_each_rank_has_neighbours_and_the_same_rounds(self):
        shares = [WHOLE.of_rank(rank, 3) for rank in range(3)]
        assert [share.num_envs for share in shares] == [4, 4, 4]
        assert [share.first_env for share in shares] == [20, 24, 28]
        assert {share.schedule.steps_per_round for share in shares} == {10}
        assert {share.schedule.num_rounds for share in shares} == {9}  # 961 frames, rounded up

    def test_the_rows_of_a_pass_are_those_of_the_whole_run(self):
        assert WHOLE.of_rank(0, 3).batch_size == 8 == WHOLE.batch_size

    def test_ranks_must_divide_the_environments(self):
        with pytest.raises(ConfigurationError, match="num_envs=12 on 5 ranks; a multiple of 5"):
            WHOLE.of_rank(0, 5)

    def test_a_rank_has_no_more_workers_than_environments(self):
        share = replace(WHOLE, num_actors=3, envs_per_executor=12).of_rank(0, 6)
        assert (share.num_envs, share.num_actors, share.envs_per_executor) == (2, 2, 2)

    def test_executors_must_divide_a_share(self):
        told = "on each of 3 ranks: num_envs=4 is no multiple of envs_per_executor=3"
        with pytest.raises(ConfigurationError, match=told):
            replace(WHOLE, envs_per_executor=3).of_rank(0, 3)


def test_containers_of_omegaconf_become_pythons_own():
    """``torch.compile`` takes no others, and Hydra gives no others."""
    given = OmegaConf.create({"options": {"max_autotune": True}, "names": ["a"]})
    settings = CollectorSettings(frames_per_batch=32, compile_policy=given)
    arguments = settings.compile_arguments
    assert arguments == {"options": {"max_autotune": True}, "names": ["a"]}
    assert [type(each) for each in (arguments, *arguments.values())] == [dict, dict, list]
