"""``tune`` with a ``fit`` that only writes evaluations; tests/integration/test_tune.py trains."""

import contextlib
import csv
import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import yaml

from hts_torchrl.cli import fit_commands
from tests.command_line import A2C, CARTPOLE, refused, run

FIT = """
import json, os, signal, sys, time
given = dict(each[2:].split("=", 1) for each in sys.argv[1:] if "=" in each)
rate, seed = float(given["model.learning_rate"]), int(given["seed_everything"])
place = json.loads(given["trainer.logger"])[1]["init_args"]
folder = os.path.join(place["save_dir"], place["name"], place["version"])
os.makedirs(folder, exist_ok=True)
print("arguments:", *sys.argv[1:])
if given.get("model.unroll") == "3":
    sys.exit("hts-torchrl: error: unroll=3 does not divide")
if given.get("model.unroll") == "5":
    sys.exit("hts-torchrl: error: last.ckpt: No space left on device")
with open(os.path.join(folder, "metrics.csv"), "w") as file:
    print("eval/frames,eval/minutes,eval/score", file=file)
    for place in range(1, 4):
        print(32 * place, 0.5 * place, 1000 * rate * place + seed, sep=",", file=file, flush=True)
        if os.path.exists("slow"):
            time.sleep(60)
if os.path.exists("cut"):
    os.remove("cut")
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
"""
SPACE = "model.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}"
FITTED = [*CARTPOLE, *A2C, "--data.evaluation_frames=32"]


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Writes a study file, runs a study by the false ``fit``, and returns the rows of its table."""
    monkeypatch.setattr(fit_commands, "_COMMAND", [sys.executable, "-S", "-c", FIT])
    monkeypatch.setattr(fit_commands, "_LOOK_EVERY_S", 0.02)

    def tune(*more, trials=3, study=f"space: {{{SPACE}}}", output="study", status=0):
        Path("study.yaml").write_text(study)
        arguments = ["--study=study.yaml", f"--trials={trials}", f"--output={output}"]
        ends = pytest.raises(SystemExit) if status else contextlib.nullcontext()
        with ends as left:
            run("tune", *arguments, *FITTED, *more)
        assert (left.value.code if left else 0) == status
        with (tmp_path / os.path.expandvars(output) / "trials.csv").open() as file:
            return list(csv.DictReader(file))

    return tune


def values(rows):
    return [(row["state"], row["value"], row["model.learning_rate"]) for row in rows]


@pytest.mark.processes
class TestTrials:
    def test_is_fit_for_each_seed_in_a_folder_of_its_own(self, tune, tmp_path, capsys):
        [row] = tune(trials=1, study=f"space: {{{SPACE}}}\nseeds: [3, 5]")
        rate = float(row["model.learning_rate"])
        assert float(row["score"]) == pytest.approx(3000 * rate + 4, rel=1e-5)
        assert (row["frames"], row["minutes"]) == ("192", "3")
        for seed in (3, 5):
            log = (tmp_path / "study" / "trial_0" / f"seed_{seed}.log").read_text()
            assert log.startswith(
                f"arguments: fit {' '.join(FITTED)} --model.learning_rate={rate} "
            )
            assert f"--seed_everything={seed} " in log
            # That of the user's flags: with one behind it Lightning refuses a bar of the user's.
            assert log.count("--trainer.enable_progress_bar") == 1
        told = capsys.readouterr().out.splitlines()
        assert told[0].startswith("trial 0:        score ")
        assert told[1].startswith("best:           trial 0, score ")
        assert told[2:] == [
            "best config:    study/best.yaml",
            "trials:         study/trials.csv",
        ]

    def test_tells_its_flags_as_a_shell_takes_them(self, tune, capsys):
        tune(trials=1, study=f"space: {{{SPACE}, model.optimizer_kwargs: [{{eps: 0.5}}]}}")
        *_, flag = shlex.split(capsys.readouterr().out.splitlines()[0])
        assert flag == '--model.optimizer_kwargs={"eps": 0.5}'

    def test_the_best_config_has_its_values_and_its_first_seed(self, tune, tmp_path):
        rows = tune(study=f"space: {{{SPACE}}}\nseeds: [3]")
        best = max(rows, key=lambda row: float(row["score"]))
        config = yaml.safe_load((tmp_path / "study" / "best.yaml").read_text())
        rate = config["model"]["init_args"]["learning_rate"]
        assert rate == float(best["model.learning_rate"])
        assert config["seed_everything"] == 3
        assert config["trainer"]["logger"] is None

    def test_a_variable_in_the_folder_is_expanded_for_all_that_is_written(
        self, tune, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("PLACE", "there")
        [row] = tune(trials=1, output="$PLACE/study")
        assert row["state"] == "complete"
        log = (tmp_path / "there" / "study" / "trial_0" / "seed_1.log").read_text()
        assert log.count('"save_dir": "there/study"') == 2

    def test_one_that_fails_is_recorded_with_its_reason_and_the_study_goes_on(self, tune):
        rows = tune(study=f"space: {{{SPACE}, model.unroll: [3, 4]}}", trials=5)
        assert len(rows) == 5
        assert {row["model.unroll"]: (row["state"], row["reason"]) for row in rows} == {
            "3": ("failed", "unroll=3 does not divide"),
            "4": ("complete", ""),
        }

    def test_one_that_a_full_disk_has_failed_has_no_outcome(self, tune):
        study = f"space: {{{SPACE}, model.unroll: [5]}}"
        with pytest.raises(OSError, match="No space left") as full:
            tune(study=study, trials=1)
        assert full.value.filename == "study/trial_0"
        fit_commands._COMMAND[-1] = FIT.replace('== "5"', '== "6"')
        rows = tune(study=study, trials=1)
        assert [row["state"] for row in rows] == ["cut off", "complete"]

    def test_a_study_without_a_complete_one_ends_with_status_1(self, tune, tmp_path, capsys):
        tune(study=f"space: {{{SPACE}, model.unroll: [3]}}", trials=1, status=1)
        assert "best:           no trial is complete" in capsys.readouterr().out
        assert not (tmp_path / "study" / "best.yaml").exists()

    def test_metrics_of_a_study_whose_journal_is_gone_are_not_read(self, tune):
        whole = tune(trials=1)
        Path("study/study.journal").unlink()
        left = Path("study/trial_0/seed_1/metrics.csv")
        left.write_text(f"{left.read_text()}128,2.0,999\n")
        slow_start = f"import time; time.sleep(0.2)\n{FIT}"
        fit_commands._COMMAND[-1] = slow_start
        assert tune(trials=1) == whole

    @pytest.mark.timeout(40)  # the false fit waits for longer than that
    def test_the_pruner_ends_a_fit_that_is_running(self, tune, tmp_path):
        study = f"space: {{{SPACE}}}\nstartup_trials: 2\nsampler: random\nseed: 3"
        first = tune(study=study, trials=2)
        assert {row["state"] for row in first} == {"complete"}
        (tmp_path / "slow").touch()
        *_, pruned = tune(study=study, trials=3)
        assert (pruned["state"], pruned["reason"]) == ("pruned", "by the pruner")
        assert pruned["frames"] == "32"

    def test_a_fit_ends_when_it_has_the_score(self, tune):
        study = f"space: {{{SPACE}}}\nobjective: {{frames_to: 10}}\nsampler: random"
        rows = tune(study=study, trials=6)
        for row in rows:
            scores = [1000 * float(row["model.learning_rate"]) * n + 1 for n in (1, 2, 3)]
            reached = [32 * (n + 1) for n, score in enumerate(scores) if score >= 10]
            assert row["state"] == ("complete" if reached else "pruned")
            assert row["value"] == (str(reached[0]) if reached else "")
        assert {row["state"] for row in rows} == {"complete", "pruned"}


@pytest.mark.processes
class TestGoingOn:
    STUDY = f"space: {{{SPACE}}}\nstartup_trials: 2\npruner: none"

    def test_the_same_study_has_the_same_table(self, tune):
        one, other = (tune(study=self.STUDY, trials=5, output=name) for name in ("one", "other"))
        assert one == other
        assert len({row["model.learning_rate"] for row in one}) == 5
        third = tune(study=f"{self.STUDY}\nseed: 1", trials=1, output="third")
        assert third[0]["model.learning_rate"] != one[0]["model.learning_rate"]

    def test_one_trial_at_a_time_gives_the_trials_of_one_command(self, tune):
        whole = tune(study=self.STUDY, trials=4, output="whole")
        for trials in (1, 2, 4):
            parts = tune(study=self.STUDY, trials=trials, output="parts")
        assert parts == whole
        assert tune(study=self.STUDY, trials=2, output="parts") == whole

    @pytest.mark.timeout(40)
    @pytest.mark.parametrize("after", [0, 3])
    def test_a_trial_that_was_cut_off_is_marked_and_repeated(self, after, tune, tmp_path, capsys):
        whole = tune(study=self.STUDY, trials=4, output="whole")
        if after:
            tune(study=self.STUDY, trials=after)
        (tmp_path / "cut").touch()
        status = 128 + signal.SIGTERM
        assert tune(study=self.STUDY, trials=4, status=status)[-1]["state"] == "cut off"
        assert capsys.readouterr().err.endswith(
            f"hts-torchrl: stopped after {after} of 4 trials; the same command continues\n"
        )
        rows = tune(study=self.STUDY, trials=4)
        assert [row["state"] for row in rows].index("cut off") == after
        assert rows[after]["model.learning_rate"] == rows[after + 1]["model.learning_rate"]
        assert values(rows[:after] + rows[after + 1 :]) == values(whole)

    def test_a_trial_of_a_killed_command_is_repeated_too(self, tune):
        whole = tune(study=self.STUDY, trials=3, output="whole")
        tune(study=self.STUDY, trials=1)
        backend = optuna.storages.journal.JournalFileBackend("study/study.journal")
        storage = optuna.storages.JournalStorage(backend)
        optuna.load_study(study_name=None, storage=storage).ask()  # and it is never told
        rows = tune(study=self.STUDY, trials=3)
        assert [row["state"] for row in rows] == ["complete", "cut off", "complete", "complete"]
        assert values([rows[0], *rows[2:]]) == values(whole)

    @pytest.mark.parametrize("cut", [1, 30])
    def test_a_line_of_the_journal_that_was_cut_off_is_left_out(self, cut, tune):
        whole = tune(study=self.STUDY, trials=3, output="whole")
        tune(study=self.STUDY, trials=2)
        journal = Path("study/study.journal")
        journal.write_bytes(journal.read_bytes()[:-cut])
        rows = tune(study=self.STUDY, trials=3)
        assert [row["state"] for row in rows] == ["complete", "cut off", "complete", "complete"]
        assert values([rows[0], *rows[2:]]) == values(whole)

    @pytest.mark.parametrize("content", ["rubbish\n", "{}\n"])
    def test_a_journal_of_something_else_is_refused(self, content, tune, capsys):
        tune(study=self.STUDY, trials=1)
        arguments = ["tune", "--study=study.yaml", "--trials=2", *FITTED]
        Path("study/study.journal").write_text(content)
        message = "--output=study: study.journal: this is no journal of Optuna's"
        assert refused(capsys, *arguments) == message

    @pytest.mark.parametrize(
        ("study", "more", "named"),
        [
            ("space: {model.learning_rate: [0.1]}", [], "study.space.model.learning_rate"),
            (f"{STUDY}\nseeds: [2]", [], "study.seeds"),
            (STUDY, ["--model.gamma=0.5"], "config.model.init_args.gamma"),
        ],
    )
    def test_another_study_is_refused(self, study, more, named, tune, capsys):
        tune(study=self.STUDY, trials=1)
        Path("study.yaml").write_text(study)
        message = refused(capsys, "tune", "--study=study.yaml", "--trials=2", *FITTED, *more)
        assert message.startswith(f"--output=study: the study there has another {named}")

    def test_a_folder_at_which_another_is_at_work_is_refused(self, tune, capsys):
        from hts_torchrl.tools.tune.study import locked  # noqa: PLC0415 - it imports optuna

        tune(study=self.STUDY, trials=1)
        arguments = ["tune", "--study=study.yaml", "--trials=2", *FITTED]
        told = "--output=study: another tune, or a fit that one has started, is at work there"
        with locked(Path("study")) as lock:
            assert refused(capsys, *arguments) == told
            sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
            left = subprocess.Popen(sleeps, pass_fds=[lock])
        try:  # a fit that outlives the command holds the lock
            assert refused(capsys, *arguments) == told
        finally:
            left.kill()
            left.wait()


@pytest.mark.processes
def test_a_system_that_starts_no_further_process_is_told(monkeypatch, capsys):
    def fork(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("hts_torchrl.cli.fit_commands.subprocess.Popen", fork)
    Path("study.yaml").write_text(f"space: {{{SPACE}}}")
    message = refused(capsys, "tune", "--study=study.yaml", "--trials=1", *FITTED)
    assert message.startswith("the limit on processes and threads is reached (ulimit -u is ")


class TestRefused:
    @pytest.mark.parametrize(
        ("study", "more", "message"),
        [
            (f"space: {{{SPACE}}}", ["--data.environments=4"], "environments"),
            ("space: {model.learning_rates: [0.1]}", [], "learning_rates"),
            (
                "space: {model.unroll: [5, 6, x]}",
                [],
                "(with --model.unroll=x, of --study=study.yaml)",
            ),
            ("space: {data.num_envs: {low: 0.5, high: 1.5}}", [], "num_envs"),
            ("space: {}", [], "--study=study.yaml: space={}; a flag of fit is needed"),
            (
                f"space: {{{SPACE}}}",
                ["--seed_everything=3"],
                "--seed_everything: the study file names the seeds",
            ),
            (
                f"space: {{{SPACE}}}",
                ["--trainer.logger.name=x"],
                "--trainer.logger: each trial logs into its own folder",
            ),
            (
                f"space: {{{SPACE}}}",
                ["--trainer.logger+=CSVLogger"],
                "--trainer.logger: each trial logs into its own folder",
            ),
            (
                f"space: {{{SPACE}}}",
                ["--print_config"],
                "--print_config: hts-torchrl fit prints configs",
            ),
            (f"space: {{{SPACE}}}", ["--trials=0"], "--trials=0; 1 or more is needed"),
            (f"space: {{{SPACE}}}", ["--trials=x"], "tune: argument --trials: invalid int value"),
        ],
    )
    def test_before_anything_is_trained(self, study, more, message, capsys, tmp_path):
        Path("study.yaml").write_text(study)
        arguments = ["--study=study.yaml", "--trials=2", "--output=made", *FITTED, *more]
        assert message in refused(capsys, "tune", *arguments)
        assert not (tmp_path / "made").exists()

    def test_without_its_own_arguments(self, capsys):
        assert "--study" in refused(capsys, "tune", *FITTED)

    def test_a_study_file_without_a_suffix_and_without_a_folder(self, capsys):
        Path("mine").write_text(f"space: {{{SPACE}}}")
        message = refused(capsys, "tune", "--study=mine", "--trials=2", *FITTED)
        assert message == "--study=mine: without a suffix .yaml it needs --output=FOLDER"

    def test_a_config_that_goes_on_from_a_checkpoint(self, capsys):
        Path("study.yaml").write_text(f"space: {{{SPACE}}}")
        Path("resumed.yaml").write_text("ckpt_path: a.ckpt")
        arguments = ["--study=study.yaml", "--trials=2", "--config=resumed.yaml", *FITTED]
        assert "ckpt_path" in refused(capsys, "tune", *arguments)

    def test_without_its_extra_by_the_line_that_installs_it(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "optuna", None)
        message = refused(capsys, "tune", "--study=study.yaml", "--trials=2")
        assert message.startswith("a study needs optuna: pip install 'hts-torchrl[tune]' (")


def test_help_of_the_command_lists_it(capsys):
    with pytest.raises(SystemExit) as left:
        run("--help")
    assert left.value.code == 0
    assert "torchrl tune` searches" in " ".join(capsys.readouterr().out.split())


@pytest.mark.processes
@pytest.mark.thorough  # it imports everything once more
def test_a_fit_ends_when_the_command_that_started_it_is_killed():
    ended = (
        "import os, signal, sys\n"
        "os.environ['HTS_TORCHRL_PARENT'] = sys.argv[1]\n"
        "from hts_torchrl.cli.fit_commands import end_with_parent\n"
        "end_with_parent()\n"
        "print('HTS_TORCHRL_PARENT' in os.environ, os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    starts = (
        "import os, signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())])\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts, ended], stdout=subprocess.PIPE, text=True
    ) as parent:
        left, process = parent.stdout.readline().split()
        assert left == "False"
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == ""  # its end closes the pipe
    assert int(process) > 0
