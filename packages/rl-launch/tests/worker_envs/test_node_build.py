import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl_launch.worker_envs.node_build import EnvBuildError, EnvIdentity, EnvPlan, build, pack, report

MINOR = "{}.{}".format(*sys.version_info[:2])
PLAN = EnvPlan(
    name="empty",
    digest="0" * 64,
    commands=(("{uv}", "venv", "--quiet", "--no-project", "--python", "{python}", "{env}"),),
    python=MINOR,
    ray="none",
    imports=("json",),
)


def test_it_is_built_once_and_then_found(tmp_path):
    first, second = build(PLAN, str(tmp_path)), build(PLAN, str(tmp_path))
    assert (first.cached, second.cached) == (False, True)
    prefix = subprocess.run(
        [first.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    ).stdout
    assert prefix.strip() == str(tmp_path / PLAN.folder)


def test_one_that_was_cut_short_is_built_again(tmp_path):
    build(PLAN, str(tmp_path))
    (tmp_path / PLAN.folder / "complete.json").unlink()
    (tmp_path / PLAN.folder / "leftover").write_text("half")
    assert not build(PLAN, str(tmp_path)).cached
    assert not (tmp_path / PLAN.folder / "leftover").exists()


def test_one_whose_interpreter_is_gone_is_built_again(tmp_path):
    built = build(PLAN, str(tmp_path))
    for path in (tmp_path / PLAN.folder / "bin").glob("python*"):
        path.unlink()
    assert not build(PLAN, str(tmp_path)).cached
    assert subprocess.run([built.python, "-c", ""], check=False).returncode == 0


def test_two_that_want_the_same_build_it_once(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build(PLAN, str(tmp_path)), range(2)))
    assert sorted(each.cached for each in built) == [False, True]


def test_one_of_another_node_is_unpacked_instead_of_built(tmp_path):
    script = "import pathlib; pathlib.Path('{env}/bin/tool').write_text('#!{env_python}\\nprint(6 * 7)\\n')"
    allow = "import os; os.chmod('{env}/bin/tool', 0o755)"
    plan = replace(PLAN, commands=(*PLAN.commands, ("{env_python}", "-c", script), ("{env_python}", "-c", allow)))
    first, second = tmp_path / "first", tmp_path / "second"
    build(plan, str(first))
    parts = list(pack(plan, str(first)))
    shutil.rmtree(first)
    built = build(plan, str(second), parts=parts)
    assert not built.cached
    run = subprocess.run([second / plan.folder / "bin" / "tool"], capture_output=True, text=True, check=True)
    assert run.stdout == "42\n", "its scripts start with this node's interpreter"
    assert build(plan, str(second), parts=iter(())).cached, "no part is read for one that is there"


def test_parts_that_are_cut_short_leave_nothing(tmp_path):
    build(PLAN, str(tmp_path / "first"))
    origin, whole = pack(PLAN, str(tmp_path / "first"))
    with pytest.raises((EnvBuildError, OSError)):
        build(PLAN, str(tmp_path / "second"), parts=[origin, whole[: len(whole) // 3 // 512 * 512 + 100]])
    assert [path.name for path in (tmp_path / "second").iterdir()] == [f"{PLAN.folder}.lock"]


def test_a_failure_shows_the_last_lines_and_leaves_nothing(tmp_path):
    failing = replace(
        PLAN, commands=(*PLAN.commands, ("{uv}", "pip", "install", "--python", "{env_python}", "./absent"))
    )
    with pytest.raises(EnvBuildError, match=r"(?s)uv pip install ended with .*absent"):
        build(failing, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"{PLAN.folder}.lock"]
    assert not build(PLAN, str(tmp_path)).cached


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray": "0.0.1"}, "it has ray none, the driver 0.0.1"),
        ({"imports": ("json", "no_such_engine")}, "import no_such_engine: ModuleNotFoundError"),
        ({"python": "3.1"}, "all nodes need the same version"),
    ],
)
def test_one_that_would_hang_ray_is_refused(tmp_path, changes, message):
    with pytest.raises(EnvBuildError, match=message):
        build(replace(PLAN, **changes), str(tmp_path))
    assert not (tmp_path / PLAN.folder).exists()


def test_the_drivers_project_does_not_leak_into_the_build(tmp_path, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "/elsewhere")
    report = replace(
        PLAN,
        commands=(
            *PLAN.commands,
            ("{env_python}", "-c", "import os; open('{env}/seen', 'w').write(repr(sorted(os.environ)))"),
        ),
    )
    build(report, str(tmp_path))
    seen = (tmp_path / PLAN.folder / "seen").read_text()
    assert "PATH" in seen
    assert "VIRTUAL_ENV" not in seen
    assert "UV_PROJECT_ENVIRONMENT" not in seen


def test_an_environment_of_other_versions_or_sources_is_not_the_drivers(tmp_path, monkeypatch):
    identity = EnvIdentity(("json", "no_such_engine"), ("pytest", "no-such-engine"), ("sources",))
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "__init__.py").write_text("VERSION = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    mine = report(identity, sys.executable)
    assert mine.differences(mine) == ["the module no_such_engine is missing"]
    (tmp_path / "sources" / "__init__.py").write_text("VERSION = 2")
    other = report(identity, sys.executable)
    driver = replace(mine, python="3.1", versions={**mine.versions, "pytest": "0.1"}, missing=())
    assert other.differences(driver) == [
        "the module no_such_engine is missing",
        f"it runs Python {MINOR}, the driver 3.1",
        f"it has pytest {mine.versions['pytest']}, the driver 0.1",
        "its sources of sources differ from the driver's",
    ]
    with pytest.raises(EnvBuildError, match="its interpreter does not start"):
        report(identity, str(tmp_path / "python"))


def test_it_can_be_shipped_to_a_node_that_has_none_of_this():
    """Pickled by value, it runs where `rl_launch` does not import."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    from rl_launch.worker_envs import node_build

    registered = node_build.__name__ in cloudpickle.list_registry_pickle_by_value()  # by a test before this one
    cloudpickle.register_pickle_by_value(node_build)
    try:
        shipped = cloudpickle.dumps((node_build.build, PLAN))
    finally:
        if not registered:
            cloudpickle.unregister_pickle_by_value(node_build)
    script = (
        "import sys, pickle; sys.modules['rl_launch'] = None; sys.modules['rl_core'] = None\n"
        "from ray import cloudpickle; build, plan = pickle.loads(sys.stdin.buffer.read())\n"
        "import tempfile; print(build(plan, tempfile.mkdtemp()).python)"
    )
    done = subprocess.run([sys.executable, "-c", script], input=shipped, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip().endswith("bin/python")
