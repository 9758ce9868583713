import envpool

from tests.unit.compat.private_names import private_names_of


def test_the_native_football_engine_plays():
    with private_names_of("envpool") as compat:
        config = envpool.make_spec("gfootball/academy_empty_goal-v1").config
        engine = compat.football_engine(config.base_path, 10)
        engine.reset("academy_empty_goal", 1, 3, 400)
        engine.action(5, True, 0)
        engine.step()
        assert len(engine.get_info()["ball_position"]) == 3


def test_an_error_that_is_kept_holds_no_frames(monkeypatch):
    with private_names_of("envpool") as compat:
        try:
            raise ImportError("no Qt")
        except ImportError as error:
            kept = error
        monkeypatch.setattr("envpool.procgen._PROCGEN_IMPORT_ERROR", kept)
        compat.let_go_of_import_error()
        assert kept.__traceback__ is None
