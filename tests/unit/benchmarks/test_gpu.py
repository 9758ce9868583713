"""The GPU's program without a GPU: what it says then, and how its report is written."""

import sys
from argparse import Namespace

import pytest


@pytest.fixture
def gpu(load):
    return load("gpu")


def test_without_a_gpu_it_ends_with_status_2_and_one_line(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "benchmarks/gpu.py: no CUDA device is here, and nothing was measured\n"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_is_told_and_the_others_go_on(gpu, monkeypatch, tmp_path):
    def broken(_):
        yield "half of it\n"
        raise RuntimeError("the fan is loud")

    def ended(_):
        sys.exit("a child ended with status 3")
        yield

    def whole(_):
        yield "all of it\n"

    monkeypatch.setattr(gpu, "gpu", lambda: "1 x Imaginary")
    monkeypatch.setattr(gpu, "PARTS", {"tests": broken, "bits": ended, "speed": whole})
    path = tmp_path / "output" / "gpu.md"
    failed = gpu.write(path, Namespace(quick=False), ["tests", "bits", "speed"])
    assert failed == ["tests", "bits"]
    report = path.read_text()
    pieces = ["1 x Imaginary", "half of it", "the fan is loud", "a child ended with status 3",
              "## Speed", "all of it", "Failed: tests, bits."]  # fmt: skip
    places = [report.index(piece) for piece in pieces]
    assert places == sorted(places)


def test_a_pass_is_timed_and_a_training_has_a_digest_for_each_pool(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "ON_GPU", {"accelerator": "cpu"})
    times = gpu.timed(
        {"network": "mlp", "rows": [4, 8], "precision": "32-true", "seconds": 0,
         "acting": {"here": {"device": "cpu"}}}
    )  # fmt: skip
    assert list(times) == ["4", "8"]
    for each in times.values():
        assert len(each["here"]) == 20
        assert min(each["here"]) > 0
    job = {"task": "CartPole", "algorithm": "A2C", "data": {"policy_device": "cpu"}, "updates": 2}
    found = gpu.trained(job | {"pools": [(0, 1), (0, 8)]})
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize(("algorithm", "steps"), [("a2c", 5), ("ppo", 128)])
def test_all_rows_train_on_the_gpu_and_have_whole_groups(gpu, algorithm, steps):
    task = gpu.Run("", "breakout", 32, steps, 1.0, algorithm)
    runs = gpu.contestants(task)
    assert len(set(runs)) == len(runs)
    assert {run.device for run in runs} == {"cuda"}
    assert all(run.num_envs % run.workers == 0 for run in runs)
    assert ("collector" in {run.system for run in runs}) is (algorithm == "a2c")


def test_updates_are_timed_after_a_warm_up_and_then_traced(gpu):
    task = gpu.Run("trainer", "cartpole", 4, 8, 0.0, "ppo", workers=2, inference_batch=4)
    job = {"warm_up": 2, "timed": 3, "traced": 2, "run": gpu.asdict(task)}
    found = gpu.timed_updates(job)
    assert len(found["update"]) == len(found["between"]) == 3
    assert min(found["update"] + found["between"]) > 0
    assert found["busy"] == found["operations"] == 0  # of a GPU
