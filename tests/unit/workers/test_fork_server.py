import os
import signal
import subprocess
import sys

import pytest

from hts_torchrl import AtariEnvs, EnvPoolEnvs, FootballEnvs, GymEnvs
from hts_torchrl.workers.make_pool import _preload

# As a fork server that the worker pool has started.
SERVER = """
import os, signal
number = NUMBER
signal.pthread_sigmask(signal.SIG_BLOCK, {number})
import hts_torchrl.workers.fork_server
os.kill(os.getpid(), number)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), number)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_child_of_the_fork_server_can_be_terminated_and_the_server_cannot(number):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = SERVER.replace("NUMBER", str(int(number)))
    server = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert server.returncode == 0, server.stderr
    assert int(server.stdout) == -number


IMPORTED = """
import importlib, sys
import hts_torchrl.workers.fork_server
for name in {modules!r}:
    importlib.import_module(name)
print([name for name in ("torch", "torchrl", "tensordict", "lightning") if name in sys.modules])
"""


@pytest.mark.processes
def test_a_fork_server_imports_nothing_that_could_start_cuda():
    # A process that was forked after CUDA was started cannot use a GPU.
    factories = [AtariEnvs("pong"), EnvPoolEnvs("CartPole-v1"), GymEnvs("CartPole-v1"),
                 FootballEnvs("3_vs_1_with_keeper")]  # fmt: skip
    modules = [module for factory in factories for module in _preload(factory)]
    assert {"envpool", "hts_torchrl.envs.atari"} <= set(modules)
    program = IMPORTED.format(modules=modules)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "[]"
