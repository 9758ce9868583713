"""Settings that all learners share are declared once, and seen in each of them."""

import inspect
from typing import Any

import pytest
from torch import nn
from torch.optim import Adam

from hts_torchrl import A2C, PPO, PQN, Impala, Learner
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.run_settings import known_arguments

SHARED = {
    "policy",
    "network",
    "squash",
    "optimizer",
    "optimizer_kwargs",
    "learning_rate",
    "learning_rate_decay",
    "epsilon",
    "gamma",
    "value_coef",
    "entropy_coef",
    "normalize_value",
    "num_threads",
    "gradient_chunks",
}
OWN = {
    A2C: {"gae_lambda", "unroll", "delayed_step", "cudagraph_loss"},
    PPO: {"gae_lambda", "unroll", "epochs", "minibatches", "clip", "clip_value", "delayed_step"},
    Impala: {"rho_clip", "c_clip"},
    PQN: {
        *("q_lambda", "epochs", "minibatches"),
        *("exploration_initial_eps", "exploration_final_eps", "exploration_fraction"),
    },
}
LACKED = {PQN: {"squash", "value_coef", "entropy_coef"}}
ALL = {learner: (SHARED | own) - LACKED.get(learner, set()) for learner, own in OWN.items()}


class Tempered(PPO):
    """PPO of a user.

    Args:
        temperature: of the policy.
    """

    def __init__(self, policy: Any = None, *, temperature: float = 1.0, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.temperature = temperature


class Distilled(PPO):
    """PPO with an argument that must be given."""

    def __init__(self, teacher: Any, policy: Any = None, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.teacher = teacher


class Closed(A2C):
    """A2C of a user who lets nothing be set."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__(learning_rate=speed)


def test_an_argument_that_must_be_given_comes_before_those_with_defaults():
    names = list(inspect.signature(Distilled).parameters)
    assert names[:2] == ["teacher", "policy"]
    assert set(names) == ALL[PPO] | {"teacher"}


def test_ppo_decouples_unless_it_is_told_otherwise():
    assert PPO().delayed_step == "decoupled"


@pytest.mark.parametrize("learner", OWN)
class TestALearner:
    def test_has_all_settings_in_its_signature(self, learner):
        assert set(inspect.signature(learner).parameters) == ALL[learner]

    def test_has_a_text_for_each_of_them(self, learner):
        for name in SHARED | OWN[learner]:
            count = learner.__doc__.count(f"\n    {name}: ")
            assert count == (name in ALL[learner])

    def test_keeps_all_but_the_policy_as_hyperparameters(self, learner):
        assert set(learner(gamma=0.5).hparams) == ALL[learner] - {"policy"}

    def test_refuses_another_by_name(self, learner):
        with pytest.raises(TypeError, match="'learning_rat'"):
            learner(learning_rat=0.5)

    def test_takes_from_a_file_what_it_has_itself(self, learner):
        with pytest.warns(UserWarning, match=rf"has a setting 'other' .*that {learner.__name__} "):
            known = known_arguments(
                learner, {"gamma": 0.5, "other": 1}, "model", besides=("policy",)
            )
        assert known == {"gamma": 0.5}
        with pytest.raises(ConfigurationError, match=r"model\.gamma='x'"):
            known_arguments(learner, {"gamma": "x"}, "model")


@pytest.mark.parametrize(
    ("learner", "rate"), [(A2C, 7e-4), (PPO, 2.5e-4), (PQN, 2.5e-4), (Impala, 6e-4)]
)
def test_a_default_of_its_own_counts_more_than_the_shared_one(learner, rate):
    assert inspect.signature(learner).parameters["learning_rate"].default == rate
    assert learner().hparams["learning_rate"] == rate


def test_a_users_learner_shows_the_settings_of_all_its_bases():
    assert set(inspect.signature(Tempered).parameters) == SHARED | OWN[PPO] | {"temperature"}
    assert "\n    temperature: of the policy.\n" in f"{Tempered.__doc__}\n"
    assert "\n    clip: bound on" in Tempered.__doc__
    assert dict(Tempered(temperature=0.5, clip=0.2).hparams)["temperature"] == 0.5


class Discounting(PQN):
    """PQN with a discount of its own."""

    lacks = ("gamma",)

    def __init__(self, policy: Any = None, **settings: Any) -> None:
        super().__init__(policy, gamma=0.5, **settings)


def test_what_a_users_learner_fixes_is_added_to_what_its_base_lacks():
    assert Discounting().gamma == 0.5
    assert set(inspect.signature(Discounting).parameters) == ALL[PQN] - {"gamma"}
    assert set(Discounting().hparams) == ALL[PQN] - {"gamma", "policy"}
    with pytest.raises(ConfigurationError, match="squash=True: PQN has no such setting"):
        Discounting(squash=True)


def test_a_users_docstring_may_be_indented_further_and_have_sections_after_its_arguments():
    class Sectioned(Tempered):
        """Another.

        Args:
                speed: of the policy,
                    in no unit.

        Note:
            Of no use.
        """

        def __init__(self, policy: Any = None, *, speed: float = 1.0, **settings: Any) -> None:
            super().__init__(policy, **settings)
            self.speed = speed

    end = "\n    speed: of the policy,\n        in no unit.\n\nNote:\n    Of no use."
    assert Sectioned.__doc__.endswith(f"\n    temperature: of the policy.{end}")


def test_a_users_learner_that_passes_none_on_shows_its_own_alone():
    assert list(inspect.signature(Closed).parameters) == ["speed"]
    assert Closed(0.5).learning_rate == 0.5


def test_the_base_class_shows_the_shared_ones():
    assert set(inspect.signature(Learner).parameters) == SHARED


@pytest.mark.parametrize(
    ("learner", "settings", "told"),
    [
        (PPO, {"gamma": "x"}, "gamma='x'; a number"),
        (PPO, {"clip": None}, "clip=None; a number"),
        (PPO, {"clip_value": "no"}, "clip_value='no'; True or False"),
        (A2C, {"learning_rate": [1e-3]}, "learning_rate of type list; a number"),
        (A2C, {"unroll": "5"}, "unroll='5'; a whole number"),
        (PPO, {"epochs": 2.0}, "epochs=2.0; 2 is needed"),
        (PPO, {"policy": "MlpPolicy"}, r"policy of type str \(network=... names one .*; a module"),
        (PQN, {"policy": "MlpPolicy"}, r"policy of type str \(network=... names one .*; a module"),
        (PPO, {"network": nn.Linear(4, 2)}, "network of type Linear; a name, such as mlp"),
        (A2C, {"optimizer": Adam}, "optimizer of type type; a name, such as adam"),
        (A2C, {"optimizer_kwargs": 3}, "optimizer_kwargs of type int; a dict"),
        (PQN, {"minibatches": 2.5}, r"minibatches=2\.5; a whole number"),
        (Impala, {"rho_clip": "1"}, "rho_clip='1'; a number"),
        (Impala, {"squash": "false"}, "squash='false'; True or False"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(learner, settings, told):
    with pytest.raises(ConfigurationError, match=told):
        learner(**settings)


class NoneByDefault(A2C):
    def __init__(self, policy=None, *, target: "float" = None, **settings):  # noqa: RUF013
        super().__init__(policy, **settings)
        self.target = target


def test_a_default_of_a_users_learner_need_not_be_of_the_type_beside_it():
    assert NoneByDefault().hparams["target"] is None
    with pytest.raises(ConfigurationError, match="target='x'; a number"):
        NoneByDefault(target="x")
