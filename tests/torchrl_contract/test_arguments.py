"""Every argument of TorchRL's collector is accepted or refused as the documents say."""

import ast
import functools
import inspect
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.envs import DoubleToFloat
from torchrl.envs.utils import ExplorationType

from hts_torchrl import ConfigurationError, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.collectors.torchrl_settings import TorchRLSettings

PAGE = Path(__file__).parents[2] / "docs" / "torchrl_contract.md"
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE))
LIMITED = {name: claim for name, claim in ROWS.items() if claim != "done"}
EXAMPLES = {
    "frames_per_batch": 16,
    "total_frames": 24,
    "device": "cpu",
    "storing_device": torch.device("cpu"),
    "policy_device": "cpu",
    "create_env_kwargs": {"limit": 3},
    "max_frames_per_traj": 3,
    "postproc": DoubleToFloat(),
    "split_trajs": True,
    "track_traj_ids": False,
    "init_random_frames": 16,
    "exploration_type": ExplorationType.DETERMINISTIC,
    "cudagraph_policy": False,
    "set_truncated": True,
    "return_same_td": True,
    "trust_policy": True,
    "auto_register_policy_transforms": True,
    "replay_buffer": ReplayBuffer(storage=ListStorage(8)),
    "compile_policy": {"backend": "eager"},
    "no_cuda_sync": True,
    "use_buffers": False,
    "track_policy_version": True,
    "worker_idx": 0,
    "trajs_per_batch": 1,
    "trajs_per_write": 1,
    "traj_format": "cat",
    "pre_collect_hook": print,
    "post_collect_hook": print,
    "compact_obs": True,
    "num_collectors": 2,
    "backend_options": {"remote_configs": {"num_cpus": 2}},
}
WITHOUT_EFFECT = (
    "auto_register_policy_transforms",
    "no_cuda_sync",
    "policy_device",
    "trust_policy",
    "use_buffers",
)
NEEDED = {
    "num_collectors": {"backend": "ray"},
    "backend_options": {"backend": "ray"},
    "trajs_per_batch": {"traj_format": "padded"},
    "trajs_per_write": {"trajs_per_batch": 1, "replay_buffer": EXAMPLES["replay_buffer"]},
    "traj_format": {"trajs_per_batch": 1},
}


def make_env(limit=None):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


def collect(make=make_env, **settings) -> HTSCollector:
    policy = make_actor_critic("mlp", env_spec_of(make))
    defaults = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 16, "num_actors": 0}
    return HTSCollector(make, policy, **(defaults | settings))


def torchrl_arguments():
    parameters = inspect.signature(Collector).parameters.values()
    return [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]


def test_the_page_has_a_row_for_every_argument_of_the_installed_torchrl():
    assert list(ROWS) == [each.name for each in torchrl_arguments()]


def test_every_row_is_tried():
    positional = {"create_env_fn", "policy", "policy_factory"}
    assert EXAMPLES.keys() | LIMITED.keys() | positional == ROWS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_argument_that_is_done_is_accepted(name):
    collector = collect(**NEEDED.get(name, {}), **{name: EXAMPLES[name]})
    if name not in WITHOUT_EFFECT:
        assert getattr(collector, name) == EXAMPLES[name]
    collector.shutdown()


@pytest.mark.parametrize("name", LIMITED)
def test_an_argument_of_which_only_some_values_are_accepted_is_given_them(name):
    listed = re.fullmatch(r"only (.+)", LIMITED[name])[1]
    for value in re.findall(r"`(.+?)`", listed):
        collect(**{name: ast.literal_eval(value)}).shutdown()


@pytest.mark.parametrize("name", LIMITED)
def test_every_other_value_is_refused_in_one_line_that_names_the_argument(name):
    with pytest.raises(ConfigurationError, match=rf"^{name}=.* is not supported, only [^\n]+$"):
        collect(**{name: object()})


def test_defaults_of_torchrl_change_nothing():
    ours = inspect.signature(HTSCollector).parameters.keys() - {"policy_device"}
    defaults = {
        each.name: each.default
        for each in torchrl_arguments()
        if each.default is not inspect.Parameter.empty and each.name not in ("policy", *ours)
    }
    assert defaults.keys() >= {"reset_at_each_iter", "sync", "extend_buffer"}
    collect(**defaults).shutdown()
    shown = inspect.signature(HTSCollector).parameters
    for each in torchrl_arguments():
        if each.name in shown and each.name != "frames_per_batch":
            assert shown[each.name].default == each.default


