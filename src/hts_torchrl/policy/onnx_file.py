"""A policy as an ONNX file, for programs without torch.

Shapes: B observations, any number.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError, reason_of
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.examination import find_readable
from hts_torchrl.policy.forward import evaluate, is_composite, memory_keys, probabilistic_module
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.limits import copied
from hts_torchrl.policy.sampling import Projection
from hts_torchrl.specs import Array, EnvSpec, Key, array_name

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_TRACED_ROWS = 3
_CHECKED_ROWS = (1, 16)
_MOST = 1e-3
"""Of the largest answer (or of 1): what differs by more is another policy."""


def save_onnx(
    policy: nn.Module, path: str | Path, *, spec: EnvSpec, about: Mapping[str, Any] | None = None
) -> float:
    """Write a policy as an ONNX file, and compare its outputs with the policy's own.

    Inputs have the names of the observations, ``[B, *shape]`` each, and their types. Outputs are
    the parameters of the distribution (``logits``, or ``loc`` and ``scale``), ``state_value``
    ``[B, 1]`` if there is one, and the greedy ``action``. Names in a path are joined by dots.

    Args:
        policy: is not changed.
        path: of the file; an old one is replaced once the new one has been checked.
        spec: observations and actions of its environment.
        about: further information for the reader, as plain values.

    Returns:
        The largest difference from the policy's own outputs, except actions.

    Raises:
        ConfigurationError: if a package is missing (``pip install 'hts-torchrl[onnx]'``), or the
            policy has a memory or a ``CompositeDistribution`` or cannot be exported, or the file's
            outputs differ.
        OSError: if it cannot be written; what was at ``path`` is still there.

    For example, with numpy only::

        save_onnx(policy, "policy.onnx", spec=env_spec_of(env))
        session = onnxruntime.InferenceSession("policy.onnx")
        (action,) = session.run(["action"], {"observation": np.zeros((1, 4), np.float32)})
    """
    try:
        *_, runtime = map(importlib.import_module, _PACKAGES)
    except ImportError as error:
        raise ConfigurationError(
            f"an ONNX file needs {', '.join(_PACKAGES)}: pip install 'hts-torchrl[onnx]' ({error})"
        ) from error
    policy = as_policy(policy, spec)
    if keys := memory_keys(policy):
        raise ConfigurationError(
            f"the policy remembers {keys[0]!r}, whose rows torch's ONNX exporter fixes in number: "
            "export it to a .safetensors file"
        )
    if is_composite(probabilistic_module(policy)):
        raise ConfigurationError(
            "the policy writes the parts of an action apart, by a CompositeDistribution, which an "
            "ONNX file cannot hold: export it to a .safetensors file"
        )
    answers = _Answers(copied(policy).cpu().eval(), spec)
    with _named(policy):
        program = _exported(answers)
    told = {"hts_torchrl": version("hts-torchrl"), "about": json.dumps(about or {}, default=str)}
    program.model.metadata_props.update(told)
    content = program.model_proto.SerializeToString()
    with _named(policy):
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    difference = max(_difference(answers, session, rows) for rows in _CHECKED_ROWS)
    try:
        with replacing(Path(path)) as new:
            new.write_bytes(content)
    except OSError as error:
        raise OSError(f"cannot write the policy {path}: {reason_of(error, path)}") from error
    return difference


class _Answers(nn.Module):
    """A policy as a function of tensors: observations in the spec's order, answers by ``names``."""

    def __init__(self, policy: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        self.policy, self.spec = policy, spec
        self.keys: list[Key] = list(spec.observations)
        self.head = probabilistic_module(policy)
        self._project = Projection(self.head, torch.device("cpu"))
        self.action_name = array_name(spec.action.key)
        self.names = list(self.by_name(self.observations(1)))

    def observations(self, rows: int) -> tuple[Tensor, ...]:
        """Return observations as an environment could give them, ``[rows, *shape]`` each."""
        inference = PolicyInference(self.policy, self.spec, batch_size=rows)
        find_readable(inference)
        return tuple(inference.inputs[key] for key in self.keys)

    def forward(self, *observations: Tensor) -> tuple[Tensor, ...]:
        """Return the answers to B observations."""
        return tuple(self.by_name(observations).values())

    def by_name(self, observations: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return parameters, value and greedy action, as far as there are these."""
        given = dict(zip(self.keys, observations, strict=True))
        result = evaluate(self.policy, given, observations[0].shape[0])
        answers = {array_name(key): result.written[key] for key in self.head.in_keys}
        if result.value is not None:
            answers["state_value"] = result.value
        with contextlib.suppress(ConfigurationError):  # as of a distribution of the user's own
            answers[self.action_name] = self._mode(result.distribution)
        return answers

    def _mode(self, distribution: d.Distribution) -> Tensor:
        key = self.spec.action.key
        return self._project({key: torch.as_tensor(mode(distribution))})[key]

    def greedy(self, parameters: Mapping[str, Array]) -> Array:
        """Return the greedy actions of distributions with such parameters."""
        given = {key: torch.from_numpy(parameters[array_name(key)]) for key in self.head.in_keys}
        rows = len(next(iter(given.values())))
        action: Array = self._mode(self.head.get_dist(TensorDict(given, [rows]))).numpy()
        return action


def _exported(answers: _Answers) -> Any:  # noqa: ANN401 - torch's ONNXProgram
    rows = {0: torch.export.Dim("batch")}
    before = logging.root.manager.disable
    # The exporter tells of itself, and of packages that are not needed.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            return torch.onnx.export(
                answers,
                answers.observations(_TRACED_ROWS),
                dynamo=True,
                input_names=list(map(array_name, answers.keys)),
                output_names=answers.names,
                dynamic_shapes=(tuple(rows for _ in answers.keys),),
                verbose=False,
            )
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _named(policy: nn.Module) -> Iterator[None]:
    """Tell which policy no ONNX file can hold."""
    try:
        yield
    except Exception as error:  # whatever a policy of the user's may lead to
        cause = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"the policy {type(policy).__name__} cannot be exported to ONNX: {cause}; a "
            ".safetensors file holds any"
        ) from error


def _difference(answers: _Answers, session: Any, rows: int) -> float:  # noqa: ANN401
    """Return the largest difference of a file's answers; refuse a file that answers otherwise."""
    observations = answers.observations(rows)
    names = map(array_name, answers.keys)
    given = {name: each.numpy() for name, each in zip(names, observations, strict=True)}
    found: dict[str, Array] = dict(zip(answers.names, session.run(None, given), strict=True))
    with torch.no_grad():
        own = {name: each.numpy() for name, each in answers.by_name(observations).items()}
    if answers.action_name in own:
        # Of the file's own parameters: equally likely actions are no difference.
        own[answers.action_name] = answers.greedy(found)
    differences = {name: _distance(found[name], own[name]) for name in answers.names}
    for name, difference in differences.items():
        sizes = np.abs(own[name].astype(np.float64))
        # Or 1; forbidden actions have logits beyond.
        largest = sizes[sizes < np.finfo(np.float32).max].max(initial=1.0)
        if not difference <= _MOST * largest:
            raise ConfigurationError(
                f"the ONNX file answers otherwise than the policy: {name} by up to {difference:g}"
            )
    return max(differences.values())


def _distance(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return float("inf")
    one, other = one.astype(np.float64), other.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))  # equal infinities too
    return float(np.abs(one[~same] - other[~same]).max(initial=0.0))
