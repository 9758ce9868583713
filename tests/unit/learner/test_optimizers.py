"""Which optimiser a name gives, of which parameters, with which arguments."""

import copy

import pytest
import torch
from torch import nn

from hts_torchrl import A2C, PPO, ConfigurationError, GymEnvs, make_actor_critic
from hts_torchrl.learner.optimizers import MuonWithAdamW, make_optimizer
from tests.fits import cartpole, quiet_trainer, watched_fit


class Heavy(torch.optim.SGD):
    """SGD of a user, who calls its learning rate as torch does."""

    def __init__(self, params, lr=0.1, mass=0.25):
        super().__init__(params, lr, momentum=mass)


class OwnEps(torch.optim.Adam):
    """Adam of a user, who has no default of that kind."""

    def __init__(self, params, lr, eps):
        super().__init__(params, lr, eps=eps)


class Rateless(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, 0.1)


def policy():
    return make_actor_critic("mlp", GymEnvs("CartPole-v1").group([0]).spec)


def made(name, policy_=None, **arguments):
    return make_optimizer(
        name, policy_ or policy(), learning_rate=0.02, epsilon=1e-3, arguments=arguments
    )


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("adamw", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("torch.optim.NAdam", torch.optim.NAdam),
        ("tests.unit.learner.test_optimizers.Heavy", Heavy),
    ],
)
def test_a_name_gives_its_class(name, cls):
    assert type(made(name)) is cls
    assert made(name).defaults["lr"] == 0.02


class Twice(torch.optim.SGD):
    """Computes the loss twice a step, as SAM does."""

    def step(self, closure):
        closure()
        return super().step(closure)


class Repeating(PPO):
    def __init__(self, kind):
        super().__init__(epochs=2, minibatches=2)
        self.kind = kind

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Twice, torch.optim.LBFGS])
def test_one_that_computes_the_loss_again_is_refused(kind):
    with pytest.raises(ConfigurationError, match=f"^optimizer {kind.__name__}: it computes the lo"):
        quiet_trainer().fit(Repeating(kind), datamodule=cartpole(2))


ALL = sorted(
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
)


@pytest.mark.parametrize("name", ALL)
def test_every_optimiser_of_torch_moves_the_policy(name):
    learner = A2C(policy(), optimizer=name, learning_rate=0.01)
    before = copy.deepcopy(learner.policy)
    quiet_trainer().fit(learner, datamodule=cartpole(2))
    pairs = zip(learner.policy.parameters(), before.parameters(), strict=True)
    assert not any(torch.equal(after, start) for after, start in pairs)


def test_epsilon_goes_where_there_is_one_number_of_that_kind():
    assert made("adamw").defaults["eps"] == 1e-3
    assert made("tests.unit.learner.test_optimizers.OwnEps").defaults["eps"] == 1e-3
    assert "eps" not in made("sgd").defaults
    assert made("adafactor").defaults["eps"] == (None, 1e-3)  # torch's own pair


