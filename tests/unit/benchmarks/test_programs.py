"""Every program in ``benchmarks/`` starts: it imports what exists, and its options are sound."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
PROGRAMS = [
    "delay.py", "determinism.py", "faults", "faults/partition.py", "faults/partition_ranks.py",
    "faults/ray_soak.py", "faults/soak.py", "football_engines.py", "gpu.py", "house.py",
    "kernels.py", "mutants.py", "overhead.py", "ranks.py", "recurrent.py", "rendezvous.py",
    "reproducibility.py", "scale.py", "score_pairs.py", "throughput.py", "time_to_score.py",
    "zoo.py",
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_tells_its_options(name, monkeypatch, capsys):
    if name == "football_engines.py" and not importlib.util.find_spec("gfootball"):
        pytest.skip("needs gfootball")
    path = FOLDER / name
    before = set(sys.modules)
    monkeypatch.syspath_prepend(path if path.is_dir() else path.parent)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    for module in set(sys.modules) - before:  # those of one program have the names of another's
        if FOLDER in Path(getattr(sys.modules[module], "__file__", None) or "/").parents:
            del sys.modules[module]
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_all_programs_are_listed_here_and_described_in_the_readme():
    programs = [*FOLDER.glob("*.py"), *FOLDER.glob("faults/*.py")]
    with_options = [path for path in programs if "parse_args()" in path.read_text()]
    names = {str(path.relative_to(FOLDER)).removesuffix("/__main__.py") for path in with_options}
    assert names == set(PROGRAMS)
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in PROGRAMS if f"benchmarks/{name}" not in readme] == []
