"""Which runs are one sample."""

import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.report.groups import grouped
from hts_torchrl.tools.report.run_folder import Run


def groups_of(*folders):
    return grouped([Run.read(folder) for folder in folders])


def test_seeds_of_the_same_settings_are_one_group(write_run):
    (group,) = groups_of(write_run("a", [1, 5], seed=2), write_run("b", [1, 3], seed=1))
    assert group.label == "mine"
    assert [run.seed for run in group.runs] == [1, 2]
    assert group.scores.tolist() == [3, 5]
    assert group.differing == {}


def test_groups_of_one_name_are_told_apart_by_the_settings_that_differ(write_run):
    folders = [write_run(f"{clip}", [1], clip=clip) for clip in (0.1, 0.2)]
    one, other = groups_of(*folders)
    assert [one.label, other.label] == ["mine, clip=0.1", "mine, clip=0.2"]
    assert other.differing == {"model.init_args.clip": 0.2}


def test_groups_with_many_differences_are_numbered(write_run):
    folders = [
        write_run("a", [1], clip=0.1),
        write_run("b", [1], clip=0.2, epochs=3, gamma=0.9),
    ]
    one, other = groups_of(*folders)
    assert [one.label, other.label] == ["mine #1", "mine #2"]
    assert one.differing == {
        "model.init_args.clip": 0.1,
        "model.init_args.epochs": None,
        "model.init_args.gamma": None,
    }


def test_a_setting_that_an_older_config_lacks_is_null(write_run):
    (group,) = groups_of(write_run("old", [1], seed=1), write_run("new", [1], seed=2, shape=None))
    assert group.label == "mine"
    assert group.differing == {}


def test_names_make_groups_of_the_same_settings(write_run):
    groups = groups_of(write_run("a", [1], name="before"), write_run("b", [1], name="after"))
    assert [group.label for group in groups] == ["before", "after"]


def test_groups_of_one_environment_are_together(write_run):
    pong = {"class_path": "AtariEnvs", "init_args": {"game": "pong"}}
    groups = groups_of(
        write_run("a", [1], name="a"),
        write_run("b", [1], name="b", env=pong),
        write_run("c", [1], name="c"),
    )
    assert [group.label for group in groups] == ["a", "c", "b"]
    assert groups[2].environment == "AtariEnvs(pong)"


def test_one_seed_twice_is_no_larger_sample(write_run):
    folders = [write_run("a", [1], seed=3), write_run("b", [2], seed=3)]
    with pytest.raises(ConfigurationError, match=r"a and .*b have the same name, .* seed 3"):
        groups_of(*folders)
