"""What a user adds to the call of a policy's modules takes effect, or is refused by name."""

from collections import OrderedDict

import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from hts_torchrl import GymEnvs, HTSCollector
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.forward import evaluate

SURE = (100.0, -100.0)


def net() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])


def head(kind=ProbabilisticTensorDictModule, **options) -> ProbabilisticTensorDictModule:
    return kind(["logits"], ["action"], distribution_class=Categorical, **options)


class Surely0(TensorDictSequential):
    """Writes logits of its own after its modules have run."""

    def forward(self, tensordict, *arguments, **options):
        tensordict = super().forward(tensordict, *arguments, **options)
        return tensordict.set("logits", torch.tensor(SURE).expand_as(tensordict["logits"]))


class Always0(ProbabilisticTensorDictSequential):
    """Writes an action of its own after one was drawn."""

    def forward(self, tensordict, *arguments, **options):
        tensordict = super().forward(tensordict, *arguments, **options)
        return tensordict.set("action", torch.zeros_like(tensordict["action"]))


class Head0(ProbabilisticTensorDictModule):
    """Draws in a way of its own."""

    def forward(self, tensordict, *_, **__):
        return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))


def hooked(module: nn.Module, register: str = "register_forward_hook") -> nn.Module:
    getattr(module, register)(lambda *_: None)
    return module


def patched() -> nn.Module:
    policy = ProbabilisticTensorDictSequential(net(), head())
    policy.forward = policy.forward
    return policy


def actions(policy: nn.Module) -> list[int]:
    collector = HTSCollector(
        GymEnvs("CartPole-v1"), policy, num_envs=2, num_actors=0, frames_per_batch=32,
        total_frames=32,
    )  # fmt: skip
    try:
        return [action for batch in collector for action in batch["action"].flatten().tolist()]
    finally:
        collector.shutdown()


@pytest.mark.parametrize("nested", [False, True])
def test_a_sequence_whose_modules_have_names_runs_as_one_without(nested):
    layer, decides = net(), head()
    first = TensorDictSequential(OrderedDict(net=layer)) if nested else layer
    named = OrderedDict(first=first, head=decides)
    given = actions(ProbabilisticTensorDictSequential(named))
    assert given == actions(ProbabilisticTensorDictSequential(layer, decides))
    assert set(given) == {0, 1}


def test_a_sequence_before_the_distribution_runs_by_its_own_forward():
    assert set(actions(ProbabilisticTensorDictSequential(Surely0(net()), head()))) == {0}


def test_a_hook_of_a_sequence_before_the_distribution_runs():
    first = TensorDictSequential(net())
    first.register_forward_hook(
        lambda _, __, out: out.set("logits", torch.tensor(SURE).expand_as(out["logits"]))
    )
    policy = ProbabilisticTensorDictSequential(first, head())
    assert set(actions(policy)) == {0}
    learnt = evaluate(policy, {"observation": torch.zeros(1, 4)}, 1)
    assert learnt.distribution.probs.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Always0(net(), head()), "Always0 has a forward"),
        (patched, "ProbabilisticTensorDictSequential has a forward"),
        (
            lambda: ProbabilisticTensorDictSequential(net(), head(Head0)),
            r"Head0 \(module.1\) has a forward",
        ),
        (
            lambda: hooked(ProbabilisticTensorDictSequential(net(), head())),
            "ProbabilisticTensorDictSequential has a hook",
        ),
        (
            lambda: hooked(
                ProbabilisticTensorDictSequential(net(), head()), "register_full_backward_hook"
            ),
            "ProbabilisticTensorDictSequential has a hook",
        ),
        (
            lambda: ProbabilisticTensorDictSequential(
                net(), hooked(head(), "register_forward_pre_hook")
            ),
            r"ProbabilisticTensorDictModule \(module.1\) has a hook",
        ),
        (
            lambda: ProbabilisticTensorDictSequential(net(), head(num_samples=3)),
            r"ProbabilisticTensorDictModule \(module.1\) has num_samples=torch.Size\(\[3\]\)",
        ),
        (
            lambda: ProbabilisticTensorDictSequential(net(), head(generator=torch.Generator())),
            r"ProbabilisticTensorDictModule \(module.1\) has generator=<torch",
        ),
        (
            lambda: ProbabilisticTensorDictSequential(net(), head(generator="seed")),
            r"ProbabilisticTensorDictModule \(module.1\) has generator=seed",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(make, named):
    with pytest.raises(ConfigurationError, match=named):
        actions(make())


def test_what_torchrl_and_tensordict_hook_themselves_is_no_users():
    actor = ProbabilisticActor(
        TensorDictSequential(net()), in_keys=["logits"], distribution_class=Categorical
    )
    assert set(actions(actor.select_out_keys("action"))) == {0, 1}
