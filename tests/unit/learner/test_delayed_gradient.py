"""The delayed gradient on J(theta) = theta^2 / 2, whose gradient is theta itself."""

import pytest
import torch
from torch import nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.delayed_gradient import DelayedGradient, DelayedWeights

LEARNING_RATE = 0.5


@pytest.fixture
def theta():
    return nn.Parameter(torch.tensor([8.0]))


def descend(theta):
    """One step of plain gradient descent from where the parameter is."""
    theta.grad = None
    (theta.square().sum() / 2).backward()
    with torch.no_grad():
        theta -= LEARNING_RATE * theta.grad


def updates_at_behaviour(theta, count):
    """theta after each update; the first round was collected by the weights it updates."""
    delayed, after = DelayedGradient([theta]), []
    for update in range(count):
        delayed.begin_round()
        if update > 0:
            delayed.load_behaviour()
        theta.grad = None
        (theta.square().sum() / 2).backward()
        if update > 0:
            delayed.restore_newest()
        with torch.no_grad():
            theta -= LEARNING_RATE * theta.grad
        delayed.end_round()
        delayed.note_published()
        after.append(theta.item())
    return after


def test_the_gradient_is_that_of_the_weights_before(theta):
    # 8 - 8/2 = 4;  4 - 8/2 = 0;  0 - 4/2 = -2;  -2 - 0/2 = -2;  -2 + 2/2 = -1
    assert updates_at_behaviour(theta, 5) == [4.0, 0.0, -2.0, -2.0, -1.0]


def test_without_delay_this_is_gradient_descent(theta):
    delayed, after = DelayedGradient([theta]), []
    for _ in range(3):
        delayed.begin_round()
        descend(theta)
        delayed.end_round()
        delayed.note_published()
        after.append(theta.item())
    assert after == [4.0, 2.0, 1.0]


def updates_by_displacement(theta, count, steps):
    delayed, after = DelayedGradient([theta]), []
    for update in range(count):
        delayed.begin_round()
        if update > 0:
            delayed.load_behaviour()
        for _ in range(steps):
            descend(theta)
        if update > 0:
            delayed.add_displacement()
        delayed.end_round()
        delayed.note_published()
        after.append(theta.item())
    return after


def test_the_displacement_from_the_behaviour_weights_is_added_to_the_newest(theta):
    # Two steps quarter theta. 8 to 2; from 8 to 2 again: 2 - 6 = -4; from 2 to 0.5: -4 - 1.5.
    assert updates_by_displacement(theta, 3, steps=2) == [2.0, -4.0, -5.5]


def test_the_displacement_of_one_plain_step_is_the_delayed_gradient(theta):
    assert updates_by_displacement(theta, 5, steps=1) == [4.0, 0.0, -2.0, -2.0, -1.0]


def test_restoring_keeps_the_gradient(theta):
    delayed = DelayedGradient([theta])
    delayed.begin_round()
    delayed.load_behaviour()
    theta.square().sum().backward()
    delayed.restore_newest()
    assert theta.grad.item() == 16.0


def test_a_step_before_an_exchange_is_kept(theta):
    delayed = DelayedGradient([theta])
    delayed.begin_round()
    descend(theta)  # 8 to 4
    delayed.load_behaviour()
    assert theta.item() == 8.0
    delayed.restore_newest()
    assert theta.item() == 4.0


def test_parameters_are_exchanged_by_value(theta):
    delayed, place = DelayedGradient([theta]), theta.data_ptr()
    for _ in range(2):
        delayed.begin_round()
        delayed.load_behaviour()
        assert theta.data_ptr() == place
        delayed.restore_newest()
        delayed.end_round()
    assert theta.data_ptr() == place


def test_the_weights_kept_are_copies(theta):
    delayed = DelayedGradient([theta])
    with torch.no_grad():
        theta.fill_(3.0)
    delayed.load_behaviour()
    assert theta.item() == 8.0


