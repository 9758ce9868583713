import pytest
import torch

from hts_torchrl.models import MLP


@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
def test_observations_of_any_shape_become_features(shape):
    assert MLP(shape)(torch.randn(7, *shape)).shape == (7, 64)


def test_the_width_is_what_was_asked_for():
    trunk = MLP((5,), width=16)
    assert trunk(torch.randn(7, 5)).shape == (7, trunk.out_features) == (7, 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
def test_observations_of_any_type_are_read(dtype):
    observations = torch.ones(2, 5, dtype=dtype)
    trunk = MLP((5,))
    assert torch.equal(trunk(observations), trunk(torch.ones(2, 5)))
