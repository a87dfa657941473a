"""Tokens per second of `VllmGenerator` and of vLLM's own `LLM.generate` on the same requests.

    python packages/rl-vllm/benchmarks/generate.py [MODEL_DIR]

Each runs in a process of its own, on one CPU thread, the best of several rounds; without a model, a tiny one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_REQUESTS = 256
NUM_TOKENS = 32
NUM_ROUNDS = 5
MAX_LEN = 256


def prompts(vocab_size: int) -> list[list[int]]:
    return [[3 + (7 * i + j) % (vocab_size - 3) for j in range(4 + i % 12)] for i in range(NUM_REQUESTS)]


def best(rounds: list[float]) -> float:
    return NUM_REQUESTS * NUM_TOKENS / min(rounds)


def of_generator(model_dir: str, vocab_size: int, answers: Any) -> None:
    import numpy as np

    from rl_core.model_config import GenerationConfig, ModelConfig
    from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
    from rl_vllm import VllmConfig, VllmGenerator

    async def measure() -> float:
        model = ModelConfig(model_name=model_dir, precision="float32", max_total_sequence_length=MAX_LEN)
        generator = VllmGenerator(GenerationConfig(), VllmConfig(), model, Placement("cpu"))
        await generator.start()
        sampling = SamplingParams(NUM_TOKENS)
        requests = [
            GenerationRequest(np.array(tokens, np.int32), sampling, seed)
            for seed, tokens in enumerate(prompts(vocab_size))
        ]
        rounds = []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            await asyncio.gather(*[generator.generate(request) for request in requests])
            rounds.append(time.perf_counter() - start)
        await generator.close()
        return best(rounds)

    answers.put(asyncio.run(measure()))


def of_vllm(model_dir: str, vocab_size: int, answers: Any, seeded: bool) -> None:
    from rl_core.rollouts.generation import Placement
    from rl_vllm.engine import process_env

    process_env.apply(Placement("cpu"), eager=True, num_ranks=1, own_process=False, environ=os.environ)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model_dir, dtype="float32", enforce_eager=True, max_model_len=MAX_LEN, max_num_seqs=256,
        kv_cache_memory_bytes=2**30, enable_chunked_prefill=False, max_num_batched_tokens=4096,
    )  # fmt: skip
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts(vocab_size)]
    sampling = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=seed if seeded else None)
        for seed in range(NUM_REQUESTS)
    ]
    rounds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        llm.generate(inputs, sampling, use_tqdm=False)
        rounds.append(time.perf_counter() - start)
    answers.put(best(rounds))


def measured(target: Any, *args: Any) -> float:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=target, args=(args[0], args[1], answers, *args[2:]))
    process.start()
    tokens_per_second: float = answers.get(timeout=300)
    process.join()
    return tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", nargs="?", type=Path)
    folder = parser.parse_args().model_dir
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            from rl_core.testing.torch.reference_model import write_reference_model

            folder = write_reference_model(Path(scratch), seed=0)
        from rl_core.testing.torch.reference_model import VOCAB_SIZE

        ours = measured(of_generator, str(folder), VOCAB_SIZE)
        bare = measured(of_vllm, str(folder), VOCAB_SIZE, False)
        seeded = measured(of_vllm, str(folder), VOCAB_SIZE, True)
    print(f"{NUM_REQUESTS} requests of {NUM_TOKENS} tokens, tokens/s, best of {NUM_ROUNDS}")
    print(f"VllmGenerator                     {ours:9.0f}")
    print(f"vllm LLM.generate, no seeds       {bare:9.0f}   ratio {ours / bare:.2f}")
    print(f"vllm LLM.generate, seeded alike   {seeded:9.0f}   ratio {ours / seeded:.2f}")


if __name__ == "__main__":
    main()
