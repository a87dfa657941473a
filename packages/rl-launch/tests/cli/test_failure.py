import pytest

from rl_launch.cli.failure import reported


def test_a_reader_that_has_enough_is_no_failure_to_report(capsys):
    with pytest.raises(BrokenPipeError), reported():
        raise BrokenPipeError
    assert capsys.readouterr() == ("", "")
