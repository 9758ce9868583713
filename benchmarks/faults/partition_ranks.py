"""One of two hosts loses its network while their ranks train: both end, and the run goes on.

Run: python benchmarks/faults/partition_ranks.py [--trials 2]

Two hosts are network namespaces of this machine, joined by a switch. ``torchrun`` starts a rank on
each, with gloo, ``gradient_chunks=2``, and 30 s as the timeout of DDP. Once there is a checkpoint
the link of the second host is cut, at a random moment. Both ranks must end with an error. Then the
link is back, and one rank or two go on from the checkpoint; the weights must be those of one rank
that was never disturbed. No process, namespace or temporary file may be left. The exit status is 1
if anything differs. It takes root and the program ``ip`` of iproute2.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from commands import LAST, Command, passed
from hosts import Hosts
from killed_ranks import RUN, has_the_bits_of_one_rank

_DDP = ["--data.evaluation_frames=1600", "--trainer.num_nodes=2", "--trainer.devices=1",
        "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy",
        "--trainer.strategy.init_args.timeout=0:00:30"]  # fmt: skip


def start(hosts: Hosts, rank: int, port: int, options: list[str], folder: Path) -> Command:
    """Start a rank on its host, in a folder of its own, except for the runs."""
    own = folder / f"{port}-{rank}"
    own.mkdir()
    (own / "runs").symlink_to(folder / "runs")
    launch = ["env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-m", "torch.distributed.run",
              "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", f"--master-port={port}",
              f"--master-addr={hosts.address(0)}", f"--local-addr={hosts.address(rank)}",
              f"--log-dir={own / 'logs'}", "--no-python"]  # fmt: skip
    return Command(hosts.on(rank, [*launch, *RUN, *_DDP, *options]), own)


def cut_and_resumed(ranks: int, dice: random.Random) -> bool:
    """Cut off a rank once there is a checkpoint; so many ranks go on from it to the end."""
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder, hosts = Path(text), Hosts(2)
        stack.callback(hosts.delete)
        (folder / "runs").mkdir()
        both = [stack.enter_context(start(hosts, rank, 29511, [], folder)) for rank in (0, 1)]
        while not (folder / LAST).exists() and both[0].process.poll() is None:
            time.sleep(0.05)
        time.sleep(dice.uniform(0, 2))
        outcome = {"trains": all(command.process.poll() is None for command in both)}
        hosts.cut(1)
        statuses = [command.status() for command in both]
        outcome["status"] = not {0, None} & set(statuses)
        outcome["left"] = all(command.leaves_nothing() for command in both)
        hosts.join(1)
        options = ["--name=resumed", f"--ckpt_path={folder / LAST}"]
        if ranks == 1:
            then = [stack.enter_context(Command([*RUN, *options], folder))]
        else:
            then = [stack.enter_context(start(hosts, r, 29512, options, folder)) for r in (0, 1)]
        outcome["resumed"] = [command.status() for command in then] == [0] * ranks
        outcome["bits"] = outcome["resumed"] and has_the_bits_of_one_rank(folder)
        outcome["hosts"] = hosts.delete()
        told = "\n".join(command.errors[-3000:] for command in (*both, *then))
        return passed(outcome, f"statuses {statuses}", told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1, help="with one rank after it, and with 2")
    arguments = parser.parse_args()
    outcomes = []
    for trial in range(arguments.trials):
        for ranks in (1, 2):
            outcomes.append(cut_and_resumed(ranks, random.Random(trial)))
            print(f"trial {trial}, then {ranks}: {outcomes[-1]}", flush=True)
    print(f"{sum(outcomes)} of {len(outcomes)} passed", flush=True)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
