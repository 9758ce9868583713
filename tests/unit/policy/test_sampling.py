import math

import numpy as np
import pytest
import tensordict.nn
import torch
from tensordict import TensorDict
from torch import distributions as d
from torchrl.modules import (
    Delta,
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
    TruncatedNormal,
)

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.distributions import ChoicesAndNumbers, MultiCategorical
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.sampling import _sums_of_first, sample
from hts_torchrl.rng import action_draws, uniform_draws

ROWS = 20_000
ONE_HOT = [d.OneHotCategorical, OneHotCategorical, tensordict.nn.OneHotCategorical]
PROBS = torch.tensor([0.1, 0.0, 0.6, 0.3])


def uniform(rows: int = ROWS, width: int = 1) -> torch.Tensor:
    return torch.from_numpy(uniform_draws(0, 0, 0, rows, width))


def normal(rows: int = ROWS, width: int = 1) -> torch.Tensor:
    return torch.from_numpy(action_draws(0, 0, 0, 0, rows, width))


def frequencies(actions: torch.Tensor, categories: int) -> list[float]:
    return (torch.bincount(actions, minlength=categories) / len(actions)).tolist()


def test_choices_and_numbers_have_draws_of_their_own():
    logits = torch.tensor([[0.1, 0.9, 0.5, 0.5]]).log().expand(2, 4)
    loc, scale = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [3.0]])
    dist = ChoicesAndNumbers(logits, loc, scale, sizes=(2, 2))
    draws = torch.tensor([[0.05, 0.6, 2.0], [0.2, 0.4, -1.0]], dtype=torch.float64)
    assert sample(dist, draws).tolist() == [[0, 1, 2.0], [1, 0, -1.0]]
    assert mode(dist)[:, 0].tolist() == [1, 1]
    assert mode(dist)[:, 2].tolist() == [1.0, 2.0]


def test_a_category_is_decided_by_where_the_draw_falls():
    draws = torch.tensor([[0.05], [0.15], [0.65], [0.75], [0.99]], dtype=torch.float64)
    actions = sample(d.Categorical(PROBS.expand(5, 4)), draws)
    assert actions.tolist() == [0, 2, 2, 3, 3]


def test_a_draw_on_the_border_of_two_categories_takes_the_second():
    dist = d.Categorical(torch.tensor([[0.5, 0.0, 0.5]]))
    assert sample(dist, torch.tensor([[0.5]], dtype=torch.float64)).tolist() == [2]


