import math
import os

import pytest

from hts_torchrl.control_group import allowed_cores, allowed_memory


@pytest.fixture
def system(tmp_path):
    """Writes the files of a system's control groups; called with names and contents."""

    def write(**files: str):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


CORES = len(os.sched_getaffinity(0))
V1 = "12:cpu,cpuacct:/docker/c0ffee\n7:memory:/docker/c0ffee\n1:name=systemd:/docker/c0ffee\n"
V2 = "0::/system.slice/job_7/step_0\n"
HALF = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def test_without_control_groups_there_are_no_limits(system):
    assert allowed_cores(system()) == CORES
    assert allowed_memory(system()) == math.inf


def test_limits_of_version_2_may_be_those_of_a_group_above(system):
    root = system(
        **{"proc/self/cgroup": V2},
        **below("system.slice/job_7/step_0", {"cpu.max": "max 100000\n", "memory.max": "max\n"}),
        **below("system.slice/job_7", {"cpu.max": "30000 100000\n", "memory.max": "4096\n"}),
        **below("system.slice", {"memory.max": "8192\n"}),
        **below("other.slice", {"cpu.max": "100 100000\n", "memory.max": "1\n"}),
    )
    assert allowed_cores(root) == 0.3
    assert allowed_memory(root) == 4096


@pytest.mark.parametrize("place", ["", "docker/c0ffee"], ids=["in a container", "on the host"])
def test_limits_of_version_1(system, place):
    root = system(
        **{"proc/self/cgroup": V1},
        **below(f"cpu/{place}", HALF),
        **below(f"memory/{place}", {"memory.limit_in_bytes": "4096\n"}),
    )
    assert allowed_cores(root) == 0.5
    assert allowed_memory(root) == 4096


def test_a_quota_of_version_1_may_be_none(system):
    root = system(**{"proc/self/cgroup": V1}, **below("cpu", HALF | {"cpu.cfs_quota_us": "-1\n"}))
    assert allowed_cores(root) == CORES


def test_a_quota_above_the_cores_is_no_limit(system):
    root = system(**{"proc/self/cgroup": "0::/\n"}, **below("", {"cpu.max": "99000000 100000\n"}))
    assert allowed_cores(root) == CORES
