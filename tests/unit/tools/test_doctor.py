"""What is in the way is found, and how to remedy it is said."""

import os
import resource
import sys
from importlib.util import find_spec

import pytest
import torch

from hts_torchrl.tools import doctor
from hts_torchrl.tools.doctor import Finding, examine
from tests.command_line import run


@pytest.fixture(scope="module")
def findings():
    return {finding.what: finding for finding in examine()}


@pytest.mark.thorough
def test_every_part_of_the_machine_is_looked_at(findings):
    assert list(findings) == [
        "cores", "processor", "memory", "file descriptors", "torch", "bfloat16", "Atari",
        "football", "gfootball", "Ray", "GPU", "network nips", "network nature", "network impala",
    ]  # fmt: skip
    assert findings["cores"].found.split(",")[0] == str(len(os.sched_getaffinity(0)))
    assert findings["Atari"] == Finding("Atari", "plays")
    assert findings["football"] == Finding("football", "plays")
    assert torch.__version__ in findings["torch"].found


def test_what_is_wrong_comes_with_what_mends_it():
    assert str(Finding("cores", "2")) == "ok    cores             2"
    assert str(Finding("cores", "2", "buy some")).splitlines()[1].strip() == "buy some"


def test_a_container_with_less_than_its_cores_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "allowed_cores", lambda: 0.5)
    finding = doctor._cores()
    assert finding.found.endswith("of which the container may use 0.5")
    assert "taskset" in finding.remedy
    monkeypatch.setattr(doctor, "allowed_cores", lambda: float(len(os.sched_getaffinity(0))))
    assert doctor._cores().remedy == ""


def test_a_container_with_little_memory_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "allowed_memory", lambda: 1024.0**3)
    finding = doctor._memory()
    assert finding.found.startswith("1.0 GB")
    assert "lower num_envs" in finding.remedy


def test_few_descriptors_are_told(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 100_000))
    assert doctor._descriptors() == Finding(
        "file descriptors", "256: enough for 52 executors", "ulimit -n 4096"
    )


def test_a_limit_of_descriptors_that_only_root_can_raise_is_told(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert doctor._descriptors().remedy == "ulimit -n 4096, as root: the hard limit is 256"


def test_more_threads_than_cores_are_told(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert doctor._threads().remedy.startswith("set OMP_NUM_THREADS=")


def test_an_engine_that_fails_is_told(monkeypatch):
    def reset(*_):
        raise OSError("no cartridge")

    monkeypatch.setattr(doctor.AtariEnvs, "group", reset)
    finding = doctor._atari()
    assert (finding.found, finding.remedy) == ("OSError: no cartridge", "pip install ale-py")


@pytest.mark.parametrize(
    ("check", "module", "needed", "install"),
    [
        ("_football", "football.envpool_engine", "envpool", "pip install 'hts-torchrl[football]'"),
        (
            "_gfootball",
            "football.gfootball_engine",
            "gfootball_engine",
            "bash scripts/install_gfootball.sh",
        ),
    ],
)
def test_football_is_no_duty(monkeypatch, check, module, needed, install):
    monkeypatch.delitem(sys.modules, f"hts_torchrl.envs.{module}", raising=False)
    monkeypatch.delattr(f"hts_torchrl.envs.{module}", raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    finding = getattr(doctor, check)()
    assert finding == Finding(check.removeprefix("_"), f"not installed: {install}")


@pytest.mark.skipif(not find_spec("gfootball_engine"), reason="scripts/install_gfootball.sh")
def test_gfootball_plays_where_it_is_installed(findings):
    assert findings["gfootball"] == Finding("gfootball", "plays")


def test_rows_that_depend_on_their_place_are_told(monkeypatch):
    monkeypatch.setattr(doctor, "depends_on_row_alone", lambda *_, **__: False)
    finding = doctor._rows("nips")
    assert "32-true, bf16-mixed" in finding.found
    assert "row by row" in finding.remedy


@pytest.mark.parametrize(("remedy", "status"), [("", 0), ("remedy it", 1)])
def test_the_exit_status_tells_whether_something_is_wrong(remedy, status, monkeypatch, capsys):
    finding = Finding("cores", "2", remedy)
    monkeypatch.setattr("hts_torchrl.cli.main.examine", lambda: iter([finding]))
    with pytest.raises(SystemExit) as left:
        run("doctor")
    assert left.value.code == status
    assert capsys.readouterr().out == f"{finding}\n"
