import numpy as np
import pytest
import torch
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.distributions import (
    ChoicesAndNumbers,
    MultiCategorical,
    action_head,
    parameter_keys,
)
from hts_torchrl.specs import ActionSpec, ArraySpec

INTEGERS = np.dtype(np.int64)
BOUNDS = np.array([1.0, 2.0], np.float32)
ACTIONS = {
    "discrete": ActionSpec("discrete", ArraySpec((), INTEGERS), (4,)),
    "one_hot": ActionSpec("one_hot", ArraySpec((4,), INTEGERS), (4,)),
    "multi_discrete": ActionSpec("multi_discrete", ArraySpec((2,), INTEGERS), (3, 5)),
    "continuous": ActionSpec(
        "continuous", ArraySpec((2,), np.dtype(np.float32)), low=-BOUNDS, high=BOUNDS
    ),
    "mixed": ActionSpec(
        "mixed", ArraySpec((4,), np.dtype(np.float32)), (3, 5), low=-BOUNDS, high=BOUNDS
    ),
}


class TestMultiCategorical:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.5]])
    dist = MultiCategorical(logits, (3, 2))

    def test_the_log_probability_is_the_sum_over_choices(self):
        action = torch.tensor([[2, 0]])
        parts = [Categorical(logits=part) for part in self.logits.split((3, 2), -1)]
        expected = parts[0].log_prob(action[:, 0]) + parts[1].log_prob(action[:, 1])
        assert torch.allclose(self.dist.log_prob(action), expected)

    def test_the_entropy_is_the_sum_over_choices(self):
        parts = [Categorical(logits=part) for part in self.logits.split((3, 2), -1)]
        expected = parts[0].entropy() + parts[1].entropy()
        assert torch.allclose(self.dist.entropy(), expected)

    def test_samples_stay_within_each_choice(self):
        samples = self.dist.sample((500,))
        assert samples.amax((0, 1)).tolist() == [2, 1]

    def test_the_mode_is_the_likeliest_of_each_choice(self):
        assert self.dist.mode.tolist() == [[2, 1]]

    def test_gradients_of_likely_actions_are_finite(self):
        logits = self.logits.clone().requires_grad_()
        dist = MultiCategorical(logits, (3, 2))
        (dist.log_prob(torch.tensor([[2, 0]])) + dist.entropy()).sum().backward()
        assert logits.grad.isfinite().all()


class TestChoicesAndNumbers:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.5], [1.0, 0.0, 0.0, 3.0, -1.0]])
    loc, scale = torch.tensor([[0.5, -1.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.5], [2.0, 3.0]])
    dist = ChoicesAndNumbers(logits, loc, scale, sizes=(3, 2))
    action = torch.tensor([[2.0, 0.0, 0.1, -1.2], [1.0, 1.0, 3.0, -4.0]])

    def parts(self, row):
        choices = [Categorical(logits=part) for part in self.logits[row].split((3, 2), -1)]
        return choices, torch.distributions.Normal(self.loc[row], self.scale[row])

    @pytest.mark.parametrize("row", [0, 1])
    def test_likelihood_and_entropy_are_sums_over_choices_and_numbers(self, row):
        (first, second), numbers = self.parts(row)
        action = self.action[row]
        likelihood = first.log_prob(action[0].long()) + second.log_prob(action[1].long())
        likelihood = likelihood + numbers.log_prob(action[2:]).sum()
        entropy = first.entropy() + second.entropy() + numbers.entropy().sum()
        torch.testing.assert_close(self.dist.log_prob(self.action)[row], likelihood)
        torch.testing.assert_close(self.dist.entropy()[row], entropy)

    def test_the_divergence_is_the_sum_over_choices_and_numbers(self):
        logits, loc = self.logits.flip(0), self.loc.flip(0)
        other = ChoicesAndNumbers(logits, loc, self.scale, sizes=(3, 2))
        kl = torch.distributions.kl_divergence
        for row in (0, 1):
            (first, second), numbers = self.parts(row)
            theirs = [Categorical(logits=part) for part in logits[row].split((3, 2), -1)]
            expected = kl(first, theirs[0]) + kl(second, theirs[1])
            normal = torch.distributions.Normal(loc[row], self.scale[row])
            expected = expected + kl(numbers, normal).sum()
            torch.testing.assert_close(kl(self.dist, other)[row], expected)

    def test_the_mode_has_the_likeliest_choices_and_the_means(self):
        assert self.dist.mode.tolist() == [[2, 1, 0.5, -1.0], [0, 0, 2.0, 0.0]]


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_action_has_a_head_that_samples_its_shape(kind):
    action = ACTIONS[kind]
    head = action_head(action)
    widths = {"logits": sum(action.sizes), "loc": 2, "scale": 2}
    parameters = {key: torch.ones(3, widths[key]) for key in parameter_keys(action)}
    dist = head.distribution_class(**parameters, **head.distribution_kwargs)
    assert dist.sample().shape == (3, *action.array.shape)


def test_a_squashed_action_stays_within_the_bounds_of_its_environment():
    head = action_head(ACTIONS["continuous"], squash=True)
    dist = head.distribution_class(
        loc=torch.zeros(500, 2), scale=torch.full((500, 2), 9.0), **head.distribution_kwargs
    )
    assert (dist.sample().abs() <= torch.from_numpy(BOUNDS)).all()


def test_the_bounds_of_a_squashed_action_are_on_the_cpu_wherever_it_is_built():
    with torch.device("meta"):
        kwargs = action_head(ACTIONS["continuous"], squash=True).distribution_kwargs
    assert (kwargs["low"].device.type, kwargs["high"].device.type) == ("cpu", "cpu")


def test_a_continuous_action_without_squashing_is_a_plain_gaussian():
    assert action_head(ACTIONS["continuous"]).distribution_class is IndependentNormal


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, np.inf), (-np.inf, 1.0), (0.5, 0.5), (-3e38, 3e38), (None, None)],
)
def test_without_finite_bounds_nothing_can_be_squashed(low, high):
    low, high = (None if each is None else np.full(2, each, np.float32) for each in (low, high))
    action = ActionSpec("continuous", ArraySpec((2,), np.dtype(np.float32)), low=low, high=high)
    with pytest.raises(ConfigurationError, match="squash=true, but the action's bounds are"):
        action_head(action, squash=True)


@pytest.mark.parametrize("kind", ["discrete", "one_hot", "multi_discrete"])
def test_choices_cannot_be_squashed(kind):
    with pytest.raises(ConfigurationError, match=f"the action is {kind}"):
        action_head(ACTIONS[kind], squash=True)
