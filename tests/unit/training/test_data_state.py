"""What a checkpoint holds of the data module; tests/unit/learner has what a run may change."""

from hts_torchrl import A2C
from tests.fits import cartpole, watched_fit


def test_the_state_counts_frames_and_updates():
    data = cartpole(3)
    watched_fit(A2C(), data)
    state = data.state_dict()
    assert (state["policy_version"], state["frames"], state["round"]) == (3, 96, 3)


def test_a_loaded_state_is_counted_on():
    data = cartpole(3)
    data.load_state_dict({"policy_version": 0, "frames": 1000})
    watched_fit(A2C(), data)
    assert data.state_dict()["frames"] == 1096
