"""Processor time of the process in front of vLLM, with and without the scheduler that holds tokens.

    uv run --group cpu benchmarks/generation_front.py [--requests 1024] [--tokens 32 128] [--rounds 3] [--scripted]

Two real engines on the CPU compute the same requests in turn, each in its own process, and so many requests at a time:
one with our scheduler, one with vLLM's, which sends every token as it is sampled. Measured is the processor time of
this process, from the request to the completion with its logprobs; the engines' own time is not in it. Both must give
the same tokens and logprobs.

With `--scripted` no engine runs: messages are written as an engine's process writes them, and measured is the time in
which vLLM's own objects of the front decode them and process them to outputs. Taking requests in and reading sockets
are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
from measurement import surroundings, table
from rich.console import Console

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.testing.torch.reference_model import write_reference_model
from rl_core.testing.weights import model_config
from rl_vllm import VllmConfig, VllmGenerator

NUM_PROMPT_TOKENS = 8


async def started(folder: Path, num_requests: int) -> VllmGenerator:
    """Return an engine in its own process that computes all requests at once."""
    backend = VllmConfig(kv_cache_gib=1.0, max_num_seqs=num_requests, own_process=True)
    generator = VllmGenerator(GenerationConfig(), backend, model_config(folder), Placement("cpu"))
    await generator.start()
    return generator


async def generated(
    generator: VllmGenerator, num_requests: int, num_tokens: int, seed: int
) -> tuple[float, list[Completion]]:
    """Return the processor seconds of this process for requests that are computed together, and their completions."""
    prompts = np.random.default_rng(seed).integers(5, 200, (num_requests, NUM_PROMPT_TOKENS), dtype=np.int32)
    requests = [GenerationRequest(row, SamplingParams(num_tokens), place) for place, row in enumerate(prompts)]
    begun = time.process_time()
    completions = await asyncio.gather(*(generator.generate(request) for request in requests))
    return time.process_time() - begun, list(completions)


async def compared(args: argparse.Namespace, folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Return the processor seconds of holding and of sending, by the number of tokens of a completion."""
    holding = await started(folder, args.requests)
    with patch("rl_vllm.engine.arguments.HoldingScheduler", None):
        sending = await started(folder, args.requests)
    found: dict[int, list[tuple[float, float]]] = {}
    for generator in (holding, sending):
        await generated(generator, args.requests, 4, 0)
    for turn in range(args.rounds):
        for num_tokens in args.tokens:
            held, first = await generated(holding, args.requests, num_tokens, turn)
            sent, second = await generated(sending, args.requests, num_tokens, turn)
            for one, other in zip(first, second, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist(), "the schedulers change no token"
                assert abs(one.logprobs - other.logprobs).max() < 1e-4, "each token has its own logprob"
            found.setdefault(num_tokens, []).append((held, sent))
    for generator in (holding, sending):
        await generator.close()
    return found


def scripted(num_requests: int, num_tokens: int, *, holds: bool) -> float:
    """Return the processor seconds of the front's objects for requests that a scripted engine samples together."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from rl_vllm.engine.holding_scheduler import REPORT_ID, Held, receive_held

    final = RequestOutputKind.FINAL_ONLY
    params = VllmSamplingParams(
        max_tokens=num_tokens, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=final, seed=0
    )
    processor = OutputProcessor(None, log_stats=False)
    queues = []
    for number in range(num_requests):
        name = str(number)
        request = EngineCoreRequest(
            name, [1] * NUM_PROMPT_TOKENS, None, params, None, 0.0, None, None, None, external_req_id=name
        )
        queues.append(RequestOutputCollector(final, name))
        processor.add_request(request, None, queue=queues[-1])
    ids = np.arange(num_requests, dtype=np.int32)[:, None]
    rows = LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0])
    held = [Held(is_sent=False, has_logprobs=True) for _ in queues]
    encoder, decoder, spent = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), 0.0
    drafts = {"engine": 0, "num_sampled": 0, "num_steps": 0, "drafts": [0, 0, []]}
    for step in range(num_tokens):
        end = FinishReason.LENGTH if step == num_tokens - 1 else None
        outputs = []
        for number, each in enumerate(held):
            output = EngineCoreOutput(str(number), [number], finish_reason=end)
            if holds:
                each.token_ids.append(number)
                each.logprobs.append(-float(number))
                if end is not None:
                    each.put_into(output)
            else:
                output.new_logprobs = rows.slice_request(number, 1)
            outputs.append(output)
        if holds:
            report = EngineCoreOutput(REPORT_ID, [], kv_transfer_params=drafts)
            outputs = [*outputs, report] if end is not None else [report]
        message = [bytes(part) for part in encoder.encode(EngineCoreOutputs(outputs=outputs))]
        begun = time.process_time()
        received = decoder.decode(message).outputs
        receive_held(processor, received)
        processor.process_outputs(received)
        spent += time.process_time() - begun
    begun = time.process_time()
    for number, queue in enumerate(queues):
        found = queue.get_nowait().outputs[0]
        tokens, logprobs = np.array(found.token_ids, np.int32), np.array(found.logprobs.logprobs, np.float32)
        assert (tokens == number).all()
        assert (logprobs == -number).all()
        assert len(tokens) == len(logprobs) == num_tokens
    return spent + time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1024, help="requests at a time (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128], help="tokens of a completion (32 128)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (%(default)s)")
    parser.add_argument("--scripted", action="store_true", help="measure the front's objects without an engine")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.tokens, args.rounds = 16, [8], 1
    console = Console()
    console.print(surroundings())
    found: dict[int, list[tuple[float, float]]] = {}
    if args.scripted:
        for _ in range(args.rounds):
            for num_tokens in args.tokens:
                held, sent = (scripted(args.requests, num_tokens, holds=holds) for holds in (True, False))
                found.setdefault(num_tokens, []).append((held, sent))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(compared(args, write_reference_model(Path(folder), seed=1)))
    rows = []
    for num_tokens, pairs in found.items():
        count = args.requests * num_tokens
        held, sent = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        ratio = statistics.median(sent / held for held, sent in pairs)
        figures = [f"{seconds / count * 1e6:.2f}" for seconds in (sent, held)]
        rows.append([str(num_tokens), *figures, f"{held / args.requests * 1e6:.0f}", f"{ratio:.1f}"])
    header = ["tokens of a completion", "us per token, sent", "us per token, held", "us per request, held", "ratio"]
    console.print(table(header, rows), soft_wrap=True)


if __name__ == "__main__":
    main()
