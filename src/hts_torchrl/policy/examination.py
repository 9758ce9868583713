"""Examines a policy before it acts: what it writes, and what its answers depend on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.policy.compiled_pass import CompiledPass
from hts_torchrl.policy.forward import PolicyOutput
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.limits import misfit
from hts_torchrl.policy.probe import (
    OTHERS,
    TORCH,
    described,
    differ,
    drawing_modules,
    noting_draws,
    varying_modules,
)
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec, Key, next_key, path_of

_CHANCE = (
    "chance must come from the policy's distribution (give a ProbabilisticActor itself, not a "
    "function or module that calls it)"
)
_ONE_BY_ONE = "actors answer one row at a time, exact but slower"
_DEPENDS = (
    "the policy's answer to an observation depends on the other rows of the batch (or on its place "
    f"among them): {_ONE_BY_ONE}; another inference_batch_size, such as 8, may do"
)
_ANSWERS_NAN = (
    "the policy answers random observations from 0 to 1 with NaN, so whether an answer depends on "
    f"other rows of the batch cannot be told: {_ONE_BY_ONE}"
)
_UNREADABLE = (RuntimeError, IndexError, ValueError)
"""What torch raises for numbers that a policy cannot read."""
_TAKEN = {"next", "collector", "done", "terminated", "truncated"}


class Examined(NamedTuple):
    """What is known of a policy before it acts."""

    outputs: dict[Key, ArraySpec]
    """What actors answer, without the row dimension."""
    extras: tuple[Key, ...]
    """Those of them that are neither action, log-probability, value nor memory."""
    batch_size: int
    """Rows of a pass in which each answer depends on its own row alone."""


def examine(
    inference: PolicyInference,
    *,
    all_outputs: bool,
    compile_policy: Mapping[str, Any] | None = None,
) -> Examined:
    """Find what a policy answers, and in passes of how many rows it can.

    Args:
        inference: of the policy.
        all_outputs: False leaves out what is neither action, log-probability nor value.
        compile_policy: arguments of ``torch.compile``; None compiles nothing. The compiled pass
            is examined beside the other, which answers random actions.

    Raises:
        ConfigurationError: as :func:`find_outputs`, ``mode`` and ``CompiledPass``.
    """
    outputs = find_outputs(inference)
    if not all_outputs:
        outputs = {key: array for key, array in outputs.items() if key not in inference.extras}
        inference.extras = []
    batch_size = inference.batch_size
    answers_numbers = find_readable(inference)
    with _refusing(inference.spec, at_random=True):
        is_exact = batch_size == 1 or depends_on_row_alone(inference)
    if compile_policy is not None:
        inference.compiled = CompiledPass(inference, compile_policy)
        inference.run_batch()
        is_exact &= batch_size == 1 or depends_on_row_alone(inference)
    if batch_size == 1 or not is_exact:
        with _refusing(inference.spec, at_random=True):
            _refuse_own_memory(inference)
    if not is_exact:
        warnings.warn(_DEPENDS if answers_numbers else _ANSWERS_NAN, stacklevel=5)
        batch_size = 1
    return Examined(outputs, tuple(inference.extras), batch_size)


@contextlib.contextmanager
def _refusing(spec: EnvSpec, *, at_random: bool = False) -> Iterator[None]:
    """Refuse a policy that has no answer to what it is tried with."""
    try:
        yield
    except ConfigurationError:
        raise
    except _UNREADABLE as error:
        if not at_random:
            raise misfit(spec, error) from error
        raise ConfigurationError(
            f"the policy fails where it is tried with random observations: {in_one_line(error)}"
        ) from error


def find_outputs(inference: PolicyInference) -> dict[Key, ArraySpec]:
    """Return shape and dtype of all that the policy writes, without the row dimension.

    As in TorchRL's collectors that is the policy's ``out_keys`` (``select_out_keys`` leaves some
    out), without names that begin with ``_``. Later passes answer all: ``inference.extras`` is set.

    Raises:
        ConfigurationError: if the policy cannot read the observation, its action is not what the
            environment accepts, its memory is not what it reads, or more than observation and draw
            decide its answer.
    """
    with noting_draws((*TORCH, *OTHERS)) as drawn, _refusing(inference.spec):
        _, result = inference.run_batch()
    inference.extras = _extras(inference, result.written)
    _refuse_chance(inference, drawn, result)
    tensors, _ = inference.run_batch()
    if covered := [key for key in tensors if key in inference.inputs]:
        raise ConfigurationError(
            f"the policy answers {covered[0]!r}, which is an observation of the environment too, "
            "and a batch has one entry of that name: give the observation another, with "
            "gymnasium.wrappers.TransformObservation or torchrl's RenameTransform"
        )
    _refuse_other_memory(inference, tensors)
    _refuse_other_actions(inference, tensors, result)
    answers = {key: value.cpu().numpy() for key, value in tensors.items()}
    return {key: ArraySpec(value.shape[1:], value.dtype) for key, value in answers.items()}


def require_fitting(inference: PolicyInference) -> None:
    """Refuse a policy for observations or actions of another environment."""
    with _refusing(inference.spec):
        answers, result = inference.run_batch()
    _refuse_other_actions(inference, answers, result)


def _refuse_other_actions(
    inference: PolicyInference, tensors: dict[Key, Tensor], result: PolicyOutput
) -> None:
    """Refuse actions ``[R, ...]`` of another shape, type or distribution than is accepted."""
    dists = inference.distributions(result.distribution) if inference.log_prob_keys else {}
    for key, wanted in inference.action_specs.items():
        action, has_numbers = tensors[key], wanted.kind in ("continuous", "mixed")
        shape = tuple(action.shape[1:])
        if shape != wanted.array.shape:
            raise ConfigurationError(
                f"the policy's {key!r} has shape {shape}, but the environment "
                f"accepts {wanted.array.shape} ({wanted.kind}){_other_form(wanted, shape)}"
            )
        if key in dists:
            _refuse_other_distribution(wanted, action, dists[key])
        elif action.is_floating_point() != has_numbers:
            raise ConfigurationError(
                f"the policy's action is {action.dtype}, but the environment's are {wanted.kind}"
            )


def _other_form(wanted: ActionSpec, shape: tuple[int, ...]) -> str:
    """Say what has the other of a choice's two forms, if that is all that differs."""
    if wanted.kind == "one_hot" and shape == ():
        return (
            ": take torchrl's OneHotCategorical, or an environment that takes numbers, as "
            "GymEnv(..., categorical_action_encoding=True) does"
        )
    if wanted.kind == "discrete" and shape == wanted.sizes:
        return ": take torch's Categorical, whose actions are numbers"
    return ""


