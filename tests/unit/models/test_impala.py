import torch

from hts_torchrl.models import ImpalaResNet, SeedResNet


def test_pixels_become_256_features():
    net = ImpalaResNet((3, 64, 48))
    pixels = torch.randint(0, 256, (2, 3, 64, 48), dtype=torch.uint8)
    assert net(pixels).shape == (2, net.out_features) == (2, 256)


def test_it_has_the_papers_fifteen_convolutions():
    net = ImpalaResNet((4, 84, 84))
    widths = [layer.out_channels for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert widths == [16] * 5 + [32] * 10


def test_a_residual_block_without_weights_passes_its_input():
    net = ImpalaResNet((4, 84, 84))
    block = net[0][2]
    for weight in block.parameters():
        torch.nn.init.zeros_(weight)
    features = torch.randn(1, 16, 5, 5)
    assert torch.equal(block(features), features)


def test_seed_has_a_fourth_stage_and_256_features():
    net = SeedResNet((16, 72, 96))
    widths = [layer.out_channels for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert widths == [16] * 5 + [32] * 15
    pixels = torch.randint(0, 256, (2, 16, 72, 96), dtype=torch.uint8)
    assert net(pixels).shape == (2, 256)
