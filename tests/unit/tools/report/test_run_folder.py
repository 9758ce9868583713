"""What is read from a run's folder."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.report.run_folder import Run, read_runs, run_folders


def training(*rows):
    """Rows of training: minutes, mean return, share in which the learner waited."""
    return [
        {
            "train/frames": 10 * place,
            "train/minutes": minutes,
            "episode/return": mean,
            "wait/learner": share,
        }
        for place, (minutes, mean, share) in enumerate(rows, start=1)
    ]


class TestRun:
    def test_has_settings_and_every_evaluation(self, write_run):
        run = Run.read(write_run("a", [1.5, 4.0, 2.0], seed=7))
        assert (run.name, run.seed, run.environment) == ("mine", 7, "GymEnvs(CartPole-v1)")
        assert run.settings["model.init_args.clip"] == 0.1
        assert run.evaluations["score"].tolist() == [1.5, 4.0, 2.0]
        assert run.evaluations["frames"].tolist() == [100, 200, 300]
        assert run.evaluations["minutes"].tolist() == [1, 2, 3]
        assert run.score == 2.0

    def test_has_the_training_returns(self, write_run):
        run = Run.read(write_run("a", [1.0], rows=training((0.1, 20, 0.5), (0.2, 30, 0.5))))
        assert run.training["score"].tolist() == [20, 30]
        assert run.training["frames"].tolist() == [10, 20]

    def test_takes_a_figure_in_single_precision_for_the_one_that_was_meant(self, write_run):
        run = Run.read(write_run("a", [float(np.float32(193.4))]))
        assert run.score == 193.4

    def test_takes_frames_as_they_are_logged_however_many(self, write_run):
        rows = [{"train/frames": 80_000_016, "train/minutes": 1.0, "episode/return": 20.0}]
        run = Run.read(write_run("a", [1.0], rows=rows))
        assert run.training["frames"].tolist() == [80_000_016]

    def test_weighs_waiting_by_time(self, write_run):
        rows = training((1, 0, 0.9), (2, 0, 0.2), (5, 0, 0.6))
        run = Run.read(write_run("a", [1.0], rows=rows))
        assert run.waiting["learner"] == pytest.approx((0.2 * 1 + 0.6 * 3) / 4)
        assert math.isnan(run.waiting["actors"])

    def test_takes_waiting_that_was_logged_once(self, write_run):
        run = Run.read(write_run("a", [1.0], rows=training((1, 0, 0.9))))
        assert run.waiting["learner"] == 0.9

    @pytest.mark.parametrize(("total_frames", "early"), [(349, False), (350, True), ("1e6", False)])
    def test_ended_early_if_a_round_is_missing(self, write_run, total_frames, early):
        folder = write_run("a", [1, 2, 3])
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"]["total_frames"] = total_frames
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        assert Run.read(folder).ended_early is early

    @pytest.mark.parametrize("metrics", [None, "", "train/frames,eval/score\n100,\n", "a,b\n1,2\n"])
    def test_is_refused_without_a_finished_evaluation(self, write_run, metrics):
        folder = write_run("a", [1.0])
        (folder / "metrics.csv").unlink()
        if metrics is not None:
            (folder / "metrics.csv").write_text(metrics)
        with pytest.raises(ConfigurationError, match="a: this run has no finished evaluation"):
            Run.read(folder)

    @pytest.mark.parametrize("cut", [1, 3, 9])
    def test_leaves_out_a_line_that_was_cut_off(self, cut, write_run):
        folder = write_run("a", [1.5, 487.25])
        text = (folder / "metrics.csv").read_text()
        assert text.endswith("487.25\n")
        (folder / "metrics.csv").write_text(text[:-cut])
        assert Run.read(folder).evaluations["score"].tolist() == [1.5]

    @pytest.mark.parametrize("config", ["[1, 2]", "name: mine", "a: [", "!!python/tuple [1]"])
    def test_is_refused_with_a_config_of_something_else(self, write_run, config):
        folder = write_run("a", [1.0])
        (folder / "config.yaml").write_text(config)
        with pytest.raises(ConfigurationError, match=r"config\.yaml"):
            Run.read(folder)

    def test_is_refused_with_metrics_that_are_no_table(self, write_run):
        folder = write_run("a", [1.0])
        (folder / "metrics.csv").write_text("a\n1,2\n1,2,3\n")
        with pytest.raises(ConfigurationError, match=r"metrics\.csv"):
            Run.read(folder)


class TestReadRuns:
    def test_leave_out_one_without_an_evaluation_below_a_folder(self, write_run, tmp_path):
        first, second = write_run("all/a", [1.0]), write_run("all/b", [])
        runs, left_out = read_runs([tmp_path / "all"])
        assert [run.folder for run in runs] == [first]
        assert left_out == {second: "has no finished evaluation"}

    def test_leave_out_one_whose_last_score_is_none(self, write_run, tmp_path):
        first = write_run("all/a", [1.0, math.nan, 3.0])
        second = write_run("all/b", [1.0, 2.0, math.nan])
        runs, left_out = read_runs([tmp_path / "all"])
        assert [run.folder for run in runs] == [first]
        assert left_out == {second: "has NaN as its last score"}
        with pytest.raises(ConfigurationError, match="b: this run has NaN as its last score"):
            read_runs([second])

    def test_name_the_logger_that_a_run_without_metrics_needs(self, write_run, tmp_path):
        first, second = write_run("all/a", [1.0]), write_run("all/b", [1.0])
        (second / "metrics.csv").unlink()
        needed = "has no finished evaluation (no metrics.csv, which CSVLogger writes)"
        assert read_runs([tmp_path / "all"])[1] == {second: needed}
        (first / "metrics.csv").unlink()
        with pytest.raises(ConfigurationError, match=r"a has no .* \(no metrics\.csv, which CSVLo"):
            read_runs([tmp_path / "all"])

    def test_refuse_one_that_is_named_itself(self, write_run, tmp_path):
        write_run("all/a", [1.0])
        second = write_run("all/b", [])
        for paths in ([second], [tmp_path / "all", second]):
            with pytest.raises(ConfigurationError, match="b: this run has no finished"):
                read_runs(paths)

    def test_refuse_a_folder_whose_runs_all_have_none(self, write_run, tmp_path):
        write_run("all/a", [])
        with pytest.raises(ConfigurationError, match="all: no run there has a last score"):
            read_runs([tmp_path / "all"])

    @pytest.mark.parametrize(
        "config",
        [
            *("name: mine", "wandb_version: 1", "a: [", "", "seed_everything: 1\nverbose: true"),
            *("began: 2026-02-30", "[" * 3000),
        ],
    )
    def test_leave_out_a_config_of_something_else(self, config, write_run, tmp_path):
        first, second = write_run("all/a", [1.0]), write_run("all/b", [1.0])
        (second / "config.yaml").write_text(config)
        runs, left_out = read_runs([tmp_path / "all"])
        assert [run.folder for run in runs] == [first]
        assert left_out == {second: "is no run of fit"}
        with pytest.raises(ConfigurationError, match=r"b/config\.yaml"):
            read_runs([tmp_path / "all", second])


class TestRunFolders:
    def test_are_those_named_and_those_below_others_each_once(self, write_run, tmp_path):
        runs = [write_run(f"all/{name}", [1.0]) for name in ("a/version_0", "a/version_1", "b")]
        assert run_folders([runs[2], tmp_path / "all"]) == [runs[2], runs[0], runs[1]]

    def test_are_found_through_links_and_once_where_links_go_round(self, write_run, tmp_path):
        runs = [write_run(name, [1.0]) for name in ("mine/a", "elsewhere/b")]
        (tmp_path / "mine" / "linked").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "mine" / "round").symlink_to(tmp_path / "mine")
        (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "mine")
        found = run_folders([tmp_path / "mine"])
        assert sorted(folder.resolve() for folder in found) == sorted(runs)

    def test_a_folder_without_a_run_is_refused(self, tmp_path):
        (tmp_path / "circle").symlink_to("circle")
        for path in (tmp_path, tmp_path / "missing", tmp_path / "circle", Path(__file__)):
            with pytest.raises(ConfigurationError, match=f"^{path}: no run of fit is there"):
                read_runs([path])
