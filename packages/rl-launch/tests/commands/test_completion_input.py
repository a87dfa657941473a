"""Completions from files and pipes."""

import asyncio
import os

import pytest

from rl_launch.commands.environments.run import CompletionInput


def read_all(descriptor):
    async def run():
        source = CompletionInput(descriptor)
        found = []
        while (text := await source.next()) is not None:
            found.append(text)
        return found

    return asyncio.run(run())


CASES = {
    "nothing": ("", []),
    "one line": ("42", ["42"]),
    "its line break": ("42\n", ["42"]),
    "several lines": ("a\n\nb\n", ["a\n\nb"]),
    "several completions": ("a\nb\n.\nc\n.\n", ["a\nb", "c"]),
    "an empty completion": (".\nb\n", ["", "b"]),
    "dots within": ("a.\n..\n .\n", ["a.\n..\n ."]),
    "line breaks of another system": ("a\r\n.\r\nb", ["a", "b"]),
    "other letters": ("Grüße ☕\n.\n答案", ["Grüße ☕", "答案"]),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_completions_of_a_file_end_with_a_line_with_a_dot(tmp_path, text, expected):
    path = tmp_path / "completions.txt"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        assert read_all(file.fileno()) == expected


def test_a_pipe_is_read_as_it_comes_while_other_work_goes_on():
    async def run():
        near, far = os.pipe()
        try:
            source = CompletionInput(near)
            waiting = asyncio.create_task(source.next())
            await asyncio.sleep(0)
            os.write(far, b"one\nt")
            assert not waiting.done()
            os.write(far, b"wo\n.\nthree")
            assert await waiting == "one\ntwo"
            os.close(far)
            assert await source.next() == "three"
            assert await source.next() is None
        finally:
            os.close(near)

    asyncio.run(run())


def test_waiting_for_a_completion_can_be_cancelled():
    async def run():
        near, far = os.pipe()
        waiting = asyncio.create_task(CompletionInput(near).next())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.close(near)
        os.close(far)

    asyncio.run(run())
