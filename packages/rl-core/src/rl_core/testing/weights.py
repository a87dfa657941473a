"""Conformance suite of weight sinks, for any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from rl_core.errors import GeneratorError, WeightSyncError
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, PauseMode, SamplingParams
from rl_core.selfcheck.rank_pool import free_port
from rl_core.testing.torch.reference_model import VOCAB_SIZE, ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import EMBEDDING, HEAD, Fault, SenderProcess, digest_of, manifest_of
from rl_core.weights import Manifest, Transport, TransportKind, WeightTarget

CONTEXT = 256
"""Maximum number of tokens of a row in `model_config`."""

SYNC_TIMEOUT_S = 60.0


def model_config(model_dir: Path) -> ModelConfig:
    """Return the neutral model config a suite's generators are built with."""
    return ModelConfig(model_name=str(model_dir), precision="float32", max_total_sequence_length=CONTEXT)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Return int32 `[length]`, tokens that mean nothing."""
    return np.random.default_rng([length, seed]).integers(3, VOCAB_SIZE, length).astype(np.int32)


class Bench:
    """A started generator on its own event loop, with models to adopt and a process that sends them."""

    def __init__(self, generator: Generator, first: Path, second: Path, sender: SenderProcess) -> None:
        self.runner = asyncio.Runner()
        self.generator = generator
        self.first = first
        self.second = second
        self.references = {folder: ReferenceModel(folder) for folder in (first, second)}
        self.senders: dict[WeightTarget, SenderProcess] = {"policy": sender}
        self.further: list[SenderProcess] = []
        self.version = 0
        self._ways: dict[tuple[TransportKind, WeightTarget, int], Transport] = {}
        self.runner.run(generator.start())

    @property
    def reference(self) -> ReferenceModel:
        """The oracle of the model the generator was started with, and has unless a test is under way."""
        return self.references[self.first]

    async def sync(
        self,
        folder: Path,
        *,
        kind: TransportKind = "ipc",
        manifest: Manifest | None = None,
        fault: Fault | None = None,
        shared: Path | None = None,
        mode: PauseMode = "finish",
        target: WeightTarget = "policy",
        num_ranks: int = 1,
        before_commit: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Bring the generator to a folder's weights, in rl-launch's order of calls; returns the version it then has.

        Args:
            folder: Folder of the weights.
            kind: Kind of transport.
            manifest: Manifest of the weights, if it is not the folder's.
            fault: Fault of the last sender.
            shared: Folder for a transport through files.
            mode: Treatment of requests under way.
            target: Model of the generator that the weights are for.
            num_ranks: Number of senders; if there are several, each holds parts of all tensors.
            before_commit: Called when the weights have been received.
        """
        self.version += 1
        in_parts = num_ranks > 1
        manifest = manifest or manifest_of(folder, 0)
        manifest = replace(manifest, version=self.version, target=target, is_held_in_parts=in_parts)
        generator = self.generator
        address = str(shared) if kind == "disk" else _address()
        fresh = Transport(kind, address, generator.num_ranks, 64 * 1024, SYNC_TIMEOUT_S, every_rank_sends=in_parts)
        transport = self._ways.pop((kind, target, num_ranks), fresh)
        while len(self.further) < num_ranks - 1:
            self.further.append(SenderProcess())
        senders = [self.senders[target], *self.further[: num_ranks - 1]]
        faults = [*[Fault()] * (num_ranks - 1), fault or Fault()]
        await generator.pause(mode)
        try:
            await generator.begin(manifest)
            sending = [
                sender.send(folder, manifest, transport, each, rank=rank, num_ranks=num_ranks)
                for rank, (sender, each) in enumerate(zip(senders, faults, strict=True))
            ]
            try:
                received = await generator.receive(transport, 1)
            finally:
                await asyncio.wait(list(map(asyncio.wrap_future, sending)), timeout=SYNC_TIMEOUT_S)
            sent = [digest for each in sending for digest in each.result(SYNC_TIMEOUT_S)]
            assert set(received) == set(sent)
            if transport.sends_parts:
                assert len(sent) == generator.num_ranks, "each rank is sent the parts that it keeps"
            if len(sent) == 1 and not in_parts:
                assert sent == [digest_of(folder, manifest, transport.bucket_bytes)]
            if before_commit is not None:
                await before_commit()
            await generator.commit(self.version)
            # the ends stay connected until a transfer fails
            self._ways[kind, target, num_ranks] = transport
        finally:
            await generator.resume()
        return self.version


