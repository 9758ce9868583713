"""The line of progress, on a terminal and in a file."""

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch

from hts_torchrl import TrainingStatistics
from hts_torchrl.training.callbacks.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def trainer(**figures):
    """Stands for a Trainer of two ranks in a run of 40 rounds of 1,024 frames, 512 of each."""
    statistics = TrainingStatistics()
    statistics.frames = 20_480
    return SimpleNamespace(
        datamodule=SimpleNamespace(schedule=SimpleNamespace(num_rounds=40, frames_per_round=1024)),
        world_size=2,
        callbacks=[statistics],
        state=SimpleNamespace(fn="fit"),
        progress_bar_metrics=figures,
        callback_metrics={"eval/score": torch.tensor(253.0)},
    )


FIGURES = {"steps_per_second": 1037.4564, "episode/return": 41.23456789, "mine": 0.123456789}
SHOWN = " 50% | 20,480 of 40,960 frames | 1,037 steps/s | episode return 41.23 | mine 0.1235"


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_a_file_gets_whole_lines_and_no_second_one_at_once():
    line, out = ProgressLine(), io.StringIO()
    with contextlib.redirect_stdout(out):
        line.on_train_batch_end(trainer())  # before there are figures
        for _ in range(2):
            line.on_train_batch_end(trainer(**FIGURES))
        line.on_validation_start(trainer(), None)
        line.on_validation_end(trainer(), None)
        line.on_train_end(trainer(), None)
    assert out.getvalue() == f"{SHOWN}\nevaluation after 20,480 frames: score 253.00\n"


def test_a_terminals_line_is_replaced_and_cleared_in_the_end(monkeypatch):
    line, out = ProgressLine(), Terminal()
    with contextlib.redirect_stdout(out):
        line.on_train_batch_end(trainer(**FIGURES))
        line.on_validation_start(trainer(), None)
        line.print("of a module")
        monkeypatch.setenv("COLUMNS", "21")
        line._next_s = 0.0
        line.on_train_batch_end(trainer(**FIGURES))
        line.on_exception(trainer(), None, KeyboardInterrupt())
    replaced = "\r\x1b[K"
    assert out.getvalue() == (
        f"{SHOWN}{replaced}evaluating ...{replaced}of a module\n{SHOWN[:20]}{replaced}"
    )


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_nothing_is_shown_when_it_is_disabled(stream):
    line, out = ProgressLine(), stream()
    line.disable()
    with contextlib.redirect_stdout(out):
        line.on_train_batch_end(trainer(**FIGURES))
        line.on_validation_start(trainer(), None)
        line.on_validation_end(trainer(), None)
    assert out.getvalue() == ""
