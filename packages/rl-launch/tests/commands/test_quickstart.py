import signal

import pytest
from rich.console import Console

from rl_launch.commands import quickstart
from rl_launch.commands.quickstart import Quickstart
from rl_launch.commands.train import Outcome


def test_a_stage_that_a_signal_ended_is_followed_by_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(quickstart, "train", lambda config, **_: Outcome({}, signal.SIGTERM))
    stages = Quickstart(tmp_path, Console(), ())
    with pytest.raises(SystemExit) as ended:
        stages.fine_tune(stages.make_model())
    assert ended.value.code == 128 + signal.SIGTERM
    assert "SIGTERM ended the run before its last step" in caplog.text
