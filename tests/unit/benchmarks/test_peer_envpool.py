"""EnvPool's program: what a config's recipe adds to it."""

import numpy as np
import pytest


@pytest.fixture
def peer(load):
    return load("peer_envpool")


def test_pixels_are_normalised_by_the_last_steps_of_all_rounds(peer):
    run = {"game": "pong", "emulator_threads": 1, "channels_last": True, "device": "cpu"}
    recipe = {"network": "nips", "normalize": True, "epochs": 1, "minibatches": 2}
    training = peer.Training(run, peer.Settings(2, 4, ppo=True, **recipe), scored=False)
    assert (training.agent.mean, training.agent.deviation) == (0.0, 255.0)
    assert [tuple(m.weight.shape) for m in training.agent.trunk if hasattr(m, "weight")] == [
        (16, 4, 8, 8), (32, 16, 4, 4), (256, 2592),
    ]  # fmt: skip
    last, moved = [], []
    for _ in range(2):
        before = [p.detach().clone() for p in training.agent.parameters()]
        training.round()
        after = training.agent.parameters()
        moved.append(any(not old.equal(new) for old, new in zip(before, after, strict=True)))
        last.append(training.rollouts.observations[-1].numpy().copy())
    assert training.agent.mean == pytest.approx(np.mean(last))
    assert training.agent.deviation == pytest.approx(np.std(last))
    assert moved == [False, True]  # the first round gives statistics only