def _refuse_other_memory(inference: PolicyInference, answers: Mapping[Key, Tensor]) -> None:
    """Refuse a policy that writes another memory than the one with which a trajectory begins."""
    for key in inference.spec.memory.initial:
        read, written = inference.inputs[key], answers[next_key(key)]
        # torch's rule is that of an assignment: 64 bits into 32, but no float into an integer.
        if written.shape != read.shape or not torch.can_cast(written.dtype, read.dtype):
            raise ConfigurationError(
                f"the policy writes {next_key(key)!r} of shape {tuple(written.shape[1:])} and "
                f"{written.dtype}, but its primer begins {key!r} with {tuple(read.shape[1:])} and "
                f"{read.dtype}: make the two alike"
            )


def _extras(inference: PolicyInference, written: TensorDictBase | dict[Key, Tensor]) -> list[Key]:
    """Return the keys of what the policy writes in addition to action, log-probability, value."""
    parts = inference.action_specs
    known = {inference.action.key, *inference.log_prob_keys, "state_value", *parts}
    known |= {*inference.inputs, *inference.carried}
    found: list[Key] = []
    out_keys: Sequence[Key] = inference.policy.out_keys  # type: ignore[assignment]
    for key in map(unravel_key, out_keys):
        value = written.get(key, None)
        if key in known or value is None or any(n.startswith("_") for n in path_of(key)):
            continue
        if isinstance(value, TensorDictBase):
            leaves = value.keys(include_nested=True, leaves_only=True)
            found += [(*path_of(key), *path_of(leaf)) for leaf in leaves]
        elif isinstance(value, Tensor):
            found.append(key)
        else:
            raise ConfigurationError(f"the policy writes {key!r}, which is no tensor")
    if taken := [key for key in (*parts, *found) if path_of(key)[0] in _TAKEN]:
        raise ConfigurationError(
            f"the policy writes {taken[0]!r}, which the collector writes: give it another name"
        )
    return found


