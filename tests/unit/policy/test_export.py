"""A policy in a file: the same bits come back, and nothing in it is run."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import nn

from hts_torchrl import ConfigurationError, load_policy, make_actor_critic, save_policy
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.models import MLP
from hts_torchrl.policy.examination import computed, fill_at_random
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.policy.spec_json import spec_as_json
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec

VECTOR = spaces.Box(-1, 1, (5,))
PIXELS = spaces.Box(0, 255, (4, 84, 84), np.uint8)
BOUNDS = np.array([-1.0, -np.inf], np.float32), np.array([0.1, np.inf], np.float32)
TASKS = {
    "nature": (PIXELS, spaces.Discrete(6), False),
    "nips": (PIXELS, spaces.Discrete(6), False),
    "mlp": (VECTOR, spaces.MultiDiscrete([3, 5]), False),
    "mlp+lstm": (VECTOR, spaces.Discrete(3), False),
    "gru": (PIXELS, spaces.Discrete(6), False),
    "mlp, choices": (spaces.MultiDiscrete([2, 3], start=[1, -4]), spaces.Discrete(3), False),
    "mlp, continuous": (VECTOR, spaces.Box(*BOUNDS), False),
    "nips, combined": (spaces.Dict({"eye": PIXELS, "place": VECTOR}), spaces.Discrete(6), False),
    "mlp, masked": (
        spaces.Dict({"place": VECTOR, "action_mask": spaces.MultiBinary(8)}),
        spaces.MultiDiscrete([3, 5]),
        False,
    ),
    "mlp, mixed": (
        VECTOR,
        spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(*BOUNDS)}),
        False,
    ),
    "mlp, squashed": (VECTOR, spaces.Box(-1, np.array([0.1, 2.0], np.float32)), True),
}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "folder" / "policy.safetensors"


def save(place, task="mlp", **settings):
    """Write a policy whose weights no initialisation gives; returns it with its specification."""
    observation, action, squash = TASKS[task]
    network, spec = task.partition(",")[0], env_spec(observation, action)
    policy = make_actor_critic(network, spec, squash=squash)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_policy(policy, place, **{"spec": spec, "network": network, "squash": squash, **settings})
    return policy, spec


def answers(policy, spec):
    inference = PolicyInference(policy, with_memory(policy, spec), batch_size=8)
    fill_at_random(inference, np.random.default_rng(0))
    return computed(inference)


class TestRoundTrip:
    @pytest.mark.parametrize("task", TASKS)
    def test_every_answer_has_the_same_bits(self, place, task):
        policy, spec = save(place, task)
        loaded = load_policy(place)
        pairs = zip(answers(policy, spec), answers(loaded, spec), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    def test_weights_keep_their_memory_order(self, place):
        """Else a convolution might take another kernel, with other last bits."""
        policy, _ = save(place, "nature")
        pairs = zip(policy.parameters(), load_policy(place).parameters(), strict=True)
        assert all(one.stride() == other.stride() for one, other in pairs)

    def test_the_loaded_policy_is_a_tensordict_module(self, place):
        save(place)
        answered = load_policy(place)(TensorDict({"observation": torch.zeros(3, 5)}, [3]))
        assert answered["action"].shape == (3, 2)

    def test_a_network_of_ones_own_is_loaded_into_its_module(self, place):
        _, spec = save(place)
        own = nn.Linear(5, 4)
        save_policy(own, place, spec=spec, network=None)
        other = nn.Linear(5, 4)
        assert load_policy(place, other) is other
        assert torch.equal(own.weight, other.weight)

    def test_keys_with_a_path_and_other_kinds_of_actions_come_back(self, place):
        key = ("agent", "move")
        action = ActionSpec("one_hot", ArraySpec((6,), np.dtype(bool)), (6,), key=key)
        spec = EnvSpec({("agent", "vector"): ArraySpec((5,), np.dtype(np.float32))}, action)
        policy = make_actor_critic("mlp", spec)
        save_policy(policy, place, spec=spec, network="mlp")
        loaded = load_policy(place)
        assert loaded.in_keys == policy.in_keys == [("agent", "vector")]
        assert loaded.dist_sample_keys == [key]

    def test_a_mask_of_another_name_comes_back(self, place):
        action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (4,), mask="legal")
        mask, seen = ArraySpec((4,), np.dtype(bool)), ArraySpec((5,), np.dtype(np.float32))
        spec = EnvSpec({"place": seen, "legal": mask}, action)
        save_policy(make_actor_critic("mlp", spec), place, spec=spec, network="mlp")
        allowed = (torch.arange(4) == 2).expand(64, 4)
        rows = TensorDict({"place": torch.randn(64, 5), "legal": allowed}, [64])
        assert load_policy(place)(rows)["action"].tolist() == [2] * 64

    def test_an_action_without_bounds_comes_back(self, place):
        """As that of TorchRL's ``Unbounded``."""
        action = ActionSpec("continuous", ArraySpec((2,), np.dtype(np.float32)))
        spec = EnvSpec({"observation": ArraySpec((5,), np.dtype(np.float32))}, action)
        policy = make_actor_critic("mlp", spec)
        save_policy(policy, place, spec=spec, network="mlp")
        pairs = zip(answers(policy, spec), answers(load_policy(place), spec), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    def test_loading_draws_no_random_number(self, place):
        save(place)
        before = torch.get_rng_state()
        load_policy(place)
        assert torch.equal(torch.get_rng_state(), before)

    def test_tied_weights_are_written(self, place):
        _, spec = save(place)
        tied, apart = (nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(2))
        tied[1].weight = tied[0].weight
        save_policy(tied, place, spec=spec, network=None)
        load_policy(place, apart)
        assert torch.equal(apart[0].weight, tied[0].weight)
        assert torch.equal(apart[1].weight, tied[0].weight)

    def test_state_that_is_no_tensor_is_refused_by_name(self, place):
        _, spec = save(place)
        before = place.read_bytes()
        with pytest.raises(ConfigurationError, match="'weight', a UninitializedParameter, but"):
            save_policy(nn.LazyLinear(5), place, spec=spec, network=None)
        assert place.read_bytes() == before


class TestDescription:
    def test_says_what_is_needed_to_build_the_network(self, place):
        save(place, "mlp, squashed", about={"updates": 7, "folder": Path("runs")})
        with safe_open(place, "pt") as file:
            described = {k: json.loads(v) for k, v in file.metadata().items() if k != "format"}
        assert described["network"] == {
            "name": "mlp",
            "squash": True,
            "normalized": False,
            "action_values": False,
        }
        assert described["about"] == {"updates": 7, "folder": "runs"}
        assert described["hts_torchrl"] == "0.1.0"
        assert described["spec"]["observations"] == [
            {"key": ["observation"], "shape": [5], "dtype": "float32"}
        ]
        assert described["spec"]["action"]["kind"] == "continuous"

    def test_is_json_that_any_reader_knows(self, place):
        """Python would write Infinity, which is none."""
        save(place, "mlp, continuous")
        with safe_open(place, "pt") as file:
            assert "Infinity" not in file.metadata()["spec"]


class TestAnotherNetwork:
    """A file that could not be loaded as what it says is not written."""

    FOUR = env_spec(VECTOR, spaces.MultiDiscrete([4, 4]))  # as many logits as 3 and 5 have
    SIX = env_spec(spaces.Box(-1, 1, (6,)), spaces.MultiDiscrete([3, 5]))
    NAMED = EnvSpec({"place": ArraySpec((5,), np.dtype(np.float32))}, FOUR.action)

    @pytest.mark.parametrize(
        ("task", "settings", "told"),
        [
            ("mlp", {"network": "nips"}, "network='nips'"),
            ("mlp", {"network": "mlp+lstm"}, "has no place"),
            ("mlp", {"network": "mpl"}, "mpl"),
            ("mlp", {"normalized": True}, "normalized=True"),
            ("mlp", {"spec": SIX}, r"float32 \[64, 5\], but float32 \[64, 6\] is needed"),
            ("mlp", {"spec": FOUR}, r"\(3, 5\)}, but .*\(4, 4\)} is needed"),
            ("mlp", {"spec": NAMED}, r"in_keys \['observation'\], but in_keys \['place'\] is"),
            ("mlp, squashed", {"squash": False}, "a TanhNormal with .* a IndependentNormal with"),
        ],
    )
    def test_is_refused(self, place, task, settings, told):
        with pytest.raises(ConfigurationError, match=told) as raised:
            save(place, task, **settings)
        assert str(raised.value).startswith("save_policy(network=")
        assert not place.exists()

    def test_draws_no_random_number(self, place):
        policy, spec = save(place)
        before = torch.get_rng_state()
        save_policy(policy, place, spec=spec, network="mlp")
        assert torch.equal(torch.get_rng_state(), before)


class TestRefusals:
    def refusal(self, place, *arguments) -> str:
        with pytest.raises(ConfigurationError) as raised:
            load_policy(place, *arguments)
        return str(raised.value)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps({"weights": 1})])
    def test_another_file_is_refused(self, place, content):
        place.parent.mkdir()
        place.write_bytes(content)
        assert "this is no policy that can be read" in self.refusal(place)

    def test_a_missing_file_is_refused_and_one_cut_off(self, place):
        assert "this is no policy that can be read" in self.refusal(place)
        save(place)
        place.write_bytes(place.read_bytes()[:-100])
        assert "this is no policy that can be read" in self.refusal(place)

    def test_safetensors_of_another_program_are_refused(self, place):
        place.parent.mkdir()
        save_file({"weight": torch.zeros(1)}, place)
        assert "not written by hts-torchrl export" in self.refusal(place)

    @pytest.mark.parametrize("network", [None, "os.system", f"{__name__}.Trap"])
    def test_a_network_that_is_not_built_in_is_not_looked_for(self, place, network):
        save(place, network=network)
        assert f"its network ({network or 'a policy of your own'}) is none of this" in self.refusal(
            place
        )

    def test_another_network_is_refused(self, place):
        save(place)
        assert "is of another network" in self.refusal(place, nn.Linear(2, 2))

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("network", "{"),
            ("network", "[]"),
            ("spec", "{}"),
            ("spec", '{"observations": [], "action": null}'),
            ("spec", None),
            ("network", "[" * 100_000),
            ("spec", '{"a":' * 100_000),
            ("spec", "9" * 10_000),
            ("network", '{"name": ["mlp"], "squash": false}'),
            ("network", '{"name": "mlp"}'),
        ],
    )
    def test_a_description_that_makes_no_sense_is_refused(self, place, name, text):
        policy, _ = save(place)
        with safe_open(place, "pt") as file:
            metadata = {**file.metadata(), name: text}
        metadata = {name: text for name, text in metadata.items() if text is not None}
        save_file(policy.state_dict(), place, metadata)
        assert "its description cannot be read" in self.refusal(place)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("observations.0.shape", [10**10]),
            ("observations.0.shape", [10**6] * 20),
            ("observations.0.shape", [10**400]),
            ("observations.0.shape", [-5]),
            ("observations.0.shape", [0]),
            ("observations.0.shape", [5.0]),
            ("observations.0.shape", 5),
            ("observations.0.dtype", "O"),
            ("observations.0.dtype", "U10000000000"),
            ("observations.0.dtype", "nonsense"),
            ("observations.0.key", []),
            ("observations.0.key", [""]),
            ("observations.0.key", [3]),
            ("observations.0.choices", [[0, 2]]),
            ("observations.0.choices", [[0, 2, 3]] * 5),
            ("observations.0.choices", [[2, 2]] * 5),
            ("observations.0.choices", [[0, 2**70]] * 5),
            ("observations.0.choices", [[0, 2.5]] * 5),
            ("observations", {}),
            ("action.shape", [10**10]),
            ("action.dtype", "int64"),
            ("action.kind", "discrete"),
            ("action.kind", "smooth"),
            ("action.kind", "mixed"),
            ("action.sizes", [10**10]),
            ("action.low", [0.0]),
            ("action.low", [float("nan"), 0.0]),
            ("action.low", ["a", "b"]),
            ("action.low", [5.0, 5.0]),
            ("action.high", None),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_a_description_of_what_cannot_be_is_refused_and_nothing_is_made(
        self, place, path, value, monkeypatch
    ):
        policy, _ = save(place, "mlp, continuous")
        with safe_open(place, "pt") as file:
            metadata = file.metadata()
        spec = json.loads(metadata["spec"])
        *parents, name = path.split(".")
        changed = spec
        for parent in parents:
            changed = changed[int(parent) if parent.isdigit() else parent]
        changed[name] = value
        save_file(policy.state_dict(), place, {**metadata, "spec": json.dumps(spec)})
        monkeypatch.setattr(torch.random, "fork_rng", fall_into)  # before anything is made
        told = self.refusal(place)
        assert told.startswith(f"{place}")
        assert "\n" not in told
        assert len(told) < 1000

    def test_choices_without_the_numbers_that_are_described_are_refused(self, place):
        policy, spec = save(place, "mlp, mixed")
        no_numbers = replace(
            spec.action,
            array=ArraySpec((1,), np.dtype(np.float32)),
            low=BOUNDS[0][:0],
            high=BOUNDS[0][:0],
        )
        wrong = EnvSpec(spec.observations, no_numbers)
        with safe_open(place, "pt") as file:
            metadata = {**file.metadata(), "spec": json.dumps(spec_as_json(wrong))}
        save_file(policy.state_dict(), place, metadata)
        assert "mixed actions of float32 [1] with 1 choices" in self.refusal(place)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda t: t.double(), "'module.0.module.0.bias' is float64 [64], but float32 [64]"),
            (lambda t: t[:1], "'module.0.module.0.bias' is float32 [1], but float32 [64] is"),
            (lambda t: t.reshape(1, *t.shape), "float32 [1, 64], but float32 [64] is needed"),
        ],
    )
    def test_tensors_that_would_be_converted_or_do_not_fit_are_refused(self, place, change, told):
        policy, _ = save(place)
        with safe_open(place, "pt") as file:
            metadata = file.metadata()
        tensors = {name: change(t).contiguous() for name, t in policy.state_dict().items()}
        save_file(tensors, place, metadata)
        assert told in self.refusal(place)
        assert "is of another network" in self.refusal(place, policy)

    def test_tensors_that_are_missing_or_too_many_are_named(self, place):
        policy, _ = save(place)
        with safe_open(place, "pt") as file:
            metadata = file.metadata()
        tensors = policy.state_dict()
        save_file({**tensors, "zzz": torch.zeros(1)}, place, metadata)
        assert self.refusal(place).endswith("is of another network: 'zzz' has no place")
        name = next(iter(tensors))
        save_file({n: t for n, t in tensors.items() if n != name}, place, metadata)
        assert self.refusal(place).endswith(f"is of another network: {name!r} is missing")

    def test_a_place_that_cannot_be_written_is_an_error_with_its_name(self, tmp_path):
        (tmp_path / "folder").write_text("a file")
        with pytest.raises(OSError, match=r"the policy .*policy\.safetensors: a file is where"):
            save(tmp_path / "folder" / "policy.safetensors")

    def test_a_full_disk_leaves_what_was_there(self, place, monkeypatch):
        save(place)
        before = place.read_bytes()

        def fill_up(tensors, path, metadata):  # noqa: ARG001
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")

        monkeypatch.setattr("hts_torchrl.policy.export.save_file", fill_up)
        with pytest.raises(OSError, match="cannot write the policy"):
            save(place)
        assert place.read_bytes() == before


def fall_into(**_):
    raise AssertionError("a network of a file's choosing was made")


class Trap(MLP):
    """A trunk that must not be made by a name in a file."""

    def __init__(self, shape) -> None:  # noqa: ARG002
        raise AssertionError("code of a file's choosing was run")
