"""Scripts as users of TRL write them, with the result for each line.

A line that ends in `#: converted`, `#: check` or `#: refused` has that result; all other lines change no training.
"""

SCRIPTS = {
    "sft in four lines": """
from datasets import load_dataset
from trl import SFTTrainer

trainer = SFTTrainer(  #: converted
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()  #: converted
""",
    "online dpo with a function and a judge of pairs": """
from datasets import load_dataset
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

def brief(completions, **kwargs):
    return [-len(each) for each in completions]

args = OnlineDPOConfig(output_dir="out", max_new_tokens=128, beta=0.2)  #: converted
trainer = OnlineDPOTrainer(  #: refused
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=brief,  #: check
    judge=PairRMJudge(),
    args=args,
    train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
)
trainer.train()  #: converted
""",
    "sft with held-out rows": '''
"""Fine-tune on chats."""
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

ds = load_dataset("json", data_files="chats.jsonl", split="train").train_test_split(test_size=0.1)  #: converted
args = SFTConfig(output_dir="out", eval_strategy="steps", eval_steps=50, num_train_epochs=2)  #: converted
trainer = SFTTrainer("x/y", args=args, train_dataset=ds["train"], eval_dataset=ds["test"])  #: converted
trainer.train()  #: converted
trainer.save_model("out/final")
metrics = trainer.evaluate()
print(metrics)
''',
    "sft with adapters": """
import logging
import os
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

logger = logging.getLogger(__name__)
os.environ["WANDB_PROJECT"] = "mine"
os.environ["MY_SWITCH"] = "1"  #: check
BASE = "Qwen"
model_id = f"{BASE}/Qwen2.5-0.5B"
tok = AutoTokenizer.from_pretrained(model_id)  #: converted
tok.pad_token = tok.eos_token
tok.padding_side = "right"
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16, device_map="auto")  #: converted
model.config.use_cache = False
model.config.rope_theta = 1e6  #: check
model.gradient_checkpointing_enable()  #: converted
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj"])  #: converted
model = get_peft_model(model, peft_config)  #: converted
model.print_trainable_parameters()
ds = load_dataset("a/chats", split="train")  #: converted
logger.info(f"{len(ds)} rows")
ds = ds.map(lambda row: {"messages": row["turns"]}, remove_columns=ds.column_names)  #: check
ds = ds.shuffle(seed=42).select(range(1000))  #: check
args = SFTConfig(  #: converted
    output_dir=os.path.join("runs", "sft"),
    learning_rate=2e-4,
    per_device_train_batch_size=2 * 2,
)
args.num_train_epochs = 1  #: converted
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, processing_class=tok)  #: converted
trainer.train(resume_from_checkpoint=True)  #: converted
trainer.push_to_hub()
""",
    "sft in four bits": """
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  #: refused
model = AutoModelForCausalLM.from_pretrained("x/y", quantization_config=bnb)  #: refused
model = prepare_model_for_kbit_training(model)
trainer = SFTTrainer(  #: converted
    model,
    args=SFTConfig("out"),
    train_dataset=load_dataset("a/b", split="train[:1%]"),
    peft_config=LoraConfig(r=8),
)
trainer.train()  #: converted
""",
    "sft of some layers": """
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

model = AutoModelForCausalLM.from_pretrained("x/y")  #: converted
for p in model.model.layers[:4].parameters():  #: check
    p.requires_grad = False  #: refused
for name, p in model.named_parameters():  #: check
    if "embed" in name:  #: check
        p.requires_grad_(False)  #: refused
model.lm_head.weight.data.zero_()  #: check
trainer = SFTTrainer(model=model, train_dataset=load_dataset("a/b", split="train"))  #: converted
trainer.train()  #: converted
""",
    "sft with everything of its own": """
from datasets import load_dataset
from transformers import EarlyStoppingCallback
from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

def fmt(row):
    return f"Q: {row['q']} A: {row['a']}"

trainer = SFTTrainer(  #: refused
    model="x/y",
    args=SFTConfig(output_dir="out"),
    train_dataset=load_dataset("a/b", split="train").filter(lambda r: r["ok"]),
    formatting_func=fmt,
    data_collator=DataCollatorForCompletionOnlyLM("A:"),
    callbacks=[EarlyStoppingCallback(3)],
    optimizers=(None, None),
    compute_loss_func=lambda outputs, labels: 0,
    preprocess_logits_for_metrics=None,
)
trainer.train()  #: converted
""",
    "sft with another vocabulary": """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format

tokenizer = AutoTokenizer.from_pretrained("x/y")  #: converted
model = AutoModelForCausalLM.from_pretrained("x/y")  #: converted
model, tokenizer = setup_chat_format(model, tokenizer)  #: refused
tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]})  #: refused
model.resize_token_embeddings(len(tokenizer))  #: refused
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  #: converted
tokenizer.chat_template = open("template.jinja").read()  #: check
trainer = SFTTrainer(  #: converted
    model, args=SFTConfig(), train_dataset=load_dataset("a/b", split="train"), processing_class=tokenizer
)
trainer.train()  #: converted
""",
    "sft of images": """
from datasets import load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")  #: converted
processor = AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")  #: converted
dataset = load_dataset("trl-lib/llava-instruct-mix")  #: converted
trainer = SFTTrainer(  #: converted
    model,
    SFTConfig("out", max_length=2048),
    train_dataset=dataset["train"],
    eval_dataset=None,
    processing_class=processor,
)
trainer.train()  #: converted
""",
    "sft by unsloth": """
from datasets import load_dataset
from transformers import TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained(  #: converted
    model_name="unsloth/llama-3-8b", max_seq_length=2048, dtype=None, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj"], bias="none")  #: converted
EOS = tokenizer.eos_token

def formatting(examples):
    return {"text": [text + EOS for text in examples["x"]]}

dataset = load_dataset("yahma/alpaca-cleaned", split="train")  #: converted
dataset = dataset.map(formatting, batched=True)  #: check
trainer = SFTTrainer(  #: converted
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    max_seq_length=3000,
    args=TrainingArguments(per_device_train_batch_size=2, max_steps=60, output_dir="outputs"),
)
stats = trainer.train()  #: converted
model.save_pretrained("lora")
""",
    "sft in main": """
import random
import numpy as np
import torch
from accelerate import PartialState
from datasets import concatenate_datasets, load_dataset
from trl import SFTConfig, SFTTrainer

def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

def get_data(names):
    parts = [load_dataset("a/b", split="train"), load_dataset("c/d", split="train")]  #: converted
    with PartialState().local_main_process_first():
        data = concatenate_datasets(parts)  #: converted
    return data

def main():
    torch.backends.cuda.matmul.allow_tf32 = True
    seed_everything(7)
    data = get_data(["a/b", "c/d"])
    assert len(data) > 0
    try:
        args = SFTConfig(output_dir="out", max_steps=10)  #: converted
    except ImportError:
        raise
    trainer = SFTTrainer(model="x/y", args=args, train_dataset=data)  #: converted
    if trainer.is_world_process_zero():
        print("ready")
    trainer.train()  #: converted

if __name__ == "__main__":
    main()
""",
    "grpo": """
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from rewards import format_reward

dataset = load_dataset("openai/gsm8k", "main")["train"]  #: converted
dataset = dataset.rename_column("question", "prompt").take(500)  #: converted
STEPS = 200

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(  #: converted
    output_dir="out",
    learning_rate=1e-6,
    max_steps=STEPS,
    num_generations=8,
    per_device_train_batch_size=8,
    max_completion_length=256,
    beta=0.04,
    use_vllm=True,
    run_name=f"run-{STEPS}",
)
training_args.temperature = 0.9  #: converted
trainer = GRPOTrainer(  #: check
    model="x/y",
    reward_funcs=[reward_len, format_reward],
    args=training_args,
    train_dataset=dataset,
    rollout_func=None,
)
trainer.train()  #: converted
""",
    "grpo with a trainer of its own": """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from rewards import correct

rows = [{"prompt": [{"role": "user", "content": "2*3"}], "answer": 6}]
dataset = Dataset.from_list(rows)  #: check

class Mine(GRPOTrainer):  #: refused
    def _compute_loss(self, model, inputs):
        return 0

GRPOTrainer._get_per_token_logps = lambda *a: None  #: refused
lr = float(open("lr.txt").read())  #: check
common = dict(num_generations=4, bf16=True)
args = GRPOConfig("out", learning_rate=lr, **common)  #: check
trainer = Mine("x/y", correct, args, dataset)  #: refused
trainer.add_callback(print)  #: check
trainer.compute_loss = lambda *a: 0  #: refused
trainer.train()  #: converted
""",
    "grpo with tools": """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

def multiply(a: int, b: int) -> int:
    return a * b

trainer = GRPOTrainer(  #: refused
    model="x/y",
    reward_funcs=accuracy_reward,
    args=GRPOConfig(output_dir="out", max_steps=5),
    train_dataset=load_dataset("a/b", split="train"),
    tools=[multiply],
    rollout_func=lambda prompts, trainer: {},
)
trainer.train()  #: converted
""",
    "grpo with a reward model": """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(  #: converted
    model="x/y",
    reward_funcs="trl-lib/Qwen2-0.5B-Reward",
    args=GRPOConfig(output_dir="out", max_steps=5),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()  #: converted
""",
    "dpo of two datasets": """
from datasets import concatenate_datasets, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("x/y")  #: converted
ref_model = AutoModelForCausalLM.from_pretrained("x/y")  #: converted
tokenizer = AutoTokenizer.from_pretrained("x/y")  #: converted
a = load_dataset("a/pairs", split="train")  #: converted
b = load_dataset("b/pairs", split="train")  #: converted
train = concatenate_datasets([a, b])  #: converted
args = DPOConfig("out", beta=0.05, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])  #: converted
trainer = DPOTrainer(  #: check
    model, ref_model, args=args, train_dataset=train, eval_dataset=a.select(range(100)), processing_class=tokenizer
)
trainer.train()  #: converted
""",
    "dpo with another reference": """
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

args = DPOConfig(output_dir="out", loss_type="robust")  #: converted
trainer = DPOTrainer(  #: refused
    model="Qwen/Qwen2.5-0.5B",
    ref_model="Qwen/Qwen2.5-1.5B",
    args=args,
    train_dataset=load_dataset("a/p", split="train"),
)
trainer.train()  #: converted
""",
    "dpo of an adapter": """
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("x/y")  #: converted
model = PeftModel.from_pretrained(model, "sft-adapter", is_trainable=True)  #: converted
ds = load_dataset("a/p", split="train")  #: converted
ds = ds.rename_columns({"good": "chosen", "bad": "rejected"}).remove_columns(["id"])  #: converted
trainer = DPOTrainer(model, args=DPOConfig("out", max_steps=10), train_dataset=ds)  #: converted
trainer.train()  #: converted
""",
    "dpo by arguments": """
import argparse
from datasets import interleave_datasets, load_dataset
from trl import DPOConfig, DPOTrainer

def load(name):
    ds = load_dataset(name, split="train")  #: converted
    return ds.skip(10)  #: converted

def build(args):
    return DPOConfig(output_dir=args.out, learning_rate=args.lr, loss_type="ipo")  #: converted

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-6)
    p.add_argument("--out", default="out")
    args = p.parse_args()  #: refused
    mixed = interleave_datasets([load("a/b"), load("c/d")], probabilities=[0.7, 0.3])  #: converted
    config = build(args)
    if args.lr > 1e-5:
        config.max_steps = 10
    if len(mixed) > 1000:  #: check
        config.max_steps = 100  #: converted
    trainer = DPOTrainer("x/y", args=config, train_dataset=mixed)  #: converted
    trainer.train()  #: converted

if __name__ == "__main__":
    main()
""",
    "kto": """
from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

dataset = load_dataset("trl-lib/kto-mix-14k")  #: converted
args = KTOConfig("out", learning_rate=5e-7, desirable_weight=1.33, eval_strategy="epoch")  #: converted
trainer = KTOTrainer(  #: converted
    model="x/y", args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"]
)
trainer.train()  #: converted
""",
    "reward": """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

set_seed(7)
model = AutoModelForSequenceClassification.from_pretrained("x/y", num_labels=1)  #: converted
tokenizer = AutoTokenizer.from_pretrained("x/y")  #: converted
model.config.pad_token_id = tokenizer.pad_token_id
data = load_dataset("trl-lib/ultrafeedback_binarized")  #: converted
args = RewardConfig("out", center_rewards_coefficient=0.01)  #: converted
trainer = RewardTrainer(model=model, args=args, train_dataset=data["train"], processing_class=tokenizer)  #: converted
trainer.train()  #: converted
""",
    "orpo": """
from datasets import load_dataset
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

args = ORPOConfig(output_dir="out", beta=0.2, learning_rate=8e-6, max_length=1024)  #: converted
trainer = ORPOTrainer(model="x/y", args=args, train_dataset=load_dataset("a/p", split="train"))  #: converted
trainer.train()  #: converted
""",
    "cpo": """
from datasets import load_from_disk
from trl import CPOConfig, CPOTrainer

pairs = load_from_disk("pairs")["train"]  #: converted
trainer = CPOTrainer(model="x/y", args=CPOConfig("out"), train_dataset=pairs)  #: converted
trainer.train()  #: converted
""",
    "simpo by a loop": """
from datasets import concatenate_datasets, load_dataset
from functools import partial
from trl import CPOConfig, CPOTrainer
from mine import clean, patch

patch()  #: check
parts = []
for name in ["a/p", "b/p"]:
    parts.append(load_dataset(name, split="train"))  #: converted
train = concatenate_datasets(parts)  #: converted
train = clean(train)  #: check
configure = partial(CPOConfig, "out", loss_type="simpo", cpo_alpha=0.0)
args = configure(beta=2.5, simpo_gamma=read_gamma())  #: check
match args.beta:  #: check
    case 2.5:
        args.max_steps = 5  #: converted
trainer = CPOTrainer(model="x/y", args=args, train_dataset=train)  #: check
while trainer.state.epoch < 3:  #: check
    trainer.train()  #: converted
""",
    "sft by a class": """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

class Settings:
    lr = 3e-5
    model = "x/y"

class Runner:
    def __init__(self, settings):
        self.settings = settings
        self.config = AutoConfig.from_pretrained(settings.model)  #: check
        self.config.attention_dropout = 0.1  #: check
        self.peft = LoraConfig(r=8)  #: converted
        self.peft.r = 64  #: converted

    def run(self):
        model = AutoModelForCausalLM.from_pretrained(self.settings.model, config=self.config)  #: check
        args = SFTConfig("out", learning_rate=self.settings.lr)  #: converted
        data = load_dataset("a/b", split=["train[:90%]", "train[90%:]"])  #: converted
        trainer = SFTTrainer(  #: converted
            model, args=args, train_dataset=data[0], eval_dataset=data[1], peft_config=self.peft
        )
        trainer.args.max_steps = 7  #: converted
        trainer.train_dataset = trainer.train_dataset.filter(lambda row: row["ok"])  #: check
        trainer.train()  #: converted
        trainer.model.save_pretrained("out")

Runner(Settings()).run()
""",
    "sft by a parser": """
from dataclasses import dataclass, field
from datasets import load_dataset
from transformers import HfArgumentParser
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

@dataclass
class Mine:
    dataset_name: str = field(default="a/b", metadata={"help": "data"})
    rows: int = 100

def main(mine, training_args, model_args):
    dataset = load_dataset(mine.dataset_name, split="train").select(range(mine.rows))  #: converted
    quantization = get_quantization_config(model_args)
    trainer = SFTTrainer(  #: check
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()  #: converted
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=mine.dataset_name)

if __name__ == "__main__":
    parser = HfArgumentParser((Mine, SFTConfig, ModelConfig))
    main(*parser.parse_args_into_dataclasses())  #: refused
""",
}

COMMANDS = {
    "trl": """
#!/bin/bash
# don't stop
set -e
export WANDB_PROJECT=mine
export MY_FLAG=1  #: check
MODEL=Qwen/Qwen2.5-0.5B
pip install trl
trl sft --model_name_or_path $MODEL --dataset_name trl-lib/Capybara --learning_rate 3.0e-5 \\  #: converted
    --max_steps 7 --packing --use_peft --lora_r 32 --num_processes 4 --output_dir ${OUT:-out}
""",
    "accelerate": """
python prepare.py > data.jsonl; echo done  #: check
accelerate launch --num_processes 8 train.py --model_name_or_path x/y --rows 50 --use_peft --lora_r 4  #: converted
""",
}
