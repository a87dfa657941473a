"""A generator in another process than the worker whose weights it receives."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from gpu_check.setup import Setup
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.weights import Manifest, Transport

ANSWER_S = 240.0
"""Seconds that an answer may take; an engine's start on a GPU takes minutes."""

Open = Callable[[Setup, ModelConfig], AbstractAsyncContextManager[Generator]]
"""Opens a generator; a function of a module, for another process to import."""
Order = Callable[..., Awaitable[Any]]
"""A coroutine function of a module, called with the generator and the arguments of a request."""


class GeneratorProcess:
    """A process with a generator, started when it is first asked, and again after it has failed.

    Args:
        setup: Setup of the section.
        open_generator: Opens the generator in the process.
        model: Model that it loads.
    """

    def __init__(self, setup: Setup, open_generator: Open, model: ModelConfig) -> None:
        self._setup = setup
        self._open = open_generator
        self._model = model
        self._context = multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None

    def __enter__(self) -> GeneratorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._pipe.close()  # at which it closes the generator and ends
            self._process.join(ANSWER_S)
            self._end()

    def start(self) -> None:
        """Start the process, with its generator loaded, if it is not running."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            # not a daemon, because an engine has processes of its own
            self._process = self._context.Process(target=_serve, args=(theirs, self._setup, self._open, self._model))
            self._process.start()
            theirs.close()
            self.answer()

    def ask(self, order: Order, *arguments: Any) -> Any:
        """Answer of the generator.

        Raises:
            RuntimeError: If it failed, with its traceback.
        """
        self.tell(order, *arguments)
        return self.answer()

    def tell(self, order: Order, *arguments: Any) -> None:
        """Ask it something that it answers later."""
        self.start()
        self._pipe.send((order, arguments))

    def answer(self) -> Any:
        """Return its next answer, as `ask` does."""
        failure, found = f"no answer within {ANSWER_S:.0f} s", None
        if self._pipe.poll(ANSWER_S):
            try:
                failure, found = self._pipe.recv()
            except EOFError:
                failure = "it ended without a message"
        if failure:
            self._end()
            raise RuntimeError(f"in the generator's process: {failure}")
        return found

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


async def begin(generator: Generator, manifest: Manifest) -> None:
    """Make ready for a version of the weights."""
    await generator.pause()
    await generator.begin(manifest)


async def receive(generator: Generator, transport: Transport, version: int) -> str:
    """Receive and serve the version; returns its digest as received."""
    digest = (await generator.receive(transport, 1))[0]
    await generator.commit(version)
    return digest


async def score(generator: Generator, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the logprobs of the tokens of each row."""
    return [await generator.score(row) for row in rows]


async def complete(generator: Generator, prompts: Sequence[np.ndarray], sampling: SamplingParams) -> list[Completion]:
    """Return one completion of each prompt, all at once, with its place as its seed."""
    requests = [GenerationRequest(prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*(generator.generate(request) for request in requests)))


async def sleep(generator: Generator) -> bool:
    """Free the device; returns whether the weights are kept."""
    await generator.pause()
    return await generator.sleep()


async def wake(generator: Generator, *parts: str) -> None:
    """Take device memory for these parts again."""
    await generator.wake(parts)


async def resume(generator: Generator) -> None:
    """Serve again."""
    await generator.resume()


def _serve(pipe: Connection, setup: Setup, open_generator: Open, model: ModelConfig) -> None:
    try:
        asyncio.run(_answer(pipe, setup, open_generator, model))
    except Exception:  # noqa: BLE001  # becomes the other process's error
        pipe.send((traceback.format_exc(), None))


async def _answer(pipe: Connection, setup: Setup, open_generator: Open, model: ModelConfig) -> None:
    async with open_generator(setup, model) as generator:
        pipe.send(("", None))
        while True:
            try:
                # This runs in a thread, so that the engine's own tasks continue.
                order, arguments = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            found = await order(generator, *arguments)
            setup.accelerator.release()
            pipe.send(("", found))
