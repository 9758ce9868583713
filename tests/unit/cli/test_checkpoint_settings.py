"""What a checkpoint may tell the command line, and what it may not do."""

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import pytest
import torch
import yaml

from hts_torchrl import A2C as A2CLearner
from hts_torchrl import EnvFactory, EnvPoolEnvs, GymEnvs
from hts_torchrl.cli.checkpoint_settings import CheckpointSettings
from hts_torchrl.errors import ConfigurationError
from tests.command_line import A2C, CARTPOLE, Valued, refused, run

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with settings that are no defaults."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--model.learning_rate=0.125", "--trainer.gradient_clip_val=0.25"]
    with contextlib.chdir(folder):
        run("fit", *CARTPOLE, *A2C, *flags, "--seed_everything=7")
    return folder / "runs" / "run" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.fixture
def forged(trained, tmp_path):
    """Writes the checkpoint as a stranger could have, and returns the flag that names it."""

    def forge(learner=None, data=None, trainer=None, env=None, portable=False, **rest):
        content = torch.load(trained, weights_only=True)
        content["learner"].update(learner or {})
        settings = content["HTSDataModule"]["settings"]
        settings["data"].update(data or {})
        settings["data"]["env"].update(env or {})
        settings["trainer"].update(trainer or {})
        settings["portable"] = portable
        content.update(rest)
        torch.save(content, tmp_path / "stranger.ckpt")
        return "--ckpt_path=stranger.ckpt"

    return forge


def test_an_optimiser_and_its_arguments_are_those_of_the_checkpoint(forged, made):
    arguments = {"weight_decay": 0.5, "betas": [0.5, 0.75]}
    path = forged(learner={"init_args": {"optimizer": "AdamW", "optimizer_kwargs": arguments}})
    line = made("validate", path, *QUIET)
    assert (line.model.optimizer_name, line.model.optimizer_kwargs) == ("AdamW", arguments)


@pytest.mark.parametrize("portable", [True, False])
def test_kernels_are_those_of_the_checkpoint(portable, forged, tmp_path):
    forged(portable=portable)
    assert CheckpointSettings.read(tmp_path / "stranger.ckpt").config["portable"] is portable


@pytest.mark.parametrize("value", ["'two  blanks'", "'two\nlines'", f"'{'x' * 1000}'"])
def test_a_value_is_proposed_as_it_is_or_not_at_all(value):
    refusal = CheckpointSettings({}, {"model.note": value}).refusal("model.note")
    assert str(refusal).endswith("names it: add --config with the config.yaml of its run")


class TestPrecedence:
    def test_the_checkpoints_settings_come_before_the_defaults(self, trained, made):
        line = made("validate", f"--ckpt_path={trained}", *QUIET)
        assert line.model.learning_rate == 0.125
        assert line.datamodule.env.id == "CartPole-v1"
        assert (line.datamodule.schedule.num_envs, line.datamodule.seed) == (4, 7)
        assert line.trainer.gradient_clip_val == 0.25

    def test_the_users_config_comes_before_the_checkpoints_and_flags_before_that(
        self, trained, made, tmp_path
    ):
        config = tmp_path / "mine.yaml"
        data = {"evaluation_episodes": 3, "num_actors": 0}
        config.write_text(yaml.safe_dump({"data": data, "seed_everything": 9}))
        command = ["validate", f"--ckpt_path={trained}", f"--config={config}", *QUIET]
        line = made(*command, "--data.evaluation_episodes=5", "--model.gamma=0.5")
        assert (line.datamodule.evaluation_episodes, line.datamodule.seed) == (5, 9)
        assert (line.model.gamma, line.model.learning_rate) == (0.5, 0.125)
        assert made(*command).datamodule.evaluation_episodes == 3

    def test_a_config_may_name_the_checkpoint(self, trained, made, tmp_path):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"ckpt_path": str(trained)}))
        assert made("validate", "--config=mine.yaml", *QUIET).model.learning_rate == 0.125

    def test_a_config_above_the_checkpoint_is_not_read(self, trained, made):
        beside = trained.parent.parent / "config.yaml"
        before = beside.read_text()
        try:
            beside.write_text("model: tests.none.Such\ndata: {evaluation_episodes: 99}\n")
            line = made("validate", f"--ckpt_path={trained}", *QUIET)
        finally:
            beside.write_text(before)
        assert line.datamodule.evaluation_episodes == 2


