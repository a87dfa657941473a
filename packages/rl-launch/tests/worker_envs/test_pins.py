import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement as Pin

from rl_algos.requirement import LOSSES
from rl_core.plugins import Requirement
from rl_core.testing.exhaustive import exhaustive
from rl_launch.worker_envs.plan import by_name, export, portable_plan, shipped_pins
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, worker_env

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.skipif(not (ROOT / "uv.lock").exists(), reason="needs the workspace's lock")

WORKERS = {
    "dtensor": (Requirement("rl-dtensor", {"cpu": ("worker",)}), LOSSES),
    "hf": (Requirement("rl-dtensor", {"cpu": ("worker",)}), ROLLOUT_WORKER),
    "megatron": (Requirement("rl-megatron", {"cpu": ("worker",)}), LOSSES),
    "vllm-cpu": (Requirement("rl-vllm", {"cpu": ("cpu",)}), ROLLOUT_WORKER),
    "vllm-cuda": (Requirement("rl-vllm", {"cpu": ("cuda",)}), ROLLOUT_WORKER),
    "math": (Requirement("rl-envs"),),
    "reasoning-gym": (Requirement("rl-envs", {"cpu": ("reasoning-gym",)}),),
}


def versions(text, python, machine):
    """Name to version for one interpreter and machine."""
    marks = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    pins = [Pin(line.partition(" --hash=")[0]) for line in text.splitlines()]
    return {pin.name: str(pin.specifier) for pin in pins if pin.marker is None or pin.marker.evaluate(marks)}


def test_the_shipped_exports_are_those_of_the_lock(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import export_worker_locks

    try:
        assert export_worker_locks.stale() == [], "run python tools/export_worker_locks.py"
    finally:
        sys.modules.pop("export_worker_locks")


@pytest.mark.parametrize("worker", WORKERS)
def test_shipped_exports_put_together_are_what_the_lock_has_for_all_at_once(worker):
    requirement, *also = WORKERS[worker]
    spec = worker_env(requirement, "cpu", also=also)
    together, locked = shipped_pins(spec.wanted), export(ROOT, spec.wanted)
    assert together is not None
    for python in ("3.11", "3.12", "3.13"):
        for machine in ("x86_64", "aarch64"):
            assert versions(together, python, machine) == versions(locked, python, machine)


@pytest.mark.parametrize("worker", WORKERS)
def test_every_pin_has_the_hashes_of_its_files(worker):
    requirement, *also = WORKERS[worker]
    spec = worker_env(requirement, "cpu", also=also)
    pins = shipped_pins(spec.wanted)
    assert pins is not None
    assert [line for line in pins.splitlines() if " --hash=sha256:" not in line] == []


def test_no_pins_are_made_up_for_what_is_not_ours():
    assert shipped_pins(worker_env(Requirement("someones-engine"), "cpu").wanted) is None


@exhaustive
def test_what_is_compiled_against_torch_is_installed_after_it_and_all_of_it_by_hash():
    spec = worker_env(Requirement("rl-dtensor", {"cuda": ("worker", "flash")}), "cuda", also=[LOSSES])
    plan = portable_plan(spec)
    pins, compiled = (dict(plan.files)[name].decode() for name in ("pins.txt", "compiled.txt"))
    assert set(by_name(compiled)) == {"flash-attn"}
    assert {"torch", "einops"} <= set(by_name(pins))
    assert "flash-attn" not in by_name(pins)
    *_, tools, last = plan.commands
    assert "ninja" in tools
    assert "--no-build-isolation" not in tools
    assert {"--no-build-isolation", "{files}/compiled.txt"} <= set(last)
    assert not any("{files}/compiled.txt" in command for command in plan.commands[:-1])
    of_files = [command for command in plan.commands if "-r" in command]
    assert [command[-1] for command in of_files] == ["{files}/pins.txt", "{files}/compiled.txt"]
    assert all("--require-hashes" in command for command in of_files)
