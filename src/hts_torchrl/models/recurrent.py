"""The memory of the built-in networks: TorchRL's LSTM or GRU behind a trunk."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Key

Cell: TypeAlias = Literal["lstm", "gru"]
CELLS: tuple[Cell, ...] = get_args(Cell)
FEATURES = "features"
"""What the trunk writes, and the memory reads."""
_STATES = ("recurrent_state", "recurrent_state_h", "recurrent_state_c")
_NAMES = (FEATURES, "hidden", *_STATES)


def make_memory(cell: Cell, width: int, *, of: str = "") -> LSTMModule | GRUModule:
    """Make a recurrent layer as wide as the trunk before it.

    It reads ``features`` ``[B, width]`` and ``is_init``, writes ``hidden`` ``[B, width]``, and
    remembers ``recurrent_state`` (an LSTM ``recurrent_state_h`` and ``recurrent_state_c``),
    ``[B, 1, width]`` each, which begin with zeros.

    TorchRL's implementation in Python is taken: on one thread a sequence with gradient has the bits
    of its steps without, where the rows are as many. With torch's own layers it has not.
    ``benchmarks/recurrent.py`` compares the two, and what a step costs.

    Args:
        cell: ``lstm`` or ``gru``.
        width: of its input and output.
        of: what all these names begin with, such as ``critic_``.
    """
    names = ["h", "c"] if cell == "lstm" else [""]
    states = [f"{of}recurrent_state_{name}".rstrip("_") for name in names]
    keys: dict[str, Any] = {
        "in_keys": [of + FEATURES, *states],
        "out_keys": [f"{of}hidden", *[("next", state) for state in states]],
    }
    module = LSTMModule if cell == "lstm" else GRUModule
    memory = module(input_size=width, hidden_size=width, python_based=True, **keys)
    for name, parameter in memory.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter, 1.0)
        else:
            nn.init.zeros_(parameter)
    return memory


class TrunkModule(TensorDictModule):
    """A trunk before a memory, called with ``[B, ...]`` also where the batch is of sequences.

    Trunks with ``reads_sequences`` are called with ``[N, T, ...]`` as it is.
    """

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:  # noqa: ANN401
        """Write the features of all observations."""
        if tensordict.ndim == 1 or getattr(self.module, "reads_sequences", False):
            return super().forward(tensordict, **kwargs)
        (key,) = self.out_keys
        rows = super().forward(tensordict.select(*self.in_keys).reshape(-1))[key]
        return tensordict.set(key, rows.reshape(*tensordict.shape, *rows.shape[1:]))


def trunk_module(
    trunk: nn.Module, keys: list[Key], memory: Cell | None, *, of: str = ""
) -> TensorDictModuleBase:
    """Return a trunk, and what remembers its features if anything does, which write ``hidden``.

    Args:
        trunk: module with ``out_features``.
        keys: of the observations that it reads.
        memory: ``lstm``, ``gru`` or None.
        of: what the names that are written begin with, such as ``critic_``.

    Raises:
        ConfigurationError: if an observation has a name that the memory writes.
    """
    if memory is None:
        return TensorDictModule(trunk, in_keys=keys, out_keys=[f"{of}hidden"])
    taken = [key for key in keys if isinstance(key, str) and key.removeprefix("critic_") in _NAMES]
    if taken:
        raise ConfigurationError(
            f"the environment has an observation named {taken[0]!r}, which a network with a memory "
            "writes itself: give it another name, with gymnasium.wrappers.TransformObservation or "
            "torchrl's RenameTransform"
        )
    width = int(trunk.out_features)  # type: ignore[arg-type]
    return TensorDictSequential(
        TrunkModule(trunk, in_keys=keys, out_keys=[of + FEATURES]),
        make_memory(memory, width, of=of),
    )