class Penalised(A2CLearner):
    """A learner of the user's own."""

    def __init__(
        self, policy=None, *, weight: float = 0.5, of: str = "gradient", **settings: Any
    ) -> None:
        super().__init__(policy, **settings)
        self.weight = weight
        self.of = of


OWN = f"{__name__}.{Penalised.__name__}"
OF_THE_USER = {
    "class_path": OWN,
    "init_args": {"weight": 0.75, "of": "gradient", "learning_rate": 0.125, "network": "mlp"},
}


class TestALearnerOfTheUsersOwn:
    def test_has_the_checkpoints_settings_once_the_command_names_it(self, forged, made):
        line = made("validate", forged(learner=OF_THE_USER), f"--model={OWN}", *QUIET)
        assert (line.model.weight, line.model.learning_rate) == (0.75, 0.125)

    @pytest.mark.parametrize(
        "config", [{"model": OWN}, {"model": {"class_path": OWN}}, {"model.class_path": OWN}]
    )
    def test_has_them_where_a_config_file_names_it(self, config, forged, made, tmp_path):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
        line = made("validate", forged(learner=OF_THE_USER), "--config=mine.yaml", *QUIET)
        assert (line.model.weight, line.model.learning_rate) == (0.75, 0.125)

    def test_has_those_of_the_command_before_them(self, forged, made):
        path = forged(learner=OF_THE_USER)
        line = made("validate", path, f"--model={OWN}", "--model.weight=2", *QUIET)
        assert (line.model.weight, line.model.learning_rate) == (2.0, 0.125)

    def test_is_not_mixed_up_with_another(self, forged, made):
        path = forged(learner=OF_THE_USER)
        assert made("validate", path, "--model=A2C", *QUIET).model.learning_rate != 0.125

    def test_takes_no_word_that_may_name_code(self, forged, capsys):
        path = forged(learner={"class_path": OWN, "init_args": {"of": "this.s"}})
        message = refused(capsys, "validate", path, f"--model={OWN}", *QUIET)
        assert message.startswith("the checkpoint's model.of is this.s, which is imported only if")


class Rule(Enum):
    """How a learner of the user's own adds up."""

    MEAN = 1
    SUM = 2


@dataclass(frozen=True)
class Shape:
    """Of such a learner's further network."""

    width: int = 8


class Choosing(A2CLearner):
    """A learner with settings of many types."""

    def __init__(
        self,
        policy=None,
        *,
        weight: float,
        rule: Rule = Rule.MEAN,
        shape: Shape = Shape(),
        sizes: tuple[int, ...] = (1,),
        **settings: Any,
    ) -> None:
        super().__init__(policy, **settings)
        self.chosen = (weight, rule, shape, sizes)


CHOOSING = f"{__name__}.{Choosing.__name__}"