def test_a_rare_category_is_not_lost_in_the_rounding_of_float32():
    dist = d.Categorical(torch.tensor([[0.5, 1e-9, 0.5]]))
    assert sample(dist, torch.tensor([[0.5 + 2e-10]], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize(
    "probs", [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.3, 0.7, 0.0]]
)
def test_an_impossible_category_is_never_chosen_even_by_extreme_draws(probs):
    extremes = torch.tensor([[2.0**-52], [1 - 2.0**-52]], dtype=torch.float64)
    draws = torch.cat([uniform(2000), extremes])
    actions = sample(d.Categorical(torch.tensor(probs).expand(len(draws), 3)), draws)
    assert (torch.tensor(probs)[actions] > 0).all()


def test_logits_of_any_size_leave_the_sum_of_probabilities_harmless():
    logits = 50 * torch.randn(500, 9)
    draws = torch.full((500, 1), 1 - 2.0**-52, dtype=torch.float64)
    dist = d.Categorical(logits=logits)
    chosen = dist.probs.gather(1, sample(dist, draws).unsqueeze(1))
    assert (chosen > 0).all()


@pytest.mark.parametrize("distribution", ONE_HOT)
def test_a_one_hot_action_marks_the_category_that_the_draw_decides(distribution):
    draws = torch.tensor([[0.05], [0.65], [0.75]], dtype=torch.float64)
    actions = sample(distribution(probs=PROBS.expand(3, 4)), draws)
    assert actions.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_masked_category_is_never_chosen():
    mask = torch.tensor([True, False, True, False]).expand(2000, 4)
    actions = sample(MaskedCategorical(logits=torch.zeros(2000, 4), mask=mask), uniform(2000))
    assert set(actions.tolist()) == {0, 2}
    one_hot = MaskedOneHotCategorical(logits=torch.zeros(2000, 4), mask=mask)
    assert torch.equal(sample(one_hot, uniform(2000)), torch.eye(4, dtype=torch.long)[actions])


def test_each_choice_of_several_has_its_own_probabilities():
    logits = torch.cat([PROBS.log(), torch.tensor([0.8, 0.2]).log()]).expand(ROWS, 6)
    actions = sample(MultiCategorical(logits, (4, 2)), uniform(width=2))
    assert frequencies(actions[:, 0], 4) == pytest.approx(PROBS.tolist(), abs=0.015)
    assert frequencies(actions[:, 1], 2) == pytest.approx([0.8, 0.2], abs=0.015)


def test_choices_of_one_action_are_independent():
    actions = sample(MultiCategorical(torch.zeros(ROWS, 4), (2, 2)), uniform(width=2))
    assert abs(np.corrcoef(actions.T.numpy())[0, 1]) < 0.03


def test_a_smaller_choice_never_takes_a_category_of_the_larger():
    draws = torch.full((1, 2), 1 - 2.0**-52, dtype=torch.float64)
    assert sample(MultiCategorical(torch.zeros(1, 7), (2, 5)), draws).tolist() == [[1, 4]]


@pytest.mark.parametrize("of", [OneHotCategorical, d.Categorical])
@pytest.mark.parametrize("width", [1, 3])
def test_no_two_choices_of_an_action_share_a_draw(of, width):
    def dist(rows):
        return of(logits=torch.zeros(rows, 3, 5))

    actions = sample(dist(2000), uniform(2000, width), lambda _: dist(1))
    choices = actions.argmax(-1) if of is OneHotCategorical else actions
    for one, other in ((0, 1), (0, 2), (1, 2)):
        alike = (choices[:, one] == choices[:, other]).float().mean()
        assert alike.item() == pytest.approx(1 / 5, abs=0.04)


def test_numbers_that_are_made_of_categories_are_as_likely_as_these():
    def dist(rows):
        return d.TransformedDistribution(
            d.Categorical(PROBS.expand(rows, 4)), [d.AffineTransform(0.5, 2.0)]
        )

    actions = sample(dist(5000), normal(5000), lambda _: dist(1))
    assert frequencies(((actions - 0.5) / 2).long(), 4) == pytest.approx(PROBS.tolist(), abs=0.03)


def test_a_gaussian_action_is_the_draw_scaled_and_shifted():
    loc, scale = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    draws = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    assert sample(IndependentNormal(loc, scale), draws).tolist() == [[2.0, -5.0]]


def test_a_gaussian_action_keeps_the_precision_of_its_mean():
    dist = IndependentNormal(torch.zeros(3, 2), torch.ones(3, 2))
    assert sample(dist, normal(3, 2)).dtype is torch.float32


def test_a_squashed_gaussian_is_the_squashed_draw():
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.5])
    dist = TanhNormal(torch.zeros(1, 2), torch.ones(1, 2), low=low, high=high)
    draws = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    expected = [-1 + 4 * (math.tanh(0.5) + 1) / 2, 0.5 * (math.tanh(-1.0) + 1) / 2]
    assert sample(dist, draws)[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_squashed_actions_stay_within_their_bounds():
    low, high = torch.tensor([-1.0]), torch.tensor([3.0])
    dist = TanhNormal(torch.zeros(ROWS, 1), 10 * torch.ones(ROWS, 1), low=low, high=high)
    actions = sample(dist, normal())
    assert actions.min() >= -1.0
    assert actions.max() <= 3.0


def beta(rows: int):
    return d.Independent(d.Beta(torch.full((rows, 1), 2.0), torch.full((rows, 1), 5.0)), 1)


def scaled_beta(rows: int):
    return d.TransformedDistribution(beta(rows), [d.AffineTransform(-1.0, 2.0, event_dim=1)])


def logistic(rows: int):
    return d.LogisticNormal(torch.zeros(rows, 2), torch.ones(rows, 2))


def truncated(rows: int):
    return TruncatedNormal(torch.zeros(rows, 1), torch.ones(rows, 1), low=-0.5, high=1.0)


@pytest.mark.parametrize("make", [beta, scaled_beta, truncated, logistic])
def test_other_distributions_are_sampled_as_torch_samples_them(make):
    rows = 1500
    theirs = make(10_000).sample()
    ours = sample(make(rows), uniform(rows, theirs.shape[-1]), lambda _: make(1))
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    assert torch.allclose(ours.quantile(levels), theirs.quantile(levels), atol=0.08)


@pytest.mark.parametrize("make", [beta, scaled_beta, truncated])
def test_other_distributions_answer_the_same_draw_alike_in_any_row(make):
    draws = uniform(6)
    actions = sample(make(6), draws, lambda _: make(1))
    assert torch.equal(sample(make(6), draws.flip(0), lambda _: make(1)), actions.flip(0))


@pytest.mark.parametrize("of", ONE_HOT)
def test_a_one_hot_category_of_its_own_method_is_a_choice_too(of):
    class Last(of):
        has_rsample = False

        def sample(self, _=()):
            return torch.tensor([[0.0, 0.0, 0.0, 1.0]])

    dist = Last(probs=PROBS.expand(6, 4))
    actions = sample(dist, uniform(6), lambda _: dist)
    assert actions.tolist() == [[0, 0, 0, 1]] * 6
    assert actions.dtype is torch.int64


def test_other_distributions_need_the_distribution_of_one_row():
    with pytest.raises(NotImplementedError, match="Independent"):
        sample(beta(2), uniform(2))


@pytest.mark.parametrize(
    ("dist", "draws", "of_row"),
    [
        (d.Categorical(PROBS.expand(3, 4)), uniform(3), None),
        (IndependentNormal(torch.zeros(3, 2), torch.ones(3, 2)), normal(3, 2), None),
        (beta(3), uniform(3), lambda _: beta(1)),
    ],
    ids=["categorical", "gaussian", "other"],
)
def test_the_global_generator_is_neither_read_nor_moved(dist, draws, of_row):
    first = sample(dist, draws, of_row)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(sample(dist, draws, of_row), first)
    assert torch.equal(torch.get_rng_state(), before)


EQUAL = torch.tensor([[0.0, 1.0, 1.0]])  # as bfloat16 often makes them


@pytest.mark.parametrize(
    ("dist", "greedy"),
    [
        (d.Categorical(PROBS.unsqueeze(0)), [2]),
        (OneHotCategorical(probs=PROBS.unsqueeze(0)), [[0, 0, 1, 0]]),
        *((of(logits=EQUAL), [[0, 1, 0]]) for of in ONE_HOT),
        (MaskedOneHotCategorical(logits=EQUAL, mask=EQUAL > 0), [[0, 1, 0]]),
        (MultiCategorical(torch.tensor([[0.0, 1.0, 5.0, 2.0, 7.0]]), (2, 3)), [[1, 2]]),
        (IndependentNormal(torch.tensor([[0.5, -1.0]]), torch.ones(1, 2)), [[0.5, -1.0]]),
    ],
)
def test_the_greedy_action_is_the_likeliest(dist, greedy):
    assert mode(dist).tolist() == greedy


def test_the_greedy_squashed_action_is_the_squashed_mean():
    dist = TanhNormal(torch.tensor([[0.7]]), torch.ones(1, 1), low=-1.0, high=1.0)
    assert mode(dist).item() == pytest.approx(math.tanh(0.7), abs=1e-5)


class OwnGamma(d.Gamma):
    """Of a class that TensorDict does not know, and not of all numbers: its mode is asked for."""


class OwnNormal(d.Normal):
    """Of a class that TensorDict does not know, of all numbers: its mean is asked for."""


LOC, SCALE = torch.tensor([[0.3, -1.2], [2.0, 0.1]]), torch.tensor([[0.5, 1.5], [0.8, 2.0]])
POSITIVE = LOC.exp() + 1


@pytest.mark.filterwarnings("ignore:deterministic_sample wasn't found")
@pytest.mark.parametrize(
    "dist",
    [
        TruncatedNormal(LOC, SCALE, low=-0.5, high=1.0),
        TanhNormal(LOC, SCALE, low=-2.0, high=2.0),
        IndependentNormal(LOC, SCALE),
        Delta(LOC),
        d.Independent(d.Beta(POSITIVE, SCALE + 1), 1),
        d.LogNormal(LOC, SCALE),
        d.Independent(d.LogNormal(LOC, SCALE), 1),
        d.Gamma(POSITIVE, SCALE),
        OwnGamma(POSITIVE, SCALE),
        d.Independent(OwnGamma(POSITIVE, SCALE), 1),
        OwnNormal(LOC, SCALE),
        d.Dirichlet(POSITIVE),
        d.HalfNormal(SCALE),
        d.LogisticNormal(LOC, SCALE),
        d.MixtureSameFamily(d.Categorical(logits=LOC), d.Normal(LOC, SCALE)),
        d.Categorical(logits=LOC),
        d.Independent(d.Bernoulli(logits=LOC), 1),
        MaskedCategorical(logits=LOC, mask=LOC < 1),
        OneHotCategorical(logits=LOC),
        MultiCategorical(LOC, (1, 1)),
        ChoicesAndNumbers(LOC, LOC, SCALE, sizes=(1, 1)),
    ],
    ids=str,
)
def test_the_greedy_action_is_torchrls_deterministic_one(dist):
    module = tensordict.nn.ProbabilisticTensorDictModule(
        ["loc"],
        ["action"],
        distribution_class=lambda loc: dist,  # noqa: ARG005
    )
    asked = TensorDict({"loc": LOC}, [2])
    assert torch.equal(mode(dist), module(asked)["action"])


def test_a_transformed_distribution_without_a_mean_transforms_that_of_its_base():
    assert torch.equal(mode(scaled_beta(3)), 2 * beta(3).mean - 1)


def test_a_distribution_without_a_greedy_action_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="a Distribution has no greedy action"):
        mode(d.Distribution(torch.Size([2]), validate_args=False))