def test_every_parameter_is_exchanged():
    linear = nn.Linear(2, 3)
    before = [parameter.clone() for parameter in linear.parameters()]
    delayed = DelayedGradient(linear.parameters())
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.add_(1.0)
    delayed.load_behaviour()
    assert all(map(torch.equal, linear.parameters(), before))


@pytest.mark.parametrize("back", ["restore_newest", "add_displacement"])
def test_autocast_computes_with_the_weights_that_are_in_place(back):
    """Within one region, as Lightning's precision plugin has for a training step."""
    layer, samples = nn.Linear(3, 2), torch.randn(4, 3)
    delayed = DelayedGradient(layer.parameters())
    delayed.set_behaviour([torch.ones(2, 3), torch.zeros(2)])
    delayed.begin_round()

    def answers_of(weight, bias):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return nn.functional.linear(samples, weight.clone(), bias.clone())

    newest = answers_of(*layer.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(samples)
        delayed.load_behaviour()
        behaviour = layer(samples)
        getattr(delayed, back)()
        after = layer(samples)
    assert torch.equal(behaviour, answers_of(torch.ones(2, 3), torch.zeros(2)))
    assert torch.equal(before, newest)
    assert torch.equal(after, newest)


def test_a_parameter_that_is_unfrozen_between_rounds_is_kept_from_then_on():
    policy = nn.Linear(1, 1)
    policy.bias.requires_grad = False
    weights = DelayedWeights(policy)
    weights.begin_round()
    weights.end_round(broadcast=False)
    policy.bias.requires_grad = True
    before = policy.bias.detach().clone()
    weights.begin_round()
    with torch.no_grad():
        policy.bias += 1
    assert weights.newest()["bias"].equal(before)
    weights.end_round(broadcast=False)
    weights.begin_round()
    with weights.behaviour():
        assert policy.bias.equal(before)
    assert policy.bias.equal(before + 1)


def test_the_behaviour_of_a_parameter_that_is_unfrozen_lies_where_it_does():
    """That of a run that goes on comes from a file, and so from the CPU."""
    delayed = DelayedGradient([])
    delayed.add(nn.Parameter(torch.ones(2, device="meta")), torch.zeros(2))
    assert delayed.behaviour[0].device.type == "meta"


def test_a_parameter_in_anothers_place_is_refused():
    policy = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).requires_grad_(False)
    policy[0].requires_grad_(True)
    weights = DelayedWeights(policy)
    weights.begin_round()
    weights.end_round(broadcast=False)
    policy[1] = nn.Linear(1, 1)
    told = r"^the policy's 1\.weight is another parameter than when the run began"
    with pytest.raises(ConfigurationError, match=told):
        weights.begin_round()


class Sharing(nn.Module):
    """Two layers with one weight, and a buffer in whose place each pass puts another tensor."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.register_buffer("passes", torch.zeros(()))
        self.again = nn.Sequential(self.one)

    def forward(self, rows):
        self.passes = self.passes + 1
        return self.other(self.one(rows))


def test_what_modules_share_is_kept_by_all_of_its_names():
    policy = Sharing()
    weights = DelayedWeights(policy)
    weights.begin_round()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    newest = weights.newest()
    assert newest.keys() == before.keys()
    assert all(newest[name].equal(tensor) for name, tensor in before.items())


def test_a_tensor_that_was_put_in_a_buffers_place_is_exchanged():
    policy = Sharing()
    weights = DelayedWeights(policy)
    for passes in (1.0, 2.0):
        weights.begin_round()
        policy(torch.ones(1, 2))
        assert weights.newest()["passes"] == passes - 1
        assert weights.moved_buffers() == ["passes"]
        weights.end_round(broadcast=False)
        weights.note_published()
    weights.begin_round()  # with what two passes left; one pass collected the round
    with weights.behaviour():
        assert policy.passes == 1.0
        policy(torch.ones(1, 2))
    assert policy.passes == 2.0
