"""Checkpoints survive a crash at any point of writing, and damage is found."""

import errno
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from hts_torchrl import CheckpointError, ConfigurationError, DurableCheckpointIO
from hts_torchrl.training.checkpoints import whole_checkpoint

IO = DurableCheckpointIO()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "folder" / "last.ckpt"


def save(place, number):
    IO.save_checkpoint({"weights": torch.full((1000,), float(number)), "number": number}, place)


def saved(place):
    checkpoint = IO.load_checkpoint(place)
    assert torch.all(checkpoint["weights"] == checkpoint["number"])
    return checkpoint["number"]


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(place):
    return sorted(path.name for path in place.parent.iterdir())


class TestSaving:
    def test_keeps_the_checkpoint_before_and_both_digests(self, place):
        for number in (1, 2, 3):
            save(place, number)
        assert names(place) == ["last.ckpt", "last.ckpt.digests", "last.ckpt.previous"]
        assert saved(place) == 3
        assert torch.load(f"{place}.previous", weights_only=True)["number"] == 2

    @pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
    def test_sha256sum_reads_the_digests(self, place):
        save(place, 1)
        save(place, 2)
        subprocess.run(["sha256sum", "-c", "last.ckpt.digests"], cwd=place.parent, check=True)

    def test_copies_where_there_are_no_hard_links(self, place, monkeypatch):
        def refuse(*_):
            raise PermissionError("no hard links here")

        monkeypatch.setattr(os, "link", refuse)
        save(place, 1)
        save(place, 2)
        damage(place)
        with pytest.warns(UserWarning, match="is damaged"):
            assert saved(place) == 1

    def test_failing_leaves_what_was_there(self, place):
        save(place, 1)
        with pytest.raises(AttributeError):
            IO.save_checkpoint({"number": lambda: 2}, place)
        assert saved(place) == 1
        assert names(place) == ["last.ckpt", "last.ckpt.digests"]

    @pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_told_with_the_path(self, place, monkeypatch):
        save(place, 1)
        original = torch.save
        monkeypatch.setattr(torch, "save", lambda obj, _: original(obj, "/dev/full"))
        with pytest.raises(CheckpointError, match=r"the checkpoint .*last\.ckpt: is the disk full"):
            save(place, 2)
        assert saved(place) == 1

    def test_removing_takes_what_lies_beside_it(self, place):
        save(place, 1)
        save(place, 2)
        IO.remove_checkpoint(place)
        assert names(place) == []


class Crash(BaseException):
    """The process is gone: nothing after this happens."""


def crashing_at(call, monkeypatch):
    """Let the call with this number to the file system be the last that is made."""
    calls = iter(range(1000))

    def counted(function):
        def step(*args, **kwargs):
            number = next(calls)
            if number > call:
                raise Crash
            result = function(*args, **kwargs)
            if number == call:
                raise Crash
            return result

        return step

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "link", counted(os.link))
    for name in ("replace", "write_text", "unlink"):
        monkeypatch.setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))


class TestCrash:
    @pytest.mark.parametrize("call", range(17))
    def test_at_any_call_leaves_a_whole_checkpoint(self, place, call, monkeypatch):
        save(place, 1)
        save(place, 2)
        with monkeypatch.context() as crashing:
            crashing_at(call, crashing)
            with pytest.raises(Crash):
                save(place, 3)
        whole = whole_checkpoint(place)
        assert whole == place
        number = saved(place)
        assert number in (2, 3)
        save(place, 4)
        damage(place)
        with pytest.warns(UserWarning, match="is damaged"):
            assert saved(place) == number

    @pytest.mark.parametrize("call", range(11))
    def test_of_a_job_of_slurm_leaves_no_name_of_a_checkpoint_that_is_not_there(
        self, call, tmp_path, monkeypatch
    ):
        """Lightning goes on from the highest number in any name, and counts on from there."""
        save(tmp_path / "hpc_ckpt_1.ckpt", 1)
        with monkeypatch.context() as crashing:
            crashing_at(call, crashing)
            with pytest.raises(Crash):
                save(tmp_path / "hpc_ckpt_2.ckpt", 2)
        found = Trainer(default_root_dir=tmp_path, logger=False)._checkpoint_connector
        assert saved(pathlib.Path(found._hpc_resume_path)) in (1, 2)

    @pytest.mark.thorough
    def test_by_sigkill_leaves_a_whole_checkpoint(self, place):
        program = f"""
import torch
from hts_torchrl import DurableCheckpointIO
io, number = DurableCheckpointIO(), 0
while True:
    number += 1
    weights = torch.full((1_000_000,), float(number))
    io.save_checkpoint({{"weights": weights, "number": number}}, {str(place)!r})
"""
        before = 0
        for delay_s in (0.013, 0.029, 0.041):
            process = subprocess.Popen([sys.executable, "-c", program])
            deadline = time.monotonic() + 60
            while not place.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert saved(place) > before