def _refuse_chance(inference: PolicyInference, drawn: Sequence[str], first: PolicyOutput) -> None:
    """Refuse a policy whose answers depend on which actor gives them, and when.

    The ``first`` pass has drawn from the global generators ``drawn``.
    """
    for generator in drawn:
        # Asked again, because another thread may have drawn.
        if modules := drawing_modules(inference.policy, lambda _: computed(inference), generator):
            raise ConfigurationError(
                f"the policy draws from {generator} in eval mode, in "
                f"{described(inference.policy, modules)}: an action would depend on which actor "
                f"chose it; {_CHANCE}"
            )
    _, second = inference.run_batch()
    if differ([*first.tensors().values()], [*second.tensors().values()]):
        raise _answers_vary(inference)


def _answers_vary(inference: PolicyInference) -> ConfigurationError:
    modules = varying_modules(inference.policy, lambda _: computed(inference)) or [""]
    return ConfigurationError(
        "in eval mode the policy answers the same observation differently when asked again"
        f" (look at {described(inference.policy, modules)}): an action would depend on which "
        f"actor chose it; {_CHANCE}, and what the policy remembers must be written "
        "under 'next'"
    )


def _refuse_own_memory(inference: PolicyInference) -> None:
    """Refuse a policy whose answer depends on what it was asked before; overwrites its inputs."""
    inputs = [*inference.inputs.values(), inference.draws]
    generator = np.random.default_rng(1)  # other rows than those that it was asked before
    fill_at_random(inference, generator)
    asked = [value.clone() for value in inputs]
    state = {name: value.clone() for name, value in inference.policy.state_dict().items()}
    before = computed(inference)
    fill_at_random(inference, generator)
    computed(inference)
    for value, again in zip(inputs, asked, strict=True):
        value.copy_(again)
    after = computed(inference)
    now = inference.policy.state_dict()
    moved = [name for name, value in state.items() if not value.equal(now[name])]
    if moved and not _same_bits(before, after):
        raise ConfigurationError(
            f"a pass of the policy in eval mode changes its {moved[0]}, on which its answers "
            "depend, and other actors do not have that: change it where self.training is True, or "
            "write it under 'next'"
        )
    if differ(before, after, tolerance=0.0):
        fill_at_random(inference, generator)
        raise _answers_vary(inference)


def _refuse_other_distribution(wanted: ActionSpec, action: Tensor, dist: Distribution) -> None:
    """Refuse distributions of other actions than the environment accepts."""
    name = type(dist).__name__
    while isinstance(dist, Independent):
        dist = dist.base_dist
    is_discrete = isinstance(dist, Bernoulli) or not action.is_floating_point()
    if is_discrete == (wanted.kind in ("continuous", "mixed")):
        raise ConfigurationError(
            f"the policy draws actions from a {name}, but the environment's are {wanted.kind}"
        )
    most = max(wanted.sizes, default=0)
    if isinstance(dist, Categorical) and dist.probs.shape[-1] != most:
        raise ConfigurationError(
            f"the policy chooses among {dist.probs.shape[-1]} actions, but the environment has "
            f"{most} ({wanted.kind})"
        )


def depends_on_row_alone(inference: PolicyInference, trials: int = 8) -> bool:
    """Return whether a row keeps its bits at another place, and among other rows.

    Rolls random observations through all places of the batch, then replaces all rows but one, and
    compares every bit of all that the policy computes: a difference in a logit shows in a
    probability once in hundreds of times. Does so ``trials`` times, and overwrites the inputs.
    """
    generator = np.random.default_rng(0)
    inputs = [*inference.inputs.values(), inference.draws]
    for _ in range(trials):
        fill_at_random(inference, generator)
        before = computed(inference)
        for shift in range(1, inference.batch_size):
            _roll(inputs)
            if not _same_bits(computed(inference), [value.roll(shift, 0) for value in before]):
                return False
        _roll(inputs)
        kept = [value[:1].clone() for value in inputs]
        fill_at_random(inference, generator)
        for value, row in zip(inputs, kept, strict=True):
            value[:1] = row
        first = [value[:1] for value in computed(inference)]
        if not _same_bits(first, [value[:1] for value in before]):
            return False
    return True


