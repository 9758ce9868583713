import numpy as np
import pytest
import torch
from torch import nn

from hts_torchrl.models import MLP, NatureCNN
from hts_torchrl.models.q_policy import normalize_layers
from hts_torchrl.models.trunks import combined_trunk, make_trunk
from hts_torchrl.specs import ArraySpec

PICTURE = ArraySpec((4, 84, 84), np.dtype(np.uint8))


def test_each_layer_of_an_mlp_is_followed_by_a_norm():
    trunk = MLP((3,))
    normalize_layers(trunk)
    kinds = [type(layer) for layer in trunk]
    assert kinds == [nn.Linear, nn.LayerNorm, nn.Tanh, nn.Linear, nn.LayerNorm, nn.Tanh]


@pytest.mark.parametrize(("network", "norms"), [("nature", 4), ("nips", 3), ("impala", 16)])
def test_each_layer_of_a_trunk_for_pictures_is_followed_by_a_norm(network, norms):
    trunk = make_trunk(network, PICTURE)
    layers = [each for each in trunk.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    normalize_layers(trunk)
    kinds = [type(each) for each in trunk.modules()]
    assert kinds.count(nn.GroupNorm) + kinds.count(nn.LayerNorm) == len(layers) == norms
    assert trunk(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, trunk.out_features)


def test_what_a_layer_writes_has_mean_0_and_variance_1_in_each_row():
    trunk = NatureCNN((4, 84, 84))
    normalize_layers(trunk)
    seen = []
    for layer in trunk.modules():
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
            layer.register_forward_hook(lambda _, __, output: seen.append(output.flatten(1)))
    trunk(torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8))
    assert len(seen) == 4
    for rows in seen:
        torch.testing.assert_close(rows.mean(1), torch.zeros(3), atol=1e-3, rtol=0)
        torch.testing.assert_close(rows.std(1), torch.ones(3), atol=1e-2, rtol=0)


def test_a_norm_of_a_convolution_keeps_what_channels_have_unlike():
    trunk = NatureCNN((4, 84, 84))
    normalize_layers(trunk)
    (norm, *_) = (each for each in trunk.modules() if isinstance(each, nn.GroupNorm))
    features = torch.randn(2, 32, 20, 20)
    features[:, 3] += 5.0
    expected = nn.functional.layer_norm(features, [32, 20, 20])
    torch.testing.assert_close(norm(features), expected)


class Wide(MLP):
    """A trunk of a user's."""


@pytest.mark.parametrize("trunk", [nn.Sequential(nn.Linear(3, 4), nn.ReLU()), Wide((3,))])
def test_a_trunk_of_the_users_own_stays_as_it_is(trunk):
    before = [type(layer) for layer in trunk]
    normalize_layers(trunk)
    assert [type(layer) for layer in trunk] == before


def test_each_trunk_of_several_observations_has_its_norms():
    numbers = ArraySpec((3,), np.dtype(np.float32))
    trunk = combined_trunk("nips", {"picture": PICTURE, "vector": numbers})
    normalize_layers(trunk)
    kinds = [type(each) for each in trunk.modules()]
    assert (kinds.count(nn.GroupNorm), kinds.count(nn.LayerNorm)) == (2, 3)