class TestLoading:
    def test_falls_back_to_the_one_before_and_says_so(self, place):
        save(place, 1)
        save(place, 2)
        damage(place)
        with pytest.warns(UserWarning, match=r"last\.ckpt is damaged: resuming from .*previous"):
            assert saved(place) == 1

    def test_a_link_in_its_place_is_followed(self, place):
        step = place.with_name("step=2.ckpt")
        save(place, 1)
        save(step, 2)
        place.unlink()
        place.symlink_to(step.name)  # as ModelCheckpoint(save_last="link") does
        assert saved(place) == 2

    def test_saving_over_a_link_keeps_what_it_stood_for(self, place):
        step = place.with_name("step=1.ckpt")
        save(step, 1)
        place.symlink_to(step.name)
        save(place, 2)
        step.unlink()
        damage(place)
        with pytest.warns(UserWarning, match="is damaged"):
            assert saved(place) == 1

    def test_a_missing_checkpoint_has_one_before(self, place):
        save(place, 1)
        save(place, 2)
        place.unlink()
        with pytest.warns(UserWarning, match=r"last\.ckpt is missing"):
            assert saved(place) == 1

    def test_saving_over_a_damaged_one_keeps_the_one_before(self, place):
        save(place, 1)
        save(place, 2)
        damage(place)
        save(place, 3)
        damage(place)
        with pytest.warns(UserWarning, match="is damaged"):
            assert saved(place) == 1

    def test_saving_where_both_are_damaged_gives_neither_a_digest(self, place):
        save(place, 1)
        save(place, 2)
        for path in (place, place.with_name("last.ckpt.previous")):
            damage(path)
        save(place, 3)
        assert names(place) == ["last.ckpt", "last.ckpt.digests"]
        damage(place)
        with pytest.raises(ConfigurationError, match="there is no earlier one"):
            saved(place)

    def test_both_damaged_is_an_error(self, place):
        save(place, 1)
        save(place, 2)
        damage(place)
        pathlib.Path(f"{place}.previous").write_bytes(b"")
        with pytest.raises(ConfigurationError, match="this is damaged"):
            saved(place)

    @pytest.mark.parametrize("digests", [b"", b" \n", b"\xff\xfe\x00", b"no digest  last.ckpt\n"])
    def test_unreadable_digests_tell_nothing_and_are_refused_by_name(self, place, digests):
        DurableCheckpointIO().save_checkpoint({"weights": 1}, place)
        record = place.with_name(place.name + ".digests")
        record.write_bytes(digests)
        with pytest.raises(ConfigurationError) as raised:
            DurableCheckpointIO().load_checkpoint(place)
        assert f"because {record.name} is damaged" in str(raised.value)
        DurableCheckpointIO().save_checkpoint({"weights": 2}, place)
        assert DurableCheckpointIO().load_checkpoint(place) == {"weights": 2}

    def test_digests_that_may_not_be_read_are_not_called_damaged(self, place, monkeypatch):
        DurableCheckpointIO().save_checkpoint({"weights": 1}, place)

        def refuse(path, *_, **__):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(pathlib.Path, "read_text", refuse)
        with pytest.raises(ConfigurationError) as raised:
            DurableCheckpointIO().load_checkpoint(place)
        assert str(raised.value) == f"{place}: last.ckpt.digests cannot be read: Permission denied"

    def test_a_checkpoint_of_another_program_is_read(self, place):
        place.parent.mkdir()
        torch.save({"weights": torch.ones(3), "number": 1}, place)
        assert saved(place) == 1

    def test_runs_no_code(self, place):
        class Attack:
            def __reduce__(self):
                return os.mkdir, (str(place.parent / "attacked"),)

        place.parent.mkdir()
        torch.save({"number": Attack()}, place)
        with pytest.raises(pickle.UnpicklingError):
            IO.load_checkpoint(place, weights_only=None)
        assert not (place.parent / "attacked").exists()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_trainer_saves_and_goes_on(tmp_path):
    def trainer(steps):
        return Trainer(
            default_root_dir=tmp_path,
            max_steps=steps,
            max_epochs=10,
            limit_train_batches=2,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            plugins=[DurableCheckpointIO()],
        )

    first = trainer(2)
    first.fit(BoringModel())
    path = pathlib.Path(first.checkpoint_callback.best_model_path)
    assert path.with_name(path.name + ".digests").is_file()
    second = trainer(4)
    second.fit(BoringModel(), ckpt_path=path)
    assert second.global_step == 4
