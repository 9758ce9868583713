import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.unit.compat.private_names import private_names_of


def fitted(tmp_path, *callbacks, model=None, **settings):
    """A Trainer that has trained for four batches in one epoch."""
    settings = {"limit_train_batches": 4, "max_epochs": 1, "limit_val_batches": 0} | settings
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(model or BoringModel())
    return trainer


class Ask(Callback):
    def __init__(self, question):
        self.question, self.answers = question, []

    def on_train_batch_start(self, trainer, *_):
        self.answers.append(self.question(trainer))


def test_logged_steps_are_those_that_are_set(tmp_path):
    with private_names_of("lightning") as compat:
        ask = Ask(lambda trainer: compat.set_logged_steps(trainer, 40))
        trainer = fitted(tmp_path, ask, limit_train_batches=1)
        assert trainer.fit_loop.state_dict()["epoch_loop.state_dict"] == {
            "_batches_that_stepped": 41
        }


def test_every_second_of_two_batches_applies_the_gradient(tmp_path):
    with private_names_of("lightning") as compat:

        class Model(BoringModel):
            def __init__(self):
                super().__init__()
                self.answers = []

            def training_step(self, batch, batch_idx):
                self.answers.append(compat.is_accumulating(self.trainer))
                return super().training_step(batch, batch_idx)

        model = Model()
        fitted(tmp_path, model=model, accumulate_grad_batches=2)
        assert model.answers == [True, False, True, False]


class Kill(Callback):
    """Replaces the answer to SIGTERM, and sends it to this process."""

    def __init__(self, replace):
        self.replace, self.seen = replace, []

    def setup(self, trainer, *_, **__):
        self.replace(trainer, lambda number, _: self.seen.append(number))

    def on_train_batch_start(self, *_):
        signal.raise_signal(signal.SIGTERM)


def test_callbacks_read_what_was_set_not_what_was_logged_before(tmp_path):
    with private_names_of("lightning") as compat:

        class Model(BoringModel):
            def training_step(self, batch, batch_idx):
                if batch_idx == 1:
                    self.log("figure", torch.tensor(10.0))
                else:
                    compat.set_callback_metrics(
                        self.trainer, {"figure": torch.tensor(float(batch_idx))}
                    )
                return super().training_step(batch, batch_idx)

        class Reads(Callback):
            def __init__(self):
                self.seen = []

            def on_train_batch_end(self, trainer, *_):
                self.seen.append(trainer.callback_metrics["figure"].item())

        reads = Reads()
        trainer = fitted(tmp_path, reads, model=Model())
        assert reads.seen == [0, 10, 2, 3]
        assert trainer.callback_metrics["figure"] == 3


def test_sigterm_is_answered_by_what_was_given(tmp_path):
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with private_names_of("lightning") as compat:
            kill = Kill(compat.answer_sigterm)
            trainer = fitted(tmp_path, kill, limit_train_batches=1)
            assert kill.seen == [signal.SIGTERM]
            assert not trainer.received_sigterm
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("ranks", "fn", "leaves", "answered"),
    [(1, "fit", True, 2), (1, "validate", True, 2), (2, "fit", False, 2), (2, "validate", True, 1)],
)
def test_at_sigterm_all_but_several_ranks_that_train_leave_at_once(ranks, fn, leaves, answered):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    left = pytest.raises(SIGTERMException) if leaves else contextlib.nullcontext()
    try:
        with private_names_of("lightning") as compat:
            state = SimpleNamespace(fn=fn)
            trainer = SimpleNamespace(world_size=ranks, received_sigterm=False, state=state)
            with left, compat.leaving_at_sigterm(SimpleNamespace(_trainer=trainer)):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # which is answered as before
            assert seen == [signal.SIGTERM] * answered
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_strategies_that_spawn_have_a_start_method():
    with private_names_of("lightning") as compat:
        spawning = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False)
        alone = Trainer(accelerator="cpu", devices=1, logger=False)
        assert compat.process_start_method(spawning.strategy) == "spawn"
        assert compat.process_start_method(alone.strategy) is None
        assert compat.process_start_method(SimpleNamespace(launcher=DDPStrategy().launcher)) is None


