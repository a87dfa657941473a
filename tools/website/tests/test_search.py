"""The search of the site answers questions of readers: the right page is among the first three, and mostly the first.

The questions are those of public issue trackers of such systems, in our words; a comment gives the thread.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
ASK = Path(__file__).with_name("ask.mjs")
FIRST = 3

# question, page, words of the answer on it
QUESTIONS = [
    # huggingface/trl#2884, huggingface/open-r1#436
    ("why does my reward stay flat?", "troubleshooting", "groups_without_signal"),
    # hiyouga/EasyR1#232
    ("reward is always zero", "troubleshooting", "rl env check"),
    # huggingface/trl#3452, huggingface/trl#3857
    ("GRPO loss is 0 but the reward changes", "troubleshooting", "Advantages of a group add up to 0"),
    # huggingface/trl#4159, huggingface/trl#4772
    ("logprobs of vLLM differ from the trainer", "concepts/mismatch", "mismatch/mean"),
    # huggingface/trl#2644
    ("pass the ground truth of a dataset column to a reward function", "rewards-and-environments", "answer"),
    # huggingface/trl#2832
    ("combine several reward functions with weights", "rewards-and-environments", "Several reward functions"),
    # huggingface/trl#5142, vllm-project/vllm#15254
    ("out of memory when vLLM wakes up for weight sync", "troubleshooting", "gpu_memory_utilization"),
    # NovaSky-AI/SkyRL#709, OpenRLHF/OpenRLHF#337
    ("launch a multi-node run with Slurm", "slurm", "rl submit slurm"),
    # Lightning-AI/pytorch-lightning#4265, lanl/BEE#936
    ("requeue after preemption", "slurm", "Preemption"),
    # huggingface/open-r1#160, facebookresearch/fairseq2#1485
    ("NCCL timeout while a checkpoint is saved", "troubleshooting", "A timeout of NCCL"),
    # Lightning-AI/pytorch-lightning#19377
    ("resume on a different number of GPUs", "resume-and-checkpoints", "does not depend on the mesh"),
    ("load the trained model with transformers", "resume-and-checkpoints", "transformers"),
    ("train on my own jsonl file", "data-formats", "data_path"),
    ("train LoRA adapters with GRPO", "lora", "policy.lora_cfg"),
    ("multi-turn tool calling", "tools", "ToolEnvironment"),
    ("read the completions while it is training", "view", "rollouts"),
    ("log to wandb", "ablations", "logger.wandb_enabled"),
    ("off-policy async training, how stale may rollouts be", "concepts/staleness", "max_trajectory_age_steps"),
    ("DPO with chosen and rejected columns", "preferences-and-reward-models", "rejected"),
    ("training hangs without an error", "troubleshooting", "rl stacks"),
    ("cluster without internet access", "datasets", "hf download"),
    ("completions are truncated at max length", "troubleshooting", "rollout/truncated"),
    ("entropy collapse", "troubleshooting", "clip_high"),
    ("convert a TRL script", "coming-from-trl", "rl config import"),
    ("does it need Ray on Kubernetes", "kubernetes", "KubeRay"),
]
# Questions in the words of users, by the page (or pages) that answer them. They include the seven for which
# an API member once came before the guide, and questions such as llama-cookbook#438 (freezing), VLM-R1#93, PRIME#17
# and verl#249 (GPUs for a size), cosmos-rl#318 and Search-R1#88 (collapse), LOMO#4 (accumulation).
ASKED = {
    "ablations": """
        mlflow
        hyperparameter sweep
        compare two runs
        weights and biases
    """,
    "ablations monitoring datasets": """
        wandb offline
    """,
    "ablations monitoring view": """
        tensorboard
    """,
    "adding-an-algorithm runs-in-python": """
        custom training loop
    """,
    "adding-an-algorithm": """
        add a new algorithm
        custom loss function
    """,
    "agents": """
        langchain agent
        openai compatible endpoint for agent
    """,
    "algorithms": """
        grpo vs ppo
    """,
    "asynchronous-rollouts": """
        async rl
    """,
    "asynchronous-rollouts concepts/staleness": """
        async rollouts off policy
    """,
    "backends-and-meshes": """
        fsdp
        tensor parallel
        flash attention
        sequence parallel long context
    """,
    "backends-and-meshes batch-sizes": """
        gradient checkpointing
    """,
    "backends-and-meshes choosing-hardware": """
        multi-GPU on one machine
        ddp multiple gpus
    """,
    "backends-and-meshes coming-from-trl": """
        deepspeed zero 3
    """,
    "backends-and-meshes model-families": """
        mixture of experts
    """,
    "batch-sizes": """
        effective batch size
        grad accum steps
        increase batch size without more memory
    """,
    "batch-sizes backends-and-meshes choosing-hardware": """
        gradient accumulation
    """,
    "batch-sizes coming-from-trl": """
        per_device_train_batch_size
    """,
    "built-in-environments": """
        sandbox code execution
    """,
    "built-in-environments data-formats": """
        thinking models think tags
    """,
    "callbacks": """
        early stopping
        how do I stop training early
    """,
    "choosing-hardware": """
        which GPU for 7B
        how much vram do I need to train 14b with lora
        train on a single 24GB gpu
        torchrun
        70B how many nodes
        run on 4 gpus single node
        how many gpus for llama 70b
        minimum gpu memory for grpo
    """,
    "choosing-hardware models-on-gpus": """
        train on 2 gpus
        can i use an rtx 4090
    """,
    "choosing-hardware optimizers": """
        8-bit optimizer
    """,
    "choosing-hardware first-run": """
        can I run this on a macbook without gpu
    """,
    "choosing-hardware fp8 lora": """
        qlora 4bit
    """,
    "choosing-hardware resume-and-checkpoints": """
        checkpoint size on disk
    """,
    "coding-agents": """
        swe-bench
    """,
    "coming-from-trl": """
        import trl config
    """,
    "concepts/packing": """
        packing sequences
    """,
    "concepts/rollouts-and-groups": """
        what is a rollout
    """,
    "data-formats": """
        assistant only loss mask
    """,
    "data-formats datasets": """
        how to use custom dataset
        use my own data
    """,
    "data-formats rewards-and-environments": """
        system prompt
    """,
    "data-formats troubleshooting": """
        chat template
    """,
    "datasets": """
        streaming dataset
        filter out easy prompts
        train test split
        validation set
    """,
    "datasets data-formats": """
        load dataset from csv
    """,
    "datasets local-models messages": """
        cannot find huggingface model 401 gated
    """,
    "distillation": """
        knowledge distillation
    """,
    "evaluation": """
        evaluate on gsm8k
        evaluate benchmark during training
        chat with the trained model
        evaluate my trained model
    """,
    "fp8": """
        fp8 training
    """,
    "freezing": """
        freeze layers
        freeze embeddings
        train only the last layers
        freeze lm_head
        freeze first n layers
    """,
    "freezing vision": """
        freeze vision encoder
    """,
    "grpo": """
        beta kl coefficient
        dr grpo
        difference between grpo and dapo
    """,
    "grpo concepts/mismatch": """
        importance sampling ratio
    """,
    "grpo troubleshooting": """
        reference model kl penalty
    """,
    "images": """
        docker image
    """,
    "images first-run": """
        cuda version driver
    """,
    "kubernetes": """
        kubernetes
        helm chart
    """,
    "local-models": """
        load model from local directory
    """,
    "local-models datasets": """
        local model path offline
        use a model without internet
        HF_TOKEN
        proxy mirror hf endpoint
        no internet on compute nodes
    """,
    "local-models resume-and-checkpoints": """
        local checkpoint as base model
    """,
    "lora": """
        lora with vllm
        merge lora adapter into base model
        inference with trained lora adapter
    """,
    "metrics": """
        metrics explained
    """,
    "metrics concepts/mismatch": """
        what does mismatch/kl mean
    """,
    "model-families": """
        unsupported model architecture
        which models are supported
    """,
    "monitoring": """
        notify me when run finishes slack
    """,
    "ppo": """
        ppo critic
    """,
    "preferences-and-reward-models": """
        reward model training
        dpo
        kto
        train reward model
    """,
    "preferences-and-reward-models coming-from-trl": """
        orpo
    """,
    "profiling": """
        profiling
    """,
    "recipes-and-config algorithms": """
        learning rate scheduler warmup
    """,
    "recipes-and-config messages": """
        error no such key in config
    """,
    "resume-and-checkpoints": """
        resume training
        continue training from a checkpoint with a different learning rate
        where are checkpoints saved
        convert checkpoint to huggingface format
        push model to hub
        disk space full checkpoints
        keep only best checkpoint
        resume from checkpoint
        save the model to huggingface
    """,
    "resume-and-checkpoints algorithms": """
        change learning rate during run
    """,
    "resume-and-checkpoints architecture": """
        set random seed reproducibility
    """,
    "resume-and-checkpoints slurm": """
        continue run after crash
    """,
    "rewards-and-environments": """
        custom reward function
        multiple reward functions
        format reward
        timeout reward function
        write a reward function
        multi turn environment
    """,
    "judges rewards-and-environments": """
        llm as a judge reward
    """,
    "runs-in-python": """
        plot reward curve in python
        use pandas to analyse rollouts
    """,
    "runs-in-python api": """
        read metrics into pandas dataframe
    """,
    "runs-in-python first-run": """
        jupyter notebook
    """,
    "several-agents": """
        self play
    """,
    "several-environments datasets": """
        curriculum learning
    """,
    "several-machines": """
        environment variables
        connect to existing ray cluster
        ray cluster
    """,
    "several-machines slurm": """
        multi node training
    """,
    "slurm": """
        slurm sbatch script
    """,
    "slurm kubernetes resume-and-checkpoints": """
        spot instance preempted
    """,
    "speculative-decoding": """
        speculative decoding
    """,
    "tools": """
        tool calling
        mcp tools
    """,
    "tools agents built-in-environments": """
        search agent multi turn
    """,
    "troubleshooting": """
        reward is always zero
        CUDA out of memory during generation
        kl divergence explodes
        nccl timeout
        loss is nan
        grad norm is nan
        loss is 0
        reward goes up but validation does not
        reward hacking
        entropy collapse
        completions are too long
        clipped completions max length
        model does not stop generating eos
        gpu utilization is low
        training hangs at start
        stuck at first step
        vllm out of memory
        oom at weight update
        my reward does not increase
        reward stuck at zero grpo
        kl too high
        kl loss keeps increasing
        nccl error watchdog timeout
        generation is very slow
        max tokens of completion
    """,
    "troubleshooting backends-and-meshes": """
        out of memory
    """,
    "troubleshooting backends-and-meshes batch-sizes": """
        CUDA error out of memory while training
    """,
    "troubleshooting concepts/placement": """
        vllm oom kv cache
    """,
    "troubleshooting debugging": """
        training is slow
    """,
    "troubleshooting messages": """
        training crashes with killed by oom killer
    """,
    "troubleshooting messages several-machines": """
        port already in use ray
    """,
    "troubleshooting metrics": """
        no rollouts differ groups without signal
    """,
    "troubleshooting recipes-and-config": """
        max sequence length
    """,
    "view debugging": """
        how to see the generated completions
    """,
    "vision": """
        train a vision language model
    """,
    "vision model-families": """
        qwen2.5-vl
    """,
}
SHARE = 0.9
"""Least share of questions for which the right page is the first."""

# a key by itself is looked up in the reference of the config, also if other pages and Python classes have it
KEYS = {
    "num_generations_per_prompt": "grpo",
    "grpo.num_generations_per_prompt": "grpo",
    "gpu_memory_utilization": "policy",
    "loss_fn.surrogate.clip_high": "loss_fn",
    "save_period": "checkpointing",
    "wandb_enabled": "logger",
    "tensor_parallel_size": "policy",
}


def right_pages():
    """The pages that answer each question of `ASKED`."""
    return {line.strip(): pages.split() for pages, lines in ASKED.items() for line in lines.strip().splitlines()}


@pytest.fixture(scope="module")
def found(html):
    if NODE is None:
        pytest.skip("needs node, which runs the worker of the search")
    asked = [
        *(question for question, _, _ in QUESTIONS),
        *right_pages(),
        *KEYS,
        "rl_core.Batch",
        "rl submit slurm",
        "resmue a run",
    ]
    done = subprocess.run([NODE, ASK, html], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def pages_of(places):
    return list(dict.fromkeys(place.partition(".html")[0] for place in places))


@pytest.mark.parametrize(("question", "page", "answer"), QUESTIONS)
def test_the_page_with_the_answer_is_among_the_first(found, pages, question, page, answer):
    assert page in pages_of(found[question][:FIRST])
    assert answer in " ".join(pages[f"{page}.md"].split())


def test_the_right_page_is_first_for_nine_in_ten_questions(found):
    wrong = {
        question: pages_of(found[question])[:FIRST]
        for question, right in right_pages().items()
        if not found[question] or pages_of(found[question])[0] not in right
    }
    assert len(wrong) <= (1 - SHARE) * len(right_pages()), wrong


def test_api_members_come_after_guides(found):
    first = [pages_of(found[question])[0] for question in right_pages() if found[question]]
    assert not [page for page in first if page.startswith("reference/python/")]


@pytest.mark.parametrize(("key", "section"), KEYS.items())
def test_a_key_is_found_in_the_reference_of_the_config(found, key, section):
    assert all(place.startswith("reference/config/") for place in found[key][:1])
    assert f"reference/config/{section}" in pages_of(found[key][:FIRST])


def test_names_and_commands_are_found_in_their_reference(found):
    assert found["rl_core.Batch"][0] == "reference/python/rl_core.html#rl_core.Batch"
    assert pages_of(found["rl submit slurm"][:FIRST])[0] in ("slurm", "reference/cli/submit")


def test_a_misspelt_word_finds_the_page(found):
    assert "resume-and-checkpoints" in pages_of(found["resmue a run"][:FIRST])
