from rl_launch.session.directory.run_state import FILE_NAME, Best, RunState
from rl_launch.session.session import StatusFile


def test_status_of_an_earlier_session_is_continued(tmp_path):
    first = StatusFile(tmp_path)
    first.open(goals={"max_num_steps": 4}, step=0)
    first.expect(4)
    first.advance(2, Best("train/loss", 0.5, 1), 2)
    first.write("interrupted", "SIGTERM")
    second = StatusFile(tmp_path)
    second.open(goals={"max_num_steps": 6}, step=2)
    second.write("running")
    state = RunState.read(tmp_path)
    assert (state.status, state.reason, state.step, state.max_steps) == ("running", "", 2, 4)
    assert (state.goals, state.best, state.saved) == ({"max_num_steps": 6}, Best("train/loss", 0.5, 1), 2)


def test_status_in_a_folder_that_is_gone_is_reported(tmp_path, caplog):
    StatusFile(tmp_path / "gone").write("running")
    assert f"{tmp_path / 'gone' / FILE_NAME} was not written" in caplog.text