def save(trainer, checkpoint, compat):
    """Whether a file was written the first time, and the second."""
    written, path = [], Path(checkpoint.dirpath, "it.ckpt")
    for _ in range(2):
        path.unlink(missing_ok=True)
        compat.save_if_anything_is_new(checkpoint, trainer)
        written.append(path.exists())
    return written


def test_a_checkpoint_is_written_only_if_something_is_new(tmp_path):
    with private_names_of("lightning") as compat:
        checkpoint = ModelCheckpoint(tmp_path, filename="it", save_on_train_epoch_end=False)
        saved = Ask(lambda trainer: save(trainer, checkpoint, compat))
        fitted(tmp_path, saved, checkpoint, limit_train_batches=3)
        assert saved.answers == [[False, False], [True, False], [True, False]]
        assert compat.last_saved(checkpoint) == str(tmp_path / "it.ckpt")


class TestFitLoop:
    def checkpoint(self, tmp_path):
        trainer = fitted(tmp_path)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return torch.load(tmp_path / "end.ckpt", weights_only=False)

    def test_the_end_of_a_run_is_finished_and_can_be_moved(self, tmp_path):
        with private_names_of("lightning") as compat:
            checkpoint = self.checkpoint(tmp_path)
            loop = compat.FitLoop.of(checkpoint)
            assert loop.is_finished
            loop.move(2, done=6, epoch_length=9)
            assert not compat.FitLoop.of(checkpoint).is_finished
            state = checkpoint["loops"]["fit_loop"]
            assert set(state["epoch_loop.batch_progress"]["current"].values()) == {6}
            assert state["epoch_progress"]["current"]["completed"] == 0

    def test_it_can_be_moved_into_a_later_epoch(self, tmp_path):
        with private_names_of("lightning") as compat:
            checkpoint = self.checkpoint(tmp_path)
            compat.FitLoop.of(checkpoint).move(2, done=6, epoch_length=4)
            state = checkpoint["loops"]["fit_loop"]
            batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
            assert set(batches["total"].values()) == {6}
            assert set(batches["current"].values()) == {2}
            second = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
            assert epochs["total"] == epochs["current"] == second

    def test_a_state_replaces_that_of_the_checkpoint(self, tmp_path):
        with private_names_of("lightning") as compat:
            checkpoint, state = self.checkpoint(tmp_path), Trainer().fit_loop.state_dict()
            compat.FitLoop.replace(checkpoint, state)
            assert checkpoint["loops"]["fit_loop"] is state
            assert not compat.FitLoop.of(checkpoint).is_finished

    def test_weights_alone_have_none(self):
        with private_names_of("lightning") as compat:
            assert compat.FitLoop.of({"state_dict": {}}) is None


def test_the_command_line_calls_its_step_before_it_makes_classes(monkeypatch):
    monkeypatch.setattr("sys.argv", ["program"])
    with private_names_of("lightning") as compat:
        called = []

        class Program(compat.CommandLine):
            def prepare_checkpoint(self):
                called.append("checkpoint")
                super().prepare_checkpoint()

            def instantiate_classes(self):
                called.append("classes")
                super().instantiate_classes()

        args = ["--trainer.max_epochs=3", "--trainer.logger=false", "--seed_everything=5"]
        cli = Program(BoringModel, run=False, args=args)
        assert called == ["checkpoint", "classes"]
        assert cli.setting("trainer")["max_epochs"] == 3


def test_the_command_line_tells_the_flags_of_a_subcommand(monkeypatch):
    monkeypatch.setattr("sys.argv", ["program", "validate"])
    flags = []
    with private_names_of("lightning") as compat:

        class Program(compat.CommandLine):
            def parse_arguments(self, *_):
                flags.extend(self.flags())
                raise SystemExit

        with pytest.raises(SystemExit):
            Program(BoringModel)
    assert {"--trainer.max_steps", "--ckpt_path", "--verbose"} <= set(flags)
