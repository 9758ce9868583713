"""A learner from a checkpoint alone."""

import copy
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator

from hts_torchrl import (
    A2C,
    PPO,
    PQN,
    ConfigurationError,
    GymEnvs,
    HTSDataModule,
    Impala,
    RoundModule,
    make_actor_critic,
)
from hts_torchrl.cli.commands import HTSTrainer
from tests.command_line import Valued
from tests.fits import cartpole, flat, quiet_trainer, watched_fit
from tests.policies import categorical_actor

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")


def saved(folder, learner):
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=1)
    watched_fit(learner, cartpole(2), callbacks=[saving], enable_checkpointing=True)
    return folder / "last.ckpt"


def forged(path, **learner):
    """The checkpoint as a stranger could have written it."""
    content = torch.load(path, weights_only=True)
    content["learner"] |= learner
    torch.save(content, path)


@pytest.mark.parametrize("make", [A2C, PPO, PQN, Impala])
def test_has_the_settings_the_weights_and_the_updates(make, tmp_path):
    trained = make(learning_rate=0.125, gamma=0.5)
    path = saved(tmp_path, trained)
    learner = make.load_from_checkpoint(path)
    assert torch.equal(flat(learner.policy), flat(trained.policy))
    assert (learner.learning_rate, learner.gamma, learner.updates) == (0.125, 0.5, 2)


class OfRounds(RoundModule):
    """A round module without settings, whose network is built by its name."""

    def training_step(self, part, _):
        with self.learning_from(part):
            policy, value = self.evaluate(self.samples_of(part.round))
            return value.square().mean() - policy.entropy().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_round_module_builds_its_network_again(tmp_path):
    trained = OfRounds()
    learner = OfRounds.load_from_checkpoint(saved(tmp_path, trained))
    assert torch.equal(flat(learner.policy), flat(trained.policy))
    assert learner.updates == 2


def test_is_evaluated_as_the_one_that_was_trained(tmp_path):
    trained = A2C()
    learner = A2C.load_from_checkpoint(saved(tmp_path, trained))
    scores = [
        quiet_trainer(limit_val_batches=1).validate(each, cartpole(), verbose=False)
        for each in (trained, learner)
    ]
    assert scores[0] == scores[1]


def test_takes_what_the_caller_gives_before_the_checkpoints(tmp_path):
    path = saved(tmp_path, A2C(learning_rate=0.125, gamma=0.5))
    learner = A2C.load_from_checkpoint(path, learning_rate=0.25)
    assert (learner.learning_rate, learner.gamma) == (0.25, 0.5)


class Untyped(PPO):
    """A learner whose author wrote no types."""

    def __init__(self, policy=None, coef=0.2, steps=(1,), hidden=None, helper=None, **settings):
        self.extra = settings.pop("extra", 0)
        super().__init__(policy, **settings)
        self.coef, self.steps, self.hidden, self.helper = coef, steps, hidden, helper


def test_an_argument_without_a_type_has_the_checkpoints_value(tmp_path):
    path = saved(tmp_path, Untyped(coef=0.7, steps=[1, 2.5], hidden={"a": [True, "b"]}, gamma=0.5))
    learner = Untyped.load_from_checkpoint(path)
    assert (learner.coef, learner.steps, learner.hidden) == (0.7, [1, 2.5], {"a": [True, "b"]})
    assert (learner.helper, learner.gamma) == (None, 0.5)


@pytest.mark.parametrize(
    "value",
    ["${oc.env:HOME}", ["${a}"], {"${a}": 1}, {"class_path": "os.system"}, "class_path: this"],
)
def test_an_argument_without_a_type_takes_nothing_that_names_something_else(value, tmp_path):
    path = saved(tmp_path, Untyped())
    forged(path, init_args={"coef": value})
    with pytest.raises(ConfigurationError, match=r"model\.coef=.*: a value of another type"):
        Untyped.load_from_checkpoint(path)


