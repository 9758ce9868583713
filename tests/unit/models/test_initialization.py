import pytest
import torch
from torch import nn

from hts_torchrl.models.initialization import orthogonal


def test_rows_of_a_layer_are_orthogonal_and_as_long_as_the_gain():
    layer = orthogonal(nn.Linear(20, 6), gain=3.0)
    assert torch.allclose(layer.weight @ layer.weight.T, 9.0 * torch.eye(6), atol=1e-4)


def test_filters_of_a_convolution_are_orthogonal():
    weight = orthogonal(nn.Conv2d(4, 6, 3), gain=1.0).weight.flatten(1)
    assert torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-4)


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv2d(3, 2, 1)])
def test_biases_start_at_zero(layer):
    assert not orthogonal(layer).bias.any()


def test_a_layer_without_bias_is_allowed():
    assert orthogonal(nn.Linear(3, 2, bias=False)).bias is None


def test_the_layer_itself_is_returned():
    layer = nn.Linear(3, 2)
    assert orthogonal(layer) is layer
