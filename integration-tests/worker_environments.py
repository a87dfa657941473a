"""Builds the environments of workers before the tests, with what the other environments of tox have compiled:
`python worker_environments.py FOLDER`.

A run that builds one compiles what its workers import of torch, transformers and vLLM, which takes longer than the run.

Args:
    FOLDER: The folder of tox's environments.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from runs import worker_env_of

from rl_core.plugins import GENERATORS, POLICIES
from rl_launch.worker_envs.node_build import build
from rl_launch.worker_envs.plan import local_plan

SHARE = Path(__file__).resolve().parents[1] / "tools" / "share_bytecode.py"
WORKERS = ((POLICIES, "dtensor"), (POLICIES, "megatron"), (GENERATORS, "vllm"))


def main():
    share = ("{env_python}", str(SHARE), sys.argv[1])
    plans = [local_plan(worker_env_of(*each)) for each in WORKERS]
    with ThreadPoolExecutor(len(plans)) as pool:
        # the digest of a plan stays, which says what is installed
        built = pool.map(lambda plan: build(replace(plan, commands=(*plan.commands, share))), plans)
        for plan, env in zip(plans, built, strict=True):
            sys.stdout.write(f"{plan.name}: {'cached' if env.cached else f'built in {env.seconds:.0f} s'}\n")


if __name__ == "__main__":
    main()