def test_what_is_no_plain_data_is_to_be_given(tmp_path):
    path = saved(tmp_path, Untyped(helper=torch.float64))
    with pytest.raises(ConfigurationError, match=r"its helper was an object, <dtype>"):
        Untyped.load_from_checkpoint(path)
    assert Untyped.load_from_checkpoint(path, helper=3).helper == 3


class Form(Enum):
    """How a learner of the user's own computes its loss."""

    PLAIN = 1
    SQUARED = 2


class Typed(PPO):
    """A learner with a setting that is no plain data."""

    def __init__(self, policy=None, *, form: Form = Form.PLAIN, **settings):
        super().__init__(policy, **settings)
        self.form = form


def test_a_member_of_an_enum_is_to_be_given(tmp_path):
    path = saved(tmp_path, Typed(form=Form.SQUARED))
    with pytest.raises(ConfigurationError) as raised:
        Typed.load_from_checkpoint(path)
    assert str(raised.value) == (
        f"{path}: its form was an object, <Form.SQUARED>, which a checkpoint only describes: give "
        "load_from_checkpoint(path, form=...)"
    )
    assert Typed.load_from_checkpoint(path, form=Form.SQUARED).form is Form.SQUARED
    forged(path, init_args={"form": "SQUARED"})  # as the command line tells it
    with pytest.raises(
        ConfigurationError, match=r"model\.form='SQUARED': .* give load_from.*form="
    ):
        Typed.load_from_checkpoint(path)


def test_a_setting_that_the_class_does_not_show_is_left_out_with_a_warning(tmp_path):
    path = saved(tmp_path, Untyped())
    forged(path, init_args={"extra": 2, "settings": {"gamma": 0.5}})
    with pytest.warns(UserWarning, match=r"has a setting 'extra' \(and 1 more\) that Untyped"):
        assert Untyped.load_from_checkpoint(path).extra == 0


def test_takes_lightnings_arguments_that_ask_for_what_it_does(tmp_path):
    trained = PPO(gamma=0.5)
    path = saved(tmp_path, trained)
    learner = PPO.load_from_checkpoint(
        path, "cpu", hparams_file=None, strict=True, weights_only=True
    )
    assert torch.equal(flat(learner.policy), flat(trained.policy))
    assert learner.gamma == 0.5


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("hparams_file", "x.yaml", "None"),
        ("weights_only", False, "True"),
    ],
)
def test_refuses_lightnings_arguments_that_ask_for_something_else(name, value, wanted, tmp_path):
    with pytest.raises(ConfigurationError) as raised:
        PPO.load_from_checkpoint(tmp_path / "none.ckpt", **{name: value})
    told = f"PPO.load_from_checkpoint({name}={value!r}); {wanted} is needed"
    assert str(raised.value) == told


def test_an_optimiser_of_the_users_own_is_to_be_named(tmp_path):
    path = saved(tmp_path, A2C())
    forged(path, init_args={"optimizer": "this.s"})
    with pytest.raises(ConfigurationError, match=r"its optimizer \(this.s\) is imported only if"):
        A2C.load_from_checkpoint(path)
    assert "this" not in sys.modules
    assert A2C.load_from_checkpoint(path, optimizer="adam").optimizer_name == "adam"


def test_a_policy_of_the_users_own_is_to_be_given(tmp_path):
    path = saved(tmp_path, A2C(Valued()))
    with pytest.raises(
        ConfigurationError, match=r"its policy \(tests.command_line.Valued\) is none"
    ):
        A2C.load_from_checkpoint(path)
    own = Valued()
    assert A2C.load_from_checkpoint(path, policy=own).policy is own


