import copy

import pytest
import torch
from torch.nn import functional

from hts_torchrl import ConfigurationError
from hts_torchrl.models import ImpalaResNet, NatureCNN, NipsCNN, SeedResNet
from hts_torchrl.models.pixel_trunks import PixelConv2d

TRUNKS = pytest.mark.parametrize(("trunk", "width"), [(NatureCNN, 512), (NipsCNN, 256)])
SHAPE = (4, 84, 84)


def pixels(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (rows, *SHAPE), dtype=torch.uint8)


@TRUNKS
def test_pixels_become_features_of_the_papers_width(trunk, width):
    net = trunk(SHAPE)
    assert net(pixels(3)).shape == (3, net.out_features) == (3, width)


@TRUNKS
def test_the_batch_itself_is_left_alone(trunk, width):  # noqa: ARG001
    batch = pixels()
    before = batch.clone()
    trunk(SHAPE)(batch)
    assert torch.equal(batch, before)


@TRUNKS
def test_float_pixels_are_left_alone_too(trunk, width):  # noqa: ARG001
    batch = pixels().float().contiguous(memory_format=torch.channels_last)
    before = batch.clone()
    trunk(SHAPE)(batch)
    assert torch.equal(batch, before)


def test_the_nature_trunk_has_the_papers_number_of_weights():
    convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
    weights = sum(parameter.numel() for parameter in NatureCNN(SHAPE).parameters())
    assert weights == convolutions + (64 * 7 * 7 + 1) * 512


@pytest.mark.parametrize("trunk", [NatureCNN, NipsCNN])
def test_memory_is_ordered_channels_last(trunk):
    weights = [weight for weight in trunk(SHAPE).parameters() if weight.ndim == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize("trunk", [NatureCNN, NipsCNN, ImpalaResNet, SeedResNet])
def test_features_are_those_of_plain_layers_that_read_scaled_pixels(trunk):
    net, batch = trunk(SHAPE), pixels()
    plain = copy.deepcopy(torch.nn.Sequential(*net))
    first = plain[0][0]
    plain[0][0] = torch.nn.Conv2d(
        4, first.out_channels, first.kernel_size, first.stride, first.padding
    )
    plain[0][0].load_state_dict(first.state_dict())
    torch.testing.assert_close(net(batch), plain(batch.float() / 255), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("trunk", [NatureCNN, ImpalaResNet])
def test_weights_cast_once_give_the_bits_of_those_cast_in_each_pass(trunk):
    learner, batch = trunk(SHAPE), pixels(8)
    actor = copy.deepcopy(learner)
    for module in actor.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
            module.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(actor(batch), learner(batch))


def test_the_nature_trunk_is_the_papers_for_football():
    """It has 2560 features before the last layer (Liu et al., 2020)."""
    assert NatureCNN((16, 72, 96))[1].weight.shape == (512, 2560)


@pytest.mark.parametrize("trunk", [NatureCNN, NipsCNN, ImpalaResNet, SeedResNet])
@pytest.mark.parametrize("shape", [(96, 96, 3), (48, 64, 4), (40, 40, 12), (40, 40, 1)])
def test_pictures_whose_channels_come_last_are_read_as_if_they_came_first(trunk, shape):
    last = trunk(shape)
    first = trunk((shape[2], *shape[:2]))
    first.load_state_dict(last.state_dict())
    batch = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    torch.testing.assert_close(last(batch), first(batch.permute(0, 3, 1, 2).contiguous()))


@pytest.mark.parametrize("sides", [(84, 84), (72, 96), (84, 82), (42, 40)])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_convolution_of_bytes_is_that_of_the_same_pixels_in_double_precision(sides, offset):
    """Whether or not it can read blocks of 4x4 pixels; so are its gradients."""
    layer = PixelConv2d(4, 32, 8, stride=4)
    flat = torch.randint(0, 256, (offset + 3 * 4 * sides[0] * sides[1],), dtype=torch.uint8)
    pixels = flat[offset:].view(3, 4, *sides)
    weight, bias = (p.detach().double().requires_grad_() for p in (layer.weight, layer.bias))
    expected = functional.conv2d(pixels.double() / 255, weight, bias, 4)
    factors = torch.randn_like(expected)
    (expected * factors).sum().backward()
    found = layer(pixels)
    (found * factors).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(layer.bias.grad.double(), bias.grad, rtol=1e-4, atol=1e-2)


def test_pictures_whose_channels_come_last_may_have_more_dimensions_before_them():
    net, batch = NipsCNN((40, 40, 3)), torch.randint(0, 256, (2, 5, 40, 40, 3), dtype=torch.uint8)
    assert torch.allclose(net(batch)[1, 3], net(batch[1, 3:4])[0], atol=1e-5)


@pytest.mark.parametrize("shape", [(20, 9, 9), (1, 42, 42), (16, 72, 96), (9, 9, 16)[::-1]])
def test_channels_that_come_first_need_not_be_the_fewest_where_pictures_are_square(shape):
    assert ImpalaResNet(shape)[0][0].in_channels == shape[0]


@pytest.mark.parametrize("shape", [(84, 84, 84), (9, 9, 20), (84, 3, 84), (40, 72, 36), (84, 84)])
def test_pictures_whose_channels_cannot_be_told_are_refused(shape):
    with pytest.raises(ConfigurationError, match="channels"):
        ImpalaResNet(shape)
