"""What a user adds to the call of a policy's modules takes effect, or is refused by name."""

import threading
from collections import OrderedDict

import pytest
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from lightning.pytorch.utilities.model_summary import ModelSummary
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import prune, spectral_norm, weight_norm
from torchrl.modules import ProbabilisticActor

from hts_torchrl import (
    PPO,
    ActorCritic,
    Evaluation,
    GymEnvs,
    HTSCollector,
    env_spec_of,
    make_actor_critic,
)
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.mlp import MLP
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.probe import TORCH, drawing_modules
from tests.fits import cartpole, quiet_trainer

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


class Params0(ProbabilisticTensorDictSequential):
    """Changes the parameters of the distribution, as its ``forward`` asks for them."""

    def get_dist_params(self, tensordict, *arguments, **options):
        tensordict = super().get_dist_params(tensordict, *arguments, **options)
        return tensordict.set("logits", torch.tensor(SURE).expand_as(tensordict["logits"]))


class Heads0(ActorCritic):
    def heads(self, observations):
        parameters, value = super().heads(observations)
        return {"logits": torch.tensor(SURE).expand_as(parameters["logits"])}, value


class Dist0(ActorCritic):
    kind = Categorical

    def distribution(self, parameters):
        return self.kind(logits=torch.tensor(SURE).expand_as(parameters["logits"]))


class OwnSample(Categorical):
    """Samples by a method of its own, and so row by row."""

    def sample(self, sample_shape=()):
        return super().sample(sample_shape)


class RowByRow0(Dist0):
    kind = OwnSample


class GetDist0(ProbabilisticTensorDictSequential):
    def get_dist(self, tensordict, *_, **__):
        return Categorical(logits=torch.tensor(SURE).expand(*tensordict.shape, 2))


class OwnHeads(ProbabilisticTensorDictSequential):
    """Has a method that is no library's."""

    def heads(self):
        return list(self.module)