def test_a_policy_of_the_users_own_that_was_normalised_is_so_again(tmp_path):
    spec = cartpole().env_spec
    trained = A2C(make_actor_critic("mlp", spec))
    saving = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    data = cartpole(3, normalize_observation=True)
    watched_fit(trained, data, callbacks=[saving], enable_checkpointing=True)
    own = make_actor_critic("mlp", spec)
    learner = A2C.load_from_checkpoint(tmp_path / "last.ckpt", policy=own)
    state = learner.state_dict()
    assert any("statistics" in name for name in state)
    assert all(torch.equal(state[name], value) for name, value in trained.state_dict().items())


def test_is_where_its_tensors_are_put(tmp_path, monkeypatch):
    path, moved = saved(tmp_path, A2C()), []
    monkeypatch.setattr(A2C, "to", lambda learner, device: moved.append(device) or learner)
    A2C.load_from_checkpoint(path)
    assert moved == [torch.device("cpu")]


@pytest.mark.parametrize("network", ["this.s", "builtins.print", "sys.exit", "os.system"])
def test_a_network_that_the_file_names_is_not_imported(network, tmp_path):
    path = saved(tmp_path, A2C())
    forged(path, init_args={"network": network})
    sys.modules.pop("this", None)
    with pytest.raises(ConfigurationError, match="is none of this package: give the module"):
        A2C.load_from_checkpoint(path)
    assert "this" not in sys.modules


def test_a_checkpoint_of_another_learner_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="is of the learner 'A2C', not PPO"):
        PPO.load_from_checkpoint(saved(tmp_path, A2C()))


