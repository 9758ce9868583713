"""The blocks of each tutorial run in order, in one namespace and on a small scale."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torchrl.envs.libs.utils  # noqa: F401 - it keeps the frames of whoever imports it first
from torchrl.collectors import Collector

from hts_torchrl import HTSCollector, HTSDataModule
from tests.command_line import files, run

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(
    path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.name != "index.md"
)
FEW_FRAMES = 2560
SMALL = [
    *("--data.num_actors=0", "--data.num_envs=4", "--data.envs_per_executor=2"),
    *("--data.frames_per_batch=32", "--data.evaluation_episodes=1"),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
]
OF_A_TEST = {
    HTSCollector: {"num_actors": 0},
    HTSDataModule: {"num_actors": 0, "evaluation_episodes": 1},
}
MARKS = {"environment": (), "several_ranks": pytest.mark.slow}
KEPT = {"model": "environment"}
"""By page, another whose files its reader has kept."""
LIMITS = {
    "fit": ["--data.total_frames=640", "--trainer.max_steps=4"],
    "fit --seeds": ["--data.total_frames=64"],  # to the end, where an evaluation is
    "report": [],
    "tune": ["--trials=1", "--data.total_frames=64", "--data.evaluation_frames=32"],
    "advise": ["--data.total_frames=64", "--seconds=1"],
    "verify": ["--data.total_frames=64", "--updates=2"],
}


def blocks(page):
    """Language and text of each block of a page that a reader would run."""
    return re.findall(r"```(python|bash|yaml|console)\n(.*?)```", page.read_text(), re.DOTALL)


def small(cls):
    """A collector or data module that a test can afford: few frames, no evaluation of ten games."""

    def make(*arguments, **settings):
        batch = settings["frames_per_batch"]
        frames = min(settings["total_frames"], max(2, FEW_FRAMES // batch) * batch)
        return cls(*arguments, **{**OF_A_TEST.get(cls, {}), **settings, "total_frames": frames})

    return make


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder that looks like a clone, to which the page's own files are written."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for home, cls in (
        ("torchrl.collectors", Collector),
        ("hts_torchrl.collectors.hts", HTSCollector),
        ("hts_torchrl.training.datamodule", HTSDataModule),
    ):
        monkeypatch.setattr(f"{home}.{cls.__name__}", small(cls))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture
def ray_of_its_own(monkeypatch):
    """Let Ray start its own cluster in a folder of its own, with a short path for its sockets."""
    pytest.importorskip("ray.train.torch")
    with tempfile.TemporaryDirectory(prefix="hts", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield


def keep(text, kind):
    """Keep a block as a file if its first line names one; return whether it does."""
    if named := re.match(rf"# (\S+\.{kind})\n", text):
        Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(named[1]).write_text(text)
    return bool(named)


def run_python(text, names):
    if not keep(text, "py"):
        exec(compile(text, "block", "exec"), names)


SHIMS = {
    "python": sys.executable,
    "hts-torchrl": f"{sys.executable} -m hts_torchrl.cli",
    "torchrun": f"{sys.executable} -m torch.distributed.run --log-dir torchrun",  # not in /tmp
}


def run_console(text):
    """Run a block of several processes as a shell would; trainings are small ones."""
    folder = Path("bin").absolute()
    folder.mkdir(exist_ok=True)
    for name, command in SHIMS.items():
        flags = shlex.join([*SMALL, "--data.total_frames=640"]) if name == "hts-torchrl" else ""
        (folder / name).write_text(
            f'#!/bin/sh\ncase "$*" in *ckpt_path*) exec {command} "$@";; esac\n'
            f'exec {command} "$@" {flags}\n'
        )
        (folder / name).chmod(0o755)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{folder}:{os.environ['PATH']}"}
    with Path("errors").open("w+") as errors:
        process = subprocess.Popen(
            ["bash", "-ec", text],
            env={**os.environ, **paths},
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        assert status == 0, errors.read()[-3000:]


def run_bash(text):
    """Run each command of a block, all of which are ours, or install an extra."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "pip":
            continue
        place = words.index("hts-torchrl")
        subcommand, *rest = words[place + 1 :]
        if subcommand == "doctor" or "--help" in rest:
            with pytest.raises(SystemExit) as left:
                run(subcommand, *rest)
            assert left.value.code == 0
            continue
        resumed = "--ckpt_path" in rest
        small_run = [] if resumed or subcommand == "report" else SMALL
        kind = "fit --seeds" if "--seeds" in rest else subcommand
        run(subcommand, *rest, *small_run, *LIMITS[kind])
        if resumed:  # a run that has ended already
            run(subcommand, *rest)


# Small layers of a user's own networks, on some processors; rows are answered one by one then.
@pytest.mark.filterwarnings("ignore:the policy's answer to an observation depends on:UserWarning")
# Of Lightning, for runs of one or two rounds and for loggers that are off.
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'optimizer' hook stage will be replaced:FutureWarning")
@pytest.mark.timeout(900)  # several commands, of which one trains twice
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, pytest.mark.thorough))
        for path in TUTORIALS
    ],
)
@pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning")
def test_a_tutorial_runs_from_top_to_bottom(page, reader, request):
    if page.stem == "ray":
        request.getfixturevalue("ray_of_its_own")
    names = {"__name__": "tutorial"}
    if page.stem in KEPT:
        for _, text in blocks(page.with_stem(KEPT[page.stem])):
            keep(text, "py")
    try:
        for language, text in blocks(page):
            if language == "python":
                run_python(text, names)
            elif language == "yaml":
                keep(text, "yaml")
            elif language == "console":
                run_console(text)
            else:
                run_bash(text)
    finally:
        names.clear()  # its functions refer to it, and it to collectors with shared memory
    assert blocks(page)
    if any("hts-torchrl fit" in text for _, text in blocks(page)):
        assert any(name.endswith("last.ckpt") for name in files(reader))


def test_each_tutorial_is_in_the_table_of_tutorials():
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert [page.name for page in TUTORIALS if f"({page.name})" not in index] == []
