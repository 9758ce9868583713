"""The small collector of many of these tests."""

from hts_torchrl import HTSCollector
from tests.fakes import CoordinateEnvs
from tests.policies import echo_policy

ENVS, STEPS = 2, 4


def collect(create=CoordinateEnvs(), policy=None, rounds=4, **settings) -> HTSCollector:  # noqa: B008
    """Rounds of 4 steps of 2 environments, answered by an echo unless told otherwise."""
    frames = ENVS * STEPS
    defaults = {"num_envs": ENVS, "frames_per_batch": frames, "total_frames": rounds * frames}
    return HTSCollector(create, policy or echo_policy(), **(defaults | settings))
