"""Who is reproducible: a difference is found where it is, and nothing that tells nothing passes."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.unit.benchmarks.test_programs import FOLDER

TOY = """
import json, os, pathlib, sys
asked = json.loads(sys.argv[1])
weight = asked["seed"]
checkpoint = pathlib.Path(asked["folder"], "checkpoint")
if asked["begins"]:
    weight = int(checkpoint.read_text())
for update in range(asked["begins"] + 1, asked["ends"] + 1):
    weight = weight * 3 % 1009 + int(os.environ.get("KERNEL", 0))
    print("noise", flush=True)
    print(f"update {update} 1 {weight:016x}{0:048x}", flush=True)
checkpoint.write_text(str(weight))
sys.exit(asked["task"] == "broken")
"""


@pytest.fixture
def programs(load, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "reproducible")
    names = ("reproducibility", "reproducibility_report", "training")
    return {name: load(name) for name in names}


@pytest.fixture
def report(programs):
    return programs["reproducibility_report"]


@pytest.fixture
def told(report):
    """A function that makes what a run told of the digests of its updates."""

    def told(text, weights=5):
        return [report.Update(n, weights, digest) for n, digest in enumerate(text, 1)]

    return told


@pytest.fixture
def toy(programs, monkeypatch, tmp_path):
    """The program, with a contestant that needs no torch."""
    program = programs["reproducibility"]
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(program, "CONTESTANTS", tmp_path)
    monkeypatch.setattr(program, "SYSTEMS", {"toy": program.System("Toy", "toy.py")})
    return program


class TestDigest:
    def test_sees_one_bit_of_one_weight(self, programs):
        digest = programs["training"].digest
        weights = {"a": torch.zeros(3, 2), "b": torch.ones(4)}
        before = digest(weights.items())
        weights["b"][3] = 1 + 2**-23
        assert before[0] == digest(weights.items())[0] == 10
        assert before[1] != digest(weights.items())[1]

    def test_sees_where_a_weight_stands(self, programs):
        digest = programs["training"].digest
        one, other = torch.zeros(2), torch.ones(2)
        assert digest([("a", one), ("b", other)]) != digest([("a", other), ("b", one)])
        assert digest([("a", torch.zeros(2, 3))]) != digest([("a", torch.zeros(3, 2))])

    def test_is_that_of_any_order_of_names_and_of_arrays(self, programs):
        digest = programs["training"].digest
        one, other = torch.zeros(2), torch.ones(2)
        assert digest([("b", other), ("a", one)]) == digest([("a", one.numpy()), ("b", other)])


class TestFirstDifference:
    def test_is_none_where_all_are_the_same(self, report, told):
        assert report.first_difference([told("abc"), told("abc"), told("abc")]) == 0

    @pytest.mark.parametrize(("other", "first"), [("xbc", 1), ("axc", 2), ("abx", 3), ("xyc", 1)])
    def test_is_the_first_update_that_differs(self, report, told, other, first):
        assert report.first_difference([told("abc"), told(other)]) == first

    def test_is_found_in_any_run(self, report, told):
        assert report.first_difference([told("abcd"), told("abcx"), told("abxd")]) == 3

    def test_needs_two_runs_of_the_same_updates(self, report, told):
        with pytest.raises(ValueError, match="nothing to be compared"):
            report.first_difference([told("abc")])
        with pytest.raises(ValueError, match="not the same updates"):
            report.first_difference([told("abc"), told("ab")])


class TestFault:
    def test_there_is_none_where_each_update_changed_the_weights(self, report, told):
        assert report.fault_of(told("aba"), 3) == ""

    @pytest.mark.parametrize(
        ("digests", "fault"),
        [("ab", r"updates [1, 2], not 1 to 3"), ("abb", "update 3 changed no weight")],
    )
    def test_is_told(self, report, told, digests, fault):
        assert fault in report.fault_of(told(digests), 3)

    def test_is_a_digest_of_nothing_or_of_other_weights(self, report, told):
        assert "covers no weights" in report.fault_of(told("abc", weights=0), 3)
        changed = [*told("ab"), report.Update(3, 6, "c")]
        assert "number of weights changed" in report.fault_of(changed, 3)


class TestTable:
    @pytest.fixture
    def runs(self, report, told):
        def run(workers, condition, repeat=1, seed=1):
            return report.Run("sf", "cartpole", workers, seed, condition, "", repeat, 4)

        return {
            run(1, "idle"): told("abcd"),
            run(1, "idle", 2): told("abcd"),
            run(1, "idle", seed=2): told("wxyz"),
            run(4, "idle"): told("abcd"),
            run(4, "idle", 2): told("abxd"),
            run(1, "loaded"): told("abcx"),
            run(1, "resumed"): told("abxx"),
            run(4, "resumed"): told("axcd"),
        }

    def test_has_in_each_cell_the_runs_of_its_question(self, report, runs):
        assert report.row(runs, "sf", "cartpole", (1, 4)) == {
            "again, 1 w": "**same** (2 runs)",
            "again, 4 w": "update 3 of 4",
            "4 w and 1 w": "**same** (2 runs)",
            "loaded, 1 w": "update 4 of 4",
            "loaded, 4 w": "-",
            "resumed, 1 w": "update 3 of 4",
            "resumed, 4 w": "update 2 of 4, before the stop",
            "another seed": "update 1 of 4",
        }

    def test_has_a_row_for_each_system_that_has_runs(self, report, runs):
        text = report.table(
            runs, {"sf": "Sample Factory", "hts": "HTS"}, ["cartpole", "go"], (1, 4)
        )
        assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == ["| Sample Factory"]

    def test_of_settings_compares_each_with_the_base(self, report, told):
        runs = {
            report.Run("hts", "cartpole", 0, 1, "idle", name, 1, 2): told(digests)
            for name, digests in {"threads=1": "ab", "A=1": "ax", "B=1": "ab"}.items()
        }
        text = report.variants_table(runs, ["A=1", "B=1"], ["cartpole"], "threads=1")
        assert text.splitlines()[2:] == [
            "| `A=1` | update 2 of 2 |",
            "| `B=1` | **same** (2 runs) |",
        ]

    def test_of_two_machines_compares_the_settings_that_both_have(self, report, told):
        def runs_of(**digests):
            return {
                report.Run("hts", "cartpole", 0, 1, "idle", name, 1, 2): told(letters)
                for name, letters in digests.items()
            }

        text = report.machines_table(
            runs_of(A="ab", B="ab", C="ab"), runs_of(B="ax", A="ab", D="ab"), ["cartpole", "go"]
        )
        assert text.splitlines()[2:] == [
            "| `A` | **same** (2 runs) | - |",
            "| `B` | update 2 of 2 | - |",
        ]

    @pytest.mark.parametrize("digests", ["abcd", "axyz"])
    def test_fails_where_two_seeds_have_the_same_first_update(
        self, programs, report, runs, told, digests
    ):
        control = programs["reproducibility"].control
        assert control(runs) == []
        other_seed = report.Run("sf", "cartpole", 1, 2, "idle", "", 1, 4)
        (fault,) = control(runs | {other_seed: told(digests)})
        assert fault.startswith("sf on cartpole: two seeds have the same weights")

    def test_and_the_control_know_only_runs_of_one_length(self, programs, report, runs, told):
        longer = {
            report.Run("sf", "cartpole", 1, seed, "idle", "", 1, 9): told(digests)
            for seed, digests in ((1, "abcdefghi"), (2, "abcdefghi"))
        }
        program = programs["reproducibility"]
        results = Namespace(runs=longer | runs)
        assert program.of_length(results, 4) == runs
        assert program.control(program.of_length(results, 4)) == []
        (fault,) = program.control(program.of_length(results, 9))
        assert fault.startswith("sf on cartpole")


@pytest.mark.processes
class TestRun:
    def run(self, program, condition="idle", **changes):
        fields = {"seed": 1, "variant": "", "repeat": 1, "updates": 4, "task": "go"} | changes
        return program.Run(system="toy", workers=1, condition=condition, **fields)

    def test_is_read_among_other_output(self, toy):
        digests = [update.digest for update in toy.train(self.run(toy))]
        assert digests == [f"{3**n:016x}" for n in range(1, 5)]

    def test_that_is_resumed_goes_on_in_another_process(self, toy):
        assert toy.train(self.run(toy, "resumed")) == toy.train(self.run(toy))

    def test_beside_load_ends_the_busy_process(self, toy):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        before = set(children.read_text().split())
        with toy.beside_load(True):
            (busy,) = set(children.read_text().split()) - before
        assert not Path("/proc", busy).exists()

    def test_has_the_variables_of_its_variant(self, toy):
        plain, other = (toy.train(self.run(toy, variant=text)) for text in ("", "KERNEL=7"))
        assert plain != other

    def test_that_fails_is_told_with_its_status(self, toy):
        with pytest.raises(RuntimeError, match="ended with status 1"):
            toy.train(self.run(toy, task="broken"))
