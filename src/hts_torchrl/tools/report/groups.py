"""Runs that differ in the seed alone make one group, the sample of its statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from hts_torchrl.config import default_batch_size
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array
from hts_torchrl.tools.report.run_folder import Run

_OF_A_RUN = (
    *("seed_everything", "ckpt_path", "weights_only", "base", "trace"),
    *("trainer.logger", "trainer.default_root_dir", "trainer.enable_progress_bar"),
)
"""Settings in which the runs of a group may differ: the seed, folders, what is shown."""
_STANDS_FOR = {
    "trainer.precision": "32-true",
    "trainer.gradient_clip_algorithm": "norm",
    "data.compile_policy": False,
}
"""What null is there; a checkpoint writes it out into the config of the run that it resumes."""
_SHORT = 2
"""Differing settings that a label names; more are numbered."""


@dataclass(frozen=True)
class Group:
    """Runs of one name with the same settings, each with a seed of its own."""

    label: str
    """Their name; if other groups have it too, with what differs or a number."""
    environment: str
    runs: tuple[Run, ...]
    """By seed."""
    differing: dict[str, Any]
    """The settings that other groups of the same name have otherwise, by dotted names."""

    @property
    def scores(self) -> Array:
        """Final scores, float64 [number of runs]."""
        return np.array([run.score for run in self.runs])


def grouped(runs: list[Run]) -> list[Group]:
    """Return the groups, those of one environment together and else in the order of the runs.

    A run that was resumed has the figures of the one before in front of its own.

    Raises:
        ConfigurationError: if two runs of a group that were begun anew have the same seed. Equal
            seeds give equal bits, so the second one is no further sample.
    """
    members: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        members.setdefault((run.name, repr(sorted(_compared(run).items()))), []).append(run)
    groups = []
    for key, several in members.items():
        mine = _joined(several)
        _require_own_seeds(mine)
        named_alike = [each for each in members if each[0] == key[0]]
        differing = _differing(mine[0], [members[each][0] for each in named_alike])
        label = _label(key[0], differing, named_alike.index(key) + 1, len(named_alike))
        by_seed = tuple(sorted(mine, key=lambda run: run.seed))
        groups.append(Group(label, mine[0].environment, by_seed, differing))
    environments = list(dict.fromkeys(group.environment for group in groups))
    return sorted(groups, key=lambda group: environments.index(group.environment))


def _compared(run: Run) -> dict[str, Any]:
    """Return what the runs of a group have alike; null is as if it were not there.

    An older version's config lacks settings that a newer one's has as null.
    """
    envs = run.settings.get("data.num_envs")
    rows = default_batch_size(envs) if isinstance(envs, int) else None
    defaults = {**_STANDS_FOR, "data.inference_batch_size": rows}
    return {
        name: value
        for name, value in run.settings.items()
        if value not in (None, defaults.get(name))
        and not any(name == own or name.startswith(f"{own}.") for own in _OF_A_RUN)
    }


def _joined(runs: list[Run]) -> list[Run]:
    """Return the runs of a group without those that another one goes on from.

    ``fit`` goes on from a checkpoint only with the settings that decide bits, the seed among them.
    So what a resumed run has learned before is what the others of its seed have.
    """
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.seed, run.begin, run.end)):
        resumed = run.settings.get("ckpt_path") and not run.settings.get("data.accept_changes")
        if resumed and joined and joined[-1].seed == run.seed:
            joined.append(run.after(joined.pop()))
        else:
            joined.append(run)
    return joined


def _require_own_seeds(runs: list[Run]) -> None:
    seed, times = Counter(run.seed for run in runs).most_common(1)[0]
    if times > 1:
        first, second, *_ = (str(run.folder) for run in runs if run.seed == seed)
        raise ConfigurationError(
            f"{first} and {second} have the same name, settings and seed {seed}: they are one "
            "sample; name one of them (or give them names, to compare versions)"
        )


def _differing(run: Run, alike: list[Run]) -> dict[str, Any]:
    mine, others = _compared(run), [_compared(other) for other in alike]
    names = sorted({name for settings in others for name in settings})
    return {
        name: mine.get(name)
        for name in names
        if any(repr(other.get(name)) != repr(mine.get(name)) for other in others)
    }


def _label(name: str, differing: dict[str, Any], number: int, of: int) -> str:
    if of == 1:
        return name
    if len(differing) > _SHORT:
        return f"{name} #{number}"
    named = (f"{setting.rpartition('.')[2]}={value}" for setting, value in differing.items())
    return f"{name}, {', '.join(named)}"
