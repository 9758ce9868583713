import pytest
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
