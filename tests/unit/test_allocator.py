"""Freed memory stays with the process."""

import resource
import subprocess
import sys

import pytest

PASSES = """
import resource
import numpy as np
from hts_torchrl.allocator import keep_freed_memory
{keep}
for _ in range(3):
    np.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 10_000_000 * 8 // resource.getpagesize()


def page_faults(keep):
    command = [sys.executable, "-c", PASSES.format(keep=keep)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    assert page_faults("keep_freed_memory()") < PAGES / 100 < page_faults("")
