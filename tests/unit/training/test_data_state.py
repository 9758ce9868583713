"""What a checkpoint holds of the data module; tests/unit/learner has what a run may change."""

import copy

import pytest

from hts_torchrl import A2C, AtariEnvs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.portable import VARIABLES
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


@pytest.mark.parametrize("was", [True, False])
def test_a_run_does_not_go_on_with_other_kernels(monkeypatch, was):
    data = cartpole(3)
    watched_fit(A2C(), data)
    state = data.state_dict()
    assert state["settings"]["portable"] is False
    state["settings"]["portable"] = was
    names = [] if was else VARIABLES.items()
    for name, value in names:
        monkeypatch.setenv(name, value)
    trainer = data.trainer
    assert data._state.changes_from(state, trainer) == {"portable": (was, not was)}
    trainer.state.fn = "fit"
    with pytest.raises(ConfigurationError, match=f"^portable={not was}, the checkpoint has {was}"):
        data._state.load(state, trainer)


def test_threads_of_atari_may_change_and_its_game_may_not():
    data = cartpole(3)
    watched_fit(A2C(), data)
    state = copy.deepcopy(data.state_dict())

    def env(**fields):
        return {"class_path": "AtariEnvs", "init_args": vars(AtariEnvs("pong", **fields))}

    def changes(**fields):
        data._state.settings["env"] = env(**fields)
        return data._state.changes_from(state, data.trainer)

    state["settings"]["data"]["env"] = env()
    assert changes(num_threads=2) == {}
    assert changes(frame_skip=2) == {"data.env.frame_skip": (4, 2)}
