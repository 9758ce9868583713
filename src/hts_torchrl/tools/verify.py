"""Two trainings compared round by round: do they have the same bits, and where do they part?"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDictBase

from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner import Learner
from hts_torchrl.specs import array_name
from hts_torchrl.tools.short_fit import short_fit
from hts_torchrl.training.datamodule import HTSDataModule
from hts_torchrl.training.round_slice import RoundSlice


@dataclass(frozen=True)
class RoundRecord:
    """What is left of one round and the update on it."""

    weights: str
    """SHA-256 of the learner's weights before the update."""
    tensors: dict[str, str]
    """SHA-256 of each of the round's tensors, by dotted name."""
    cells: list[list[int]]
    """CRC-32 of what environment ``n`` recorded at step ``t``: ``[N][T]``."""

    @classmethod
    def of(cls, batch: TensorDictBase, learner: LightningModule) -> Self:
        """Record a round that is about to be learned."""
        leaves = {
            array_name(key): _bytes(tensor)
            for key, tensor in batch.items(include_nested=True, leaves_only=True)
        }
        cells = np.zeros(batch.shape, np.int64)
        for _, array in sorted(leaves.items()):
            for place in np.ndindex(cells.shape):
                cells[place] = zlib.crc32(array[place].tobytes(), int(cells[place]))
        tensors = {name: hashlib.sha256(array.data).hexdigest() for name, array in leaves.items()}
        return cls(_digest(learner), tensors, cells.tolist())


@dataclass(frozen=True)
class Manifest:
    """What is left of a training: enough to say where another one differs first."""

    seed: int
    rounds: list[RoundRecord]
    weights: str
    """SHA-256 of the weights in the end."""

    def write(self, path: Path) -> None:
        """Write JSON, all of it or no file."""
        with replacing(path) as new:
            new.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what :meth:`write` wrote.

        Raises:
            ConfigurationError: if there is no such file, or it is something else.
        """
        try:
            content = json.loads(path.read_text())
            rounds = [RoundRecord(**each) for each in content["rounds"]]
            return cls(content["seed"], rounds, content["weights"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}: this is no manifest of verify: {error}") from error


def record(learner: Learner, data: HTSDataModule, trainer: Trainer) -> Manifest:
    """Train a copy of a learner to the end of the data, and return what is left of it."""
    recorder = _Recorder()
    trained = short_fit(learner, data, trainer, recorder)
    return Manifest(data.seed, recorder.rounds, _digest(trained))


def first_difference(one: Manifest, other: Manifest) -> str | None:
    """Say where two trainings of one task part, or None.

    Raises:
        ConfigurationError: if they are not of one task.
    """
    if (one.seed, len(one.rounds)) != (other.seed, len(other.rounds)):
        raise ConfigurationError(
            f"seed {one.seed} and {len(one.rounds)} updates cannot be compared with seed "
            f"{other.seed} and {len(other.rounds)}"
        )
    for index, (mine, theirs) in enumerate(zip(one.rounds, other.rounds, strict=True)):
        if mine.weights != theirs.weights:
            before = "before the first round" if index == 0 else f"after the update on {index - 1}"
            return f"the weights differ {before}, and nothing does before that"
        if difference := _difference_of_rounds(mine, theirs):
            return f"round {index}, {difference}"
    if one.weights != other.weights:
        return "the weights differ after the last update, and nothing does before that"
    return None


def _difference_of_rounds(one: RoundRecord, other: RoundRecord) -> str | None:
    if alone := sorted(one.tensors.keys() ^ other.tensors.keys()):
        return f"of which only one has {', '.join(alone)}"
    names = sorted(one.tensors)
    differing = [name for name in names if one.tensors[name] != other.tensors[name]]
    if not differing:
        return None
    cells, others = np.array(one.cells), np.array(other.cells)
    if cells.shape != others.shape:
        return f"which has shape {cells.shape} here and {others.shape} there"
    step, env = np.argwhere((cells != others).T)[0]
    return f"environment {env}, step {step} (the round differs in {', '.join(differing)})"


class _Recorder(Callback):
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def on_train_batch_start(
        self, _: Trainer, learner: LightningModule, part: RoundSlice, *__: int
    ) -> None:
        if part.is_first:
            self.rounds.append(RoundRecord.of(part.round, learner))


def _bytes(tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
    held = tensor.detach().cpu()
    if held.dtype == torch.bfloat16:  # which numpy does not have
        held = held.view(torch.int16)
    return np.ascontiguousarray(held.numpy())


def _digest(learner: LightningModule) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(learner.state_dict().items()):
        total.update(name.encode())
        total.update(_bytes(tensor).data)
    return total.hexdigest()
