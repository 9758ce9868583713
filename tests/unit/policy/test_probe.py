"""Modules that do what costs the bits are found, and the innermost of them is named."""

import copy

import pytest
import torch
from torch import nn
from torchrl.modules import MultiAgentMLP

from hts_torchrl.compat.torch import hooks_of
from hts_torchrl.policy.probe import (
    OTHERS,
    TORCH,
    described,
    differ,
    drawing_modules,
    modules_of_two_modes,
    noting_draws,
    varying_modules,
)
from tests.policies import Noise

ROWS = torch.linspace(-1.0, 1.0, 64).view(16, 4)
GENERATORS = {"torch": TORCH[0], "numpy": OTHERS[0], "python": OTHERS[1]}


class Inner(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def forward(self, rows):
        return self.inner(rows)


def nested(layer):
    """The layer is ``body.1.inner``."""
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), Inner(layer))})


def run(policy):
    return policy["body"](ROWS)


class Counting(nn.Module):
    """Remembers how often it was asked, and says so."""

    calls = 0

    def forward(self, rows):
        self.calls += 1
        return rows + self.calls


class OwnNoise(nn.Module):
    """Adds noise of a generator of its own, which is no state of the process."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, rows):
        return rows + torch.rand(rows.shape, generator=self.generator)


class InPlace(nn.Module):
    """Writes into its argument."""

    def forward(self, rows):
        return rows.mul_(2.0)


class FunctionalDropout(nn.Module):
    def forward(self, rows):
        return nn.functional.dropout(rows, 0.5, self.training)


@pytest.mark.parametrize("name", GENERATORS)
class TestDraws:
    def test_name_the_generator_and_no_other(self, name):
        policy = nested(Noise(name, learning=True))
        with noting_draws((*TORCH, *OTHERS)) as drawn:
            run(policy)
        assert drawn == [GENERATORS[name]]

    def test_name_the_module(self, name):
        policy = nested(Noise(name, learning=True))
        assert drawing_modules(policy, run, GENERATORS[name]) == ["body.1.inner"]
        others = [each for each in GENERATORS.values() if each != GENERATORS[name]]
        assert [drawing_modules(policy, run, other) for other in others] == [[], []]

    def test_of_the_other_mode_are_none(self, name):
        assert drawing_modules(nested(Noise(name, learning=False)), run, GENERATORS[name]) == []


def test_nothing_is_noted_where_nothing_is_drawn():
    policy = nested(nn.Dropout(0.5)).eval()
    with noting_draws((*TORCH, *OTHERS)) as drawn:
        run(policy)
        torch.rand(3, generator=torch.Generator())
    assert drawn == []


@pytest.mark.parametrize("layer", [Counting(), OwnNoise()])
def test_a_module_that_answers_differently_again_is_found(layer):
    assert varying_modules(nested(layer), run) == ["body.1.inner"]


def test_a_policy_keeps_no_hook_whether_it_ran_or_failed():
    policy = nested(nn.Dropout())
    assert drawing_modules(policy, run, TORCH[0]) == ["body.1.inner"]
    with pytest.raises(KeyError):
        drawing_modules(policy, lambda policy: policy["head"](ROWS), TORCH[0])
    assert not any(hooks_of(each) for each in policy.modules())


@pytest.mark.parametrize("layer", [nn.Tanh(), InPlace(), nn.ReLU(inplace=True)])
def test_a_module_that_answers_the_same_again_is_not(layer):
    assert varying_modules(nested(layer), run) == []


TWO_MODES = [
    nn.Dropout(0.1),
    nn.AlphaDropout(0.1),
    nn.RReLU(),
    nn.BatchNorm1d(4),
    FunctionalDropout(),
    Noise("numpy", learning=True),
]
ONE_MODE = [
    nn.Dropout(0.0),
    nn.Dropout(0.5).eval(),
    nn.BatchNorm1d(4).eval(),
    nn.BatchNorm1d(4, track_running_stats=False),
    nn.LayerNorm(4),
    InPlace(),
]


@pytest.mark.parametrize("layer", TWO_MODES, ids=repr)
def test_a_layer_of_two_modes_is_found_and_keeps_its_statistics(layer):
    policy = nested(layer)
    before = copy.deepcopy(policy.state_dict())
    assert modules_of_two_modes(policy, run) == ["body.1.inner"]
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert policy.training


@pytest.mark.parametrize("layer", ONE_MODE, ids=repr)
def test_a_layer_that_does_the_same_in_both_modes_is_not(layer):
    assert modules_of_two_modes(nested(layer), run) == []


def test_attention_differs_between_its_modes_by_rounding_only():
    """In eval mode torch takes another kernel for the same layer."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    assert modules_of_two_modes(nested(layer), run) == []
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    found = modules_of_two_modes(nested(layer), run)
    assert found
    assert all(name.startswith("body.1.inner") for name in found)


