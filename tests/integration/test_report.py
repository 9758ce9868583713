"""Two seeds by one command, and their report."""

import contextlib
import csv

import pytest
import torch

from tests.command_line import A2C, CARTPOLE, refused, run

SMALL = [*CARTPOLE, *A2C, "--name=mine", "--data.evaluation_frames=32"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder in which seeds 1 and 2 were trained by one command."""
    directory = tmp_path_factory.mktemp("seeds")
    with contextlib.chdir(directory):
        run("fit", "--seeds", "1", "2", *SMALL)
    return directory


def weights(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.processes
def test_a_seed_has_the_bits_and_the_folder_of_its_own_command(clone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("fit", *SMALL, "--seed_everything=2")
    alone = weights(tmp_path / "runs" / "mine" / "version_0")
    first, second = (weights(clone / "runs" / "mine" / f"version_{n}") for n in range(2))
    assert all(alone[name].equal(tensor) for name, tensor in second.items())
    assert not all(alone[name].equal(tensor) for name, tensor in first.items())


@pytest.mark.processes
def test_their_report_has_the_scores_that_they_logged(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    run("report", "runs/mine", "--output=made")
    assert capsys.readouterr().out == f"{'report:':15} made/report.html\n"
    with (clone / "made" / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["seed"]) for row in rows] == [("mine", "1"), ("mine", "2")]
    for row in rows:
        with (clone / row["folder"] / "metrics.csv").open() as file:
            logged = [line for line in csv.DictReader(file) if line["eval/score"]]
        assert float(row["score"]) == pytest.approx(float(logged[-1]["eval/score"]))
        assert float(row["frames"]) == float(logged[-1]["eval/frames"]) == 96
        assert 0 <= float(row["learner_waiting"]) <= 1
        assert row["ended_early"] == "False"


@pytest.mark.processes
def test_a_run_and_its_copy_are_refused(clone, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(clone)
    copy = tmp_path / "copy"
    copy.symlink_to(clone / "runs" / "mine" / "version_0")
    run("report", "runs/mine/version_0", str(copy), "--output=one")  # the same folder
    copy.unlink()
    copy.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        (copy / name).write_bytes((clone / "runs" / "mine" / "version_0" / name).read_bytes())
    message = refused(capsys, "report", "runs/mine", str(copy), "--output=two")
    assert "have the same name, settings and seed 1" in message
    assert not (clone / "two").exists()
