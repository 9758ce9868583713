"""Which evaluations of a trial are reported, when it ends, and what it is worth."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from hts_torchrl.tools.tune.study_file import Objective
from hts_torchrl.tools.tune.trial import Budget, Evaluation, TrialWatch, read_evaluations


class FakeTrial:
    """Notes what is reported, and is to be pruned from a step on."""

    def __init__(self, prunes_at=None):
        self.reported = {}
        self._prunes_at = prunes_at

    def report(self, value, step):
        assert step not in self.reported
        self.reported[step] = value

    def should_prune(self):
        return self._prunes_at is not None and max(self.reported) >= self._prunes_at


def curve(*scores, every=100):
    return [
        Evaluation(score, place * every, float(place))
        for place, score in enumerate(scores, start=1)
    ]


def watched(*curves, objective=Objective(), prunes_at=None, budget=Budget(300, 100)):  # noqa: B008
    """The watch and trial after curves of seeds, each seen whole or up to its end."""
    trial = FakeTrial(prunes_at)
    watch = TrialWatch(trial, objective, budget)
    for each in curves:
        watch.begin_seed()
        for length in range(len(each) + 1):
            if watch.look(each[:length]):
                break
        if not watch.goes_on:
            break
    return watch, trial


def test_the_score_is_the_mean_of_the_last_ones():
    watch, _ = watched(curve(1, 9, 4), curve(2, 3, 8))
    outcome = watch.outcome()
    assert (outcome.state, outcome.value, outcome.score) == ("complete", 6, 6)
    assert (outcome.frames, outcome.minutes) == (600, 6.0)


def test_steps_go_on_with_the_next_seed_and_values_are_means_of_the_seeds_so_far():
    _, trial = watched(curve(1, 9, 4), curve(2, 3, 8))
    assert trial.reported == {100: 1, 200: 9, 300: 4, 400: 3, 500: 3.5, 600: 6}


def test_rounds_of_other_lengths_have_the_same_steps():
    budget = Budget(300, 100)
    assert [budget.step(0, frames) for frames in (96, 104, 208, 10)] == [100, 100, 200, 100]
    assert budget.step(1, 96) == 400
    assert Budget(300, None).step(0, 96) == 96


def test_two_evaluations_of_one_step_are_reported_once():
    _, trial = watched(curve(1, 2, 3, every=40))
    assert trial.reported == {100: 1}


@pytest.mark.parametrize("at_once", [True, False])
def test_what_comes_after_the_pruning_is_not_looked_at(at_once):
    trial = FakeTrial(prunes_at=200)
    watch = TrialWatch(trial, Objective(), Budget(300, 100))
    watch.begin_seed()
    for length in [3] if at_once else [1, 2, 3]:
        enough = watch.look(curve(5, 1, 9)[:length])
    assert enough
    assert not watch.goes_on
    outcome = watch.outcome()
    assert (outcome.state, outcome.value, outcome.score) == ("pruned", None, 1)
    assert trial.reported == {100: 5, 200: 1}
    assert outcome.frames == 200


@pytest.mark.parametrize(("aim", "value"), [("frames_to", 250), ("minutes_to", 2.5)])
def test_a_seed_ends_with_the_target_and_its_time_counts(aim, value):
    watch, trial = watched(curve(1, 5, 9), curve(1, 4, 6), objective=Objective(aim, 5))
    outcome = watch.outcome()
    assert (outcome.state, outcome.value) == ("complete", value)
    assert trial.reported == {100: -1, 200: -5, 400: -3, 500: -4.5, 600: -5.5}


def test_a_seed_that_misses_the_target_ends_the_trial():
    objective = Objective("frames_to", 8)
    watch, _ = watched(curve(1, 2, 3), curve(9), objective=objective)
    outcome = watch.outcome()
    assert (outcome.state, outcome.reason) == ("pruned", "without a score of 8")
    assert outcome.frames == 300


def test_a_score_that_is_no_number_is_a_failure():
    watch, _ = watched(curve(1, float("nan")))
    assert watch.outcome().state == "failed"


def test_a_seed_without_an_evaluation_has_seen_none():
    watch = TrialWatch(FakeTrial(), Objective(), Budget(300, 100))
    watch.begin_seed()
    assert not watch.look([])
    assert not watch.has_seen


HEAD = "eval/frames,eval/minutes,eval/score,step\n"


def test_a_run_that_has_logged_nothing_has_none(tmp_path):
    assert read_evaluations(tmp_path / "metrics.csv") == []
    (tmp_path / "metrics.csv").write_text("")
    assert read_evaluations(tmp_path / "metrics.csv") == []


@pytest.mark.parametrize("half", ["200.0,0.2,47", "200.0,0.2,47.5,", "200.0,0.2", "2"])
def test_a_line_counts_when_it_is_whole(half, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEAD}100.0,0.1,12.5,7\n,,,8\n{half}")
    assert read_evaluations(path) == [Evaluation(12.5, 100, 0.1)]


def test_of_two_after_the_same_frames_the_first_counts(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEAD}100,0.1,1,7\n100,0.2,2,7\n200,0.3,3,8\n")
    assert [each.score for each in read_evaluations(path)] == [1, 3]


def test_frames_are_those_that_are_logged_however_many(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEAD}80000016.0,0.1,1,7\n")
    assert [each.frames for each in read_evaluations(path)] == [80_000_016]


def test_each_is_there_as_soon_as_lightning_has_saved_it(tmp_path):
    logger = CSVLogger(tmp_path, name="a", version="b")
    path = tmp_path / "a" / "b" / "metrics.csv"
    for place in range(3):
        logger.log_metrics({f"train/{place}": 1.0}, step=place)  # a new column
        figures = {"eval/score": 0.8999999761581421, "eval/frames": 10.0 * place}
        logger.log_metrics({**figures, "eval/minutes": 0.5}, step=place)
        logger.save()
        assert len(read_evaluations(path)) == place + 1
    assert read_evaluations(path)[-1] == Evaluation(0.9, 20, 0.5)
