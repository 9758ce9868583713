import numpy as np
import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import GRUModule, LSTMModule, ValueOperator

from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.memory import evaluate_sequences, with_memory
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.policies import counting_policy

ENVS, STEPS = 6, 9
ACTION = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,))
SPEC = EnvSpec({"observation": ArraySpec((4,), np.dtype(np.float32))}, ACTION)


def built_in(network: str):
    torch.manual_seed(2)
    return make_actor_critic(network, SPEC)


def torch_lstm():
    """The built-in network with torch's own LSTM, of other bits."""
    policy = built_in("lstm")
    module = next(each for each in policy.modules() if isinstance(each, LSTMModule))
    module.make_cudnn_based()
    return policy


def two_memories():
    """One that TorchRL runs over whole sequences, and one that it does not."""
    torch.manual_seed(2)
    policy = counting_policy()
    count, head = policy.module
    count.in_keys = ["hidden", "count"]
    memory = GRUModule(input_size=4, hidden_size=5, in_key="observation", out_key="hidden")
    return ProbabilisticTensorDictSequential(memory, count, head)


@torch.no_grad()
def played(policy, is_init: torch.Tensor):
    """Inputs of a round as they are stored, with logits and values of each step of an actor."""
    memory = with_memory(policy, SPEC).memory
    observations = torch.randn(ENVS, STEPS, 4, generator=torch.Generator().manual_seed(1))
    first = {key: torch.from_numpy(value) for key, value in memory.initial.items()}
    state = {key: torch.rand(ENVS, *value.shape) for key, value in first.items()}
    columns, logits, values = [], [], []
    for step in range(STEPS):
        for key, value in first.items():
            state[key] = state[key].clone()
            state[key][is_init[:, step, 0]] = value
        inputs = {"observation": observations[:, step], **state}
        if memory.reads_is_init:
            inputs["is_init"] = is_init[:, step]
        result = evaluate(policy, inputs, ENVS)
        columns.append(inputs)
        logits.append(result.distribution.logits)
        values.append(result.value)
        state = {key: result.written["next", key] for key in state}
    inputs = {key: torch.stack([column[key] for column in columns], 1) for key in columns[0]}
    return inputs, torch.stack(logits, 1), torch.stack(values, 1)


def no_ends() -> torch.Tensor:
    return torch.zeros(ENVS, STEPS, 1, dtype=torch.bool)


def some_ends() -> torch.Tensor:
    is_init = no_ends()
    is_init[0, 0] = is_init[1, 3] = is_init[1, 4] = is_init[4, STEPS - 1] = True
    return is_init


@pytest.mark.parametrize("network", ["lstm", "gru"])
def test_a_built_in_network_has_the_bits_of_its_steps_where_the_rows_are_as_many(network):
    policy = built_in(network)
    inputs, logits, values = played(policy, no_ends())
    result = evaluate_sequences(policy, inputs, no_ends())
    assert torch.equal(result.distribution.logits, logits)
    assert torch.equal(result.value, values)


@pytest.mark.parametrize("make", [lambda: built_in("lstm"), lambda: built_in("gru"), torch_lstm])
def test_where_trajectories_end_sequences_are_those_of_steps_to_float_accuracy(make):
    policy = make()
    inputs, logits, values = played(policy, some_ends())
    result = evaluate_sequences(policy, inputs, some_ends())
    torch.testing.assert_close(result.distribution.logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.value, values, rtol=1e-5, atol=1e-6)


def test_another_memory_is_unrolled_to_the_bits_of_its_steps():
    policy = counting_policy(first=3.0)
    inputs, logits, values = played(policy, some_ends())
    result = evaluate_sequences(policy, inputs, some_ends())
    assert torch.equal(result.distribution.logits, logits)
    assert torch.equal(result.value, values)
    assert values[1, :, 0].tolist()[3:] == [3, 3, 4, 5, 6, 7]


def test_modules_beside_the_memory_are_given_rows_as_actors_give_them():
    """A ``Flatten`` would take the steps for features, and ``normalize`` divide by their length."""

    class Normalized(nn.Module):
        def forward(self, observation):
            return torch.nn.functional.normalize(observation, dim=1)

    torch.manual_seed(2)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Flatten(), ["observation"], ["flat"]),
        TensorDictModule(Normalized(), ["flat"], ["features"]),
        GRUModule(input_size=4, hidden_size=5, in_key="features", out_key="hidden"),
        TensorDictModule(nn.Linear(5, 2), ["hidden"], ["logits"]),
        ValueOperator(nn.Linear(5, 1), ["hidden"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    )
    inputs, logits, values = played(policy, some_ends())
    result = evaluate_sequences(policy, inputs, some_ends())
    torch.testing.assert_close(result.distribution.logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.value, values, rtol=1e-5, atol=1e-6)


def test_a_memory_of_another_precision_is_carried_in_that_of_its_primer():
    """Actors store float32; the sum of 1e-9 and 1 is 1 there."""

    class Sum(nn.Module):
        def forward(self, observation, total):
            total = total.double() + 1e-9
            return observation[..., :2] + total.float(), total - 1, total

    class SumModule(TensorDictModule):
        def __init__(self) -> None:
            keys = ["logits", "state_value", ("next", "total")]
            super().__init__(Sum(), ["observation", "total"], keys)

        def make_tensordict_primer(self):
            return TensorDictPrimer({"total": Unbounded((1,))}, default_value=1.0)

    head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    policy = ProbabilisticTensorDictSequential(SumModule(), head)
    inputs = {"observation": torch.zeros(1, STEPS, 4), "total": torch.ones(1, STEPS, 1)}
    values = evaluate_sequences(policy, inputs, no_ends()[:1]).value
    assert values.flatten().tolist() == pytest.approx([1e-9] * STEPS)


def test_only_the_memory_of_the_first_step_and_of_new_trajectories_is_read():
    """The others are computed again: the gradient reaches the first step."""
    for policy in (built_in("lstm"), counting_policy(), two_memories()):
        inputs, _, _ = played(policy, some_ends())
        expected = evaluate_sequences(policy, inputs, some_ends()).distribution.logits
        spoiled = dict(inputs)
        for key in inputs.keys() - {"observation", "is_init"}:
            kept = some_ends().squeeze(-1)
            kept[:, 0] = True
            spoiled[key] = inputs[key].clone()
            spoiled[key][~kept] = torch.nan
        result = evaluate_sequences(policy, spoiled, some_ends()).distribution.logits
        assert torch.equal(result, expected)


def test_the_gradient_goes_back_through_time():
    policy = built_in("gru")
    inputs, _, _ = played(policy, no_ends())
    inputs["observation"].requires_grad_()
    evaluate_sequences(policy, inputs, no_ends()).value[:, -1].sum().backward()
    assert inputs["observation"].grad[:, 0].abs().min() > 0
