import numpy as np
import pytest
import torch
from torchrl.modules import LSTMModule

from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.policy.sequence import evaluate_sequences
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


def test_only_the_memory_of_the_first_step_and_of_new_trajectories_is_read():
    """The others are computed again: the gradient reaches the first step."""
    for policy in (built_in("lstm"), counting_policy()):
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