@pytest.mark.parametrize(
    "learner", [{"spec": None}, {"spec": [1]}, {"init_args": 3}, {"init_args": {"gamma": "x"}}]
)
def test_settings_of_another_form_are_refused(learner, tmp_path):
    path = saved(tmp_path, A2C())
    forged(path, **learner)
    with pytest.raises(ConfigurationError):
        A2C.load_from_checkpoint(path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "none.ckpt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ConfigurationError, match="this is no checkpoint, or half of one"):
        A2C.load_from_checkpoint(tmp_path / "none.ckpt")


class WithTarget(A2C):
    """Keeps a second policy that trails its own, as off-policy methods do."""

    def configure_model(self):
        super().configure_model()
        if not hasattr(self, "target"):
            self.target = copy.deepcopy(self.policy).requires_grad_(False)


@pytest.mark.parametrize("normalized", [False, True])
def test_has_what_a_subclass_builds_with_its_policy(normalized, tmp_path):
    trained = WithTarget()
    saving = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    data = cartpole(3, normalize_observation=normalized)
    watched_fit(trained, data, callbacks=[saving], enable_checkpointing=True)
    state = torch.get_rng_state()
    learner = WithTarget.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(flat(learner.target), flat(trained.target))
    assert not torch.equal(flat(learner.target), flat(learner.policy))


def test_what_a_subclass_builds_with_its_policy_is_there_when_it_is_exported(tmp_path):
    path = saved(tmp_path, WithTarget())
    trainer = HTSTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    file = tmp_path / "policy.safetensors"
    trainer.export(WithTarget(), cartpole(), ckpt_path=str(path), output=str(file))
    assert file.is_file()


class Fixes(A2C):
    """A learner with a discount of its own."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, gamma=0.5, **settings)


class Lacks(Fixes):
    lacks = ("gamma",)


def test_a_setting_that_a_subclass_fixes_is_to_be_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'gamma': a .* Fixes fixes .* class's lacks"):
        Fixes.load_from_checkpoint(saved(tmp_path, Fixes()))
    assert Lacks.load_from_checkpoint(saved(tmp_path / "lacks", Lacks())).gamma == 0.5


class Saving(A2C):
    """A learner whose author saves all hyperparameters."""

    def __init__(self, policy=None, *, helper=None, **settings):
        super().__init__(policy, **settings)
        self.save_hyperparameters()
        self.helper = helper


@pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`")
def test_a_policy_that_a_subclass_saves_as_a_hyperparameter_is_in_no_checkpoint(tmp_path):
    spec = cartpole().env_spec
    trained = Saving(make_actor_critic("mlp", spec))
    path = saved(tmp_path, trained)
    learner = Saving.load_from_checkpoint(path, policy=make_actor_critic("mlp", spec))
    assert torch.equal(flat(learner.policy), flat(trained.policy))
    resumed = watched_fit(Saving(make_actor_critic("mlp", spec)), cartpole(3), path)
    assert resumed.updates == [2]


@pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`")
def test_a_module_that_is_an_argument_is_to_be_given_again(tmp_path):
    trained = Saving(helper=nn.Linear(1, 1))
    path = saved(tmp_path, trained)
    with pytest.raises(ConfigurationError, match=r"its helper was .* <Linear>.* helper=\.\.\.\)"):
        Saving.load_from_checkpoint(path)
    learner = Saving.load_from_checkpoint(path, helper=nn.Linear(1, 1))
    assert torch.equal(learner.helper.weight, trained.helper.weight)


def test_another_object_there_is_told(tmp_path):
    path = saved(tmp_path, Saving(helper=Path("there")))
    with pytest.raises(ConfigurationError, match=r"its helper was .*Path>.* helper=\.\.\.\)"):
        Saving.load_from_checkpoint(path)
    assert Saving.load_from_checkpoint(path, helper=Path("there")).helper == Path("there")


def test_an_object_that_a_callback_saves_is_told(tmp_path):
    path = saved(tmp_path, A2C())
    torch.save({**torch.load(path, weights_only=True), "mine": Path("there")}, path)
    with pytest.raises(ConfigurationError, match=r"objects beside tensors .* ignore=\[\.\.\.\]"):
        A2C.load_from_checkpoint(path)


class Building(PPO):
    """PPO that makes its policy itself, for a spec that it is given."""

    lacks = ("policy",)

    def __init__(self, spec, **settings):
        super().__init__(make_actor_critic("mlp", spec), **settings)


class Named(HTSDataModule):
    """A data module that keeps its factory as a hyperparameter."""

    def __init__(self, env, **settings):
        super().__init__(env, **settings)
        self.save_hyperparameters()


@pytest.mark.parametrize("make_logger", [CSVLogger, TensorBoardLogger])
def test_a_learner_that_is_given_a_spec_is_logged_resumed_and_restored(make_logger, tmp_path):
    def fit(rounds, ckpt_path=None):
        torch.manual_seed(0)
        env = GymEnvs("CartPole-v1")
        data = Named(env, num_envs=4, num_actors=0, frames_per_batch=32, total_frames=rounds * 32)
        learner = Building(data.env_spec, epochs=2, minibatches=2, learning_rate=0.01)
        trainer = quiet_trainer(logger=make_logger(tmp_path), log_every_n_steps=1)
        trainer.fit(learner, data, ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        told = yaml.safe_load(Path(trainer.log_dir, "hparams.yaml").read_text())
        return learner, data.env_spec, told

    half, spec, told = fit(2)
    assert told["spec"]["class_path"] == "EnvSpec"
    assert told["env"]["init_args"]["id"] == "CartPole-v1"
    whole, resumed = fit(4)[0], fit(4, tmp_path / "2.ckpt")[0]
    assert torch.equal(flat(whole.policy), flat(resumed.policy))
    with pytest.raises(ConfigurationError, match=r"its spec was an object, <EnvSpec>.* spec=\.\."):
        Building.load_from_checkpoint(tmp_path / "2.ckpt")
    again = Building.load_from_checkpoint(tmp_path / "2.ckpt", spec=spec)
    assert torch.equal(flat(again.policy), flat(half.policy))
    assert (again.learning_rate, again.epochs) == (0.01, 2)


class Partly(A2C):
    """A learner that leaves what is trained elsewhere out of its checkpoints."""

    strict_loading = False

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.elsewhere = nn.Linear(1, 1).requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if not k.startswith("elsewhere")}


def test_weights_may_be_missing_where_loading_is_not_strict(tmp_path):
    trained = Partly()
    path = saved(tmp_path, trained)
    assert not any("elsewhere" in name for name in torch.load(path)["state_dict"])
    assert torch.equal(flat(Partly.load_from_checkpoint(path).policy), flat(trained.policy))
    assert watched_fit(Partly(), cartpole(3), path).updates == [2]


class Extended(A2C):
    """A learner that got another module after its checkpoint was written."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.added = nn.Linear(1, 1)


class Loosely(Extended):
    strict_loading = False


@pytest.mark.parametrize("kind", [Extended, Loosely])
def test_a_checkpoint_without_a_later_module_is_loaded_only_if_that_is_not_strict(kind, tmp_path):
    trained = kind()
    path = saved(tmp_path, trained)
    content = torch.load(path)
    content["state_dict"] = {k: v for k, v in content["state_dict"].items() if "added" not in k}
    torch.save(content, path)
    if kind is Extended:
        with pytest.raises(ConfigurationError, match=r"another network: it has no added\.bias$"):
            kind.load_from_checkpoint(path)
    else:
        assert torch.equal(flat(kind.load_from_checkpoint(path).policy), flat(trained.policy))


@pytest.mark.parametrize(
    ("name", "weight", "told"),
    [
        ("added.bias", torch.zeros(3), r"its added.bias has shape \(3,\), but \(1,\) is needed"),
        ("added.left", torch.zeros(1), "it has added.left, which this one does not have"),
    ],
)
def test_how_the_network_of_a_checkpoint_differs_is_told(name, weight, told, tmp_path):
    path = saved(tmp_path, Extended())
    content = torch.load(path)
    content["state_dict"][name] = weight
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match=f"of another network: {told}$"):
        Extended.load_from_checkpoint(path, strict=True)


