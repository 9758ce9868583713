import os
import signal
import subprocess
import sys

import pytest

# As a fork server that the worker pool has started.
SERVER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
import hts_torchrl.workers.fork_server
os.kill(os.getpid(), signal.SIGTERM)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_child_of_the_fork_server_can_be_terminated_and_the_server_cannot():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.run([sys.executable, "-c", SERVER], env=environment, capture_output=True)
    assert server.returncode == 0, server.stderr
    assert int(server.stdout) == -signal.SIGTERM
