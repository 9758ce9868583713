import numpy as np
import pytest
from gymnasium import spaces

from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ArraySpec

BOX = spaces.Box(-1.0, 2.0, (3,), np.float32)
PICTURE = spaces.Box(0, 255, (1, 4, 4), np.uint8)
TWO = spaces.Discrete(2)


def test_a_plain_observation_is_called_observation():
    assert env_spec(BOX, TWO).observations == {"observation": ArraySpec((3,), np.dtype("float32"))}


def test_numbers_have_the_byte_order_of_this_machine():
    space = spaces.Box(-1.0, 2.0, (3,), np.dtype(np.float32).newbyteorder())
    assert env_spec(space, TWO).observations == {
        "observation": ArraySpec((3,), np.dtype("float32"))
    }


def test_numbers_of_more_bits_than_torch_has_are_refused():
    space = spaces.Box(-1.0, 2.0, (3,), np.longdouble)
    with pytest.raises(ConfigurationError, match="which torch lacks; float64 or less is needed"):
        env_spec(space, TWO)


def test_a_dictionary_gives_one_observation_an_entry():
    spec = env_spec(spaces.Dict({"picture": PICTURE, "vector": BOX}), TWO)
    assert spec.observations == {
        "picture": ArraySpec((1, 4, 4), np.dtype("uint8")),
        "vector": ArraySpec((3,), np.dtype("float32")),
    }


@pytest.mark.parametrize(
    ("space", "shape", "choices"),
    [
        (spaces.Discrete(5), (), (range(5),)),
        (spaces.Discrete(5, start=-2), (), (range(-2, 3),)),
        (spaces.MultiDiscrete([2, 3]), (2,), (range(2), range(3))),
        (spaces.MultiDiscrete([[2], [3]], start=[[1], [4]]), (2, 1), (range(1, 3), range(4, 7))),
        (spaces.MultiBinary(4), (4,), ()),
    ],
)
def test_observations_may_be_choices(space, shape, choices):
    (array,) = env_spec(space, TWO).observations.values()
    assert (array.shape, array.choices) == (shape, choices)


def test_a_discrete_action_is_one_choice():
    action = env_spec(BOX, spaces.Discrete(5)).action
    assert (action.kind, action.sizes, action.array.shape) == ("discrete", (5,), ())


def test_a_discrete_action_may_start_anywhere():
    assert env_spec(BOX, spaces.Discrete(5, start=-2)).action.sizes == (5,)


def test_a_multi_discrete_action_has_a_choice_for_each_component():
    action = env_spec(BOX, spaces.MultiDiscrete([3, 5])).action
    assert (action.kind, action.sizes, action.array.shape) == ("multi_discrete", (3, 5), (2,))


def test_a_box_of_floats_is_a_continuous_action_with_bounds():
    action = env_spec(PICTURE, BOX).action
    assert (action.kind, action.sizes) == ("continuous", ())
    assert (action.low.tolist(), action.high.tolist()) == ([-1.0] * 3, [2.0] * 3)


def test_continuous_actions_are_single_precision_also_where_the_environment_is_not():
    action = env_spec(BOX, spaces.Box(-1.0, 1.0, (2,), np.float64)).action
    assert {action.array.dtype, action.low.dtype, action.high.dtype} == {np.dtype("float32")}


def test_a_binary_action_is_a_choice_of_two_for_each_component():
    action = env_spec(BOX, spaces.MultiBinary(3)).action
    assert (action.kind, action.sizes, action.array.shape) == ("multi_discrete", (2, 2, 2), (3,))


@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 3, 4, 5)),
        (spaces.MultiBinary([2, 3]), (2,) * 6),
        (spaces.Box(-1, np.array([[0], [3]]), (2, 1), np.int32), (2, 5)),
        (spaces.Box(3, 255, (), np.uint8), (253,)),
        (spaces.Box(0, 1, (2,), bool), (2, 2)),
    ],
)
def test_choices_of_any_shape_and_bounded_integers_are_flat(space, sizes):
    action = env_spec(BOX, space).action
    assert (action.kind, action.sizes) == ("multi_discrete", sizes)
    assert action.array == ArraySpec((len(sizes),), np.dtype(np.int64))