def ours(kind=ActorCritic, **options) -> ActorCritic:
    envs = GymEnvs("CartPole-v1")
    return kind(MLP((4,)), env_spec_of(envs), **options)


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
        (lambda: Params0(net(), head()), "Params0 has a get_dist_params"),
        (lambda: ours(Heads0), "Heads0 has a heads"),
        (lambda: ours(Dist0, memory="lstm"), "Dist0 has a distribution"),
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


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "compute",
    [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_weights_that_a_hook_computes_are_refused_by_name(compute):
    policy = ProbabilisticTensorDictSequential(net(), head())
    compute(policy.module[0].module)
    with pytest.raises(ConfigurationError, match=r"\(module\.0\.module\) .*'weight' in a hook"):
        HTSCollector(GymEnvs("CartPole-v1"), policy, num_envs=2, frames_per_batch=4, total_frames=4)


def test_what_torchrl_and_tensordict_hook_themselves_is_no_users():
    actor = ProbabilisticActor(
        TensorDictSequential(net()), in_keys=["logits"], distribution_class=Categorical
    )
    assert set(actions(actor.select_out_keys("action"))) == {0, 1}


def test_an_evaluation_and_a_learner_refuse_it_too():
    policy = Always0(net(), head())
    with pytest.raises(ConfigurationError, match="Always0 has a forward"):
        Evaluation(GymEnvs("CartPole-v1"), 1, 0).run(policy)
    with pytest.raises(ConfigurationError, match="Always0 has a forward"):
        PPO(policy)


def test_get_dist_is_the_losses_to_ask_and_no_learner_does():
    policy = GetDist0(net(), head())
    assert set(actions(policy)) == {0, 1}
    with pytest.raises(ConfigurationError, match="GetDist0 has a get_dist of"):
        PPO(policy)


def test_a_method_that_is_no_librarys_is_the_users_own():
    assert set(actions(OwnHeads(net(), head()))) == {0, 1}


def test_a_hook_within_our_actor_critic_runs():
    policy = ours()
    policy.get_submodule("module.1.module.0").register_forward_hook(
        lambda _, __, out: out.set("logits", torch.tensor(SURE).expand_as(out["logits"]))
    )
    assert set(actions(policy)) == {0}


def test_a_forward_of_its_own_within_our_actor_critic_runs():
    policy = ours()
    module = policy.get_submodule("module.1.module.0")
    module.forward = lambda rows: rows.set("logits", torch.tensor(SURE).expand(*rows.shape, 2))
    assert set(actions(policy)) == {0}


@pytest.mark.parametrize("kind", [Dist0, RowByRow0])
def test_the_distribution_of_our_actor_critic_may_be_another(kind):
    assert set(actions(ours(kind))) == {0}


def test_a_policy_is_examined_by_the_pass_that_acts(monkeypatch):
    policy = make_actor_critic("mlp", env_spec_of(GymEnvs("CartPole-v1")))
    passes, fused = [], policy.fused
    monkeypatch.setattr(policy, "fused", lambda rows: passes.append(1) or fused(rows))

    def run(_):
        evaluate(policy, {"observation": torch.zeros(1, 4)}, 1)

    assert drawing_modules(policy, run, TORCH[0]) == []
    assert passes == [1]


class Keeping(nn.Linear):
    """Keeps something in an attribute: what it is given, or else its last answers, in a list."""

    def __init__(self, thing=None):
        super().__init__(4, 2)
        self.kept = thing

    def forward(self, observation):
        answers = super().forward(observation)
        if self.kept is None or isinstance(self.kept, list):
            self.kept = [answers]
        return answers


def keeping(*thing) -> ProbabilisticTensorDictSequential:
    value = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    layer = TensorDictModule(Keeping(*thing), ["observation"], ["logits"])
    return ProbabilisticTensorDictSequential(value, layer, head(return_log_prob=True))


def test_a_policy_that_keeps_its_last_answers_trains_and_is_evaluated():
    """They have a graph while it learns, and torch copies no such tensor."""
    policy = keeping()
    learner = PPO(policy, epochs=1, minibatches=1)
    quiet_trainer(limit_val_batches=1.0).fit(learner, cartpole(2))
    assert not policy.module[1].module.kept[0].is_leaf
    assert len(Evaluation(GymEnvs("CartPole-v1"), 2, 0).run(policy).scores) == 2
    assert set(actions(policy)) <= {0, 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda policy: Evaluation(GymEnvs("CartPole-v1"), 1, 0).run(policy),
        lambda policy: actions(policy),
        lambda policy: quiet_trainer().fit(PPO(policy), cartpole(1)),
    ],
    ids=["evaluation", "collector", "learner"],
)
def test_what_cannot_be_copied_for_the_actors_is_named(use):
    named = r"Keeping \(module\.1\.module\) cannot be copied .* its 'kept' \(TypeError: cannot"
    with pytest.raises(ConfigurationError, match=named):
        use(keeping(threading.Lock()))


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_hooks_of_lightnings_profiler_are_refused_with_what_leaves_them_out(run):
    learner = PPO(keeping())
    refused = pytest.raises(ConfigurationError, match="record_module_names=False")
    with RegisterRecordFunction(learner), refused:  # as Trainer(profiler="pytorch") does
        getattr(quiet_trainer(limit_val_batches=1.0), run)(learner, cartpole(1))


def test_a_summary_of_lightnings_has_the_sizes_of_layers():
    """It puts hooks on all modules, and calls the learner with its example."""
    learner = PPO(make_actor_critic("mlp", env_spec_of(GymEnvs("CartPole-v1"))))
    learner.example_input_array = torch.zeros(3, 4)
    summary = ModelSummary(learner, max_depth=-1)
    sizes = dict(zip(summary.layer_names, summary.out_sizes, strict=True))
    layers = [name for name, layer in learner.named_modules() if isinstance(layer, nn.Linear)]
    assert layers
    assert all(sizes[name][0] == 3 for name in layers)
    quiet_trainer(enable_model_summary=True).fit(learner, cartpole(1))