def lazy_policy():
    actor = categorical_actor(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2)))
    critic = ValueOperator(nn.LazyLinear(1))
    return ProbabilisticTensorDictSequential(critic, *actor.module)


def test_a_lazy_layer_takes_the_shapes_of_the_checkpoint(tmp_path):
    trained = A2C(lazy_policy())
    path = saved(tmp_path, trained)
    restored = A2C.load_from_checkpoint(path, policy=lazy_policy())
    assert torch.equal(flat(restored.policy), flat(trained.policy))
    rows = torch.randn(3, 4)
    assert torch.equal(restored(rows), trained(rows))
    content = torch.load(path)
    del content["state_dict"]["policy.module.0.module.bias"]
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match=r"it has no policy\.module\.0\.module\.bias$"):
        A2C.load_from_checkpoint(path, policy=lazy_policy())


def test_strict_says_for_one_call_whether_weights_may_be_missing(tmp_path):
    trained = Extended()
    path = saved(tmp_path, trained)
    content = torch.load(path)
    del content["state_dict"]["added.bias"]
    content["state_dict"]["removed"] = torch.zeros(1)
    torch.save(content, path)
    with pytest.warns(UserWarning, match=r"lacks \['added\.bias'\], and has \['removed'\]"):
        loaded = Extended.load_from_checkpoint(path, strict=False)
    assert torch.equal(flat(loaded.policy), flat(trained.policy))
    assert loaded.strict_loading
    for kind in (Extended, Loosely):
        with pytest.raises(ConfigurationError, match="another network"):
            kind.load_from_checkpoint(path, strict=True)


def test_is_another_learner_than_one_that_is_asked_for_it(tmp_path):
    with pytest.raises(TypeError, match=r"`A2C\.load_from_checkpoint` cannot be called on an inst"):
        A2C().load_from_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("name", "told"), [("", "Is a directory"), ("missing.ckpt", "No such file or directory")]
)
def test_a_path_of_no_file_is_refused_as_such(tmp_path, name, told):
    with pytest.raises(ConfigurationError, match=f": {told}$"):
        PPO.load_from_checkpoint(tmp_path / name)