def find_readable(inference: PolicyInference) -> bool:
    """Fill the inputs at random, so that the policy has an answer to them; sets ``within_one``.

    A logarithm has none to numbers below zero, and a table of 11 objects none to the byte 200,
    which the environment may never give. Returns whether all that it answers then are numbers.
    """
    for within_one in (False, True):
        inference.within_one = within_one
        fill_at_random(inference, np.random.default_rng(0))
        with contextlib.suppress(*_UNREADABLE):
            if not any(value.isnan().any() for value in computed(inference)):
                return True
    return False


def fill_at_random(inference: PolicyInference, generator: np.random.Generator) -> None:
    """Fill inputs and draws: choices and bytes over their range, floats from a normal distribution.

    Other integers are 0 or 1. ``inference.within_one`` asks for numbers from 0 to 1 alone, but for
    choices. Several booleans, or a mask, allow something: where all are 0 they become 1.
    """
    spec = inference.spec
    for key, value in inference.inputs.items():
        batch, choices = value.numpy(), spec.inputs[key].choices
        if choices:
            first, after = [each.start for each in choices], [each.stop for each in choices]
            chosen = generator.integers(first, after, (len(batch), len(choices)))
            batch[...] = chosen.reshape(batch.shape)
        elif batch.dtype.kind in "iub":
            is_byte = batch.dtype == np.uint8 and not inference.within_one
            batch[...] = generator.integers(0, 256 if is_byte else 2, batch.shape)
        elif inference.within_one:
            batch[...] = generator.random(batch.shape)
        else:
            batch[...] = generator.standard_normal(batch.shape)
        several = batch.dtype.kind == "b" and batch.ndim > 1 and batch.shape[-1] > 1
        if several or (key == spec.action_mask and batch.dtype.kind in "iub"):
            batch |= ~batch.any(-1, keepdims=True)
    inference.draws.numpy()[...] = generator.random(inference.draws.shape)


def computed(inference: PolicyInference) -> list[Tensor]:
    """Run a pass, and return copies of all that it computes, each ``[R, ...]``."""
    inputs = inference.inputs
    # A policy that kept a view of these would read what is written there later, and never the past.
    inference.inputs = {key: value.clone() for key, value in inputs.items()}
    try:
        answers, result = inference.run_batch()
    finally:
        inference.inputs = inputs
    return [value.clone() for value in (*answers.values(), *result.tensors().values())]


def _roll(values: Sequence[Tensor]) -> None:
    for value in values:
        value.copy_(value.roll(1, 0))


def _same_bits(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, values, others))


def require_capturable(inference: PolicyInference) -> None:
    """Refuse a policy whose pass no CUDA graph can hold, or which gives other bits there.

    Overwrites inputs and weights.
    """
    find_readable(inference)
    _, result = inference.run_batch()
    if rows := inference.row_by_row(result):
        raise ConfigurationError(
            f"cudagraph_policy=True: {rows} draws row by row from a generator, which no CUDA graph "
            "can hold; leave it out"
        )
    inputs = {key: value.numpy().copy() for key, value in inference.inputs.items()}
    draws = inference.draws.numpy().copy()
    for _ in range(2):  # with other weights, too
        plain, _ = inference.run_batch()
        replayed = inference.answer(inputs, draws)
        for key, value in plain.items():
            if value.cpu().numpy().tobytes() != replayed[key].tobytes():
                raise ConfigurationError(
                    f"cudagraph_policy=True: the policy's {key!r} has other bits in a CUDA graph "
                    "than without; leave it out"
                )
        inference.policy.train()  # as where weights are loaded
        with torch.no_grad():
            for parameter in inference.policy.parameters():
                parameter.mul_(0.5)
        inference.policy.eval()