def test_an_action_whose_bounds_are_no_numbers_is_refused():
    space = spaces.Box(-1.0, 1.0, (2,))
    space.low[0] = np.nan
    with pytest.raises(ConfigurationError, match="bounds that are not numbers"):
        env_spec(BOX, space)


def test_bounds_that_single_precision_does_not_reach_are_none():
    action = env_spec(BOX, spaces.Box(-1e300, 1e300, (2,), np.float64)).action
    assert (action.low.tolist(), action.high.tolist()) == ([-np.inf] * 2, [np.inf] * 2)


@pytest.mark.parametrize("space", [spaces.Box(0, 1, (0,)), spaces.Dict(a=spaces.Box(0, 1, (2, 0)))])
def test_observations_without_elements_are_refused(space):
    with pytest.raises(ConfigurationError, match="has no elements"):
        env_spec(space, TWO)


def test_nested_observations_have_the_path_to_each_as_its_key():
    """A ``Dict`` as TorchRL's ``GymWrapper`` names it; a place in a ``Tuple`` by its number."""
    arm = spaces.Tuple([BOX, spaces.Dict(grip=TWO)])
    spec = env_spec(spaces.Dict({"eye": PICTURE, "arm": arm}), TWO)
    assert {key: array.shape for key, array in spec.observations.items()} == {
        "eye": (1, 4, 4),
        ("arm", "0"): (3,),
        ("arm", "1", "grip"): (),
    }


@pytest.mark.parametrize("name", ["next", "action"])
def test_a_part_of_an_observation_with_a_name_of_the_batch_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"named \['{name}'\]"):
        env_spec(spaces.Dict({name: spaces.Dict(inner=BOX)}), TWO)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Dict({"inner": spaces.Tuple([spaces.Text(5)])}),
        spaces.Sequence(BOX),
        spaces.OneOf([BOX, TWO]),
        spaces.Graph(BOX, TWO),
    ],
)
def test_other_observations_are_refused(space):
    with pytest.raises(ConfigurationError, match="not supported"):
        env_spec(space, TWO)


def test_spaces_of_the_old_gym_are_refused_with_those_that_are_needed():
    old = type("Space", (), {"__module__": "gym.spaces.space"})
    box = type("Box", (old,), {"__repr__": lambda _: "Box(3,)"})()
    message = r"^the (observation|action) space Box\(3,\) is of the old Gym; gymnasium"
    for pair in ((box, TWO), (BOX, box)):
        with pytest.raises(ConfigurationError, match=message):
            env_spec(*pair)


def test_what_leaves_a_part_out_is_named_for_parts_alone():
    mission = spaces.Dict({"image": PICTURE, "mission": spaces.Text(5)})
    with pytest.raises(ConfigurationError, match=r"'mission' space.*FilterObservation leaves"):
        env_spec(mission, TWO)
    with pytest.raises(ConfigurationError, match=r"Tuple of these are$"):
        env_spec(spaces.Text(5), TWO)


@pytest.mark.parametrize(
    "space",
    [spaces.Text(5), spaces.Box(-np.inf, 5, (2,), np.int64), spaces.Dict(a=spaces.Sequence(BOX))],
)
def test_other_actions_are_refused(space):
    with pytest.raises(ConfigurationError, match="not supported"):
        env_spec(BOX, space)


def test_two_parts_of_one_name_are_refused():
    box = spaces.Box(-1, 1, (2,))
    with pytest.raises(ConfigurationError, match=r"two parts of the .* have the key '1'"):
        env_spec(spaces.Dict({1: box, "1": box}), spaces.Discrete(2))
