import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.schedule import Schedule


def schedule(frames_per_batch=80, total_frames=-1, num_envs=16, delay=1):
    return Schedule.from_frames(
        frames_per_batch, total_frames=total_frames, num_envs=num_envs, delay=delay
    )


def test_steps_of_a_round_are_the_frames_of_one_environment():
    assert schedule(frames_per_batch=80, num_envs=16).steps_per_round == 5


def test_frames_of_a_round_are_those_asked_for():
    assert schedule(frames_per_batch=96, num_envs=16).frames_per_round == 96


@pytest.mark.parametrize(("total_frames", "rounds"), [(160, 2), (161, 3), (1, 1)])
def test_total_frames_are_rounded_up_to_whole_rounds(total_frames, rounds):
    assert schedule(total_frames=total_frames).num_rounds == rounds


def test_a_limited_run_has_no_round_after_its_last():
    limited = schedule(total_frames=160)
    assert [limited.exists(index) for index in range(4)] == [True, True, False, False]


def test_an_endless_run_has_every_round():
    assert schedule(total_frames=-1).exists(10**12)


def test_consecutive_rounds_write_different_storages():
    endless = schedule()
    assert [endless.storage_of(index) for index in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("delay", "before"), [(1, True), (0, False)])
def test_a_round_starts_before_the_update_only_with_a_delay(delay, before):
    assert schedule(delay=delay).starts_before_update() is before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"frames_per_batch": 0}, "frames_per_batch=0"),
        ({"frames_per_batch": -16}, "frames_per_batch=-16"),
        ({"frames_per_batch": 81}, "the nearest that works is 80, or give another num_envs"),
        ({"frames_per_batch": 3}, "the nearest that works is 16"),
        ({"total_frames": 0}, "total_frames=0"),
        ({"total_frames": -2}, "total_frames=-2"),
        ({"delay": 2}, "delay=2"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        schedule(**settings)
