"""A machine of a Ray cluster loses its network within a round: the same bits, or one error.

Run: python benchmarks/faults/partition.py [--trials 3] [--only outage]

Four machines are network namespaces of this one, joined by a switch. The first has Ray's head and
the learner. The others have room for two rollout nodes, of one process and eight environments each,
and for those that replace them. A2C trains on CartPole whose steps take 5 ms. In the middle of the
fourth round the link of a machine with a node is cut, at a random moment: its processes live, and
nobody can reach them. The link stays down to the end of the training, or comes back. A trial passes
if weights, batches and the optimiser's state are those of the serial twin, and if the node was
replaced as often as it should be. Without ``recover`` one error must name it. When the link is back
all rollout nodes must end by themselves. No process, namespace, file or part of Ray's store may be
left. The exit status is 1 if anything differs. It takes root, the program ``ip`` of iproute2, and
the extras ``ray`` and ``test``; a trial takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

# Also where this is a script, and the folder above is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.determinism import quiet
from benchmarks.faults.ray_soak import ENVS, STEP_S, train
from hosts import Hosts

from hts_torchrl import WorkerError

NODES, MACHINES, UPDATES, CUT_AFTER = 2, 4, 8, 3
STORE_BYTES = 78_643_200
ENDED_S, NAMED_S = 400.0, 60.0
QUICK = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3,
}  # fmt: skip
PACKED = {"num_cpus": 1, "scheduling_strategy": "DEFAULT"}
# cpus: of each machine but the first. health: how Ray gives up a machine. back_s: when the link is
# back. replaced: how often, if not once.
TRIALS: dict[str, dict[str, Any]] = {
    "cut, lost by timeout_s": {"timeout_s": 15.0},
    "cut, lost by Ray": {"timeout_s": 90.0, "health": QUICK},
    # Ray puts both nodes on one machine, and those that replace them there, too, until it gives up.
    "cut, with room for the new nodes": {
        "timeout_s": 15.0,
        "cpus": 5,
        "remote_configs": PACKED,
        "replaced": (1, 2, 3),
    },
    "cut, and back when the node was replaced": {"timeout_s": 15.0, "back_s": 30.0},
    "an outage of 5 s": {"timeout_s": 30.0, "back_s": 5.0, "replaced": (0,)},
    "cut, without recover": {"timeout_s": 15.0, "recover": "fail"},
}


def learn(hosts: Hosts, trial: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Train on the first host, cut off another one, and return what came of it."""
    told, log = BufferingHandler(10**6), logging.getLogger("hts_torchrl")
    told.setLevel(logging.WARNING)
    log.addHandler(told)
    log.propagate = False
    outcome: dict[str, Any] = {}

    def cut() -> None:
        host = dice.choice([host for host in hosts.all if hosts.processes(host, "RolloutNode")])
        hosts.cut(host)
        outcome["cut"] = host, time.monotonic()
        if "back_s" in trial:
            time.sleep(trial["back_s"])
            hosts.join(host)

    cutting = threading.Timer(dice.uniform(0.1, 0.9), cut)

    def over(updates: int) -> bool:
        if updates == CUT_AFTER:
            cutting.start()
        return updates == UPDATES

    address = hosts.address(0)
    options = {
        "ray_init_config": {"address": f"{address}:6379", "_node_ip_address": address},
        "remote_configs": trial.get("remote_configs", {}),
    }
    try:
        outcome["digest"], _ = train(
            over, STEP_S, backend="ray", num_collectors=NODES, num_actors=0,
            envs_per_executor=ENVS // NODES, timeout_s=trial["timeout_s"],
            recover=trial.get("recover", "replay"), backend_options=options,
        )  # fmt: skip
    except WorkerError as error:
        outcome |= {"error": str(error), "failed": time.monotonic()}
    if cutting.ident is not None:  # else it failed before, which is reported
        cutting.join()
    return outcome | {"told": [record.getMessage() for record in told.buffer]}


