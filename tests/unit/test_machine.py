import os
import resource
from pathlib import Path

import pytest

from hts_torchrl import machine
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import cpu_model, require_descriptors, require_memory


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
    require_descriptors(8, "two things need", "one thing")
    with pytest.raises(ConfigurationError, match=f"the limit is {limit}: raise it"):
        require_descriptors(12, "two things need", "one thing")


def test_the_processor_has_the_name_that_the_kernel_tells():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert cpu_model() in told or not told
    assert cpu_model()
