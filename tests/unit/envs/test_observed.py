import numpy as np
import pytest
import torch
from gymnasium import spaces

from hts_torchrl.envs.observed import DeclaredGroup, DeclaredSpace, as_declared, called
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec


def declared(shape, dtype) -> ArraySpec:
    return ArraySpec(shape, np.dtype(dtype))


FLOATS, BYTES = declared((2,), np.float32), declared((2,), np.uint8)


def refusal(value, spec) -> str:
    with pytest.raises(ConfigurationError) as raised:
        as_declared("place", value, spec)
    return str(raised.value)


def test_what_would_end_the_callers_loop_is_raised_as_an_error():
    """Lightning's evaluation ends at a StopIteration of whatever it calls."""
    told = r"^make\(\) of environment 3 raised StopIteration$"
    with pytest.raises(RuntimeError, match=told), called("make", 3):
        next(iter(()))


class TestAsDeclared:
    def test_an_array_of_the_declared_shape_and_type_is_passed_on_itself(self):
        value = np.zeros(2, np.float32)
        assert as_declared("place", value, FLOATS) is value

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (np.zeros(3, np.float32), "float32 [3]"),
            (np.zeros((2, 1), np.float32), "float32 [2, 1]"),
            (np.float32(0), "float32 []"),  # which a cell would repeat
            (np.zeros(2), "float64 [2]"),
            (torch.zeros(2, dtype=torch.float64), "float64 [2]"),
            (np.zeros(2, np.int64), "int64 [2]"),
            ([[1.0], [2.0, 3.0]], "object []"),
            ({"place": 1}, "object []"),
            ("words", "<U5 []"),
            (None, "missing"),
        ],
    )
    def test_another_shape_or_type_is_refused(self, value, found):
        message = f"'place' is {found}, but float32 [2] is declared"
        assert refusal(value, FLOATS) == message

    def test_a_tensor_with_a_gradient_is_refused(self):
        message = refusal(torch.zeros(2, requires_grad=True), FLOATS)
        assert message.startswith("a Tensor: Can't call numpy() on Tensor that requires grad")

    @pytest.mark.parametrize(
        ("value", "spec"),
        [
            (np.ones(2, np.uint8), FLOATS),
            (np.array([0.5, 2], np.dtype(np.float32).newbyteorder()), FLOATS),
            (np.ones(2, np.float32), declared((2,), np.float64)),
            (np.array([0, 255]), BYTES),
            ([0, 255], BYTES),
            ([0.5, 0.25], FLOATS),
            ([1, 2], FLOATS),
            ((1, 2), declared((2,), np.int64)),
            (3, declared((), np.int64)),
            (np.int32(3), declared((), np.int64)),
            (np.array([True, False]), declared((2,), np.int8)),
        ],
    )
    def test_what_the_declared_type_holds_without_loss_is_accepted(self, value, spec):
        assert (
            as_declared("place", value, spec).astype(spec.dtype).tolist()
            == np.asarray(value).tolist()
        )

    @pytest.mark.parametrize("value", [np.array([0, 256]), np.array([-1, 0]), [0.0, 1.0], [-1, 0]])
    def test_numbers_that_the_declared_integers_do_not_hold_are_refused(self, value):
        assert "uint8 [2] is declared" in refusal(value, BYTES)


def gate(space: spaces.Space) -> DeclaredSpace:
    return DeclaredSpace(space, env_spec(space, spaces.Discrete(2)).observations)


BOTH = spaces.Dict({"vector": spaces.Box(-1, 1, (2,)), "number": spaces.Discrete(3, start=5)})


PAIR = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
NESTED = spaces.Dict(pair=PAIR)