def start_ray(hosts: Hosts, host: int, trial: dict[str, Any], environ: dict[str, str]) -> None:
    """Start Ray on a host; the first has the head, and no place for nodes."""
    options = [f"--address={hosts.address(0)}:6379", f"--num-cpus={trial.get('cpus', 1)}"]
    if not host:
        health = f"--system-config={json.dumps(trial.get('health', {}))}"
        options = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", health]
        options.append(f"--temp-dir={environ['RAY_TMPDIR']}")
    options += [f"--node-ip-address={hosts.address(host)}", f"--object-store-memory={STORE_BYTES}"]
    command = hosts.on(host, [sys.executable, "-m", "ray.scripts.scripts", "start", *options])
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)


def judge(trial: dict[str, Any], outcome: dict[str, Any], twin: str) -> dict[str, bool]:
    """Return what is as it must be."""
    named = rf"node [01] \(environments \[.*\]\), round {CUT_AFTER}: "
    if trial.get("recover") == "fail":
        error, until_s = outcome.get("error", ""), outcome.get("failed", 0.0) - outcome["cut"][1]
        in_time = until_s < trial["timeout_s"] + NAMED_S
        return {"error": bool(re.match(named, error)) and not outcome["told"], "in time": in_time}
    told = outcome["told"]
    replaced = len(told) in trial.get("replaced", (1,)) and all(
        re.match(named, one) for one in told
    )
    return {"bits": outcome.get("digest") == twin, "replaced": replaced}


def stores() -> set[Path]:
    return set(Path("/dev/shm").glob("plasma*"))


def passed(kind: str, seed: int, twin: str) -> bool:
    """Make one trial, and tell what came of it."""
    trial, before, told = TRIALS[kind], stores(), ""
    # Sockets lie in it, whose paths are limited to about 100 characters.
    folder = tempfile.mkdtemp(prefix="hts", dir="/tmp")
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RAY_TMPDIR": folder, "TMPDIR": folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    hosts, checks = Hosts(MACHINES), {"ended": False}
    try:
        for host in hosts.all:
            start_ray(hosts, host, trial, environ)
        learner = [sys.executable, __file__, "--learner", hosts.name, kind, str(seed)]
        ended = subprocess.run(
            hosts.on(0, learner), env=environ, check=False, timeout=ENDED_S, text=True,
            capture_output=True,
        )  # fmt: skip
        told = ended.stdout + ended.stderr
        outcome = json.loads(ended.stdout.splitlines()[-1])
        hosts.join(outcome["cut"][0])
        checks = judge(trial, outcome, twin) | {"nodes end": hosts.end("RolloutNode")}
    except (subprocess.SubprocessError, LookupError, ValueError) as error:
        told += repr(error)
    finally:
        checks["hosts"] = hosts.delete()
        shutil.rmtree(folder, ignore_errors=True)
    checks["files"] = not Path(folder).exists() and stores() <= before
    wrong = [name for name, right in checks.items() if not right]
    print(f"{kind}, trial {seed}: {f'WRONG: {wrong}; {told}' if wrong else 'passed'}", flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1, help="of each kind")
    parser.add_argument("--only", nargs="+", default=[""], help="kinds with such a word")
    parser.add_argument("--learner", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet()
    if arguments.learner:
        name, kind, seed = arguments.learner
        outcome = learn(Hosts(MACHINES, name), TRIALS[kind], random.Random(f"{kind} {seed}"))
        print(json.dumps(outcome))
        return 0
    twin, _ = train(lambda updates: updates == UPDATES, 0.0, num_actors=0)
    kinds = [kind for kind in TRIALS if any(word in kind for word in arguments.only)]
    outcomes = [passed(kind, seed, twin) for kind in kinds for seed in range(arguments.trials)]
    print(f"{sum(outcomes)} of {len(outcomes)} passed", flush=True)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
