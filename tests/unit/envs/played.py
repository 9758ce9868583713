"""Games of a group, played by a plan of actions and recorded."""

import numpy as np


def played(factory, plan: np.ndarray, seeds=(3,), first_env: int = 0) -> list[dict]:
    """One record of copies a step, the reset first."""
    group = factory.group(range(first_env, first_env + len(seeds)))
    records = [{"next_observation": group.reset(seeds)["observation"].copy()}]
    for row in plan:
        step = vars(group.step(row)).items()
        arrays = {k: each["observation"] if isinstance(each, dict) else each for k, each in step}
        records.append({name: array.copy() for name, array in arrays.items()})
    group.close()
    return records


def column(records: list[dict], name: str) -> np.ndarray:
    return np.stack([record[name] for record in records[1:]])