class TwoModes(nn.Module):
    def forward(self, rows):
        return rows if self.training else rows + 1


class Mapped(Inner):
    """Runs its layer on each row by ``vmap``, as TorchRL runs networks of several agents."""

    def forward(self, rows):
        return torch.func.vmap(self.inner)(rows)


def test_of_what_vmap_runs_the_module_that_asks_for_it_is_named():
    assert modules_of_two_modes(nested(Mapped(TwoModes())), run) == ["body.1.inner"]


class Lending(Inner):
    """Runs its layer with weights that it computes."""

    def forward(self, rows):
        weights = {name: 2 * weight for name, weight in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (rows,))


@pytest.mark.parametrize(
    ("layer", "named"), [(nn.Linear(4, 4), []), (nn.BatchNorm1d(4), ["body.1.inner"])], ids=repr
)
def test_of_what_runs_with_lent_weights_the_module_that_lends_them_is_named(layer, named):
    assert modules_of_two_modes(nested(Lending(layer)), run) == named


def test_a_network_that_several_agents_share_does_the_same_in_both_modes():
    """TorchRL keeps it without weights, on the meta device, and lends it its weights."""
    settings = {"centralized": False, "share_params": True, "depth": 1, "num_cells": 4}
    agents = MultiAgentMLP(n_agent_inputs=2, n_agent_outputs=2, n_agents=2, **settings)
    layer = nn.Sequential(nn.Unflatten(-1, (2, 2)), agents)
    assert modules_of_two_modes(nested(layer), run) == []


def test_modules_are_described_by_name_and_class():
    policy = nested(nn.Dropout())
    assert (
        described(policy, ["body.1.inner", ""]) == "body.1.inner (Dropout), the policy (ModuleDict)"
    )


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([1.0, 100.0], [1.5, 100.0], False),  # half a percent of the largest
        ([1.0, 100.0], [3.0, 100.0], True),
        ([1e-6, 2e-6], [1e-6, 3e-6], True),
        ([-INFINITY, 1.0], [-INFINITY, 1.0], False),
        ([-INFINITY, 1.0], [0.0, 1.0], True),
        ([float("nan")], [float("nan")], False),
        ([0.0], [1e-30], True),
        ([1.0], [1.0, 1.0], True),  # which would be broadcast
    ],
)
def test_more_than_rounding_is_a_difference(one, other, wanted):
    assert differ({"a": (torch.tensor(one),)}, {"a": (torch.tensor(other),)}) is wanted


def opaque(name):
    """A dropout between layers, in a form whose inside runs without Python's hooks."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    return torch.jit.script(layers) if name == "scripted" else torch.compile(layers)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize(("form", "named"), [("scripted", "body.1"), ("compiled", "body.1.inner")])
def test_what_holds_a_compiled_or_scripted_module_is_named_for_it(form, named):
    with torch.compiler.set_stance("force_eager"):
        assert modules_of_two_modes(nested(opaque(form)), run) == [named]