class WeightSinkSuite:
    """Conformance of weight adoption: weights are complete and verified, or refused and listed.

    A subclass, in a test module, supplies `make_generator` and may state `tolerance`.
    """

    tolerance: ClassVar[float] = 1e-4
    """Maximum difference of a logprob from a float32 forward pass of `transformers`."""

    kinds: ClassVar[tuple[TransportKind, ...]] = ("ipc", "collective", "disk")
    """Transports the engine receives over."""

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        """Yield a generator of `model_config(model_dir)`, not started, on one CPU rank, in float32."""
        raise NotImplementedError

    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        """Make the head compute with other values than the tied embedding it received, as a packed copy would."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        """Yield the suite's generator; a test that damages it repairs it."""
        first = write_reference_model(tmp_path_factory.mktemp("first"), seed=1)
        second = write_reference_model(tmp_path_factory.mktemp("second"), seed=2)
        sender = SenderProcess()
        bench = Bench(cls.make_generator(first), first, second, sender)
        try:
            yield bench
        finally:
            bench.runner.run(bench.generator.close())
            bench.runner.close()
            for each in (sender, *bench.further):
                each.close()

    def test_weights_arrive_over_every_transport(self, bench: Bench, tmp_path: Path) -> None:
        for kind in self.kinds:
            for folder in (bench.second, bench.first):
                version = bench.runner.run(bench.sync(folder, kind=kind, shared=tmp_path))
                self._check_serves(bench, folder, version)

    def test_parts_arrive_from_all_ranks_of_a_policy(self, bench: Bench) -> None:
        sync = partial(bench.sync, kind="collective", num_ranks=2)
        for folder in (bench.second, bench.first, bench.second):
            self._check_serves(bench, folder, bench.runner.run(sync(folder)))
        with pytest.raises(WeightSyncError, match="lost sender rank 1"):
            bench.runner.run(sync(bench.second, fault=Fault(die_at="the beginning")))
        self._check_serves_nothing_until_mended(bench)
        self._check_serves(bench, bench.second, bench.runner.run(sync(bench.second)))
        bench.runner.run(bench.sync(bench.first))

    def test_a_prompt_seen_before_a_sync_is_read_anew(self, bench: Bench) -> None:
        async def completion() -> tuple[np.ndarray, np.ndarray]:
            found = await bench.generator.generate(request)
            return found.token_ids, found.logprobs

        request = GenerationRequest(prompt(200), SamplingParams(8), seed=1)
        bench.runner.run(completion())
        bench.runner.run(bench.sync(bench.second))
        tokens, logprobs = bench.runner.run(completion())
        expected = bench.references[bench.second].completion_logprobs(request.token_ids, tokens)
        bench.runner.run(bench.sync(bench.first))
        np.testing.assert_allclose(logprobs, expected, atol=self.tolerance)

    def test_a_tensor_left_out_of_the_manifest_is_named(self, bench: Bench) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        whole = manifest_of(bench.second, 0)
        manifest = replace(whole, tensors=tuple(spec for spec in whole.tensors if spec.name != name))
        self._check_refuses(bench, name, manifest=manifest)

    def test_an_unknown_tensor_is_named(self, bench: Bench) -> None:
        whole = manifest_of(bench.second, 0)
        spec = replace(whole.tensors[-1], name="model.layers.7.mlp.down_proj.weight")
        self._check_refuses(bench, spec.name, manifest=replace(whole, tensors=(*whole.tensors, spec)))

    def test_a_tensor_the_sender_omits_is_named(self, bench: Bench) -> None:
        name = manifest_of(bench.second, 0).tensors[3].name
        self._check_refuses(bench, name, fault=Fault(omit=name))

    def test_a_corrupt_tensor_is_named(self, bench: Bench) -> None:
        name = manifest_of(bench.second, 0).tensors[-2].name
        self._check_refuses(bench, name, fault=Fault(corrupt=name))

    def test_a_sender_that_dies_midway_leaves_nothing_served(self, bench: Bench) -> None:
        self._check_refuses(bench, "", fault=Fault(die_at=manifest_of(bench.second, 0).tensors[-1].name))

    def test_a_stale_tied_head_is_named(self, bench: Bench) -> None:
        assert manifest_of(bench.second, 0).tied == {HEAD: EMBEDDING}
        make_stale = partial(self.make_head_stale, bench.generator)
        with pytest.raises(WeightSyncError) as caught:
            bench.runner.run(bench.sync(bench.second, before_commit=make_stale))
        assert HEAD in caught.value.tensors
        self._check_serves_nothing_until_mended(bench)

    def _check_refuses(
        self, bench: Bench, name: str, *, manifest: Manifest | None = None, fault: Fault | None = None
    ) -> None:
        with pytest.raises(WeightSyncError) as caught:
            bench.runner.run(bench.sync(bench.second, manifest=manifest, fault=fault))
        assert name in str(caught.value)
        self._check_serves_nothing_until_mended(bench)

    def _check_serves_nothing_until_mended(self, bench: Bench) -> None:
        request = GenerationRequest(prompt(5), SamplingParams(2), seed=0)
        with pytest.raises(GeneratorError):
            bench.runner.run(bench.generator.generate(request))
        with pytest.raises(GeneratorError):
            bench.runner.run(bench.generator.score(prompt(5)))
        version = bench.runner.run(bench.sync(bench.first))
        self._check_serves(bench, bench.first, version)

    def _check_serves(self, bench: Bench, folder: Path, version: int) -> None:
        reference = bench.references[folder]
        tokens = prompt(20, seed=version)
        scores = bench.runner.run(bench.generator.score(tokens))
        np.testing.assert_allclose(scores, reference.score(tokens), atol=self.tolerance)
        found = bench.runner.run(bench.generator.generate(GenerationRequest(tokens, SamplingParams(6), seed=version)))
        expected = reference.completion_logprobs(tokens, found.token_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=self.tolerance)
        assert [(span.version, span.num_tokens) for span in found.spans] == [(version, 6)]


def _address() -> str:
    return f"127.0.0.1:{free_port()}"
