from types import SimpleNamespace

import numpy as np
import pytest

from hts_torchrl.workers.silence import Silence


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until a test turns it."""
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr("hts_torchrl.workers.silence.time.monotonic", lambda: clock.s)
    return clock


@pytest.fixture
def signs():
    return np.zeros((3, 4))


@pytest.fixture
def silence(now, signs):  # noqa: ARG001
    return Silence(SimpleNamespace(signs=signs.copy))


def test_silence_lasts_since_the_beginning_where_nothing_is_heard(silence, now):
    now.s += 7
    assert silence.lasts_s().tolist() == [7, 7, 7]


@pytest.mark.parametrize("sign", range(4))
def test_any_sign_ends_the_silence_of_its_worker_alone(silence, now, signs, sign):
    now.s += 7
    signs[1, sign] += 1
    assert silence.lasts_s().tolist() == [7, 0, 7]


def test_one_sign_counts_once(silence, now, signs):
    signs[1, 0] += 1
    silence.lasts_s()
    now.s += 7
    assert silence.lasts_s().tolist() == [7, 7, 7]