def test_further_arguments_reach_the_class():
    assert made("rmsprop", alpha=0.5).defaults["alpha"] == 0.5
    assert tuple(made("adamw", betas=[0.5, 0.75]).param_groups[0]["betas"]) == (0.5, 0.75)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_one_pass_over_the_memory_steps_as_several(name):
    networks = [policy(), policy()]
    networks[1].load_state_dict(networks[0].state_dict())
    fused, several = made(name, networks[0]), made(name, networks[1], foreach=False)
    assert fused.defaults["fused"]
    assert not several.defaults["fused"]
    for step in range(3):
        for network, optimizer in zip(networks, (fused, several), strict=True):
            torch.manual_seed(step)
            for p in network.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
    for one, two in zip(*(n.parameters() for n in networks), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


class TestRMSprop:
    def pair(self, **settings):
        networks = [policy(), policy()]
        networks[1].load_state_dict(networks[0].state_dict())
        torchs = torch.optim.RMSprop(networks[1].parameters(), 0.02, 0.99, 1e-3, **settings)
        return networks, (made("rmsprop", networks[0], **settings), torchs)

    def step(self, networks, optimizers, number):
        for network, optimizer in zip(networks, optimizers, strict=True):
            torch.manual_seed(number)
            for p in network.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()

    def test_steps_as_torchs_in_one_pass_over_the_memory(self, monkeypatch):
        networks, optimizers = self.pair()
        for number in range(5):
            self.step(networks, optimizers, number)
        for one, two in zip(*(n.parameters() for n in networks), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
        fast = networks[0].get_parameter("module.0.module.0.weight")
        assert optimizers[0].state[fast]["step"] == 5
        monkeypatch.setattr(torch.optim.RMSprop, "step", None)  # torch's own is not asked
        networks[0].zero_grad()
        optimizers[0].step()

    def test_leaves_the_gradients_as_they_are(self):
        network = policy()
        for p in network.parameters():
            p.grad = torch.randn_like(p)
        before = [p.grad.clone() for p in network.parameters()]
        made("rmsprop", network).step()
        assert all(map(torch.equal, before, (p.grad for p in network.parameters())))

    @pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"centered": True}, {"foreach": True}])
    def test_steps_by_torchs_own_step_where_there_is_more_to_it(self, settings):
        networks, optimizers = self.pair(**settings)
        for number in range(3):
            self.step(networks, optimizers, number)
        assert all(map(torch.equal, *(n.parameters() for n in networks)))

    def test_goes_on_from_the_state_of_torchs(self):
        networks, (ours, torchs) = self.pair()
        for number in range(3):
            self.step(networks[1:], [torchs], number)
        networks[0].load_state_dict(networks[1].state_dict())
        ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
        self.step(networks, (ours, torchs), 3)
        for one, two in zip(*(n.parameters() for n in networks), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_before_a_step_in_one_pass():
    learner = A2C(policy(), optimizer="adam")
    trainer = quiet_trainer(precision="bf16-mixed", gradient_clip_val=0.5)
    trainer.fit(learner, datamodule=cartpole(2))
    assert learner.updates == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "LBFGS"}, "optimizer='LBFGS': it computes the loss several times a step"),
        ({"optimizer": "SparseAdam"}, "optimizer='SparseAdam': it takes sparse gradients"),
        ({"optimizer": "sdg"}, "no optimizer 'sdg'; adadelta, .*, sgd or module.Class is needed"),
        ({"optimizer": "torch.nn.Linear"}, "'torch.nn.Linear' is no torch.optim.Optimizer"),
        (
            {"optimizer": "tests.unit.learner.test_optimizers.Rateless"},
            "Rateless' has no lr; an optimiser with a learning rate is needed",
        ),
        ({"optimizer_kwargs": {"eps": 1}}, "optimizer_kwargs has 'eps': set epsilon instead"),
        ({"optimizer_kwargs": {"betas": 1}}, "has 'betas', which rmsprop does not take; it takes"),
    ],
)
def test_what_cannot_work_is_refused_when_the_learner_is_made(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        A2C(**settings)


def test_a_value_that_the_class_refuses_is_told_in_its_words():
    with pytest.raises(ConfigurationError, match=r"'sgd' with {'momentum': -1}: Invalid momentum"):
        made("sgd", momentum=-1)


class TestMuon:
    def test_moves_hidden_matrices_and_adamw_the_rest(self):
        network = policy()
        optimizer = made("muon", network)
        assert type(optimizer) is MuonWithAdamW
        matrices, rest = (set(group["params"]) for group in optimizer.param_groups)
        hidden = {"module.0.module.0.weight", "module.0.module.2.weight"}
        critic = {"module.2.module.0.0.weight", "module.2.module.0.2.weight"}
        assert {n for n, p in network.named_parameters() if p in matrices} == hidden | critic
        assert matrices | rest == set(network.parameters())
        assert not matrices & rest

    def test_steps_as_the_two_of_torch_would(self):
        networks = [policy(), policy()]
        networks[1].load_state_dict(networks[0].state_dict())
        both = made("muon", networks[0], weight_decay=0.25, momentum=0.5, betas=[0.5, 0.75])
        names = {p: n for n, p in networks[0].named_parameters()}
        other = dict(networks[1].named_parameters())
        first, rest = ([other[names[p]] for p in g["params"]] for g in both.param_groups)
        muon = torch.optim.Muon(
            first, 0.02, 0.25, momentum=0.5, eps=1e-3, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(
            rest, 0.02, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25, fused=True
        )
        for step in range(3):
            for network in networks:
                torch.manual_seed(step)
                for p in network.parameters():
                    p.grad = torch.randn_like(p)
            for each in (both, muon, adamw):
                each.step()
        for one, two in zip(*(n.parameters() for n in networks), strict=True):
            assert torch.equal(one, two)

    def test_alone_moves_a_policy_of_matrices_only(self):
        assert type(made("muon", nn.Linear(3, 4, bias=False))) is torch.optim.Muon

    def test_of_a_policy_without_any_is_refused(self):
        with pytest.raises(ConfigurationError, match="'muon': the policy has no hidden weight mat"):
            made("muon", nn.LayerNorm(3))

    def test_decays_both_rates(self):
        learner = PPO(optimizer="muon", learning_rate=0.5, learning_rate_decay=True, epochs=1)
        assert watched_fit(learner, cartpole(2)).learning_rates[::4] == [0.5, 0.25]


class Predicting(A2C):
    """Trains a layer beside the policy."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.predictor = nn.Linear(4, 1)

    def loss(self, batch):
        return super().loss(batch) + self.predictor(batch["observation"]).square().mean()


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_what_a_learner_trains_beside_its_policy_moves(optimizer):
    learner = Predicting(optimizer=optimizer)
    before = [p.detach().clone() for p in learner.predictor.parameters()]
    watched_fit(learner, cartpole())
    pairs = zip(before, learner.predictor.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)
