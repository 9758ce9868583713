"""Updates by chunks: gradients, minibatches, advantages, logged losses, and what is refused."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from hts_torchrl import (
    A2C,
    PPO,
    ConfigurationError,
    GymEnvs,
    NotFiniteError,
    make_actor_critic,
)
from hts_torchrl.learner import Learner
from hts_torchrl.learner.gradient_chunks import RUNNING, ComputedGradient
from tests.fits import SGDA2C, cartpole, flat, flat_gradient, quiet_trainer, watched_fit
from tests.policies import policy_with

ENV = GymEnvs("CartPole-v1")


def policy():
    torch.manual_seed(0)
    return make_actor_critic("mlp", ENV.group([0]).spec)


def test_the_gradient_is_the_mean_of_the_chunks_own():
    (one,) = watched_fit(SGDA2C(policy(), gradient_chunks=4), cartpole(1)).gradients
    (whole,) = watched_fit(SGDA2C(policy()), cartpole(1)).gradients
    torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-6)
    assert not torch.equal(one, whole)  # it was added in another order


def test_the_gradient_is_clipped_after_it_was_added():
    class Norm(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):  # noqa: ARG002
            if pl_module.policy is not None and next(pl_module.parameters()).grad is not None:
                self.norm = flat_gradient(pl_module.policy).norm()

    seen = Norm()
    learner = SGDA2C(policy(), gradient_chunks=4)
    quiet_trainer(callbacks=[seen], gradient_clip_val=0.25).fit(learner, cartpole(2))
    torch.testing.assert_close(seen.norm, torch.tensor(0.25))


def minibatches(chunks, minibatches=4, **settings):
    """The rows of each minibatch in each chunk, of two epochs of one round."""
    rows = []

    class Rows(PPO):
        def training_step(self, part, index):
            loss = super().training_step(part, index)
            rows.append([self._minibatches.rows_of(part, chunk) for chunk in range(chunks)])
            return loss

    learner = Rows(policy(), epochs=2, minibatches=minibatches, gradient_chunks=chunks)
    quiet_trainer().fit(learner, cartpole(1, **settings))
    return rows


def test_a_minibatch_has_as_many_samples_of_each_chunk():
    rows = minibatches(2)  # 4 environments of 8 steps: 16 samples a chunk
    for chunk in range(2):
        for epoch in (rows[:4], rows[4:]):
            order = torch.cat([each[chunk] for each in epoch])
            assert order.sort().values.tolist() == list(range(16 * chunk, 16 * chunk + 16))
            assert order.tolist() != order.sort().values.tolist()


def test_each_chunk_and_each_epoch_has_an_order_of_its_own():
    rows = minibatches(2)
    orders = [
        torch.cat([each[chunk] for each in epoch]) - 16 * chunk
        for chunk in range(2)
        for epoch in (rows[:4], rows[4:])
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 4


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_advantages_are_normalised_over_the_whole_round(chunks):
    learner = PPO(policy(), epochs=1, minibatches=1, gradient_chunks=chunks)
    quiet_trainer().fit(learner, cartpole(1))
    advantage = learner.samples["advantage"].double()
    torch.testing.assert_close(advantage.mean().item(), 0.0, atol=1e-6, rtol=0)
    torch.testing.assert_close(advantage.std().item(), 1.0, atol=1e-6, rtol=0)
    halves = advantage.view(2, -1).mean(1)
    assert halves.abs().min() > 1e-3  # a chunk by itself is not normalised


def test_the_logged_loss_is_that_of_all_chunks():
    logged = []
    for chunks in (1, 4):
        trainer = quiet_trainer(log_every_n_steps=1)
        trainer.fit(A2C(policy(), gradient_chunks=chunks), cartpole(1))
        logged.append(trainer.logged_metrics | trainer.callback_metrics)
    assert {"loss/policy", "loss/value", "loss/entropy"} <= logged[0].keys()
    for name, value in logged[0].items():
        torch.testing.assert_close(logged[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "trainer", "told"),
    [
        ({"gradient_chunks": 3}, {}, "gradient_chunks=3 does not divide the 4 environments"),
        (
            {"gradient_chunks": 2},
            {"accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 with gradient_chunks=2",
        ),
    ],
    ids=["environments", "accumulation"],
)
def test_what_chunks_do_not_go_with_is_refused(model, trainer, told):
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer(**trainer).fit(A2C(policy(), **model), cartpole(2))


def test_minibatches_must_divide_a_chunk():
    with pytest.raises(ConfigurationError, match=r"minibatches=3 does not divide the 16 frames of"):
        minibatches(2, minibatches=3)


@pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
def test_statistics_of_passes_are_refused():
    learner = A2C(policy_with(nn.BatchNorm1d(16), ENV), gradient_chunks=2)
    with pytest.raises(ConfigurationError, match=r"running_mean changes with each pass"):
        quiet_trainer().fit(learner, cartpole(2))


def test_a_training_step_that_knows_no_chunks_is_refused():
    class Own(Learner):
        def training_step(self, part, _):
            with self.learning_from(part):
                samples = self.samples_of(part.round)
                return self.evaluate(samples)[1].mean()

    with pytest.raises(ConfigurationError, match=r"Own.training_step computes one gradient"):
        quiet_trainer().fit(Own(policy(), gradient_chunks=2), cartpole(2))


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_hook_after_accumulation_runs_or_is_refused(chunks):
    learner, calls = A2C(policy(), gradient_chunks=chunks), []
    next(learner.parameters()).register_post_accumulate_grad_hook(calls.append)
    if chunks == 1:
        watched_fit(learner, cartpole(1))
        assert len(calls) == 1
    else:
        with pytest.raises(ConfigurationError, match="weight has a post_accumulate_grad_hook"):
            watched_fit(learner, cartpole(1))


@pytest.mark.parametrize(
    "changed",
    [
        lambda loss, weight: loss + weight.square().sum(),
        lambda loss, weight: loss + (weight - weight.detach()).sum(),  # which adds 0
        lambda loss, weight: 0.5 * loss,  # noqa: ARG005
        lambda loss, weight: loss.mul_(0.5),  # noqa: ARG005
        lambda loss, weight: loss.double() / 3,  # noqa: ARG005
    ],
    ids=["a term", "a gradient alone", "a factor", "a factor in place", "another type"],
)
def test_what_a_training_step_makes_of_the_loss_of_the_chunks_is_refused(changed):
    class Changes(A2C):
        def training_step(self, part, index):
            return changed(super().training_step(part, index), next(self.parameters()))

    told = r"Changes.training_step computes one gradient .* loss_by_chunks\(\.\.\.\) alone"
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer().fit(Changes(policy(), gradient_chunks=2), cartpole(2))


def test_a_loss_and_figures_with_a_dimension_of_one_are_as_good_as_numbers():
    class Shaped(SGDA2C):
        def loss(self, batch):
            loss = super().loss(batch)
            self.log_losses({"whole": loss.view(1, 1)})
            return loss.view(1)

    weights = []
    for kind in (Shaped, SGDA2C):
        trainer = quiet_trainer(log_every_n_steps=1)
        learner = kind(policy(), gradient_chunks=2, learning_rate=0.1)
        trainer.fit(learner, cartpole(2))
        weights.append(flat(learner.policy))
        if kind is Shaped:
            assert trainer.callback_metrics["loss/whole"].shape == ()
    assert torch.equal(*weights)


def test_figures_may_be_on_the_cpu_wherever_the_loss_is(monkeypatch):
    """The device meta, for which there is no autocast, stands for a GPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    layer = nn.Linear(2, 1, device="meta")

    def loss():
        RUNNING.figures["temperature"] = torch.tensor(0.5)
        return layer(torch.ones(3, 2, device="meta")).sum()

    vector = ComputedGradient(layer).of(loss)  # gradients, loss, what it reaches, figure
    assert (vector.device.type, vector.shape) == ("meta", (3 + 1 + 2 + 1,))


