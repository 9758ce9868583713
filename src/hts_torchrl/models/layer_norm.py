"""LayerNorm (Ba et al., 2016) in the networks of this package, between a layer and its activation.

What keeps Q-learning from diverging without a target network (Gallici et al., 2024).
"""

from __future__ import annotations

from torch import nn

from hts_torchrl.models.trunks import BUILT_IN_TRUNKS


def normalize_layers(trunk: nn.Module) -> None:
    """Put a LayerNorm behind each linear layer and each convolution of a built-in trunk, in place.

    That of a convolution is over channels, height and width of one picture. A trunk of the user's
    own, also of a class derived from one of these, stays as it is: what it normalises is its
    author's choice.

    Args:
        trunk: of this package, or one that has such inside.
    """
    sequences = [
        inner
        for each in trunk.modules()
        if type(each) in BUILT_IN_TRUNKS.values()
        for inner in each.modules()
        if isinstance(inner, nn.Sequential)
    ]
    for sequence in sequences:
        for place, layer in reversed(list(enumerate(sequence))):
            if isinstance(layer, nn.Linear):
                sequence.insert(place + 1, nn.LayerNorm(layer.out_features))
            elif isinstance(layer, nn.Conv2d):
                # One group: that is LayerNorm, and needs to know neither height nor width.
                sequence.insert(place + 1, nn.GroupNorm(1, layer.out_channels))