class TestSettingsOfAnyType:
    @staticmethod
    def path(forged, **arguments):
        plain = {"weight": 0.5, "rule": "MEAN", "shape": {"width": 8}, "sizes": [1], **arguments}
        return forged(learner={"class_path": CHOOSING, "init_args": plain})

    def test_are_the_checkpoints_where_they_are_numbers_or_defaults(self, forged, made):
        path = self.path(forged, sizes=[2, 5])
        line = made("validate", path, f"--model={CHOOSING}", *QUIET)
        assert line.model.chosen == (0.5, Rule.MEAN, Shape(8), (2, 5))

    @pytest.mark.parametrize(
        ("given", "flag"),
        [
            ({"rule": "SUM"}, "--model.rule=SUM"),
            ({"shape": {"width": 3}}, """--model.shape='{"width": 3}'"""),
        ],
    )
    def test_are_to_be_named_otherwise(self, given, flag, forged, made, capsys):
        path = self.path(forged, **given)
        message = refused(capsys, "validate", path, f"--model={CHOOSING}", *QUIET)
        assert f"names it: add {flag} (or " in message
        named = shlex.split(flag)
        line = made("validate", path, f"--model={CHOOSING}", *named, *QUIET)
        rule, width = given.get("rule", "MEAN"), given.get("shape", {}).get("width", 8)
        assert line.model.chosen == (0.5, Rule[rule], Shape(width), (1,))

    def test_may_be_those_of_a_config_file(self, forged, made, tmp_path):
        path = self.path(forged, rule="SUM", shape={"width": 3})
        arguments = {"rule": "SUM", "shape": {"width": 3}}
        config = {"model": {"class_path": CHOOSING, "init_args": arguments}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
        line = made("validate", path, "--config=mine.yaml", *QUIET)
        assert line.model.chosen == (0.5, Rule.SUM, Shape(3), (1,))


class Tempered(Valued):
    """A policy of the user's own with a setting that no weight shows."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature


class TestArgumentsOfAPolicy:
    NAMED: ClassVar = f"--model.policy={__name__}.{Tempered.__name__}"
    WARM: ClassVar = "--model.policy.temperature=3.0"

    @pytest.fixture
    def path(self, forged):
        name = self.NAMED.partition("=")[2]
        return forged(learner={"policy": name, "policy_arguments": {"temperature": 3.0}})

    @pytest.mark.parametrize("named", [[], [NAMED]])
    def test_are_to_be_named_with_it(self, named, path, made, capsys):
        message = refused(capsys, "validate", path, *named, *QUIET)
        assert f"names it: add {self.NAMED} {self.WARM} (or " in message
        assert made("validate", path, self.NAMED, self.WARM, *QUIET).model.policy.temperature == 3.0

    def test_may_be_others_where_the_command_says_so(self, path, made):
        given = [self.NAMED, "--model.policy.temperature=1.0"]
        assert made("validate", path, *given, *QUIET).model.policy.temperature == 1.0

    def test_may_not_be_others_where_a_run_goes_on(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, self.NAMED, self.WARM)
        path = "--ckpt_path=runs/run/version_0/checkpoints/last.ckpt"
        given = [self.NAMED, "--model.policy.temperature=1.5", "--data.total_frames=128"]
        message = refused(capsys, "fit", path, *given)
        assert "model.policy.temperature=1.5, the checkpoint has 3.0: bits depend on" in message


@dataclass(frozen=True)
class Tables(EnvFactory):
    """Environments of the user's own."""

    length: int = 50
    kind: str = "round"

    def group(self, indices, *, render=False):
        made = GymEnvs("CartPole-v1", {"max_episode_steps": self.length})
        return made.group(indices, render=render)


class TestEnvironmentsOfTheUsersOwn:
    TABLES: ClassVar = f"{__name__}.{Tables.__name__}"

    def test_have_the_checkpoints_numbers_once_the_command_names_them(self, forged, made):
        path = forged(env={"class_path": self.TABLES, "init_args": {"length": 9, "kind": "round"}})
        line = made("validate", path, f"--data.env={self.TABLES}", *QUIET)
        assert line.datamodule.env == Tables(9)
        line = made("validate", path, f"--data.env={self.TABLES}", "--data.env.length=7", *QUIET)
        assert line.datamodule.env == Tables(7)

    def test_need_the_name_of_what_may_name_code(self, forged, made, capsys):
        path = forged(env={"class_path": self.TABLES, "init_args": {"length": 9, "kind": "this.s"}})
        message = refused(capsys, "validate", path, f"--data.env={self.TABLES}", *QUIET)
        assert message.startswith("the checkpoint's data.env.kind is this.s, which is imported")
        line = made("validate", path, f"--data.env={self.TABLES}", "--data.env.kind=this.s", *QUIET)
        assert line.datamodule.env == Tables(9, "this.s")


class TestArgumentsOfAnEnvironmentThatIsImported:
    ENV: ClassVar = {"init_args": {"id": "tests.fakes:Any-v0", "kwargs": {"rew": 5.0}}}
    NAMED: ClassVar = ["--data.env=GymEnvs", "--data.env.id=tests.fakes:Any-v0"]

    def test_are_in_the_command_that_is_proposed(self, forged, capsys):
        message = refused(capsys, "validate", forged(env=self.ENV), *QUIET)
        assert """--data.env.id=tests.fakes:Any-v0 --data.env.kwargs='{"rew": 5.0}'""" in message

    def test_are_proposed_whole_or_not_at_all(self, forged, capsys):
        few = {f"argument_{number}": number for number in range(20)}
        many = {f"argument_{number}": number for number in range(100)}
        proposed = []
        for kwargs in (few, many):
            path = forged(env={"init_args": {**self.ENV["init_args"], "kwargs": kwargs}})
            proposed.append(refused(capsys, "play", path, *QUIET).partition(" names it: add ")[2])
        flags = shlex.split(proposed[0].partition(" (or ")[0])
        assert json.loads(flags[-1].removeprefix("--data.env.kwargs=")) == few
        assert proposed[1] == "--config with the config.yaml of its run"

    @pytest.mark.parametrize("subcommand", ["validate", "play", "export"])
    def test_are_not_dropped_without_a_word(self, subcommand, forged, capsys):
        message = refused(capsys, subcommand, forged(env=self.ENV), *self.NAMED, *QUIET)
        assert message.startswith("""the checkpoint's data.env.kwargs is '{"rew": 5.0}', which""")
        assert """add --data.env.kwargs='{"rew": 5.0}'""" in message

    @pytest.mark.parametrize(
        "flags",
        [
            [*NAMED, "--data.env.kwargs={rew: 7}"],
            ["--data.env=GymEnvs", "--data.env.id=Pendulum-v1"],
        ],
    )
    def test_are_those_of_the_command_where_it_names_some(self, flags, forged, made):
        given = made("validate", forged(env=self.ENV), *flags, *QUIET).datamodule.env.kwargs
        assert given == ({"rew": 7} if len(flags) > 2 else {})


CODE = ["builtins.print", "sys.exit", "os.system", "tests.command_line.Valued"]


@pytest.fixture
def nothing_imported():
    """Fails the test if a module was imported that only a checkpoint names."""
    sys.modules.pop("this", None)
    yield
    assert not {"this", "evilmodule"} & set(sys.modules)


@pytest.mark.usefixtures("nothing_imported")
class TestAStrangersCheckpoint:
    @pytest.mark.parametrize(
        ("subcommand", "network"),
        [(subcommand, "this.s") for subcommand in ("validate", "play", "export", "fit")]
        + [("play", name) for name in CODE],
    )
    def test_names_no_network(self, subcommand, network, forged, capsys):
        path = forged(
            learner={"init_args": {"network": network}},
            hyper_parameters={"network": network, "_class_path": network},
        )
        message = refused(capsys, subcommand, path, *QUIET)
        assert message == (
            f"the checkpoint's model.network is {network}, which is imported only if your command "
            f"names it: add --model.network={network} (or --config with the config.yaml of its run)"
        )

    @pytest.mark.parametrize("setting", ["model", "data.env", "model.policy", "model.optimizer"])
    def test_names_no_class(self, setting, forged, capsys):
        forgery = {
            "model": {"learner": {"class_path": "this.s"}},
            "data.env": {"env": {"class_path": "this.s"}},
            "model.policy": {"learner": {"policy": "this.s"}},
            "model.optimizer": {"learner": {"init_args": {"optimizer": "this.s"}}},
        }
        message = refused(capsys, "play", forged(**forgery[setting]), *QUIET)
        assert message.startswith(f"the checkpoint's {setting} is this.s, which is imported only")
        assert f"--{setting}=this.s" in message

    @pytest.mark.parametrize(
        ("setting", "forgery"),
        [
            ("model", {"learner": {"class_path": "this.s; ls"}}),
            ("model.network", {"learner": {"init_args": {"network": "this.s; ls"}}}),
            ("model.optimizer", {"learner": {"init_args": {"optimizer": "this.s; ls"}}}),
            ("model.policy", {"learner": {"policy": "this.s; ls"}}),
            ("model.policy", {"learner": {"policy": "this.s", "policy_arguments": {"; ls": 1}}}),
            ("data.env", {"env": {"class_path": "this.s; ls"}}),
            ("data.env", {"env": {"init_args": {"id": "evilmodule:Env-v0; ls"}}}),
        ],
    )
    def test_proposes_no_further_command(self, setting, forgery, forged, capsys):
        message = refused(capsys, "play", forged(**forgery), *QUIET)
        proposed = message.partition(": add ")[2].partition(" (or ")[0]
        assert proposed.startswith(f"--{setting}=")
        assert "; ls" in proposed
        assert ";" not in shlex.shlex(proposed, posix=True, punctuation_chars=True)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"id": "evilmodule:Env-v0", "kwargs": {}},
            {"id": "CartPole-v1", "kwargs": {"entry_point": "this:s"}},
            {"id": "CartPole-v1", "kwargs": {"wrapper": {"class_path": "this.s"}}},
            {"id": "CartPole-v1", "kwargs": {"wrappers": ["this.s"]}},
            {"id": "CartPole-v1", "imports": ["evilmodule"]},
        ],
    )
    def test_names_no_module_of_an_environment(self, arguments, forged, capsys):
        message = refused(capsys, "play", forged(env={"init_args": arguments}), *QUIET)
        assert message.startswith("the checkpoint's data.env is GymEnvs --data.env.id=")
        assert "which is imported only if your command names it" in message

    def test_imports_no_game_of_several_agents(self, forged, capsys):
        env = {"class_path": "PettingZooEnvs", "init_args": {"id": "evilmodule:game"}}
        message = refused(capsys, "play", forged(env=env), *QUIET)
        assert "PettingZooEnvs --data.env.id=evilmodule:game, which is imported only" in message

    def test_runs_no_program_of_an_environment(self, forged, capsys):
        """VizDoom's engine is a program, whose path is an argument."""
        arguments = {"id": "D1Basic-v1", "kwargs": {"vzd_path": "this.s"}}
        env = {"class_path": "EnvPoolEnvs", "init_args": arguments}
        message = refused(capsys, "play", forged(env=env), *QUIET)
        assert message.startswith("the checkpoint's data.env is EnvPoolEnvs --data.env.id=D1Basic")


