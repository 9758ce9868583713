"""TorchRL's losses and value estimators train the built-in networks."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss
from torchrl.objectives.value import (
    GAE,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    VTrace,
)

from hts_torchrl.models import make_actor_critic
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.unit.models.test_distributions import ACTIONS

LOSSES = [A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss]
ESTIMATORS = [GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace]
VECTOR = ArraySpec((6,), np.dtype(np.float32))
PIXELS = ArraySpec((1, 36, 36), np.dtype(np.uint8))
GEARS = ArraySpec((2, 2), np.dtype(np.int8))
MASK = {
    kind: ArraySpec((sum(action.sizes),), np.dtype(bool))
    for kind, action in ACTIONS.items()
    if action.sizes
}
TEAM = ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (3, 3))
NETWORKS = {
    **{f"mlp {kind}": ("mlp", VECTOR, action, False) for kind, action in ACTIONS.items()},
    "mlp squash": ("mlp", VECTOR, ACTIONS["continuous"], True),
    **{name: (name, PIXELS, ACTIONS["discrete"], False)
       for name in ("nature", "nips", "impala", "seed")},
    "players": ("nature", ArraySpec((2, *PIXELS.shape), PIXELS.dtype), TEAM, False),
    "vectors": ("mlp", {"a": VECTOR, "b": GEARS}, ACTIONS["discrete"], False),
    "combined": ("nips", {"a": VECTOR, "b": PIXELS}, ACTIONS["continuous"], False),
    **{f"masked {kind}": ("mlp", {"observation": VECTOR, "action_mask": MASK[kind]}, action, False)
       for kind, action in ACTIONS.items() if kind in MASK},
}  # fmt: skip


@pytest.fixture(params=NETWORKS)
def policy(request):
    network, seen, action, squash = NETWORKS[request.param]
    torch.manual_seed(0)
    seen = seen if isinstance(seen, dict) else {"observation": seen}
    policy = make_actor_critic(network, EnvSpec(seen, action), squash=squash)
    policy.seen = seen
    return policy


def observe(array, shape):
    """Random numbers; of a mask every second element, which leaves each choice one."""
    if array.dtype == bool:
        return (torch.arange(array.shape[0]) % 2 == 0).expand(*shape, -1).clone()
    if array.dtype == np.uint8:
        return torch.randint(0, 255, (*shape, *array.shape), dtype=torch.uint8)
    numbers = torch.randn(*shape, *array.shape)
    return numbers if array is VECTOR else numbers.to(torch.int8)


def batch_of(policy, envs=2, steps=3):
    """What a collector of TorchRL hands over: all that the policy writes is in it."""

    def seen():
        return {key: observe(array, (envs, steps)) for key, array in policy.seen.items()}

    flags = {name: torch.zeros(envs, steps, 1, dtype=torch.bool) for name in ("done", "terminated")}
    after = {**seen(), "reward": torch.randn(envs, steps, 1), **flags}
    batch = TensorDict(
        {**seen(), "next": TensorDict(after, [envs, steps])},
        [envs, steps],
        names=[None, "time"],
    )
    with torch.no_grad():
        return policy.get_policy_operator()(batch)


def gradients(loss_class, policy, actor, batch, **settings):
    """The gradient of all that a loss minimises, by parameter."""
    critic = policy.get_value_operator()
    loss = loss_class(actor, critic, **settings)
    torch.manual_seed(0)  # the entropy of a squashed Gaussian is sampled
    losses = loss(batch.clone())
    policy.zero_grad()
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    return {name: weight.grad for name, weight in policy.named_parameters()}


def with_targets(policy, batch):
    """Targets by plain calls of the critic, so that losses need no estimator of their own."""
    critic = policy.get_value_operator()
    with torch.no_grad():
        GAE(gamma=0.9, lmbda=0.8, value_network=critic, deactivate_vmap=True)(batch)
    return batch


@pytest.mark.parametrize("loss_class", LOSSES)
def test_a_loss_has_the_gradient_that_it_has_on_the_networks_own_parameters(loss_class, policy):
    """By default TorchRL takes the parameters out of the network, and puts tensors in."""
    batch = with_targets(policy, batch_of(policy))
    actor = policy.get_policy_operator()
    ours = gradients(loss_class, policy, actor, batch)
    plain = gradients(loss_class, policy, actor, batch, functional=False)
    for name, gradient in plain.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(ours[name], gradient, msg=name)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_an_actor_critic_is_an_actor_as_its_policy_operator_is(loss_class, policy):
    batch = with_targets(policy, batch_of(policy))
    operator = gradients(loss_class, policy, policy.get_policy_operator(), batch)
    whole = gradients(loss_class, policy, policy, batch)
    for name, gradient in operator.items():
        assert torch.equal(whole[name], gradient), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_takes_parameters_and_finds_the_same_advantage(estimator, policy):
    policy = policy.double()  # float32 differs by more on some processors
    settings = {"gamma": 0.9, "value_network": policy.get_value_operator()}
    if estimator in (GAE, TDLambdaEstimator):
        settings["lmbda"] = 0.8
    if estimator is VTrace:
        settings["actor_network"] = policy.get_policy_operator()
    batch = batch_of(policy)
    weights = TensorDict.from_module(settings["value_network"]).data
    torch.manual_seed(0)  # TorchRL's V-trace samples
    vectorised = estimator(**settings)(batch.clone(), params=weights, target_params=weights.clone())
    if estimator is not VTrace:  # which always goes by vmap
        settings["deactivate_vmap"] = True
    torch.manual_seed(0)
    with torch.no_grad():
        plain = estimator(**settings)(batch.clone())
    torch.testing.assert_close(vectorised["advantage"], plain["advantage"], rtol=1e-5, atol=1e-6)
