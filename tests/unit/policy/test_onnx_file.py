"""A policy in an ONNX file, run without torch."""

import json
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from hts_torchrl import ConfigurationError, make_actor_critic, save_onnx
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.policy import onnx_file
from hts_torchrl.specs import ArraySpec, EnvSpec
from tests.policies import drawing_policy

VECTOR = spaces.Box(-1, 1, (5,))
PIXELS = spaces.Box(0, 255, (4, 84, 84), np.uint8)
TASKS = {
    "mlp": (VECTOR, spaces.Discrete(3), False),
    "mlp, choices": (VECTOR, spaces.MultiDiscrete([3, 5]), False),
    "mlp, continuous": (VECTOR, spaces.Box(-1, 1, (2,)), False),
    "mlp, squashed": (VECTOR, spaces.Box(-1, np.array([0.1, 2.0], np.float32)), True),
    "mlp, of doubles": (spaces.Box(-1, 1, (5,), np.float64), spaces.Discrete(3), False),
    "nature": (PIXELS, spaces.Discrete(6), False),
    "nips": (PIXELS, spaces.Discrete(6), False),
    "impala": (PIXELS, spaces.Discrete(6), False),
    "seed": (PIXELS, spaces.Discrete(6), False),
    "nature, of players": (
        spaces.Box(0, 255, (3, 4, 84, 84), np.uint8),
        spaces.MultiDiscrete([5, 5, 5]),
        False,
    ),
}
QUICK = ("mlp", "mlp, squashed", "nature")


def session_of(path):
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])


def observations_for(spec, rows):
    generator = np.random.default_rng(3)
    return {
        name: generator.integers(0, 256, (rows, *array.shape)).astype(array.dtype)
        for name, array in spec.observations.items()
    }


@pytest.mark.parametrize(
    "task",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in TASKS],
)
@pytest.mark.parametrize("rows", [1, 7])
def test_answers_as_the_policy_for_any_number_of_rows(task, rows, tmp_path):
    pytest.importorskip("onnxscript")
    observation, action, squash = TASKS[task]
    spec = env_spec(observation, action)
    policy = make_actor_critic(task.partition(",")[0], spec, squash=squash)
    difference = save_onnx(policy, tmp_path / "policy.onnx", spec=spec)
    assert 0 <= difference < 1e-4
    given = observations_for(spec, rows)
    session = session_of(tmp_path / "policy.onnx")
    names = [each.name for each in session.get_outputs()]
    parameters = ["loc", "scale"] if "continuous" in task or squash else ["logits"]
    assert names == [*parameters, "state_value", "action"]
    found = dict(zip(names, session.run(None, given), strict=True))
    # TorchRL's own way: the operators of the policy, one after the other.
    batch = TensorDict({name: torch.from_numpy(each) for name, each in given.items()}, [rows])
    with torch.no_grad():
        batch = policy.get_value_operator()(batch)
        dist = policy.get_policy_operator().get_dist(batch)
    for name in (*parameters, "state_value"):
        np.testing.assert_allclose(found[name], batch[name].numpy(), rtol=1e-3, atol=1e-4)
    if squash:
        low, high = torch.tensor([-1.0, -1.0]), torch.tensor([0.1, 2.0])
        greedy = low + (torch.tanh(batch["loc"]) + 1) / 2 * (high - low)
        np.testing.assert_allclose(found["action"], greedy.numpy(), atol=1e-3)
    elif parameters == ["logits"]:
        assert np.array_equal(found["action"], dist.mode.numpy())


def test_a_memory_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    spec = env_spec(*TASKS["mlp"][:2])
    with pytest.raises(ConfigurationError, match=r"remembers 'recurrent_state'.* \.safetensors"):
        save_onnx(make_actor_critic("gru", spec), tmp_path / "policy.onnx", spec=spec)