class TestDeclaredSpace:
    def test_a_plain_observation_has_one_entry(self):
        entries = gate(spaces.Box(-1, 1, (2,))).entries(np.ones(2, np.float32))
        assert {key: array.tolist() for key, array in entries.items()} == {"observation": [1, 1]}

    def test_a_dictionary_has_the_declared_entries_and_no_others(self):
        entries = gate(BOTH).entries({"vector": np.ones(2, np.float32), "number": 7, "more": 1})
        assert {key: array.tolist() for key, array in entries.items()} == {
            "number": 7,
            "vector": [1, 1],
        }

    def test_a_list_is_a_tuple_as_gymnasium_says(self):
        assert PAIR.contains([1, np.ones(2, np.float32)])
        entries = gate(PAIR).entries([1, np.ones(2, np.float32)])
        assert {key: array.tolist() for key, array in entries.items()} == {"0": 1, "1": [1, 1]}

    def test_a_nested_one_has_the_entries_of_each_path(self):
        space = spaces.Dict(arm=spaces.Tuple([spaces.Discrete(3), BOTH]), eye=spaces.Discrete(2))
        inner = {"vector": np.ones(2, np.float32), "number": 6}
        entries = gate(space).entries({"eye": 1, "arm": (2, inner)})
        assert {key: array.tolist() for key, array in entries.items()} == {
            "eye": 1,
            ("arm", "0"): 2,
            ("arm", "1", "vector"): [1, 1],
            ("arm", "1", "number"): 6,
        }

    @pytest.mark.parametrize(
        ("space", "observation", "message"),
        [
            (NESTED, {"pair": (1,)}, "('pair', '1') is missing, but float32 [2] is declared"),
            (NESTED, {"pair": 1}, "('pair', '0') is missing, but int64 [] is declared"),
            (NESTED, {}, "('pair', '0') is missing, but int64 [] is declared"),
            (PAIR, {"0": 1}, "a dict came, but a tuple is declared"),
            (BOTH, np.ones(2, np.float32), "a ndarray came, but a dict is declared"),
            (BOTH, {"number": 5}, "'vector' is missing, but float32 [2] is declared"),
            (spaces.Box(-1, 1, (2,)), {"observation": np.ones(2)}, "'observation' is object []"),
            (spaces.Discrete(3), 3, "'observation' is 3, but range(0, 3) is declared"),
            (spaces.Discrete(3, start=5), 4, "'observation' is 4, but range(5, 8) is declared"),
            (spaces.Discrete(3), np.int64(-1), "'observation' is -1, but range(0, 3) is declared"),
            (
                spaces.MultiDiscrete([2, 3]),
                np.array([1, 3]),
                "'observation' is [1 3], but range(0, 2) range(0, 3) is declared",
            ),
            (
                spaces.MultiDiscrete([2, 2], start=[5, 0]),
                np.array([4, 0]),
                "'observation' is [4 0], but range(5, 7) range(0, 2) is declared",
            ),
            (spaces.Discrete(3), 1.0, "'observation' is float64 [], but int64 [] is declared"),
        ],
    )
    def test_anything_else_is_refused(self, space, observation, message):
        with pytest.raises(ConfigurationError) as raised:
            gate(space).entries(observation)
        assert str(raised.value).startswith(message)

    @pytest.mark.parametrize(
        ("space", "observation"),
        [
            (spaces.Discrete(3, start=5), 7),
            (spaces.Discrete(3), np.int32(2)),
            (spaces.MultiDiscrete([2, 9]), np.array([1, 8])),
            (spaces.MultiBinary(2), np.array([0, 1], np.int8)),
            (spaces.Box(0, 1, (2,)), np.array([-9, np.nan], np.float32)),  # whose bounds are words
        ],
    )
    def test_what_was_declared_is_accepted(self, space, observation):
        entries = gate(space).entries(observation)
        assert np.array_equal(entries["observation"], observation, equal_nan=True)


class TestCalled:
    def test_names_call_and_environment_in_a_refusal(self):
        with pytest.raises(ConfigurationError) as raised, called("reset", 4):
            as_declared("place", 1.0, FLOATS)
        assert str(raised.value) == (
            "reset() of environment 4 returned what is not declared: 'place' is float32 [], but "
            "float32 [2] is declared"
        )

    def test_names_all_environments_of_a_group(self):
        message = r"step\(\) of environments \[2, 3\] returned"
        with pytest.raises(ConfigurationError, match=message), called("step", [2, 3]):
            as_declared("place", 1.0, FLOATS)

    def test_leaves_a_note_on_any_other_exception(self):
        with pytest.raises(KeyError) as raised, called("step", 4):
            raise KeyError
        assert raised.value.__notes__ == ["raised by step() of environment 4"]

    def test_leaves_what_an_environment_refuses_itself_in_its_own_words(self):
        with pytest.raises(ConfigurationError) as raised, called("reset", 4):
            raise ConfigurationError("no such opponent")
        assert str(raised.value) == "no such opponent"
        assert raised.value.__notes__ == ["raised by reset() of environment 4"]


class TestDeclaredGroup:
    def test_what_is_none_of_the_declared_choices_is_refused(self):
        integers = np.dtype(np.int64)
        place = ArraySpec((), integers, (range(1, 4),))
        action = ActionSpec("discrete", ArraySpec((), integers), (2,))
        group = DeclaredGroup(EnvSpec({"place": place}, action), [6, 7])
        group.require_observation({"place": np.array([1, 3])}, "step")
        message = r"step\(\) of environments \[6, 7\] .*'place' is 4, but range\(1, 4\) is declared"
        with pytest.raises(ConfigurationError, match=message):
            group.require_observation({"place": np.array([3, 4])}, "step")