@pytest.mark.parametrize(
    ("forgery", "message"),
    [
        ({"learner": {"init_args": {"gamma": "0.5"}}}, "model.gamma='0.5': a value of another"),
        ({"learner": {"init_args": {"gamma": {"class_path": "this.s"}}}}, "model.gamma=a dict: "),
        ({"learner": {"init_args": {"squash": 1}}}, "model.squash=1: a value of another type"),
        ({"learner": {"init_args": {"network": ["this.s"]}}}, "model.network=a list: a value of"),
        ({"learner": {"init_args": {"optimizer": 3}}}, "model.optimizer=3: a value of another"),
        (
            {"learner": {"init_args": {"optimizer_kwargs": {"betas": ["${oc.env:HOME}", 0.9]}}}},
            "model.optimizer_kwargs=a dict: a value of another type",
        ),
        ({"learner": {"init_args": [1]}}, "model=a list: settings by name are needed"),
        ({"learner": {"class_path": ["A2C"]}}, "model has no name"),
        ({"env": {"class_path": None}}, "data.env has no name"),
        ({"env": {"init_args": {"id": 3}}}, "data.env.id=3: a value of another type"),
        ({"env": {"init_args": {"id": "${oc.env:HOME}"}}}, "data.env.id='${oc.env:HOME}': "),
        ({"env": {"init_args": {"id": "A-v0", "kwargs": [1]}}}, "data.env.kwargs=a list: a value"),
        ({"data": {"num_envs": True}}, "data.num_envs=True: a value of another type"),
        ({"data": {"timeout_s": "x" * 9999}}, "data.timeout_s='xxx"),
        ({"trainer": {"precision": 16}}, "trainer.precision=16: a value of another type"),
        ({"portable": "this.s"}, "portable: true or false is needed"),
        ({"HTSDataModule": {"settings": [1]}}, "settings of data and trainer are missing"),
        ({"HTSDataModule": {"settings": {"data": [], "trainer": {}}}}, "settings are a list"),
        ({"learner": {"init_args": {"gamma": None}}, "hyper_parameters": 3}, "model.gamma=None: a"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_in_one_short_line(forgery, message, forged, capsys):
    refusal = refused(capsys, "validate", forged(**forgery), *QUIET)
    assert refusal.startswith("--ckpt_path=stranger.ckpt: the checkpoint's ")
    assert message in refusal
    assert len(refusal) < 250


def test_a_learner_that_is_no_mapping_is_refused(trained, tmp_path):
    content = torch.load(trained, weights_only=True)
    torch.save(content | {"learner": [1]}, tmp_path / "list.ckpt")
    with pytest.raises(ConfigurationError, match="the checkpoint's settings are a list"):
        CheckpointSettings.read(tmp_path / "list.ckpt")


@pytest.mark.parametrize(
    "forgery",
    [
        {"learner": {"init_args": {"callbacks": "this.s", "policy": "this.s"}}},
        {"data": {"accept_changes": True}},
        {"data": {"backend": "ray", "backend_options": {"ray_init_config": {"address": "this"}}}},
        {"trainer": {"callbacks": ["this.s"], "logger": "this.s", "plugins": "this.s"}},
    ],
)
def test_a_field_that_no_checkpoint_may_give_is_left_out_with_a_warning(forgery, forged, made):
    path = forged(**forgery)
    with pytest.warns(UserWarning, match="has a setting '.*it is left out"):
        line = made("validate", path, *QUIET)
    assert line.model.policy is None
    assert not line.datamodule.accept_changes
    assert line.datamodule.pool.backend is None
    assert not {"this"} & {type(each).__module__ for each in line.trainer.callbacks}


def test_environments_of_envpool_need_not_be_named_again(forged, made):
    env = {"class_path": "EnvPoolEnvs", "init_args": {"id": "CartPole-v1", "kwargs": {}}}
    assert made("validate", forged(env=env), *QUIET).datamodule.env == EnvPoolEnvs("CartPole-v1")


def test_modules_of_environments_are_named_by_the_checkpoint_and_imported_by_the_command(
    forged, made, capsys
):
    path = forged(env={"init_args": {"id": "CartPole-v1", "imports": ["tests.fakes"]}})
    message = refused(capsys, "play", path, *QUIET)
    assert """--data.env.id=CartPole-v1 --data.env.imports='["tests.fakes"]'""" in message
    named = ["--data.env=GymEnvs", "--data.env.id=CartPole-v1", "--data.env.imports=[tests.fakes]"]
    assert made("validate", path, *named, *QUIET).datamodule.env.imports == ["tests.fakes"]


def test_what_the_command_names_is_imported(forged, made):
    path = forged(learner={"policy": "tests.command_line.Valued"})
    line = made("validate", path, "--model.policy=tests.command_line.Valued", *QUIET)
    assert type(line.model.policy).__name__ == "Valued"
    path = forged(learner={"init_args": {"optimizer": "torch.optim.SGD"}})
    line = made("validate", path, "--model.optimizer=torch.optim.SGD", *QUIET)
    assert line.model.optimizer_name == "torch.optim.SGD"
    env = forged(env={"init_args": {"id": "gymnasium:CartPole-v1", "kwargs": {}}})
    named = ["--data.env=GymEnvs", "--data.env.id=gymnasium:CartPole-v1"]
    assert made("validate", env, *named, *QUIET).datamodule.env.id == "gymnasium:CartPole-v1"
