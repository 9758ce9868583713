"""What a study file says, and what is refused."""

import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.tune.study_file import Choices, Objective, Range, StudyFile, flags


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "study.yaml"
        path.write_text(text)
        return StudyFile.read(path)

    return read


def test_has_ranges_and_choices_in_their_order(read):
    study = read(
        "space:\n"
        "  model.learning_rate: {low: 1e-4, high: 1.0e-2, log: true}\n"
        "  model.epochs: [2, 4]\n"
        "  data.num_envs: {low: 4, high: 16, step: 4}\n"
        "  --model.network: [mlp, null, [1, 2]]\n"
    )
    assert list(study.space.items()) == [
        ("model.learning_rate", Range(1e-4, 1e-2, log=True)),
        ("model.epochs", Choices((2, 4))),
        ("data.num_envs", Range(4, 16, step=4)),
        ("model.network", Choices(("mlp", None, "[1, 2]"))),
    ]
    assert study.seeds == (1,)
    assert study.objective == Objective()


def test_examples_have_both_ends_and_every_choice(read):
    examples = read("space: {a: {low: 1, high: 3}, b: [x, y, z]}").examples()
    assert examples == [{"a": 1, "b": "x"}, {"a": 3, "b": "y"}, {"a": 3, "b": "z"}]


def test_flags_are_what_the_parser_takes_for_the_values():
    values = {"a": 1e-05, "b": True, "c": None, "d": "mlp", "e": "[1, 2]"}
    assert flags(values) == ["--a=1e-05", "--b=true", "--c=null", "--d=mlp", "--e=[1, 2]"]


@pytest.mark.parametrize(
    ("text", "objective", "direction"),
    [
        ("eval/score", Objective("score"), "maximize"),
        ("score", Objective("score"), "maximize"),
        ("{frames_to: 475}", Objective("frames_to", 475), "minimize"),
        ("{minutes_to: 20.5}", Objective("minutes_to", 20.5), "minimize"),
    ],
)
def test_the_objective_gives_the_direction(text, objective, direction, read):
    study = read(f"space: {{a: [1]}}\nobjective: {text}")
    assert study.objective == objective
    assert study.objective.direction == direction


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "it is a list; names with values are needed"),
        ("spaces: {a: [1]}", "spaces is none of space, objective,"),
        ("seeds: [1]", "space={}; a flag of fit is needed"),
        ("space: {seed_everything: [1]}", "space.seed_everything: a study cannot search"),
        ("space: {trainer.logger.name: [a]}", "space.trainer.logger.name: a study cannot"),
        ("space: {a: 1}", "space.a is a int; names with values are needed"),
        ("space: {a: []}", r"space.a=\[\]; different values"),
        ("space: {a: [1, 1]}", r"space.a=\[1, 1\]; different values"),
        ("space: {a: [1, true]}", r"space.a=\[1, True\]; different values .1, 1.0 and true"),
        ("space: {a: [0.0, 0]}", r"space.a=\[0.0, 0\]; different values"),
        ("space: {a: {low: 1}}", "space.a has low; low and high are needed"),
        ("space: {a: {low: 1, high: 2, logs: 1}}", "space.a has low, high, logs;"),
        ("space: {a: {low: x, high: 2}}", "space.a.low=x; a number"),
        ("space: {a: {low: null, high: 2}}", "space.a.low=None; a number"),
        ("space: {a: {low: .inf, high: 2}}", "space.a.low=inf; a number"),
        (f"space: {{a: {{low: 1{400 * '0'}, high: 2}}}}", "space.a.low=10+; a number"),
        ("space: {a: {low: 2, high: 2}}", "space.a.high=2; more than low=2"),
        ("space: {a: {low: 0, high: 2, log: true}}", "space.a.low=0; with log, more than 0"),
        ("space: {a: {low: 1, high: 2, log: 3}}", "space.a.log=3; true or false"),
        ("space: {a: {low: 1, high: 2, step: 0.5}}", "space.a.step=0.5; a whole number"),
        ("space: {a: {low: 1, high: 9, step: 2, log: true}}", "space.a.step=2; with log, none"),
        (
            "space: {a: {low: 1, high: 4, step: 2}}",
            "space.a.step=2; a divisor of high - low = 3",
        ),
        (
            "space: {a: {low: 0.1, high: 0.5, step: 0.3}}",
            "space.a.step=0.3; a divisor of high - low",
        ),
        ("space: {a: [1]}\nobjective: best", "objective=best; score, frames_to: SCORE"),
        ("space: {a: [1]}\nobjective: {frames_to: x}", "objective.frames_to=x; a number"),
        ("space: {a: [1]}\nseeds: [1, 1]", r"seeds=\[1, 1\]; a list of different"),
        ("space: {a: [1]}\nseeds: 1", "seeds=1; a list of different"),
        ("space: {a: [1]}\nseeds: [4294967296]", r"different whole numbers, 0 to 4294967295, is"),
        ("space: {a: [1]}\npruner: mean", "pruner=mean; median or hyperband or none"),
        ("space: {a: [1]}\nstartup_trials: -1", "startup_trials=-1; a whole number, 0 or more"),
        ("space: {a: [2026-01-31]}", "space.a has 2026-01-31, a date; put quotes around it"),
        ("space: {a: [2026-99-99]}", "month must be in 1..12"),
        ("space: {a: [1], b: [2], a: [3]}", "it has a twice"),
        ("space: {", "while parsing"),
        ("space: {a: [2026-02-30]}", "day is out of range for month"),
        ("space: {a: [!!bool maybe]}", "a value is none of the type that its tag"),
        ("space: {a: [!!int '']}", "a value is none of the type that its tag"),
        ("space: {a: [!!timestamp x]}", "a value is none of the type that its tag"),
        (f"space: {'[' * 3000}{']' * 3000}", "it nests too deeply"),
    ],
)
def test_what_is_wrong_is_named(text, message, read):
    with pytest.raises(ConfigurationError, match=rf"study\.yaml: .*{message}"):
        read(text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--study=.*none\.yaml: No such file"):
        StudyFile.read(tmp_path / "none.yaml")
