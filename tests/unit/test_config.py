import numpy as np
import pytest

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec, PoolConfig
from hts_torchrl.errors import ConfigurationError

FLOATS = np.dtype(np.float32)
VECTOR = ArraySpec((3,), FLOATS)
RAY = {"backend": "ray", "num_envs": 8}


def continuous(low: float) -> ActionSpec:
    bounds = np.full(3, low, np.float32)
    return ActionSpec("continuous", VECTOR, low=bounds, high=-bounds)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_actors": -1}, "num_actors=-1"),
        ({"envs_per_executor": 0}, "envs_per_executor=0"),
        ({"num_envs": 4, "envs_per_executor": 8}, "envs_per_executor=8 is more"),
        ({"num_envs": 6, "envs_per_executor": 4}, "num_envs=6 is no multiple"),
        ({"inference_batch_size": 0}, "inference_batch_size=0"),
        ({"step_barrier": True, "num_actors": 2}, "step_barrier with num_actors=2"),
        ({"start_method": "fork"}, "start_method='fork'"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"num_envs": 65_537}, "num_envs=65537; at most 65536"),
        ({"inference_batch_size": 10**23}, "inference_batch_size=1000"),
        ({"num_envs": 4, "num_actors": 5}, "num_actors=5 is more than num_envs=4"),
        ({"backend": "rpc"}, "backend='rpc' is not supported, only None, 'direct' or 'ray'"),
        ({"num_collectors": 2}, "num_collectors=2: this is for rollout nodes"),
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
        PoolConfig(**settings)


def test_nodes_share_out_all_environments():
    config = PoolConfig(**RAY, num_collectors=4, envs_per_executor=2)
    assert (config.num_nodes, config.envs_per_node) == (4, 2)
    assert (PoolConfig(**RAY).num_nodes, PoolConfig(**RAY).envs_per_node) == (1, 8)
    assert (PoolConfig().num_nodes, PoolConfig().envs_per_node) == (0, 16)


def test_executors_share_out_all_environments_without_overlap():
    config = PoolConfig(num_envs=6, envs_per_executor=2)
    shares = [config.envs_of(executor) for executor in range(config.num_executors)]
    assert shares == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(("num_envs", "rows"), [(2, 2), (8, 8), (64, 8)])
def test_a_pass_has_at_most_eight_rows_by_default(num_envs, rows):
    assert PoolConfig(num_envs=num_envs).batch_size == rows


def test_a_pass_has_as_many_rows_as_were_asked_for():
    assert PoolConfig(num_envs=2, inference_batch_size=5).batch_size == 5


@pytest.mark.parametrize(
    ("action", "draws"),
    [
        (ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (6,)), 1),
        (ActionSpec("one_hot", ArraySpec((6,), np.dtype(np.int64)), (6,)), 1),
        (ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (3, 5)), 2),
        (ActionSpec("continuous", ArraySpec((2, 3), FLOATS)), 6),
        (ActionSpec("mixed", ArraySpec((5,), FLOATS), (3, 5)), 5),
    ],
)
def test_an_action_takes_one_draw_for_each_choice_or_dimension(action, draws):
    assert action.num_draws == draws


def test_an_environment_without_observations_is_refused():
    with pytest.raises(ConfigurationError, match="no observation"):
        EnvSpec({}, continuous(-1.0))


@pytest.mark.parametrize("name", ["action", "reward", "done", "next", "episode_end"])
def test_an_observation_named_as_another_entry_of_a_batch_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"observations named \['{name}'\]"):
        EnvSpec({name: VECTOR, "observation": VECTOR}, continuous(-1.0))


@pytest.mark.parametrize(
    ("name", "dtype"), [("step_count", np.int64), ("episode_reward", np.float32)]
)
def test_what_an_environment_counts_itself_has_the_shape_and_type_of_torchrls(name, dtype):
    spec = EnvSpec({name: ArraySpec((1,), np.dtype(dtype))}, continuous(-1.0))
    assert name in spec.observations
    for other in (ArraySpec((), np.dtype(dtype)), ArraySpec((1,), np.dtype(np.int32))):
        with pytest.raises(ConfigurationError, match=f"observation '{name}' is .* another name"):
            EnvSpec({name: other, "observation": VECTOR}, continuous(-1.0))


def test_a_spec_is_described_in_one_line():
    described = str(EnvSpec({"observation": VECTOR}, continuous(-1.0)))
    assert described == (
        "observations 'observation' float32 [3] and actions continuous float32 [3] "
        "from [-1.0, -1.0, -1.0] to [1.0, 1.0, 1.0]"
    )


@pytest.mark.parametrize(
    "other",
    [
        EnvSpec({"pixels": VECTOR}, continuous(-1.0)),
        EnvSpec({"observation": VECTOR}, continuous(-2.0)),
        EnvSpec({"observation": ArraySpec((4,), FLOATS)}, continuous(-1.0)),
        EnvSpec(
            {"observation": VECTOR}, ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (3,))
        ),
        "observation",
    ],
)
def test_specs_of_other_shapes_kinds_or_bounds_are_not_equal(other):
    assert EnvSpec({"observation": VECTOR}, continuous(-1.0)) != other
