import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hts_torchrl.models.layers import NarrowLinear, orthogonal


class TestNarrowLinear:
    @pytest.mark.parametrize("outputs", [1, 2, 3, 4, 7])
    def test_it_computes_what_a_linear_layer_computes(self, outputs):
        layer, features = NarrowLinear(16, outputs, 1.0), torch.randn(5, 16)
        expected = torch.nn.functional.linear(features, layer.weight, layer.bias)
        assert torch.allclose(layer(features), expected, atol=1e-6)

    @pytest.mark.parametrize("outputs", [1, 2, 3, 4])
    def test_its_gradients_are_those_of_a_linear_layer(self, outputs):
        layer, features = NarrowLinear(16, outputs, 1.0), torch.randn(5, 16)
        layer(features).square().sum().backward()
        ours = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
        nn.Linear.forward(layer, features).square().sum().backward()
        theirs = [parameter.grad for parameter in layer.parameters()]
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(ours, theirs, strict=True))

    @pytest.mark.parametrize("outputs", [1, 2, 3])
    @pytest.mark.parametrize("rows", [2, 3, 5, 8])
    def test_a_row_has_the_same_bits_at_any_place(self, outputs, rows):
        layer, features = NarrowLinear(64, outputs, 1.0), torch.randn(rows, 64)
        with torch.no_grad():
            shifts = range(rows)
            rolled = [layer(features.roll(shift, 0)).roll(-shift, 0) for shift in shifts]
        assert all(torch.equal(rolled[0], other) for other in rolled)

    def test_it_answers_in_single_precision_under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            assert NarrowLinear(16, 2, 1.0)(torch.randn(5, 16)).dtype is torch.float32

    def test_its_weight_has_no_padding(self):
        assert NarrowLinear(16, 2, 1.0).weight.shape == (2, 16)


@pytest.mark.parametrize("computed", [lambda layer: layer, weight_norm], ids=["own", "computed"])
@pytest.mark.parametrize("width", [1, 3, 4, 6])
def test_weights_that_are_padded_once_are_those_that_are_loaded_later(width, computed):
    acting, learning = (computed(NarrowLinear(8, width, 1.0)) for _ in range(2))
    acting.pad_once()
    state = acting.state_dict()  # as an actor loads: into the tensors that are there
    for name, value in learning.state_dict().items():
        state[name].copy_(value)
    features = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(acting(features), learning(features))


def test_layers_that_share_a_weight_both_have_the_weights_that_are_loaded_later():
    acting, learning = ([NarrowLinear(8, 2, 1.0) for _ in range(2)] for _ in range(2))
    for first, second in (acting, learning):
        second.weight = first.weight
    for layer in acting:
        layer.pad_once()
    with torch.no_grad():
        for own, new in zip(acting, learning, strict=True):
            own.weight.copy_(new.weight)
            own.bias.copy_(new.bias)
        features = torch.randn(5, 8)
        for own, new in zip(acting, learning, strict=True):
            assert torch.equal(own(features), new(features))


def test_rows_of_a_layer_are_orthogonal_and_as_long_as_the_gain():
    layer = orthogonal(nn.Linear(20, 6), gain=3.0)
    assert torch.allclose(layer.weight @ layer.weight.T, 9.0 * torch.eye(6), atol=1e-4)


def test_filters_of_a_convolution_are_orthogonal():
    weight = orthogonal(nn.Conv2d(4, 6, 3), gain=1.0).weight.flatten(1)
    assert torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-4)


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv2d(3, 2, 1)])
def test_biases_start_at_zero(layer):
    assert not orthogonal(layer).bias.any()


def test_the_layer_itself_is_returned_with_or_without_bias():
    layer = nn.Linear(3, 2, bias=False)
    assert orthogonal(layer) is layer
