"""Runs that are stopped and go on from what was saved."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

import torch
from short_runs import ROUNDS, TASKS, learn, make, undisturbed, weights


def resumed(task: str, dice: random.Random) -> bool:
    """Stop at a random rendezvous, and go on with another crew from what was saved."""
    stop, delay = dice.randrange(1, ROUNDS), 1
    crews = [{"num_actors": 0}, {}, {"num_actors": 2, "envs_per_executor": 1}]
    first = make(task, delay=delay, **dice.choice(crews))
    learn(task, first, stop=stop)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(dict(first.state_dict()), Path(folder, "state"))
        first.shutdown()
        state = torch.load(Path(folder, "state"), weights_only=True)
    second = make(task, delay=delay, **dice.choice(crews))
    second.policy.load_state_dict(weights(task, stop))
    second.load_state_dict(state)
    rest = learn(task, second, updates=stop)
    second.shutdown()
    return rest == undisturbed(task)[stop:]


ROWS = {f"stop and resume, {task}: the same bits": (20, partial(resumed, task)) for task in TASKS}
