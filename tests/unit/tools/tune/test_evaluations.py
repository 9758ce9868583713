"""What is read from metrics that are still being written."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from hts_torchrl.tools.tune.evaluations import Evaluation, read_evaluations

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
