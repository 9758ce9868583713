"""What environments leave as it is in the learner's process. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Put back what environments may change for themselves.

    Torch's number of threads decides the learner's bits; into the working folder loggers and
    checkpoints write; and at Ctrl-C and SIGTERM the Trainer saves and ends.
    """
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    folder = os.open(".", os.O_PATH)  # which may have been removed, and then has no name
    answers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        if torch and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if threading.current_thread() is threading.main_thread():
            for number, answer in answers.items():
                if signal.getsignal(number) is not answer and answer is not None:
                    signal.signal(number, answer)