class Two(nn.Module):
    """Reads two observations."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, near, far):
        features = torch.cat([near, far], -1)
        return self.linear(features), features.sum(-1, keepdim=True)


def policy_around(net, *reads):
    return drawing_policy(net, "logits", "state_value", reads=reads, in_keys=["logits"])


def spec_with(**shapes):
    spec = env_spec(VECTOR, spaces.Discrete(3))
    arrays = {name: ArraySpec(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
    return EnvSpec(arrays, spec.action)


def test_a_policy_of_the_users_own_has_its_observations_by_name(tmp_path):
    pytest.importorskip("onnxscript")
    spec = spec_with(near=(2,), far=(3,))
    policy = policy_around(Two(), "near", "far")
    save_onnx(policy, tmp_path / "own.onnx", spec=spec)
    session = session_of(tmp_path / "own.onnx")
    near, far = np.ones((4, 2), np.float32), np.full((4, 3), 2, np.float32)
    _, value, action = session.run(None, {"far": far, "near": near})
    assert value.tolist() == [[8.0]] * 4
    assert action.shape == (4,)


def test_tells_where_it_is_from(tmp_path):
    onnx = pytest.importorskip("onnx")
    spec = env_spec(VECTOR, spaces.Discrete(3))
    policy = make_actor_critic("mlp", spec)
    save_onnx(policy, tmp_path / "new" / "policy.onnx", spec=spec, about={"updates": 3})
    told = {
        each.key: each.value for each in onnx.load(tmp_path / "new" / "policy.onnx").metadata_props
    }
    assert json.loads(told["about"]) == {"updates": 3}
    assert policy.training


class Branching(nn.Module):
    """Decides by the numbers that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, observation):
        if observation.sum() > 0:
            return self.linear(observation), observation[:, :1]
        return self.linear(-observation), observation[:, :1]


class Halves(nn.Linear):
    """Computes in bfloat16, for which onnxruntime has no matrix product on a CPU."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.bfloat16)

    def forward(self, observation):
        return super().forward(observation.bfloat16()), observation[:, :1]


@pytest.mark.parametrize("make", [Branching, Halves])
def test_what_cannot_be_exported_is_refused_by_name_and_leaves_the_file(tmp_path, make):
    pytest.importorskip("onnxscript")
    place = tmp_path / "policy.onnx"
    place.write_text("before")
    policy = policy_around(make(), "observation")
    with pytest.raises(ConfigurationError, match="cannot be exported to ONNX: ") as refusal:
        save_onnx(policy, place, spec=env_spec(VECTOR, spaces.Discrete(3)))
    assert "\n" not in str(refusal.value)
    assert place.read_text() == "before"


def shift_what_is_compared(monkeypatch):
    """Change the policy after it was exported, and before the file is compared with it."""
    exported = onnx_file._exported

    def other(answers):
        program = exported(answers)
        with torch.no_grad():
            next(p for n, p in answers.named_parameters() if n.endswith("bias")).add_(1.0)
        return program

    monkeypatch.setattr(onnx_file, "_exported", other)


def test_a_file_that_answers_otherwise_is_refused_and_not_left(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    spec = env_spec(VECTOR, spaces.Discrete(3))
    shift_what_is_compared(monkeypatch)
    with pytest.raises(ConfigurationError, match="answers otherwise than the policy: logits by up"):
        save_onnx(make_actor_critic("mlp", spec), tmp_path / "policy.onnx", spec=spec)
    assert list(tmp_path.iterdir()) == []


class Masked(nn.Linear):
    """Forbids the first action by a logit of minus infinity."""

    def __init__(self):
        super().__init__(5, 3)

    def forward(self, observation):
        allowed = torch.tensor([False, True, True])
        return super().forward(observation).masked_fill(~allowed, -torch.inf), observation[:, :1]


def test_equal_infinities_are_no_difference(tmp_path):
    pytest.importorskip("onnxscript")
    policy = policy_around(Masked(), "observation")
    spec = env_spec(VECTOR, spaces.Discrete(3))
    assert save_onnx(policy, tmp_path / "policy.onnx", spec=spec) < 1e-4


def test_forbidden_actions_hide_no_difference(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    mask = spaces.MultiBinary(30)
    spec = env_spec(spaces.Dict(observation=VECTOR, action_mask=mask), spaces.Discrete(30))
    shift_what_is_compared(monkeypatch)
    with pytest.raises(ConfigurationError, match="answers otherwise than the policy: logits by up"):
        save_onnx(make_actor_critic("mlp", spec), tmp_path / "policy.onnx", spec=spec)


def test_a_table_is_tried_with_bytes_that_it_has(tmp_path):
    pytest.importorskip("onnxscript")

    class Table(nn.Embedding):
        def forward(self, seen):
            rows = super().forward(seen.long()).sum(1)
            return rows, rows[:, :1]

    spec = env_spec(spaces.Box(0, 255, (4,), np.uint8), spaces.Discrete(3))
    policy = policy_around(Table(11, 3), "observation")
    assert save_onnx(policy, tmp_path / "policy.onnx", spec=spec) < 1e-4


def test_without_the_packages_one_line_says_how_to_have_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    spec = env_spec(VECTOR, spaces.Discrete(3))
    with pytest.raises(ConfigurationError, match=r"pip install 'hts-torchrl\[onnx\]'"):
        save_onnx(make_actor_critic("mlp", spec), tmp_path / "policy.onnx", spec=spec)
