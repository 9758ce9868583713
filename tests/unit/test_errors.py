import pickle

from hts_torchrl.errors import ConfigurationError, ProtocolError, WorkerError, WorkerPlace

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
