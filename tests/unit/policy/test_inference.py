from copy import deepcopy

import numpy as np
import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import (
    Categorical,
)
from torch.nn.utils.parametrizations import weight_norm
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import NoisyLinear

from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.examination import fill_at_random
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.inference import PolicyInference, one_thread
from hts_torchrl.policy.normalization import NormalizedPolicy, RunningStatistics
from hts_torchrl.rng import action_draws, uniform_draws
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.policies import echo_policy

FLOATS = np.dtype(np.float32)
WIDTH = 64


def discrete(actions: int, width: int = WIDTH) -> EnvSpec:
    action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (actions,))
    return EnvSpec({"observation": ArraySpec((width,), FLOATS)}, action)


def continuous(size: int) -> EnvSpec:
    bounds = np.ones(size, np.float32)
    action = ActionSpec("continuous", ArraySpec((size,), FLOATS), low=-bounds, high=bounds)
    return EnvSpec({"observation": ArraySpec((WIDTH,), FLOATS)}, action)


def observations(rows: int, width: int = WIDTH) -> dict:
    values = np.random.default_rng(1).standard_normal((rows, width))
    return {"observation": values.astype(np.float32)}


def same_bits(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[key], theirs[key]) for key in ours
    )


class TestAnswers:
    def test_action_log_probability_and_value_have_one_row_each(self):
        spec = discrete(3)
        inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=4)
        answers = inference.answer(observations(3), uniform_draws(0, 0, 0, 3, 1))
        shapes = {key: value.shape for key, value in answers.items()}
        assert shapes == {"action": (3,), "action_log_prob": (3,), "state_value": (3, 1)}

    def test_the_log_probability_is_that_of_the_chosen_action(self):
        spec = discrete(3)
        policy = make_actor_critic("mlp", spec)
        inference = PolicyInference(policy, spec, batch_size=3)
        rows = observations(3)
        answers = inference.answer(rows, uniform_draws(0, 0, 0, 3, 1))
        parameters, _ = policy.heads({"observation": torch.from_numpy(rows["observation"])})
        expected = policy.distribution(parameters).log_prob(torch.from_numpy(answers["action"]))
        assert answers["action_log_prob"] == pytest.approx(expected.detach().numpy(), abs=1e-6)

    @pytest.mark.parametrize("actions", [2, 3])
    @pytest.mark.parametrize("batch_size", [2, 3, 5, 8])
    def test_an_answer_does_not_depend_on_the_rows_around_it(self, actions, batch_size):
        spec = discrete(actions)
        inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=batch_size)
        rows, draws = observations(11), uniform_draws(0, 0, 0, 11, 1)
        together = inference.answer(rows, draws)
        shuffled = np.random.default_rng(2).permutation(11)
        answers = inference.answer({"observation": rows["observation"][shuffled]}, draws[shuffled])
        assert same_bits(answers, {key: value[shuffled] for key, value in together.items()})

    def test_an_answer_does_not_depend_on_how_many_were_asked_for(self):
        spec = continuous(3)
        inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=8)
        rows, draws = observations(11), action_draws(0, 0, 0, 0, 11, 3)
        together = inference.answer(rows, draws)
        for row in range(11):
            one = {"observation": rows["observation"][row : row + 1]}
            alone = inference.answer(one, draws[row : row + 1])
            assert same_bits(alone, {key: value[row : row + 1] for key, value in together.items()})

    def test_an_answer_survives_the_passes_after_it(self):
        """EchoNet's value is computed from the input, a critic may even return a view of it."""
        spec = discrete(4, width=5)
        view = TensorDictModule(lambda x: x[:, :1], ["observation"], ["state_value"])
        policy = ProbabilisticTensorDictSequential(
            view,
            TensorDictModule(nn.Linear(5, 4), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
        )
        inference = PolicyInference(policy, spec, batch_size=2)
        rows = observations(6, width=5)
        answers = inference.answer(rows, uniform_draws(0, 0, 0, 6, 1))
        assert np.array_equal(answers["state_value"], rows["observation"][:, :1])

    def test_a_greedy_answer_does_not_depend_on_the_draw(self):
        spec = discrete(3)
        policy = make_actor_critic("mlp", spec)
        inference = PolicyInference(policy, spec, batch_size=4, greedy=True)
        rows = observations(4)
        answers = [inference.answer(rows, uniform_draws(seed, 0, 0, 4, 1)) for seed in (0, 1)]
        assert same_bits(*answers)

    def test_a_draw_decides_the_action(self):
        spec = discrete(4, width=5)
        inference = PolicyInference(echo_policy(), spec, batch_size=4)
        draws = np.array([[0.1], [0.3], [0.6], [0.9]])
        assert inference.answer(observations(4, 5), draws)["action"].tolist() == [0, 1, 2, 3]

    def test_the_policy_is_run_in_evaluation_mode(self):
        spec = discrete(4)
        policy = as_policy(nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5)), spec)
        inference = PolicyInference(policy, spec, batch_size=2)
        answers = [inference.answer(observations(2), np.full((2, 1), 0.5)) for _ in range(2)]
        assert same_bits(*answers)

    @pytest.mark.parametrize("callers", [None, *ExplorationType], ids=str)
    @pytest.mark.parametrize("greedy", [False, True])
    def test_noise_of_weights_acts_unless_it_is_greedy_whatever_the_caller_does(
        self, greedy, callers
    ):
        spec, layer, rows = continuous(2), NoisyLinear(WIDTH, 2), observations(4)
        inference = PolicyInference(as_policy(layer, spec), spec, batch_size=4, greedy=greedy)
        with set_exploration_type(callers):
            answered = inference.answer(rows, np.full((4, 2), 0.5))["action"]
        weight, bias = layer.weight_mu, layer.bias_mu
        if not greedy:
            weight = weight + layer.weight_sigma * layer.weight_epsilon
            bias = bias + layer.bias_sigma * layer.bias_epsilon
        expected = torch.from_numpy(rows["observation"]) @ weight.T + bias
        torch.testing.assert_close(torch.from_numpy(answered), expected.detach())

    def test_no_answer_carries_a_gradient(self):
        spec = discrete(4)
        policy = as_policy(nn.Linear(WIDTH, 4), spec)
        PolicyInference(policy, spec, batch_size=2).answer(observations(2), np.full((2, 1), 0.5))
        assert all(parameter.grad is None for parameter in policy.parameters())

    def test_mixed_precision_computes_in_bfloat16(self):
        spec = discrete(4)
        policy = make_actor_critic("mlp", spec)
        values = [
            PolicyInference(policy, spec, batch_size=4, precision=precision).answer(
                observations(4), np.full((4, 1), 0.5)
            )["state_value"]
            for precision in ("32-true", "bf16-mixed")
        ]
        assert not np.array_equal(*values)
        assert values[0] == pytest.approx(values[1], abs=0.05)


