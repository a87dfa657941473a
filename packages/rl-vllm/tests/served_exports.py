"""Completions of exported models by an engine, in a process of its own: `python served_exports.py ENGINE < orders`.

Standard input is JSON: a list of `[folder, arguments, rows]`. The last line of output is JSON: for each model either a
list of `[tokens, logprobs]` of each row's 24 greedy tokens, or the error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

NUM_TOKENS = 24
MAX_LENGTH = 400
Row = tuple[list[int], list[float]]


def by_plain_vllm(folder: str, arguments: dict[str, Any], rows: list[list[int]]) -> list[Row]:
    """Serve with `vllm.LLM` and nothing of rl, unless an argument loads it."""
    from vllm import LLM, SamplingParams, TokensPrompt

    settings = {"max_model_len": MAX_LENGTH, **arguments}
    memory = {"kv_cache_memory_bytes": 2**27, "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 16}
    engine = LLM(model=folder, skip_tokenizer_init=True, disable_log_stats=True, **memory, **settings)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=row) for row in rows], params, use_tqdm=False)
    found = [each.outputs[0] for each in outputs]
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    return [
        (list(each.token_ids), [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)])
        for each in found
    ]


def by_rl(folder: str, arguments: dict[str, Any], rows: list[list[int]]) -> list[Row]:
    """Serve with the generator."""
    import numpy as np

    from rl_core.model_config import GenerationConfig, ModelConfig
    from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
    from rl_vllm import VllmConfig
    from rl_vllm.generator import VllmGenerator

    longest = arguments.get("max_model_len", MAX_LENGTH + 1) - 1
    model = ModelConfig(model_name=folder, precision="float32", max_total_sequence_length=longest)
    generator = VllmGenerator(GenerationConfig(), VllmConfig(kv_cache_gib=0.25), model, Placement("cpu"))
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)

    async def complete() -> list[Row]:
        await generator.start()
        try:
            requests = [GenerationRequest(np.array(row, np.int32), sampling, seed=0) for row in rows]
            found = await asyncio.gather(*map(generator.generate, requests))
            return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in found]
        finally:
            await generator.close()

    return asyncio.run(complete())


ENGINES: dict[str, Callable[[str, dict[str, Any], list[list[int]]], list[Row]]] = {"vllm": by_plain_vllm, "rl": by_rl}


def main() -> None:
    """Serve what standard input asks for."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = []
    for folder, arguments, rows in json.load(sys.stdin):
        try:
            answers.append(ENGINES[sys.argv[1]](folder, arguments, rows))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answers.append(f"{type(error).__name__}: {error}")
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
