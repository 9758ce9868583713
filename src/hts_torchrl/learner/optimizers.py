"""Optimisers by name: any of torch.optim, or a class of the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, Optimizer, RMSprop, SparseAdam

from hts_torchrl.compat.torch import fused_adam, let_gradients_be_clipped
from hts_torchrl.errors import ConfigurationError, require, require_type
from hts_torchrl.models.layers import NarrowLinear

_BY_NAME = {
    name.lower(): each
    for name, each in vars(torch.optim).items()
    if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
}
COMPUTES_AGAIN = "it computes the loss several times a step, and a part of a round is computed once"
_REFUSED: dict[type[Optimizer], str] = {
    LBFGS: COMPUTES_AGAIN,
    SparseAdam: "it takes sparse gradients, and those of a policy are dense",
}
_KNOWN = f"{', '.join(sorted(n for n, c in _BY_NAME.items() if c not in _REFUSED))} or module.Class"
_SET_OTHERWISE = {"params": "policy", "lr": "learning_rate", "eps": "epsilon"}
_OURS: dict[str, dict[str, Any]] = {
    "RMSprop": {"alpha": 0.99},  # the paper's
    "Muon": {"adjust_lr_fn": "match_rms_adamw"},  # so that AdamW's learning rate suits it too
}
"""Defaults that stand whatever a version of torch has."""
_FUSED = (Adam, SGD)
"""Whose step torch can make in one pass over the memory, on CPUs as on GPUs; AdamW is an Adam."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of a name.

    Args:
        name: of a class of torch.optim, in capitals or not; or ``module.Class``.

    Raises:
        ConfigurationError: if there is none, or it cannot learn from rounds.
    """
    require_type("optimizer", name, str, "a name, such as adam or module.Class,")
    found: object = _BY_NAME.get(name.lower())
    if found is None:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(f"no optimizer {name!r}; {_KNOWN} is needed") from error
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        raise ConfigurationError(f"optimizer={name!r} is no torch.optim.Optimizer; {_KNOWN} is one")
    for kind, reason in _REFUSED.items():
        if issubclass(found, kind):
            raise ConfigurationError(f"optimizer={name!r}: {reason}; adam or sgd is possible")
    return found


def require_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the optimiser does not have, or that are settings of the learner."""
    cls = optimizer_class(name)
    require_type("optimizer_kwargs", arguments, Mapping, "a dict of the class's arguments")
    kinds = [Muon, AdamW] if cls is Muon else [cls]
    taken = {argument for each in kinds for argument in inspect.signature(each).parameters}
    require("lr" in taken, f"optimizer={name!r} has no lr", "an optimiser with a learning rate")
    for argument in arguments:
        if (setting := _SET_OTHERWISE.get(argument)) is not None:
            raise ConfigurationError(f"optimizer_kwargs has {argument!r}: set {setting} instead")
        if argument not in taken:
            known = ", ".join(sorted(taken - _SET_OTHERWISE.keys()))
            raise ConfigurationError(
                f"optimizer_kwargs has {argument!r}, which {name} does not take; it takes {known}"
            )


def make_optimizer(
    name: str,
    policy: nn.Module,
    *,
    learning_rate: float,
    epsilon: float,
    arguments: Mapping[str, Any],
) -> Optimizer:
    """Return an optimiser of what of a policy is trained.

    Args:
        name: as :func:`optimizer_class` takes it; Muon gets the weight matrices between the
            observation and the heads, and AdamW the rest.
        policy: whose parameters move.
        learning_rate: at the start.
        epsilon: for a class that has one number of that kind.
        arguments: further ones of the class; with Muon, to whichever of the two takes them.

    Raises:
        ConfigurationError: if nothing can be trained, or the class refuses an argument.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigurationError("the policy has no parameter that requires a gradient")

    settings = {**arguments, "lr": learning_rate, "eps": epsilon}
    cls = optimizer_class(name)
    matrices = _hidden_matrices(policy) if cls is Muon else []
    if cls is Muon and not matrices:
        raise ConfigurationError(f"optimizer={name!r}: the policy has no hidden weight matrix")
    rest = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    try:
        if matrices and rest:
            return MuonWithAdamW(_made(Muon, matrices, settings), _made(AdamW, rest, settings))
        return _made(cls, parameters, settings)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"optimizer={name!r} with {dict(arguments)}: {error}") from error


def _made(
    cls: type[Optimizer], parameters: list[Parameter], settings: Mapping[str, Any]
) -> Optimizer:
    """Return an optimiser with those of the settings that its class takes."""
    taken, of_torch = inspect.signature(cls).parameters, cls in _BY_NAME.values()
    defaults = _OURS.get(cls.__name__, {}) if of_torch else {}
    given = {k: v for k, v in {**defaults, **settings}.items() if k in taken}
    if "eps" in taken and isinstance(taken["eps"].default, tuple):  # it has several
        del given["eps"]
    one_by_one = {"foreach", "differentiable"} & given.keys()
    if of_torch and issubclass(cls, _FUSED) and not one_by_one:
        given.setdefault("fused", all(p.is_floating_point() for p in parameters))
    make: Callable[..., Optimizer] = OnePassRMSprop if cls is RMSprop else cls
    optimizer = make(parameters, **given)
    if given.get("fused"):
        let_gradients_be_clipped(optimizer)
    return optimizer


class OnePassRMSprop(torch.optim.RMSprop):
    """``torch.optim.RMSprop``, with torch's fused kernel of Adam where that computes the same.

    RMSprop is Adam (Kingma and Ba, 2015, section 5) without momentum and without its correction of
    the bias. torch has a fused kernel of Adam alone. With momentum, weight decay or ``centered``,
    on a GPU, or with parameters of other types than float32, the step is torch's own.

    State and settings are those of ``torch.optim.RMSprop``, so their checkpoints are the same.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Step once; the weights differ from torch's in the last bits."""
        if not all(_is_fused(group) for group in self.param_groups):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for p in moving:
                if not self.state[p]:
                    square = torch.zeros_like(p, memory_format=torch.preserve_format)
                    self.state[p] = {"step": torch.zeros(()), "square_avg": square}
                self.state[p]["step"] += 1
            if not moving:
                continue
            fused_adam(
                moving,
                [self.state[p]["square_avg"] for p in moving],
                learning_rate=group["lr"],
                smoothing=group["alpha"],
                epsilon=group["eps"],
            )
        return loss


def _is_fused(group: dict[str, Any]) -> bool:
    others = ("momentum", "weight_decay", "centered", "maximize", "differentiable", "capturable")
    return (
        not any(group[name] for name in others)
        and group["foreach"] is None
        and group["alpha"] < 1
        and not isinstance(group["lr"], torch.Tensor)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in group["params"])
    )


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimiser: the Trainer steps one.

    Its groups and its state are those of both, so a checkpoint holds them as it holds any.
    """

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._both = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Step both; groups and state may have been replaced by those of a checkpoint."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each, group in zip(self._both, self.param_groups, strict=True):
            each.param_groups, each.state = [group], self.state
            each.step()
        return loss


def _hidden_matrices(policy: nn.Module) -> list[Parameter]:
    """Return the trained weights with two dimensions, but those of the heads of ActorCritic."""
    layers = [layer for layer in policy.modules() if isinstance(layer, NarrowLinear)]
    heads = {parameter for layer in layers for parameter in layer.parameters()}
    return [p for p in policy.parameters() if p.requires_grad and p.ndim == 2 and p not in heads]
