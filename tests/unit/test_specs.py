import numpy as np
import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec, path_of

FLOATS = np.dtype(np.float32)
VECTOR = ArraySpec((3,), FLOATS)


def continuous(low: float) -> ActionSpec:
    bounds = np.full(3, low, np.float32)
    return ActionSpec("continuous", VECTOR, low=bounds, high=-bounds)


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


def test_two_observations_that_would_have_one_place_in_memory_are_refused():
    with pytest.raises(ConfigurationError, match=r"two observations named 'a\.b'"):
        EnvSpec({"a.b": VECTOR, ("a", "b"): VECTOR}, continuous(-1.0))


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


@pytest.mark.parametrize(
    ("key", "path"),
    [("eye", ("eye",)), (("eye",), ("eye",)), (("left", ("eye", "lens")), ("left", "eye", "lens"))],
)
def test_a_key_is_a_path_of_single_names(key, path):
    assert path_of(key) == path
