from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_vllm.engine.engine_output import EngineOutput, cause_in

WORKER = "(Worker_TP0 pid=7) ERROR 11-22 01:33:12 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=5) ERROR 11-22 01:33:15 [core.py:1510] "


def test_the_first_process_that_failed_names_the_cause() -> None:
    lines = [
        WORKER + "Traceback (most recent call last):",
        WORKER + '  File "loader.py", line 3, in load',
        WORKER + "AssertionError: sizes differ",
        "Loading safetensors checkpoint shards:   0% Completed",
        CORE + "EngineCore failed to start.",
        CORE + "Exception: WorkerProc initialization failed due to an exception in a background process.",
        "Exception: WorkerProc initialization failed due to an exception in a background process.",
        "RuntimeError: Connection closed by peer",
    ]
    assert cause_in(lines) == "AssertionError: sizes differ"
    assert cause_in(lines[3:7]) == ""


def test_an_exception_that_led_to_another_is_not_the_cause() -> None:
    lines = [
        CORE + "KeyError: 'qwen9'",
        CORE,
        CORE + "The above exception was the direct cause of the following exception:",
        CORE + "ValueError: no such architecture",
    ]
    assert cause_in(lines) == "ValueError: no such architecture"


def test_what_was_only_warned_of_is_not_the_cause() -> None:
    warned = "(EngineCore pid=5) WARNING 11-22 01:33:15 [plugins.py:15] ImportError: no flashinfer"
    assert cause_in([warned]) == ""
    assert cause_in([warned, CORE + "torch.OutOfMemoryError: CUDA out of memory."]).startswith("torch.OutOfMemoryError")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            CORE + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            "VllmWorker-1 was killed by SIGKILL",
        ),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("[rank0]: ValueError: head_dim=16", "ValueError: head_dim=16"),
        ("SystemExit", ""),
    ],
)
def test_other_ends(line: str, cause: str) -> None:
    assert cause_in([line]) == cause


def test_output_of_children_is_passed_on_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    with output.captured():
        child = subprocess.Popen([sys.executable, "-c", "print('hello', flush=True); raise ValueError('broken')"])
        later = subprocess.Popen([sys.executable, "-c", "input(); print('later', flush=True)"], stdin=subprocess.PIPE)
    os.write(1, b"mine\n")
    assert child.wait(60) == 1
    later.communicate(b"\n", timeout=60)
    assert output.cause(60) == "ValueError: broken"
    passed_on = capfd.readouterr()
    assert passed_on.out == "mine\n"
    assert "hello" in passed_on.err
    assert "later" in passed_on.err