def test_a_loss_of_a_chunk_that_is_no_tensor_is_refused():
    class Nothing(A2C):
        def loss(self, batch):  # noqa: ARG002
            return None

    with pytest.raises(ConfigurationError, match="a chunk's loss of type NoneType; a tensor is"):
        quiet_trainer().fit(Nothing(policy(), gradient_chunks=2), cartpole(2))


def test_a_loss_of_the_chunks_that_is_no_number_is_told_as_such():
    class Broken(A2C):
        def loss(self, batch):
            return super().loss(batch) * float("nan")

    with pytest.raises(NotFiniteError, match=r"the gradient of .* is not finite"):
        quiet_trainer().fit(Broken(policy(), gradient_chunks=2), cartpole(2))


class Table(nn.Module):
    """Adds a row of a table to the features, whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(2, 16, sparse=True)

    def forward(self, features):
        return features + self.rows((features[..., 0] > 0).long())


class Spared(A2C):
    """Has a weight that the losses of some chunks reach."""

    def __init__(self, policy, reaching=(), **settings):
        super().__init__(policy, **settings)
        self.spare, self.reaching = nn.Parameter(torch.ones(())), reaching

    def loss(self, batch):
        loss = super().loss(batch)
        return loss + self.spare if RUNNING.index in self.reaching else loss


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_weight_that_no_loss_reaches_stays_as_it_is(chunks):
    """An optimiser would move it by a gradient of 0: here by its decay, elsewhere by momentum."""
    decays = {"optimizer": "adamw", "optimizer_kwargs": {"weight_decay": 0.5}}
    learner = Spared(policy(), gradient_chunks=chunks, learning_rate=0.1, **decays)
    quiet_trainer().fit(learner, cartpole(2))
    assert learner.spare == 1


def test_a_weight_that_the_loss_of_one_chunk_reaches_has_the_mean_of_all():
    settings = {"optimizer": "sgd", "learning_rate": 0.25}
    learner = Spared(policy(), reaching=(1,), gradient_chunks=2, **settings)
    quiet_trainer().fit(learner, cartpole(1))
    assert learner.spare == 1 - 0.25 / 2


def test_a_sparse_gradient_of_a_chunk_is_refused():
    learner = A2C(policy_with(Table(), ENV), gradient_chunks=2)
    with pytest.raises(ConfigurationError, match=r"a gradient is sparse, and gradients are dense"):
        quiet_trainer().fit(learner, cartpole(2))


class Rewrites(Callback):
    """Puts gradients of its own in their place, as methods for several tasks do."""

    def on_after_backward(self, _, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
def test_a_step_moves_weights_whatever_the_order_of_their_memory(optimizer):
    """Fused steps go through the memory of weights and gradients side by side."""
    finals = []
    for chunks, callbacks in ((1, []), (1, [Rewrites()]), (2, [])):
        own = policy()
        for layer in own.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        settings = {"optimizer": optimizer, "learning_rate": 0.1, "epsilon": 0.1}
        learner = A2C(own, gradient_chunks=chunks, **settings)
        finals.append(watched_fit(learner, cartpole(3), callbacks=callbacks).final_weights)
    assert torch.equal(finals[0], finals[1])
    torch.testing.assert_close(finals[0], finals[2], rtol=1e-3, atol=1e-4)
