"""The actor's pass as one compiled graph: what ``compile_policy`` asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hts_torchrl.compat.torch import as_one_graph, compile_failure, compile_settings
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.forward import PolicyOutput
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import Key

_log = logging.getLogger(__name__)
_LEAVE_OUT = "leave compile_policy out"


class CompiledPass:
    """A pass of an inference as one graph, from inputs and draws to the answers.

    The weights are inputs of the graph, so it goes on with whatever is copied into them. What the
    policy keeps in Python is as it was when the graph was made: at the first call.

    Raises:
        ConfigurationError: when it is called, in one line that says why it cannot be compiled.

    Example:
        >>> from hts_torchrl import GymEnvs, env_spec_of, make_actor_critic
        >>> spec = env_spec_of(GymEnvs("CartPole-v1"))
        >>> inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=8)
        >>> inference.compiled = CompiledPass(inference, {"backend": "eager"})
        >>> answers, _ = inference.run_batch()
        >>> answers["action"].shape
        torch.Size([8])
    """

    def __init__(self, inference: PolicyInference, arguments: Mapping[str, Any]) -> None:
        self._inference, self._arguments = inference, dict(arguments)
        self._graph: _Graph | None = None

    def __call__(
        self, inputs: dict[Key, Tensor], draws: Tensor
    ) -> tuple[dict[Key, Tensor], PolicyOutput]:
        """Return the answers of a pass ``[B, ...]``, and all else that it computed."""
        if self._graph is None:
            self._graph = self._compile(inputs, draws)
        answers, written = self._graph(inputs, draws)
        return answers, PolicyOutput(None, answers.get("state_value"), written)

    def _compile(self, inputs: dict[Key, Tensor], draws: Tensor) -> _Graph:
        inference = self._inference
        _refuse_device(draws.device)
        expected, result = inference.compute(inputs, draws)
        if rows := inference.row_by_row(result):
            raise ConfigurationError(
                f"{self._setting}: {rows} draws row by row from a generator, which cannot be "
                f"compiled; {_LEAVE_OUT}"
            )

        def run(inputs: dict[Key, Tensor], draws: Tensor) -> _Computed:
            answers, result = inference.compute(inputs, draws)
            written = result.tensors()
            # All of it, although actors use the answers alone: what is examined is what acts.
            return answers, {key: written[key] for key in written.keys() - inputs.keys()}

        try:
            graph: _Graph = as_one_graph(run, self._arguments)
        except (ValueError, RuntimeError) as error:  # torch's, of a backend that it does not know
            raise ConfigurationError(f"{self._setting}: {compile_failure(error)[0]}") from error
        began_s = time.perf_counter()
        try:
            with compile_settings():
                answers, _ = graph(inputs, draws)
        except Exception as error:  # of Dynamo, of the backend, or of the C++ compiler
            why, is_without_compiler = compile_failure(error)
            reason = f"the policy's pass cannot be compiled as one graph ({why}); "
            if is_without_compiler:
                reason = "torch finds no C++ compiler that works; install one, such as g++, or "
            raise ConfigurationError(f"{self._setting}: {reason}{_LEAVE_OUT}") from error
        self._refuse_other_types(answers, expected)
        took_s = time.perf_counter() - began_s
        _log.info("a pass of %d rows was compiled in %.1f s", inference.batch_size, took_s)
        return graph

    def _refuse_other_types(self, answers: dict[Key, Tensor], expected: dict[Key, Tensor]) -> None:
        """Refuse answers that do not fit where those of the plain pass do."""
        for key, value in expected.items():
            kinds = [(each.dtype, tuple(each.shape)) for each in (answers[key], value)]
            if kinds[0] != kinds[1]:
                raise ConfigurationError(
                    f"{self._setting}: the compiled pass answers {key!r} as {kinds[0]}, and not as "
                    f"{kinds[1]}; {_LEAVE_OUT}"
                )

    @property
    def _setting(self) -> str:
        return f"compile_policy={self._arguments or True}"


_Computed = tuple[dict[Key, Tensor], dict[Key, Tensor]]
_Graph = Callable[[dict[Key, Tensor], Tensor], _Computed]


def _refuse_device(device: torch.device) -> None:
    """Refuse a GPU, for which kernels are chosen by timing them, in each process anew."""
    if device.type != "cpu":
        raise ConfigurationError(
            f"compile_policy with policy_device='{device}': actors compile for the CPU only; "
            f"{_LEAVE_OUT}, or give policy_device='cpu'"
        )
