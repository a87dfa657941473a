import os
import shutil
import stat
import sys
import tempfile

import psutil
import pytest

from rl_core.config import Config
from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.engine_checks import engine_problems, has_passed, keep_passed, kept_check_processes


class Root(Config):
    optimizer: str = "torch.optim.Adm"


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    """A package that only the worker's process can import."""
    (tmp_path / "some_engine.py").write_text(
        "import sys\n"
        "def check(config):\n"
        "    print('loading kernels')\n"
        "    return [] if config['optimizer'] == 'known' else [config['optimizer'] + ' is unknown']\n"
        "def count(config):\n"
        "    with open(config['optimizer'], 'a') as calls:\n"
        "        calls.write('.')\n"
        "    return [] if calls.name.endswith('known') else ['it is unknown']\n"
        "def process(config):\n"
        "    import os\n"
        "    return [str(os.getpid())]\n"
        "def variable(config):\n"
        "    import os\n"
        "    return [] if os.environ[config['optimizer']] == 'known' else ['it is unknown']\n"
        "def crash(config):\n"
        "    raise RuntimeError('no driver')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))


def test_problems_come_back_from_the_worker_environment():
    assert engine_problems(sys.executable, "some_engine:check", Root()) == ["torch.optim.Adm is unknown"]
    assert engine_problems(sys.executable, "some_engine:check", Root(optimizer="known")) == []


@pytest.mark.parametrize(("name", "num_calls"), [("known", 1), ("missing", 2)])
def test_only_a_check_that_found_a_problem_is_repeated_for_the_same_section(tmp_path, monkeypatch, name, num_calls):
    monkeypatch.chdir(tmp_path)
    calls = tmp_path / name
    section = Root(optimizer=name)
    first = engine_problems(sys.executable, "some_engine:count", section)
    assert engine_problems(sys.executable, "some_engine:count", section) == first
    assert len(calls.read_text()) == num_calls


def test_a_check_has_the_variables_of_its_worker_and_is_repeated_with_others():
    section = Root(optimizer="SOME_VARIABLE")
    found = [
        engine_problems(sys.executable, "some_engine:variable", section, variables={"SOME_VARIABLE": value})
        for value in ("known", "other")
    ]
    assert found == [[], ["it is unknown"]]


@pytest.mark.parametrize(
    ("check", "said"), [("some_engine:crash", "no driver"), ("no_engine:check", "No module named")]
)
def test_a_check_that_does_not_run_is_an_error(check, said):
    with pytest.raises(WorkerEnvironmentError, match=said):
        engine_problems(sys.executable, check, Root())


@pytest.mark.parametrize(
    ("change", "is_repeated"),
    [
        pytest.param(lambda model, _: model.rename(model.with_name("moved")), False, id="model moved"),
        pytest.param(lambda model, _: (model / "config.json").write_text('{"a": 2}') and model, True, id="config"),
        pytest.param(lambda model, _: (model / "model.safetensors").write_bytes(b"12") and model, True, id="weights"),
        pytest.param(lambda model, code: code.write_text(code.read_text() + "\n") and model, True, id="code"),
    ],
)
def test_a_check_is_repeated_once_anything_that_it_may_depend_on_has_changed(tmp_path, change, is_repeated):
    model, code = tmp_path / "model", tmp_path / "some_engine.py"
    model.mkdir()
    (model / "config.json").write_text('{"a": 1}')
    (model / "model.safetensors").write_bytes(b"1")
    calls = tmp_path / "calls.txt"
    code.write_text(f"def check(config):\n    open({str(calls)!r}, 'a').write('.')\n    return []\n")
    engine_problems(sys.executable, "some_engine:check", Root(optimizer=str(model)))
    moved = change(model, code) or model
    engine_problems(sys.executable, "some_engine:check", Root(optimizer=str(moved)))
    assert len(calls.read_text()) == 1 + is_repeated


def test_kept_checks_share_a_process_that_ends_with_them():
    def process_of_a_check():
        [pid] = engine_problems(sys.executable, "some_engine:process", Root())
        return int(pid)

    assert process_of_a_check() != process_of_a_check()
    with kept_check_processes():
        first = process_of_a_check()
        assert process_of_a_check() == first
        with pytest.raises(WorkerEnvironmentError, match="no driver"):
            engine_problems(sys.executable, "some_engine:crash", Root())
        second = process_of_a_check()
        assert second != first
        assert psutil.pid_exists(second)
    assert not psutil.pid_exists(second)


def test_a_record_that_another_user_wrote_does_not_count(tmp_path, monkeypatch):
    keep_passed("one")
    assert has_passed("one")
    assert stat.S_IMODE((tmp_path / "home" / "checks").stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not has_passed("one")


def test_checks_of_several_runs_share_what_they_import(tmp_path, monkeypatch):
    # a socket's path is short
    short = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("TMPDIR", short)
    imported = tmp_path / "imported"
    with (tmp_path / "some_engine.py").open("a") as code:
        code.write(f"open({str(imported)!r}, 'a').write('.')\n")
    pids = [
        engine_problems(sys.executable, "some_engine:process", Root(), imports=("some_engine",), fork_server_s=seconds)
        for seconds in (5.0, 5.0, 0.0)
    ]
    assert len({pid for [pid] in pids}) == 3
    # by the server, and by the process without one
    assert imported.read_text() == ".."
    shutil.rmtree(short)