@pytest.mark.parametrize(
    ("name", "value"),
    [("reset_at_each_iter", 0), ("extend_buffer", 1), ("sync", False), ("env_device", "cuda:0"),
     ("backend", "process"),
     ("use_buffers", 1)],
)  # fmt: skip
def test_values_that_are_nearly_accepted_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        collect(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split_trajs": True, "track_traj_ids": False}, "track_traj_ids=False leaves out"),
        ({"split_trajs": True, "trajs_per_batch": 1}, "one of the two"),
        ({"trajs_per_batch": 1, "track_traj_ids": False}, "track_traj_ids=False leaves out"),
        ({"compile_policy": "default"}, "compile_policy of type str; True, False, or a dict"),
        ({"trajs_per_batch": 0}, "trajs_per_batch=0; 1 or more"),
        ({"trajs_per_batch": 1.5}, "^trajs_per_batch=1.5; a whole number is needed$"),
        ({"trajs_per_batch": 1, "trajs_per_write": "2"}, "^trajs_per_write='2'; a whole number"),
        ({"max_frames_per_traj": "5"}, "^max_frames_per_traj='5'; a whole number is needed$"),
        ({"worker_idx": "0"}, "^worker_idx='0'; a whole number is needed$"),
        ({"trajs_per_write": 1}, "trajs_per_write says nothing"),
        ({"traj_format": "cat"}, "traj_format='cat' says nothing"),
        ({"traj_format": "rows", "trajs_per_batch": 1}, "'rows' must be 'padded' or 'cat'"),
        ({"return_same_td": True, "split_trajs": True}, "one shape: leave out split_trajs"),
        ({"return_same_td": True, "replay_buffer": ReplayBuffer()}, "leave out replay_buffer"),
        ({"track_policy_version": object()}, "track_policy_version of type object; True or False"),
        ({"postproc": 3}, "postproc of type int; a function is needed"),
        ({"post_collect_hook": []}, "post_collect_hook of type list; a function"),
        ({"replay_buffer": {}}, "replay_buffer of type dict; a ReplayBuffer"),
        ({"storing_device": "gpu"}, "storing_device='gpu'; a device of this machine"),
        ({"policy_device": "xpu:77"}, "policy_device='xpu:77'; a device of this machine"),
        ({"device": 3.5}, "^device=3.5; a device of this machine"),
        ({"init_random_frames": -2}, "init_random_frames=-2; a number of steps"),
        ({"init_random_frames": 0.5}, "init_random_frames=0.5; a whole number"),
        ({"init_random_frames": True}, "init_random_frames=True; a number of steps"),
        ({"exploration_type": ExplorationType.MEAN}, "exploration_type=.*discrete actions"),
        ({"exploration_type": "bold"}, "exploration_type='bold'"),
        ({"cudagraph_policy": True}, "cudagraph_policy=True: actors compute on 'cpu'"),
        ({"cudagraph_policy": {}}, "cudagraph_policy of type dict; True or False"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        collect(**settings)


def test_another_default_device_than_the_cpu_is_refused():
    told = r"^torch\.set_default_device\('meta'\); 'cpu' is needed$"
    with torch.device("meta"), pytest.raises(ConfigurationError, match=told):
        collect()


@pytest.mark.parametrize("number", [np.int64(16), 16.0])
def test_random_frames_may_be_a_number_of_any_kind_as_all_counts_may(number):
    assert TorchRLSettings(init_random_frames=number).random_frames == 16


def test_arguments_of_a_users_function_are_left_as_they_are():
    """A TensorDict is a mapping, and a number of numpy has a precision."""
    given = {"scale": np.float32(0.1), "start": TensorDict({"x": torch.zeros(3)}, [3])}
    assert TorchRLSettings(create_env_kwargs=given).create_env_kwargs is given


def test_random_actions_are_refused_where_cuda_graphs_are_asked_for():
    settings = TorchRLSettings(cudagraph_policy=True, init_random_frames=8)
    with pytest.raises(
        ConfigurationError, match=r"^cudagraph_policy=True and init_random_frames=8"
    ):
        settings.cudagraph("cuda:0")
    assert TorchRLSettings(cudagraph_policy=True).cudagraph("cuda:0") is True
    assert TorchRLSettings(cudagraph_policy=None).cudagraph("cuda:0") is False


def test_the_coming_change_of_trajectories_is_told_to_the_caller():
    with pytest.warns(FutureWarning, match="traj_format='padded' or 'cat'") as warned:
        collect(trajs_per_batch=1).shutdown()
    assert [each.filename for each in warned] == [__file__]


def test_unknown_arguments_are_still_refused():
    with pytest.raises(TypeError, match="did you mean 'postproc'"):
        collect(postprocs=None)


def test_the_example_of_the_page_runs(monkeypatch):
    home = "hts_torchrl.collectors.hts.HTSCollector"
    monkeypatch.setattr(home, functools.partial(HTSCollector, num_actors=0))
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, "example", "exec"), names)
    assert len(names["buffer"]) == 256


def test_an_observation_is_not_replaced_by_the_version():
    def make():
        env = gymnasium.make("CartPole-v1")
        space = gymnasium.spaces.Dict({"policy_version": env.observation_space})
        named = gymnasium.wrappers.TransformObservation
        return named(env, lambda seen: {"policy_version": seen}, space)

    collect(make).shutdown()
    with pytest.raises(ConfigurationError, match="and an observation 'policy_version'; another"):
        collect(make, track_policy_version=True)
