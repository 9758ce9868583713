"""Which modules of a policy do what costs the bits: found by hooks, the innermost are named."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from hts_torchrl.compat.torch import is_transforming, tree_leaves, tree_map, uncompiled
from hts_torchrl.policy.limits import copied

Pass: TypeAlias = Callable[[nn.Module], object]
"""One forward pass of a policy."""

_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

TORCH = ("torch's global generator", "torch's global CUDA generators")
OTHERS = ("numpy's global generator (np.random)", "Python's global generator (random)")
_STATES: dict[str, Callable[[], object]] = {
    TORCH[0]: lambda: torch.default_generator.get_state().numpy().tobytes(),
    TORCH[1]: lambda: [g.get_state().numpy().tobytes() for g in torch.cuda.default_generators],
    OTHERS[0]: lambda: pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002
    OTHERS[1]: random.getstate,
}


@contextlib.contextmanager
def noting_draws(generators: Sequence[str]) -> Iterator[list[str]]:
    """Give a list which in the end names those of the ``generators`` that were drawn from."""
    before = {name: _STATES[name]() for name in generators}
    drawn: list[str] = []
    yield drawn
    drawn += [name for name in generators if _STATES[name]() != before[name]]


def drawing_modules(policy: nn.Module, run: Pass, generator: str) -> list[str]:
    """Return the names of modules that draw from one of :data:`TORCH` and :data:`OTHERS`."""
    read = _STATES[generator]
    return _innermost(policy, run, lambda *_: read(), lambda state, *_: read() != state)


def varying_modules(policy: nn.Module, run: Pass) -> list[str]:
    """Return the names of modules that give the same inputs other outputs in a second pass."""

    def varies(call: _Call, module: nn.Module, output: object) -> bool:
        args, kwargs = call
        return differ(output, module(*args, **kwargs), tolerance=0.0)

    return _innermost(policy, run, _copied, varies)


def modules_of_two_modes(policy: nn.Module, run: Pass) -> list[str]:
    """Return the names of modules whose outputs in eval mode differ from those in their own mode.

    Copies are run: the policy keeps its statistics. A module that runs with weights that another
    one lends it, as in torchrl's ``MultiAgentMLP``, is not asked, but the other one is.
    """
    acting, learning = copied(policy).eval(), copied(policy)
    twins = dict(zip(acting.modules(), learning.modules(), strict=True))
    own_weights = {module: _weights(module) for module in acting.modules()}

    def differs(call: _Call, module: nn.Module, output: object) -> bool:
        args, kwargs = call
        are_own = _weights(module) == own_weights[module]
        return are_own and differ(output, twins[module](*args, **kwargs))

    return _innermost(acting, run, _copied, differs)


def _weights(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module.parameters()]


def described(policy: nn.Module, names: Sequence[str]) -> str:
    """Return names of modules as a user knows them, with their classes."""
    kinds = {name: type(policy.get_submodule(name)).__name__ for name in names}
    return ", ".join(f"{name or 'the policy'} ({kind})" for name, kind in kinds.items())


def differ(one: object, other: object, *, tolerance: float = 0.01) -> bool:
    """Return whether two structures of tensors, of one form, differ by more than rounding.

    ``tolerance`` is a share of a tensor's largest number.
    """
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return any(isinstance(a, Tensor) and not _close(a, b, tolerance) for a, b in pairs)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.detach().double(), other.detach().double()
    finite = one[one.isfinite()].abs()
    most = tolerance * float(finite.max()) if finite.numel() else 0.0
    return bool(torch.isclose(one, other, rtol=0.0, atol=most, equal_nan=True).all())


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Return arguments that a module which writes into its own does not reach."""
    copied: _Call = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
    return copied


def _innermost(
    policy: nn.Module,
    run: Pass,
    before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    is_sought: Callable[[Any, nn.Module, object], bool],
) -> list[str]:
    """Return the names of the modules that are sought, without those that contain another one.

    Of what ``torch.func.vmap`` runs the module that asks for that is the innermost.

    ``before`` makes of a module's arguments what ``is_sought`` decides from, with its output.
    """
    found: list[str] = []
    running: list[tuple[Any, int]] = []
    asking = False

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (asking or is_transforming()):
            running.append((before(args, kwargs), len(found)))

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
            nonlocal asking
            if asking or is_transforming():
                return
            noted, known = running.pop()
            asking = True
            if len(found) == known and is_sought(noted, module, output):
                found.append(name)
            asking = False

        return hook

    handles = []
    for name, module in _open_modules(policy):
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
    try:
        with torch.no_grad():
            run(policy)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))


def _open_modules(policy: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without those that torch compiles or scripts: these take no hooks."""
    closed: tuple[str, ...] = ()
    for name, module in policy.named_modules():
        if name.startswith(closed) or isinstance(module, ScriptModule):
            continue
        if uncompiled(module) is not module:
            closed += (f"{name}.",)
        yield name, module
