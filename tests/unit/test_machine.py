import math
import os
import resource
from pathlib import Path

import pytest

from hts_torchrl import machine
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import (
    allowed_cores,
    allowed_memory,
    cpu_model,
    require_descriptors,
    require_memory,
    require_proc,
)
from hts_torchrl.tools.doctor import examine


def test_memory_that_no_machine_has_is_refused_with_both_sizes():
    with pytest.raises(ConfigurationError, match=r"^it takes 1000000000\.0 GB, and the"):
        require_memory(10**18, "it takes", "less is needed")


def test_memory_that_the_machine_has_is_fine():
    require_memory(1, "it takes", "less is needed")


def test_memory_that_the_container_may_not_use_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "allowed_memory", lambda: 2e9)
    require_memory(2 * 10**9, "it takes", "less is needed")
    with pytest.raises(ConfigurationError, match=r"the container may use 2\.0 GB: less is"):
        require_memory(2 * 10**9 + 1, "it takes", "less is needed")


@pytest.fixture
def limit():
    """A limit of as many descriptors as are open, and ten more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/dev/fd")) + 10  # noqa: PTH208 - not as the code counts them
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_descriptors_than_the_limit_are_refused_with_the_limit(limit):
    require_descriptors(8, "two things need")
    with pytest.raises(ConfigurationError, match=f"the limit is {limit}: raise it"):
        require_descriptors(12, "two things need")


def test_a_machine_whose_kernel_tells_nothing_is_refused(tmp_path, monkeypatch):
    assert require_proc().samefile(f"/proc/{os.getpid()}")
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    for ask in (require_proc, lambda: require_descriptors(1, "it needs"), lambda: [*examine()]):
        with pytest.raises(ConfigurationError, match=r"^/proc is not mounted.*: mount -t proc"):
            ask()


def test_the_processor_has_the_name_that_the_kernel_tells():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert cpu_model() in told or not told
    assert cpu_model()


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes the files of a system's control groups; called with names and contents."""

    def write(**files: str):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(machine, "_ROOT", tmp_path)

    return write


CORES = len(os.sched_getaffinity(0))
V1 = "12:cpu,cpuacct:/docker/c0ffee\n7:memory:/docker/c0ffee\n1:name=systemd:/docker/c0ffee\n"
V2 = "0::/system.slice/job_7/step_0\n"
HALF = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def test_without_control_groups_there_are_no_limits(system):
    system()
    assert allowed_cores() == CORES
    assert allowed_memory() == math.inf


def test_limits_of_version_2_may_be_those_of_a_group_above(system):
    system(
        **{"proc/self/cgroup": V2},
        **below("system.slice/job_7/step_0", {"cpu.max": "max 100000\n", "memory.max": "max\n"}),
        **below("system.slice/job_7", {"cpu.max": "30000 100000\n", "memory.max": "4096\n"}),
        **below("system.slice", {"memory.max": "8192\n"}),
        **below("other.slice", {"cpu.max": "100 100000\n", "memory.max": "1\n"}),
    )
    assert allowed_cores() == 0.3
    assert allowed_memory() == 4096


@pytest.mark.parametrize("place", ["", "docker/c0ffee"], ids=["in a container", "on the host"])
def test_limits_of_version_1(system, place):
    system(
        **{"proc/self/cgroup": V1},
        **below(f"cpu/{place}", HALF),
        **below(f"memory/{place}", {"memory.limit_in_bytes": "4096\n"}),
    )
    assert allowed_cores() == 0.5
    assert allowed_memory() == 4096


def test_a_quota_of_version_1_may_be_none(system):
    system(**{"proc/self/cgroup": V1}, **below("cpu", HALF | {"cpu.cfs_quota_us": "-1\n"}))
    assert allowed_cores() == CORES


def test_a_quota_above_the_cores_is_no_limit(system):
    system(**{"proc/self/cgroup": "0::/\n"}, **below("", {"cpu.max": "99000000 100000\n"}))
    assert allowed_cores() == CORES
