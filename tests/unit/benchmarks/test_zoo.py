"""The table of configs is whole, and is what its command writes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def zoo(load):
    return load("zoo")


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs"
    (folder / "game").mkdir(parents=True)
    (folder / "game" / "ppo.yaml").write_text("model: {class_path: PPO}\n")
    (folder / "game" / "chess.yaml").write_text("base: ppo.yaml\nname: chess\n")
    (folder / "go.yaml").write_text("name: go\n")
    (folder / "results.toml").write_text(
        '["game/chess"]\nscore = "0.5"\nsteps = 1_000\nminutes = 2.5\nversion = "9.9"\n'
    )
    return folder


def test_every_config_is_in_the_table():
    text = (ROOT / "docs" / "zoo.md").read_text()
    configs = (ROOT / "configs").rglob("*.yaml")
    names = {str(path.relative_to(ROOT / "configs")).removesuffix(".yaml") for path in configs}
    assert len(names) > 40
    assert set(re.findall(r"`([\w/]+)`", text)) - {"configs"} >= names


def test_the_table_is_what_the_command_writes():
    command = [sys.executable, "benchmarks/zoo.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_a_page_that_is_old_is_told(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "zoo.py", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "zoo.md").write_text("old\n")
    command = [sys.executable, "benchmarks/zoo.py", "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1
    assert (tmp_path / "docs" / "zoo.md").read_text() == "old\n"


def test_a_row_has_the_figures_and_says_where_there_are_none(zoo, configs):
    lines = zoo.page(configs).splitlines()
    assert "| `game/chess` | 0.5 | 1,000 | 2.5 | 9.9 | not recorded | not recorded |" in lines
    assert "Not yet run: `go`." in lines
    assert lines[-1].endswith("are not run on their own: `game/ppo`.")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("game/chess", "game/ppo", "no config is named game/ppo"), ("steps", "step", "no field step")],
)
def test_a_result_of_nothing_is_refused(zoo, configs, old, new, message):
    path = configs / "results.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        zoo.page(configs)
