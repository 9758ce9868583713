import pytest

from tests.unit.compat.private_names import private_names_of


@pytest.mark.parametrize("error", [AttributeError("_gone"), ImportError("_gone")])
def test_a_changed_name_is_told_with_library_and_version(error):
    with (
        pytest.raises(pytest.fail.Exception, match=r"lightning \d+\.\d+.* private name .*_gone"),
        private_names_of("lightning"),
    ):
        raise error
