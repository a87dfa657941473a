"""A process that asks a judge questions until it is killed: `killed_service.py FOLDER BASE_URL NUM_QUESTIONS`."""

import asyncio
import sys
from pathlib import Path

from scripted_endpoint import SCORE, question

from rl_algos.judges.config import EndpointJudgeConfig, JudgeLimitsConfig
from rl_algos.judges.service import JudgeService


async def main(folder, base_url, num_questions):
    limits = JudgeLimitsConfig(concurrent=4, max_total_tokens=100_000)
    config = EndpointJudgeConfig(
        kind="endpoint", base_url=base_url, model="m", max_new_tokens=16, limits=limits, timeout_s=30.0
    )
    service = JudgeService({"critic": config}, folder / "cache", folder / "run" / "spent.jsonl")
    questions = [question(f"Question {number}", SCORE) for number in range(num_questions)]
    verdicts = await service.ask("critic", questions)
    total, cached = sum(verdict.value["score"] for verdict in verdicts), service.usage()["judge/critic/cached"]
    sys.stdout.write(f"{total} {cached}\n")
    await service.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
