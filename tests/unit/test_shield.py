import signal

import pytest

from hts_torchrl.learner.shield import Shield


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_until_the_shield_is_lowered():
    shield = Shield()
    shield.raise_()
    press()
    with pytest.raises(KeyboardInterrupt):
        shield.lower()


def test_without_ctrl_c_nothing_happens():
    shield = Shield()
    shield.raise_()
    shield.lower()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_lowered_shield_holds_nothing_back():
    shield = Shield()
    shield.raise_()
    shield.lower()
    with pytest.raises(KeyboardInterrupt):
        press()
    shield.lower()


def test_a_second_ctrl_c_is_not_held_back():
    shield = Shield()
    shield.raise_()
    press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_an_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shield = Shield()
    shield.raise_()
    press()
    shield.lower()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
