"""A policy of action values: its probabilities, what it writes, and what it refuses."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import one_hot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from hts_torchrl import ActionSpec, ArraySpec, EnvSpec, make_q_policy
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.q_policy import EpsilonGreedy, OneHotEpsilonGreedy, QHead, q_head_of
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.sampling import sample

LOWEST = torch.finfo(torch.float32).min
INTEGERS = np.dtype(np.int64)
OBSERVATION = ArraySpec((3,), np.dtype(np.float32))
VALUES = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -2.0, -3.0]])


def spec(kind="discrete", **observations):
    shape = () if kind == "discrete" else (3,)
    action = ActionSpec(kind, ArraySpec(shape, INTEGERS), (3,))
    return EnvSpec({"observation": OBSERVATION, **observations}, action)


def distribution(values=VALUES, epsilon=0.3, kind=EpsilonGreedy):
    return kind(values, torch.tensor([[epsilon]]).expand(len(values), 1))


class TestProbabilities:
    def test_the_best_action_has_what_chance_leaves_and_its_share_of_that(self):
        expected = torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]])
        torch.testing.assert_close(distribution().probs, expected)

    @pytest.mark.parametrize(
        ("epsilon", "expected"), [(0.0, [0.0, 1.0, 0.0]), (1.0, [1 / 3, 1 / 3, 1 / 3])]
    )
    def test_epsilon_goes_from_greedy_to_uniform(self, epsilon, expected):
        torch.testing.assert_close(distribution(epsilon=epsilon).probs[0], torch.tensor(expected))

    def test_forbidden_actions_have_none(self):
        values = torch.tensor([[LOWEST, -5.0, -6.0]])
        torch.testing.assert_close(distribution(values).probs, torch.tensor([[0.0, 0.85, 0.15]]))

    def test_each_row_has_an_epsilon_of_its_own(self):
        dist = EpsilonGreedy(VALUES, torch.tensor([[0.0], [0.6]]))
        expected = torch.tensor([[0.0, 1.0, 0.0], [0.6, 0.2, 0.2]])
        torch.testing.assert_close(dist.probs, expected)

    @pytest.mark.parametrize("epsilon", [0.0, 1.0])
    def test_the_mode_is_greedy_whatever_epsilon(self, epsilon):
        assert mode(distribution(epsilon=epsilon)).tolist() == [1, 0]
        one_hots = mode(distribution(epsilon=epsilon, kind=OneHotEpsilonGreedy))
        assert one_hots.tolist() == [[0, 1, 0], [1, 0, 0]]

    def test_of_equal_values_the_first_is_taken(self):
        assert mode(distribution(torch.zeros(1, 3))).tolist() == [0]

    def test_a_draw_decides_the_action(self):
        values = VALUES[:1].expand(4, 3)
        draws = torch.tensor([[0.05], [0.15], [0.85], [0.95]], dtype=torch.float64)
        assert sample(distribution(values), draws).tolist() == [0, 1, 1, 2]

    def test_the_logarithm_is_that_of_the_probability(self):
        log_prob = distribution().log_prob(torch.tensor([1, 2]))
        torch.testing.assert_close(log_prob, torch.tensor([0.8, 0.1]).log())

    def test_an_action_that_is_never_drawn_has_a_finite_logarithm(self):
        assert distribution(epsilon=0.0).log_prob(torch.tensor([0, 1])).isfinite().all()

    def test_of_one_hot_actions_they_are_the_same(self):
        dist, whole = distribution(kind=OneHotEpsilonGreedy), distribution()
        draws = torch.tensor([[0.05], [0.95]], dtype=torch.float64)
        torch.testing.assert_close(dist.probs, whole.probs)
        assert torch.equal(sample(dist, draws), one_hot(sample(whole, draws), 3))
        assert torch.equal(mode(dist), one_hot(mode(whole), 3))


class TestValues:
    @pytest.mark.parametrize("kind", [EpsilonGreedy, OneHotEpsilonGreedy])
    def test_of_actions_have_a_gradient_for_these_alone(self, kind):
        values = VALUES.clone().requires_grad_()
        action = torch.tensor([2, 0])
        taken = one_hot(action, 3) if kind is OneHotEpsilonGreedy else action
        value = distribution(values, kind=kind).value_of(taken)
        assert value.tolist() == [2.0, -1.0]
        value.sum().backward()
        assert values.grad.tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]

    def test_of_sequences_keep_their_shape(self):
        dist = EpsilonGreedy(VALUES.expand(4, 2, 3), torch.zeros(4, 2, 1))
        assert dist.value_of(torch.ones(4, 2, dtype=torch.int64)).tolist() == [[3.0, -2.0]] * 4


class TestHead:
    def head(self):
        head = QHead(3, 3)
        torch.nn.init.eye_(head.layer.weight)
        head.epsilon.fill_(0.25)
        return head

    def test_writes_values_epsilon_and_the_largest_value(self):
        value, epsilon, largest = self.head()(VALUES)
        assert torch.equal(value, VALUES)
        assert epsilon.tolist() == [[0.25], [0.25]]
        assert largest.tolist() == [[3.0], [-1.0]]

    def test_the_largest_value_is_that_of_an_allowed_action(self):
        mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
        value, _, largest = self.head()(VALUES, mask)
        assert value.tolist() == [[1.0, LOWEST, 2.0], [LOWEST, -2.0, -3.0]]
        assert largest.tolist() == [[2.0], [-2.0]]

    def test_an_observation_that_allows_nothing_has_a_value(self):
        _, _, largest = self.head()(VALUES, torch.zeros(2, 3))
        assert largest.tolist() == [[3.0], [-1.0]]

    def test_epsilon_is_published_with_the_weights_and_not_trained(self):
        head = self.head()
        assert head.state_dict()["epsilon"] == 0.25
        assert "epsilon" not in dict(head.named_parameters())


class TestPolicy:
    @pytest.mark.parametrize("kind", ["discrete", "one_hot"])
    def test_writes_the_keys_of_torchrl(self, kind):
        policy = make_q_policy("mlp", spec(kind))
        written = policy(TensorDict({"observation": torch.randn(5, 3)}, [5]))
        assert written["action_value"].shape == (5, 3)
        assert torch.equal(written["state_value"], written["action_value"].amax(-1, keepdim=True))
        assert written["action"].shape == ((5,) if kind == "discrete" else (5, 3))
        assert written["action_log_prob"].shape == (5,)

    @pytest.mark.parametrize("kind", ["discrete", "one_hot"])
    def test_acts_greedily_without_a_warning_where_torchrl_asks_for_it(self, kind):
        policy = make_q_policy("mlp", spec(kind))
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            written = policy(TensorDict({"observation": torch.randn(5, 3)}, [5]))
        best = written["action_value"].argmax(-1)
        assert torch.equal(written["action"], best if kind == "discrete" else one_hot(best, 3))

    def test_answers_actors_by_their_draws(self):
        policy = make_q_policy("mlp", spec())
        q_head_of(policy).epsilon.fill_(0.0)
        inference = PolicyInference(policy, spec(), batch_size=8, extras=["action_value"])
        rows = {"observation": np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)}
        answers = inference.answer(rows, np.full((20, 1), 0.7))
        assert np.array_equal(answers["action"], answers["action_value"].argmax(-1))

    def test_a_row_has_the_same_bits_wherever_it_is_in_the_batch(self):
        policy = make_q_policy("mlp", spec()).eval()
        rows = torch.randn(16, 3)
        turned = evaluate(policy, {"observation": rows.roll(5, 0)}, 16).written["action_value"]
        straight = evaluate(policy, {"observation": rows}, 16).written["action_value"]
        assert torch.equal(turned.roll(-5, 0), straight)

    def test_does_what_the_environment_allows(self):
        masked = spec(action_mask=ArraySpec((3,), INTEGERS))
        policy = make_q_policy("mlp", masked)
        mask = torch.tensor([[0, 1, 0], [1, 0, 0]]).repeat(50, 1)
        rows = TensorDict({"observation": torch.randn(100, 3), "action_mask": mask}, [100])
        assert torch.equal(policy(rows)["action"], mask.argmax(-1))

    @pytest.mark.parametrize("network", ["lstm", "mlp+gru"])
    def test_may_have_a_memory(self, network):
        policy = make_q_policy(network, spec())
        assert any("recurrent_state" in str(key) for key in policy.in_keys)

    @pytest.mark.parametrize(
        ("kind", "sizes", "shape", "told"),
        [
            ("continuous", (), (2,), r"continuous \[2\]"),
            ("multi_discrete", (3, 5), (2,), r"multi_discrete \[3, 5\]"),
            ("mixed", (3,), (2,), r"mixed \[3\]"),
        ],
    )
    def test_other_actions_are_refused_by_their_kind(self, kind, sizes, shape, told):
        action = ActionSpec(kind, ArraySpec(shape, INTEGERS), sizes)
        with pytest.raises(ConfigurationError, match=f"the action is {told}, .*one choice"):
            make_q_policy("mlp", EnvSpec({"observation": OBSERVATION}, action))
