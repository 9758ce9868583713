import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from hts_torchrl import Evaluation, HTSCollector, env_spec_of
from hts_torchrl.envs.kept_process import process_kept
from tests.fakes import CoordinateEnv
from tests.policies import echo_policy


class RovingEnv(CoordinateEnv):
    """Changes its process when it is made, or when it is reset: folder, threads and signals."""

    def __init__(self, folder: Path, when: str) -> None:
        super().__init__(0)
        self.folder, self.when = folder, when
        self._rove("made")

    def _rove(self, when: str) -> None:
        if when == self.when:
            os.chdir(self.folder)
            torch.set_num_threads(torch.get_num_threads() + 1)
            signal.signal(signal.SIGTERM, lambda *_: None)

    def reset(self, *, seed=None, options=None):
        self._rove("reset")
        return super().reset(seed=seed, options=options)


def seen():
    return Path.cwd(), torch.get_num_threads(), signal.getsignal(signal.SIGTERM)


def evaluate(create):
    Evaluation(create, episodes=1, seed=0).run(echo_policy())


def collect(create):
    HTSCollector(create, echo_policy(), num_envs=1, frames_per_batch=1).shutdown()


@pytest.mark.parametrize(
    ("use", "when"),
    [(env_spec_of, "made"), (collect, "made"), (evaluate, "made"), (evaluate, "reset")],
)
def test_what_environments_change_for_themselves_stays_the_learners(use, when, tmp_path):
    before = seen()
    try:
        use(partial(RovingEnv, tmp_path, when))
        assert seen() == before
    finally:
        os.chdir(before[0])


def test_a_working_folder_that_was_removed_stays_the_learners(tmp_path, monkeypatch):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with process_kept():
        os.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        Path.cwd()
