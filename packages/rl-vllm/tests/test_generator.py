"""The generator, on a real engine that all tests of a class share."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from adapter_suite import SOME, AdapterSuite
from spoilable_generator import SpoilableGenerator
from transformers import AutoModelForCausalLM, DynamicCache

from rl_core.errors import GeneratorError, RequestRefused, WeightSyncError
from rl_core.model_config import GenerationConfig, LoraConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, Placement, SamplingParams
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive, with_exhaustive
from rl_core.testing.generator import GeneratorSuite
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, write_reference_model
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.testing.weights import SYNC_TIMEOUT_S, Bench, WeightSinkSuite, _address, model_config, prompt
from rl_core.weights import Transport
from rl_vllm import VllmConfig, VllmGenerator

CPU_PLACEMENT = Placement("cpu")


def make_generator(
    model_dir: Path, placement: Placement = CPU_PLACEMENT, *, lora: LoraConfig | None = None, **settings: object
) -> SpoilableGenerator:
    backend = VllmConfig(kv_cache_gib=0.25, **settings)
    if lora is None:
        return SpoilableGenerator(GenerationConfig(), backend, model_config(model_dir), placement)
    model = model_config(model_dir).model_copy(update={"lora_cfg": lora})
    return SpoilableGenerator(GenerationConfig(lora_sync="adapter"), backend, model, placement)


class VllmSuite(GeneratorSuite):
    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        assert isinstance(generator, SpoilableGenerator)
        await generator.spoil("restore_packed_head")

    def test_weights_that_are_loaded_by_plan_are_those_of_the_engines_own_reload(self, bench: Bench) -> None:
        async def scores(*, reloads: bool) -> np.ndarray:
            await bench.generator.spoil("reload", reloads)
            await bench.sync(bench.second)
            found = await bench.generator.score(prompt(40))
            await bench.sync(bench.first)
            return found

        async def plans(opaque: str) -> list[bool]:
            return await bench.generator.spoil("loads_by_plan", opaque)

        reloaded = bench.runner.run(scores(reloads=True))
        planned = bench.runner.run(scores(reloads=False))
        assert reloaded.tobytes() == planned.tobytes()
        assert all(bench.runner.run(plans("")))
        assert not any(bench.runner.run(plans("model.layers.0.mlp.down_proj.weight")))

    def test_the_load_of_the_engine_is_known_while_it_decodes(self, bench: Bench) -> None:
        def load() -> tuple[float, bool]:
            found = bench.generator._running().load
            return found.get("num_running", 0), 0 < found.get("kv_cache_usage", 0) <= 1

        async def asking() -> set[tuple[float, bool]]:
            requests = [GenerationRequest(prompt(5), SamplingParams(200), seed) for seed in range(8)]
            tasks = [asyncio.create_task(bench.generator.generate(request)) for request in requests]
            seen = set()
            while not all(task.done() for task in tasks):
                seen.add(load())
                await asyncio.sleep(0.002)
            return seen

        assert (8, True) in bench.runner.run(asking())

    def test_the_end_of_sequence_ends_only_completions_that_list_it(self, bench: Bench) -> None:
        # at the highest temperature that vLLM takes, with enough draws for the end of sequence to be among them
        async def together() -> list[Completion]:
            requests = [GenerationRequest(prompt(4), SamplingParams(200, temperature=2.0), seed) for seed in range(48)]
            return await asyncio.gather(*[bench.generator.generate(request) for request in requests])

        found = bench.runner.run(together())
        assert any(EOS_TOKEN_ID in completion.token_ids for completion in found)
        assert {(len(completion.token_ids), completion.stop_reason) for completion in found} == {(200, "length")}


class TestVllmGenerator(VllmSuite):
    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        return make_generator(model_dir)

    def test_many_requests_at_once_get_each_their_own(self, bench: Bench) -> None:
        requests = [GenerationRequest(prompt(1 + i % 40, i), SamplingParams(4 + i % 9), i) for i in range(600)]

        async def together() -> list[list[int]]:
            found = await asyncio.gather(*[bench.generator.generate(request) for request in requests])
            return [completion.token_ids.tolist() for completion in found]

        first = bench.runner.run(together())
        assert [len(tokens) for tokens in first] == [4 + i % 9 for i in range(600)]
        assert bench.runner.run(together()) == first

    @pytest.mark.parametrize("temperature", [0.001, 2.5])
    def test_a_temperature_that_vllm_would_change_is_refused(self, bench: Bench, temperature: float) -> None:
        request = GenerationRequest(prompt(4), SamplingParams(1, temperature=temperature), 0)
        with pytest.raises(RequestRefused, match="temperature"):
            bench.runner.run(bench.generator.generate(request))

    def test_a_stop_string_may_be_a_special_tokens_text(self, bench: Bench) -> None:
        sampling = SamplingParams(240, temperature=2.0, stop_strings=("<|im_end|>",))

        async def together() -> list[tuple[list[int], str]]:
            requests = [GenerationRequest(prompt(4), sampling, seed) for seed in range(32)]
            found = await asyncio.gather(*[bench.generator.generate(request) for request in requests])
            return [(completion.token_ids.tolist(), completion.stop_reason) for completion in found]

        stopped = [tokens for tokens, reason in bench.runner.run(together()) if reason == "stop"]
        assert stopped
        assert all(tokens[-1] == 2 and 2 not in tokens[:-1] for tokens in stopped)

    def test_one_value_computed_wrongly_in_a_fused_layer_is_named(self, bench: Bench) -> None:
        bench.version += 1
        manifest = manifest_of(bench.second, bench.version)
        rows_of_q = 4 * 32

        async def sync() -> None:
            await bench.generator.pause()
            await bench.generator.begin(manifest)
            transport = Transport("ipc", _address(), 1, timeout_s=SYNC_TIMEOUT_S)
            sending = bench.senders["policy"].send(bench.second, manifest, transport, Fault())
            await bench.generator.receive(transport, 1)
            sending.result(SYNC_TIMEOUT_S)
            for column in range(64):
                await bench.generator.spoil("change_one_value", "model.layers.1.self_attn.qkv_proj", rows_of_q, column)
            try:
                await bench.generator.commit(manifest.version)
            finally:
                await bench.generator.resume()

        with pytest.raises(WeightSyncError) as caught:
            bench.runner.run(sync())
        assert caught.value.tensors == ("model.layers.1.self_attn.k_proj.weight",)
        self._check_serves_nothing_until_mended(bench)

    def test_a_commit_without_a_transfer_is_refused(self, bench: Bench) -> None:
        async def commit() -> None:
            await bench.generator.begin(manifest_of(bench.first, 10**6))
            await bench.generator.commit(10**6)

        with pytest.raises(WeightSyncError, match="never received"):
            bench.runner.run(commit())
        with pytest.raises(WeightSyncError, match="cannot commit"):
            bench.runner.run(bench.generator.commit(7))
        self._check_serves_nothing_until_mended(bench)

    def test_a_request_that_is_given_up_leaves_the_engine(self, bench: Bench) -> None:
        async def giving_up() -> None:
            task = asyncio.create_task(bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(200), 0)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # over long before the other would be
            await bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(2), 1))

        bench.runner.run(giving_up())
        engine = bench.generator._running()._engine.vllm
        assert not engine.has_unfinished_requests()
        assert bench.runner.run(bench.generator.health())["num_requests"] == 0

    def test_a_request_that_the_engine_refuses_fails_alone(self, bench: Bench) -> None:
        async def together() -> list[object]:
            requests = [GenerationRequest(prompt(5), SamplingParams(4), seed) for seed in range(3)]
            requests[1] = GenerationRequest(np.array([10**6], np.int32), SamplingParams(4), 1)
            return await asyncio.gather(
                *[bench.generator.generate(request) for request in requests], return_exceptions=True
            )

        first, refused, last = bench.runner.run(together())
        assert isinstance(first, Completion)
        assert isinstance(last, Completion)
        with pytest.raises(RequestRefused, match="refused a request"):
            raise refused

    def test_zz_an_engine_that_fails_says_why_from_then_on(self, bench: Bench) -> None:
        """Last: it leaves no engine behind."""

        async def failing() -> None:
            task = asyncio.create_task(bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(200), 0)))
            await asyncio.sleep(0.05)
            await bench.generator.spoil("break_forward")
            await task

        for call in (
            failing(),
            bench.generator.health(),
            bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(1), 0)),
        ):
            with pytest.raises(GeneratorError, match="engine died: RuntimeError: out of order"):
                bench.runner.run(call)


@with_exhaustive(
    "test_every_token_has_the_logprob_of_the_weights_of_its_span",
    "test_interruptions_change_no_greedy_completion",
    "test_the_end_of_sequence_ends_only_completions_that_list_it",
)
class TestEngineInItsOwnProcess(VllmSuite):
    """As on GPUs."""

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        return make_generator(model_dir, Placement("cpu", reports_load=True), own_process=True)

    def test_health_has_the_load_if_it_is_asked_for(self, bench: Bench) -> None:
        bench.runner.run(bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(4), 0)))
        figures = {"num_running", "num_waiting", "kv_cache_usage", "num_preempted"}
        assert figures <= set(bench.runner.run(bench.generator.health()))

    def test_tokens_stay_in_the_engines_process_until_a_request_ends(self, bench: Bench) -> None:
        # vLLM reads the environment when it is imported, which the engine has set by now.
        from rl_vllm.engine.holding_scheduler import REPORT_ID

        processor = bench.generator._running().vllm.output_processor
        process, seen = processor.process_outputs, []

        def process_seen(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend((each.request_id, len(each.new_token_ids)) for each in outputs if each.request_id != REPORT_ID)
            return process(outputs, *args, **kwargs)

        async def together(**stop: Any) -> list[int]:
            seen.clear()
            requests = [GenerationRequest(prompt(5), SamplingParams(20, **stop), seed) for seed in range(4)]
            completions = await asyncio.gather(*(bench.generator.generate(request) for request in requests))
            assert [len(each.logprobs) for each in completions] == [len(each.token_ids) for each in completions]
            return [len(each.token_ids) for each in completions]

        processor.process_outputs = process_seen
        try:
            before = bench.runner.run(bench.generator.health())["num_sampled"]
            assert bench.runner.run(together()) == [20] * 4
            assert sorted(count for _, count in seen) == [20] * 4, "one output for each request"
            assert bench.runner.run(bench.generator.health())["num_sampled"] == before + 80
            # Their text is searched here.
            bench.runner.run(together(stop_strings=("no such text",)))
            assert len(seen) == 80
        finally:
            processor.process_outputs = process

    def test_zz_an_engine_that_is_killed_fails_requests_and_calls_at_once(self, bench: Bench) -> None:
        """Last: it leaves no engine behind."""
        engine = next(p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline()) + p.name())

        async def killing() -> None:
            requests = [GenerationRequest(prompt(5), SamplingParams(200), seed) for seed in range(8)]
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(bench.generator.generate(request)) for request in requests
            ]
            await asyncio.sleep(0.05)
            os.kill(engine.pid, signal.SIGSTOP)
            tasks.append(asyncio.create_task(bench.generator._running().ask("is_sleeping")))
            await asyncio.sleep(0.05)
            os.kill(engine.pid, signal.SIGKILL)
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(failure, GeneratorError) for failure in failures)

        bench.runner.run(killing())
        for call in (
            bench.generator.health(),
            bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(1), 0)),
        ):
            with pytest.raises(GeneratorError, match="died: EngineCore was killed by SIGKILL"):
                bench.runner.run(call)


class TestAdaptersInThisProcess(AdapterSuite):
    """Weights and adapters of an engine that applies adapters itself, on some of its layers."""

    lora = SOME

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        return make_generator(model_dir, lora=SOME)

    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        assert isinstance(generator, SpoilableGenerator)
        await generator.spoil("restore_packed_head")


class TestTensorParallelWeights(WeightSinkSuite):
    """Each of two ranks is sent its shards, or takes them of the whole."""

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        return make_generator(model_dir, tensor_parallel_size=2)

    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        assert isinstance(generator, SpoilableGenerator)
        await generator.spoil("restore_packed_head")

    def test_zz_closing_ends_all_processes_and_frees_shared_memory(self, bench: Bench) -> None:
        """Last: it leaves no engine behind."""
        ours = [
            p
            for p in psutil.Process().children(recursive=True)
            if "VLLM" in p.name() or "VLLM" in " ".join(p.cmdline())
        ]
        assert len(ours) >= 2
        shared = {path for process in ours for path in _shared_memory(process)}
        assert shared
        waiting = GenerationRequest(prompt(5), SamplingParams(4), 0)

        async def closing() -> BaseException | None:
            await bench.generator.pause()
            late = asyncio.create_task(bench.generator.generate(waiting))
            await asyncio.sleep(0.05)
            await bench.generator.close()
            return (await asyncio.gather(late, return_exceptions=True))[0]

        assert isinstance(bench.runner.run(closing()), GeneratorError)
        assert not [p for p in ours if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not [path for path in shared if path.exists()]
        with pytest.raises(GeneratorError):
            bench.runner.run(bench.generator.health())


REPORTING = Placement("cpu", reports_routing=True)


def test_routing_that_the_cpu_build_does_not_report_is_refused_at_the_start(tmp_path: Path) -> None:
    generator = make_generator(tmp_path, REPORTING)
    with pytest.raises(GeneratorError, match="routing of experts is not reported: on cpu vLLM has only model runner"):
        asyncio.run(generator.start())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_completion_has_the_routing_that_the_engine_returned(tmp_path: Path, dtype: type) -> None:
    from vllm.outputs import CompletionOutput

    generator = make_generator(tmp_path, REPORTING)
    experts = np.array([[[3, 200]], [[7, 0]], [[255, 1]]], dtype)

    def output(tokens: list[int], routed: np.ndarray | None) -> Any:
        logprobs = SimpleNamespace(logprobs=[-0.5] * len(tokens))
        return CompletionOutput(0, "", tokens, None, logprobs, routed_experts=routed, finish_reason="stop")

    found = generator._completion(output([5, 6], experts), 1, 2)
    assert found.routed_experts is not None
    assert found.routed_experts.dtype == np.int16
    assert found.routed_experts.tolist() == experts.tolist()
    assert len(generator._completion(output([5], experts), 1, 2).routed_experts) == 2
    assert generator._completion(output([], None), 1, 2).routed_experts is None
    for routed, message in ((None, "routing of 0 of 3 tokens"), (experts[:1], "routing of 1 of 3 tokens")):
        with pytest.raises(GeneratorError, match=message):
            generator._completion(output([5, 6], routed), 1, 2)
    assert make_generator(tmp_path)._completion(output([5], experts), 1, 2).routed_experts is None


def _shared_memory(process: psutil.Process) -> list[Path]:
    """Files of shared memory that a process has mapped and that still have a name."""
    mapped = (Path(found.path) for found in process.memory_maps() if found.path.startswith("/dev/shm/"))
    return [path for path in mapped if path.exists()]


def test_gpus_must_match_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ValueError, match="needs 2 GPUs, but its process sees: 4"):
        VllmGenerator(
            GenerationConfig(), VllmConfig(tensor_parallel_size=2), model_config(tmp_path), Placement("cuda", ("4",))
        )


def _failure_of_start(generator: VllmGenerator) -> str:
    async def starting() -> None:
        try:
            await generator.start()
            # on CPU vLLM builds attention when it is first computed
            await generator.generate(GenerationRequest(prompt(4), SamplingParams(2), 0))
        finally:
            await generator.close()

    with pytest.raises(GeneratorError) as caught:
        asyncio.run(starting())
    return str(caught.value)


def test_a_model_that_is_not_there_is_reported(tmp_path: Path) -> None:
    assert "did not start" in _failure_of_start(make_generator(tmp_path))


@pytest.mark.parametrize("settings", partly_exhaustive([{}, {"own_process": True}], always=[{}]), ids=str)
def test_an_engine_that_dies_says_why_in_one_line(tmp_path: Path, settings: dict[str, object]) -> None:
    folder = write_reference_model(tmp_path, seed=1, head_dim=16)
    failure = _failure_of_start(make_generator(folder, **settings))
    assert "Unsupported CPU attention configuration: head_dim=16" in failure
    assert "\n" not in failure


def test_it_serves_nothing_before_it_started(tmp_path: Path) -> None:
    generator = make_generator(tmp_path)
    with pytest.raises(GeneratorError, match="not been started"):
        asyncio.run(generator.score(np.arange(3, dtype=np.int32)))


BLOCK_TOKENS = 32


def test_keys_and_values_of_an_interrupted_request_are_kept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The rest of it is computed over whole blocks of the older weights; a new request is not, nor is a canary."""
    first = write_reference_model(tmp_path, seed=1)
    second = write_reference_model(tmp_path_factory.mktemp("second"), seed=2)
    placement = Placement("cpu", keeps_cache=True)
    generator = make_generator(first, placement, vllm_kwargs={"block_size": BLOCK_TOKENS})
    request = GenerationRequest(prompt(50), SamplingParams(150), 3)
    sender = SenderProcess()
    bench = Bench(generator, first, second, sender)

    async def interrupted() -> Completion:
        for _ in range(20):
            before = (await generator.health())["num_sampled"]
            task = asyncio.create_task(generate_whole(generator.generate, request))
            while not task.done() and (await generator.health())["num_sampled"] < before + 3:
                await asyncio.sleep(0.001)
            await bench.sync(second, mode="interrupt")
            found = await task
            if len(found.spans) == 2:
                return found
            await bench.sync(first)
        raise AssertionError("every request was over before it could be interrupted")

    async def others() -> tuple[Completion, np.ndarray]:
        return await generator.generate(request), await generator.score(request.token_ids)

    try:
        mixed = bench.runner.run(interrupted())
        fresh, scores = bench.runner.run(others())
    finally:
        bench.runner.run(generator.close())
        bench.runner.close()
        sender.close()
    num_before = mixed.spans[0].num_tokens
    row = np.concatenate([request.token_ids, mixed.token_ids])
    num_kept = (len(request.token_ids) + num_before - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    kept = logprobs_over_kept(first, second, row, num_kept)[len(request.token_ids) + num_before - 1 :]
    np.testing.assert_allclose(mixed.logprobs[num_before:], kept, atol=1e-4)
    newer = bench.references[second]
    anew = newer.score(row)[len(request.token_ids) + num_before :]
    assert np.abs(mixed.logprobs[num_before:] - anew).max() > 0.01
    expected = newer.completion_logprobs(request.token_ids, fresh.token_ids)
    np.testing.assert_allclose(fresh.logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(scores, newer.score(request.token_ids), atol=1e-4)


def logprobs_over_kept(first: Path, second: Path, row: np.ndarray, num_kept: int) -> np.ndarray:
    """float64 `[tokens - 1]`, logprobs of all tokens but the first; from place `num_kept` on the second model computes
    them over keys and values of the first.
    """
    tokens = torch.from_numpy(row.astype(np.int64))[None]
    cache, logits = DynamicCache(), []
    for folder, part in ((first, tokens[:, :num_kept]), (second, tokens[:, num_kept:])):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            logits.append(model(part, past_key_values=cache, use_cache=True).logits[0])
    logprobs = torch.cat(logits).double().log_softmax(-1)[:-1]
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()


@exhaustive
def test_keys_and_values_are_not_kept_without_a_prefix_cache(tmp_path: Path) -> None:
    folder = write_reference_model(tmp_path, seed=1)
    settings = {"vllm_kwargs": {"enable_prefix_caching": False}}
    generator = make_generator(folder, Placement("cpu", keeps_cache=True), **settings)
    with asyncio.Runner() as runner:
        with pytest.raises(GeneratorError, match="recompute_kv_cache_after_weight_updates=true"):
            runner.run(generator.start())
        runner.run(generator.close())
