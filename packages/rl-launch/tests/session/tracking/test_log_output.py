"""Messages of a run on a terminal, in a pipe and in a notebook."""

import io
import logging
import warnings

import pytest
from rich.console import Console

from rl_launch.run_session.tracking import log_output
from rl_launch.run_session.tracking.log_output import logged_to, show_logs


@pytest.fixture
def shown(monkeypatch):
    """Shows the logs on a console; returns what its file holds after a message and a warning."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def on(console):
        monkeypatch.setattr(log_output, "shared_console", lambda: console)
        show_logs()
        logging.getLogger("rl_launch.test").info("step 1/3")
        logging.getLogger("rl_launch.test").warning("a replica died")
        return console.file.getvalue()

    yield on
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_pipe_gets_plain_lines_that_name_warnings(shown):
    lines = shown(Console(file=io.StringIO(), force_terminal=False)).splitlines()
    assert lines[0].endswith(" step 1/3")
    assert lines[1].startswith("warning: ")


def test_a_notebook_gets_ordinary_output_of_the_cell(shown, capsys):
    errors = shown(Console(file=io.StringIO(), force_jupyter=True, force_terminal=False))
    assert errors == ""
    assert "step 1/3\n" in capsys.readouterr().out


def test_libraries_do_not_ask_for_widgets(shown):
    console = Console(file=io.StringIO(), force_terminal=False)
    with warnings.catch_warnings():
        shown(console)
        warnings.warn("IProgress not found. Please update jupyter and ipywidgets.", stacklevel=1)
        logging.getLogger("ray.widgets.util").warning("Missing packages: ['ipywidgets']")
        warnings.warn("something else", stacklevel=1)
    assert "something else" in console.file.getvalue()
    assert "widgets" not in console.file.getvalue()


def test_the_drivers_log_starts_over_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_launch.run_session.tracking.log_output.MAX_LOG_BYTES", 500)
    with logged_to(tmp_path / "driver.log"):
        for number in range(40):
            logging.getLogger("rl_launch.test").warning("message %d", number)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["driver.log", "driver.log.1"]
    assert all(path.stat().st_size <= 500 for path in files)
    assert files[0].read_text().endswith("message 39\n")
