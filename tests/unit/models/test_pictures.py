"""Which picture each trunk reads: among several, and behind a memory."""

import pytest
from tensordict.nn import TensorDictModule
from torch import nn

from hts_torchrl import ConfigurationError, make_actor_critic, make_q_policy
from hts_torchrl.config import ArraySpec
from hts_torchrl.models import NatureCNN
from hts_torchrl.models.pictures import pixel_trunks
from tests.unit.models.test_combined import BYTES, CAMERA, SMALL, SPEED, several

TWO = several(front=CAMERA, speed=SPEED, back=ArraySpec((2, 40, 40), BYTES))


@pytest.mark.parametrize("make", [make_actor_critic, make_q_policy])
@pytest.mark.parametrize("network", ["nature", "nature+lstm"])
def test_each_picture_has_its_trunk(make, network):
    found = dict(pixel_trunks(make(network, TWO), TWO))
    channels = {key: trunk[0][0].in_channels for key, trunk in found.items()}
    assert channels == {"front": 1, "back": 2}


def test_a_vector_has_none():
    assert pixel_trunks(make_actor_critic("mlp", several(speed=SPEED)), several(speed=SPEED)) == []


def test_two_trunks_of_one_picture_are_refused():
    both = nn.Sequential(NatureCNN(CAMERA.shape), NatureCNN(CAMERA.shape))
    policy = TensorDictModule(both, in_keys=["front"], out_keys=["hidden"])
    with pytest.raises(ConfigurationError, match="2 trunks of pictures reads 1 pictures"):
        pixel_trunks(policy, several(front=CAMERA, small=SMALL))
