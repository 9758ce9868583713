"""What is not finite ends a run before it reaches the weights, and is named."""

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tensordict import TensorDict

from hts_torchrl import A2C, PPO, NotFiniteError, RoundModule
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.finite import require_finite_gradients
from tests.command_line import A2C as A2C_FLAGS
from tests.command_line import CARTPOLE, run
from tests.fits import cartpole, quiet_trainer
from tests.policies import categorical_actor

BAD_ENV, BAD_STEP = 2, 13  # the second round, its step 5
WHERE = f"of environment {BAD_ENV}, step 5 of its round, is not finite"


class BrokenCartPole(gymnasium.Wrapper):
    """One environment's reward or observation is broken at one step, over all its games."""

    def __init__(self, index, reward=1.0, observation=None):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.index, self.reward, self.observation, self.steps = index, reward, observation, 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if (self.index, self.steps) == (BAD_ENV, BAD_STEP):
            reward = self.reward
            if self.observation is not None:
                observation = np.full(4, self.observation, np.float32)
        self.steps += 1
        return observation, reward, *rest


class Before(Callback):
    """Keeps the weights before the latest round."""

    def on_train_batch_start(self, _trainer, pl_module, batch, _):
        if batch.is_first:
            self.weights = {k: v.clone() for k, v in pl_module.state_dict().items()}


def fails(learner, tmp_path, *normalized, **broken):
    """Train until it fails; return the message."""
    before = Before()
    last = ModelCheckpoint(tmp_path, "last", save_on_exception=True)
    trainer = quiet_trainer(callbacks=[before, last], enable_checkpointing=True)
    settings = dict.fromkeys(normalized, True)
    data = cartpole(4, env=lambda index: BrokenCartPole(index, **broken), **settings)
    with pytest.raises(NotFiniteError) as failed:
        trainer.fit(learner, data)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], weights) for name, weights in before.weights.items())
    assert all(weights.isfinite().all() for weights in saved.values())
    return str(failed.value)


LEARNERS = pytest.mark.parametrize(
    "make",
    [lambda: A2C(network="mlp"), lambda: PPO(network="mlp")],
    ids=["A2C", "PPO"],
)


@LEARNERS
@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_reward_is_named(make, reward, tmp_path):
    assert fails(make(), tmp_path, reward=reward) == f"next.reward {WHERE}"


def test_an_observation_is_named(tmp_path):
    message = fails(A2C(network="mlp"), tmp_path, observation=np.inf)
    assert message == f"next.observation {WHERE}"


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_what_is_infinite_is_named_where_it_is_normalised(name, tmp_path):
    message = fails(A2C(network="mlp"), tmp_path, f"normalize_{name}", **{name: np.inf})
    assert message == f"next.{name} {WHERE}"


@LEARNERS
def test_a_parameter_is_named_where_what_was_collected_is_finite(make, tmp_path):
    learner = make()
    calls = iter(range(10**6))

    def spoil(gradient):
        return gradient * np.nan if next(calls) > 2 else gradient

    learner.on_train_start = lambda: learner.policy.module[0].module[0].weight.register_hook(spoil)
    message = fails(learner, tmp_path)
    assert message.startswith("the gradient of module.0.module.0.weight is not finite, though")


class Beside(A2C):
    """Trains a layer beside the policy, whose gradient is NaN."""

    def __init__(self):
        super().__init__(network="mlp")
        self.beside = torch.nn.Linear(1, 1)

    def training_step(self, part, index):
        return super().training_step(part, index) + self.beside(torch.full((1, 1), np.nan)).sum()


def test_a_parameter_beside_the_policy_is_named():
    with pytest.raises(NotFiniteError, match=r"^the gradient of beside\.weight is not finite"):
        quiet_trainer().fit(Beside(), cartpole(2))


class Unregistered(A2C):
    """Trains a layer that is no module of its own, whose gradient is NaN."""

    def __init__(self):
        super().__init__(network="mlp")
        self.layers = [torch.nn.Linear(1, 1)]

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.layers[0].parameters()], 0.1)

    def training_step(self, part, index):
        nan = torch.full((1, 1), np.nan)
        return super().training_step(part, index) + self.layers[0](nan).sum()


def test_a_tensor_that_the_module_does_not_know_ends_the_run_too():
    """Lightning takes a StopIteration for the end of the run."""
    message = "^the gradient of a tensor that is no parameter of the module is not finite"
    with pytest.raises(NotFiniteError, match=message):
        quiet_trainer().fit(Unregistered(), cartpole(2))


class WithoutCritic(RoundModule):
    """The policy gradient, by a loss that is NaN in the second round."""

    def training_step(self, part, _):
        with self.learning_from(part):
            policy = self.policy.get_dist(part.round.reshape(-1).select("observation"))
            return policy.entropy().mean() * (np.nan if self.updates else 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_parameter_is_named_where_the_policy_has_no_value():
    policy = categorical_actor(torch.nn.Linear(4, 2))
    with pytest.raises(NotFiniteError, match=r"^the gradient of .*weight is not finite, though"):
        quiet_trainer().fit(WithoutCritic(policy), cartpole(3))


def test_an_environment_is_named_by_its_number_over_all_ranks():
    policy = torch.nn.Linear(1, 1, bias=False)
    policy.weight.grad = torch.tensor([[np.inf]])
    round_ = TensorDict({"reward": torch.tensor([[1.0, 2.0], [3.0, np.nan]])}, [2, 2])
    with pytest.raises(NotFiniteError, match="reward of environment 7, step 1 of its round"):
        require_finite_gradients(
            policy, torch.optim.SGD(policy.parameters()), round_, ["reward"], first_env=6
        )


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_command_line_says_it_in_one_line_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *A2C_FLAGS, "--model.learning_rate=1e30")
    assert left.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hts-torchrl: error: ")
    assert last.count("not finite") == 1


def test_a_sparse_gradient_is_refused_by_the_parameters_name():
    layer = torch.nn.Sequential(torch.nn.Embedding(3, 1, sparse=True))
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight is sparse"):
        require_finite_gradients(
            layer, torch.optim.SGD(layer.parameters()), TensorDict(), [], first_env=0
        )
