"""What README and the first pages tell a newcomer to type works, on a small scale."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from hts_torchrl import HTSCollector, HTSDataModule, load_policy
from tests.command_line import files, run

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md")
SMALL = [
    *("--data.num_actors=0", "--data.num_envs=4", "--data.envs_per_executor=1"),
    "--data.frames_per_batch=64",
    *("--data.total_frames=128", "--data.evaluation_frames=64", "--data.evaluation_episodes=1"),
    *("--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"),
    "--trainer.enable_progress_bar=false",
]
SHORT_GAME = "--data.env.max_frames=160"  # of Atari


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(page):
    """Arguments of each ``hts-torchrl`` on a page, in order."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    found = []
    for line in words:
        places = [index for index, word in enumerate(line) if word.endswith("hts-torchrl")]
        if places:
            found.append(line[places[0] + 1 :])
    return found


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that looks like a clone, for what is typed there."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def type_in(words):
    """Run one command on a small scale."""
    football = any("football" in word for word in words)
    atari = not football and not any("cartpole" in word for word in words)
    if "--help" in words or words == ["doctor"]:
        with pytest.raises(SystemExit) as left:
            run(*words)
        assert left.value.code == 0
    else:
        run(*words, *SMALL, *([SHORT_GAME] if atari else []))


def test_the_commands_of_the_readme_work_one_after_another(clone, capsys):
    typed = commands("README.md")
    assert [words[0] for words in typed] == ["fit", "fit", "validate", "play", "export", "fit"]
    for words in typed:
        type_in(words)
        assert capsys.readouterr().out
    assert (clone / "pong.mp4").stat().st_size > 0
    assert load_policy(clone / "pong.safetensors").in_keys == ["observation"]
    for run_name in ("pong", "cartpole_ppo"):
        assert f"runs/{run_name}/version_0/learning_curve.png" in files(clone)


@pytest.mark.parametrize(
    "page", [pytest.param("start", marks=pytest.mark.thorough), "troubleshooting"]
)
def test_the_commands_of_a_page_work_one_after_another(page, clone, capsys):  # noqa: ARG001
    typed = commands(f"docs/{page}.md")
    assert typed
    for words in typed:
        if "--data.env.engine=gfootball" in words and not find_spec("gfootball_engine"):
            continue  # scripts/install_gfootball.sh
        type_in(words)
        assert capsys.readouterr().out


PROGRAMS = [pytest.param(program, id=page) for page in PAGES for program in blocks(page, "python")]


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program, clone, monkeypatch):  # noqa: ARG001
    made = []

    def small(cls):
        def make(*arguments, **settings):
            frames = 2 * settings["frames_per_batch"]
            made.append(cls(*arguments, **{**settings, "num_actors": 0, "total_frames": frames}))
            return made[-1]

        return make

    monkeypatch.setattr("hts_torchrl.collectors.hts.HTSCollector", small(HTSCollector))
    monkeypatch.setattr("hts_torchrl.training.datamodule.HTSDataModule", small(HTSDataModule))
    exec(compile(program, "program", "exec"), {})
    (source,) = made
    assert source.schedule.num_rounds == 2


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_programs_that_the_readme_names_are_there():
    named = re.findall(r"(?:bash|python) ([\w./]+)", (ROOT / "README.md").read_text())
    assert ".ci/test" in named
    assert [path for path in named if not (ROOT / path).exists()] == []