def of_layer(layer: nn.Module):
    spec = discrete(4)
    return as_policy(layer, spec), spec


class Centred(nn.Linear):
    """A user's layer, which computes with another weight than its parameter."""

    def forward(self, rows):
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return nn.functional.linear(rows, weight, self.bias)


class Sharing(nn.Module):
    """Reads a layer's weight in float32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.weight = self.layer.weight

    def forward(self, rows):
        return self.layer(rows) + (rows * self.weight[0]).sum(1, keepdim=True)


def of_normalised_pixels():
    pixels = ArraySpec((3, 36, 36), np.dtype(np.uint8))
    spec = EnvSpec({"observation": pixels}, discrete(4).action)
    policy = NormalizedPolicy(make_actor_critic("nips", spec), spec)
    for module in policy.modules():
        if isinstance(module, RunningStatistics):
            module.update(200 * torch.rand(1000))
    return policy, spec


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_layer(nn.Linear(WIDTH, 4)),
        lambda: of_layer(NoisyLinear(WIDTH, 4)),
        lambda: of_layer(weight_norm(nn.Linear(WIDTH, 4))),
        lambda: of_layer(Centred(WIDTH, 4)),
        lambda: of_layer(Sharing()),
        of_normalised_pixels,
    ],
)
def test_mixed_precision_answers_as_autocast_does_with_the_weights_that_learn(make):
    policy, spec = make()
    inference = PolicyInference(
        deepcopy(policy), spec, batch_size=4, precision="bf16-mixed", extras=["logits"]
    )
    fill_at_random(inference, np.random.default_rng(0))
    answers, _ = inference.run_batch()
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast, torch.no_grad(), one_thread(), set_exploration_type(ExplorationType.RANDOM):
        learned = evaluate(policy.eval(), inference.inputs, 4)
    assert torch.equal(answers["logits"], learned.written["logits"].float())


class MeanAndDeviation(nn.Linear):
    """Both in bfloat16, where the layers are."""

    def forward(self, rows):
        mean, deviation = super().forward(rows).chunk(2, -1)
        return mean, deviation.exp()


def test_mixed_precision_answers_the_log_probability_of_the_action_that_is_stored():
    array = ArraySpec((2,), np.dtype(np.float32))
    seen = {"observation": ArraySpec((WIDTH,), np.dtype(np.float32))}
    spec = EnvSpec(seen, ActionSpec("continuous", array))
    policy = as_policy(MeanAndDeviation(WIDTH, 4), spec)
    inference = PolicyInference(deepcopy(policy), spec, batch_size=64, precision="bf16-mixed")
    fill_at_random(inference, np.random.default_rng(0))
    answers, _ = inference.run_batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), one_thread():
        learned = evaluate(policy.eval(), inference.inputs, 64).distribution
        log_prob = learned.log_prob(answers["action"])
    assert torch.equal(answers["action_log_prob"], log_prob.float())


def test_one_thread_is_restored_to_what_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            inside = torch.get_num_threads()
        assert (inside, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


def test_answers_have_the_same_bits_whatever_the_callers_number_of_threads():
    spec = discrete(4)
    inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=5)
    rows, draws = observations(5), uniform_draws(0, 0, 0, 5, 1)
    single = inference.answer(rows, draws)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert same_bits(inference.answer(rows, draws), single)
    finally:
        torch.set_num_threads(before)