@pytest.mark.parametrize("count", [1, 2, 5, 18, 300])
def test_the_sums_of_a_gpu_are_those_of_cumsum(count):
    values = torch.rand(64, 3, count, dtype=torch.float64).softmax(-1)
    values[..., count // 2] = 0
    sums = _sums_of_first(values)
    torch.testing.assert_close(sums, values.cumsum(-1), rtol=1e-14, atol=0)
    assert (sums.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("kind", [MaskedCategorical, MaskedOneHotCategorical])
def test_a_mask_of_indices_gives_the_choices_that_these_name(kind):
    indices = torch.tensor([[2, 2, 2], [1, 1, 1]])

    def of(rows):
        return kind(torch.zeros(len(rows), 3), indices=indices[rows])

    drawn = sample(of([0, 1]), uniform(2), lambda row: of([row]))
    chosen = drawn.argmax(-1) if drawn.ndim == 2 else drawn
    assert chosen.tolist() == [2, 1]


class Second(OneHotCategorical):
    """Its deterministic action is a choice of its own."""

    @property
    def deterministic_sample(self):
        return torch.nn.functional.one_hot(torch.ones(len(self.probs), dtype=torch.int64), 4)


def test_a_one_hot_greedy_action_of_its_own_counts():
    assert mode(Second(probs=PROBS.expand(1, 4))).tolist() == [[0, 1, 0, 0]]
