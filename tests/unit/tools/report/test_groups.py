"""Which runs are one sample."""

import pytest
import yaml

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


def test_a_resumed_run_takes_over_from_the_one_before_where_it_begins(write_run):
    def logged(*figures):
        """Rows of training: frames, minutes, share in which the learner waited."""
        names = ("train/frames", "train/minutes", "wait/learner")
        return [dict(zip(names, each, strict=True)) for each in figures]

    stopped = write_run(
        "a", [1, 2, 3], rows=logged((50, 0.5, 0.1), (150, 1.5, 0.2), (250, 9.0, 0.9))
    )
    rows = logged((100, 1.1, 0.3), (150, 1.4, 0.4), (250, 2.4, 0.6))  # the first within a round
    resumed = write_run("b", [20, 30], begin=1, rows=rows)
    (group,) = groups_of(resumed, stopped)
    (run,) = group.runs
    assert run.evaluations["score"].tolist() == [1, 20, 30]
    assert run.evaluations["frames"].tolist() == [100, 200, 300]
    assert run.waiting["learner"] == pytest.approx((0.3 * 0.6 + 0.4 * 0.3 + 0.6) / 1.9)
    assert (run.folder, run.earlier) == (resumed, (stopped,))


def test_a_run_is_resumed_more_than_once_and_seeds_are_kept_apart(write_run):
    folders = [
        write_run("a", [1, 2, 3]),
        write_run("b", [20, 30], begin=1),  # as did the next one, which went on for longer
        write_run("c", [21, 31, 41], begin=1),
        write_run("other", [5, 6, 7, 8], seed=2),
        write_run("d", [400], begin=3),
    ]
    for folder in folders:
        text = (folder / "config.yaml").read_text()
        text = text.replace("total_frames: 300", "total_frames: 400")
        (folder / "config.yaml").write_text(text)
    (group,) = groups_of(*folders)
    assert [run.evaluations["score"].tolist() for run in group.runs] == [
        [1, 21, 31, 400],
        [5, 6, 7, 8],
    ]
    assert group.runs[0].earlier == tuple(folders[:3])


@pytest.mark.parametrize(("rows", "groups"), [(4, 1), (2, 2)])
def test_a_run_that_its_checkpoint_resumed_has_the_settings_of_the_first(rows, groups, write_run):
    """The checkpoint has what counts, where the first run's config has null."""
    stopped, resumed = write_run("a", [1]), write_run("b", [2], begin=1)
    null = {"inference_batch_size": None, "compile_policy": None}
    written = {"inference_batch_size": rows, "compile_policy": False}
    for folder, data, trainer in (
        (stopped, null, {"precision": None, "gradient_clip_algorithm": None}),
        (resumed, written, {"precision": "32-true", "gradient_clip_algorithm": "norm"}),
    ):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"] |= {"num_envs": 4, "total_frames": 200, **data}
        config["trainer"] |= trainer
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = groups_of(stopped, resumed)
    assert len(found) == groups
    assert found[-1].runs[0].earlier == ((stopped,) if groups == 1 else ())


def test_one_that_accepted_other_settings_is_no_continuation(write_run):
    folders = [write_run("a", [1, 2]), write_run("b", [3], begin=1)]
    for folder in folders:
        text = (folder / "config.yaml").read_text()
        text = text.replace("data:\n", "data:\n  accept_changes: true\n")
        (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"a and .*b have the same name, .* seed 1"):
        groups_of(*folders)
