import pickle

import pytest

from hts_torchrl.errors import (
    ConfigurationError,
    ProtocolError,
    WorkerError,
    WorkerPlace,
    reason_of,
)

EXECUTOR = WorkerPlace("executor", 3, (6, 7), 12, 4)


def test_a_mistake_in_settings_is_a_value_error():
    assert issubclass(ConfigurationError, ValueError)


def test_a_mistake_in_the_order_of_calls_is_a_runtime_error():
    assert issubclass(ProtocolError, RuntimeError)


def test_the_place_of_an_executor_names_environments_round_and_step():
    assert str(EXECUTOR) == "executor 3 (environments [6, 7]), round 12, step 4"


def test_the_place_of_an_actor_names_its_round_only():
    assert str(WorkerPlace("actor", 1, (), 12, 0)) == "actor 1, round 12"


def test_a_worker_error_says_where_and_why():
    assert (
        str(WorkerError(EXECUTOR, "was killed by SIGKILL")) == f"{EXECUTOR}: was killed by SIGKILL"
    )


def test_a_worker_error_survives_pickling():
    copy = pickle.loads(pickle.dumps(WorkerError(EXECUTOR, "raised")))
    assert (copy.place, copy.cause, str(copy)) == (EXECUTOR, "raised", f"{EXECUTOR}: raised")


def refused_by_the_system(call):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - of any kind
        call()
    return caught.value


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    below = tmp_path / "runs" / "mine"
    error = refused_by_the_system((tmp_path / "runs").mkdir)
    assert reason_of(error, below) == f"a file is where a folder is needed: {tmp_path / 'runs'}"
    error = refused_by_the_system(below.mkdir)
    assert reason_of(error, str(below)) == "a file is where a folder is needed"


def test_the_path_that_the_caller_names_is_not_told_twice(tmp_path):
    error = refused_by_the_system((tmp_path / "none.yaml").read_bytes)
    assert reason_of(error, tmp_path / "none.yaml") == "No such file or directory"
    assert reason_of(error, tmp_path) == f"No such file or directory: {tmp_path / 'none.yaml'}"


def test_an_error_of_a_library_is_told_in_its_own_words():
    assert reason_of(OSError("no such codec"), "play.mp4") == "no such codec"
