from hts_torchrl.buffers.keys import array_name


def test_a_name_is_its_own_array_name():
    assert array_name("observation") == "observation"


def test_a_path_is_joined_by_dots():
    assert array_name(("next", "agent", "vector")) == "next.agent.vector"
