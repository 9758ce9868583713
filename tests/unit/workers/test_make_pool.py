import pytest
import torch
from torch import nn

from hts_torchrl import GymEnvs, HTSCollector
from hts_torchrl.errors import ConfigurationError


class Stays(nn.Linear):
    def __deepcopy__(self, _):
        return self

    def __reduce__(self):
        raise TypeError("it stays here")


def test_a_policy_that_cannot_be_sent_is_refused_with_the_remedies():
    collector = HTSCollector(
        GymEnvs("CartPole-v1"), Stays(4, 2), num_envs=2, frames_per_batch=4, total_frames=4
    )
    remedies = r"sent to the actors \(TypeError: it stays here\); .*policy_factory .*num_actors=0"
    with pytest.raises(ConfigurationError, match=remedies):
        next(iter(collector))
    collector.shutdown()


class Holding(nn.Linear):
    """A policy with a buffer of a type of its own, which it does not read."""

    def __init__(self, dtype):
        super().__init__(4, 2)
        self.register_buffer("held", torch.zeros(3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_a_buffer_that_torch_cannot_unpickle_is_refused_for_processes_alone(dtype):
    settings = {"num_envs": 2, "frames_per_batch": 4, "total_frames": 8}
    collector = HTSCollector(GymEnvs("CartPole-v1"), Holding(dtype), **settings)
    with pytest.raises(ConfigurationError, match=r"actors cannot read the policy .*num_actors=0"):
        next(iter(collector))
    collector.shutdown()
    serial = HTSCollector(GymEnvs("CartPole-v1"), Holding(dtype), num_actors=0, **settings)
    for _ in serial:
        serial.update_policy_weights_()
    assert serial.policy_version == 2
