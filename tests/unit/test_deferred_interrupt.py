import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from hts_torchrl.deferred_interrupt import DeferredInterrupt


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupt():
    """One that holds Ctrl-C back."""
    interrupt = DeferredInterrupt()
    interrupt.hold()
    return interrupt


def test_ctrl_c_waits_until_it_is_released(interrupt):
    press()
    with pytest.raises(KeyboardInterrupt):
        interrupt.release()


def test_a_released_interrupt_holds_nothing_back(interrupt):
    interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        press()
    interrupt.release()


@pytest.mark.usefixtures("interrupt")
def test_a_second_ctrl_c_is_not_held_back():
    press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_other_signals_wait_each_for_itself():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        interrupt = DeferredInterrupt([signal.SIGINT, signal.SIGUSR1])
        interrupt.hold()
        signal.raise_signal(signal.SIGUSR1)
        assert not came
        press()  # the first of its kind
        with pytest.raises(KeyboardInterrupt):
            interrupt.release()
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt = DeferredInterrupt()
    interrupt.hold()
    press()
    interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_answer_that_another_has_set_meanwhile_stays(interrupt):
    """Lightning puts those of before a fit back at its end, when a signal may still be held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_which_no_signal_reaches_nothing_happens():
    interrupt = DeferredInterrupt()

    def hold_and_release():
        interrupt.hold()
        interrupt.release()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold_and_release).result()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_held_already_is_released_to_its_own_answer(interrupt):
    interrupt.hold()
    interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
