"""`rl chat` with a real generator."""

from runs import by_transformers

from rl_algos.tiny_model import make_tiny_model
from rl_core.testing.exhaustive import exhaustive

GREEDY = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+30="}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
generated = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""


@exhaustive
def test_an_answer_is_what_transformers_generates(rl, tmp_path):
    model = tmp_path / "model"
    make_tiny_model(model)
    expected = by_transformers(GREEDY, model).splitlines()[-1]
    told = rl(
        "chat",
        str(model),
        "policy.generation.backend=hf",
        "policy.precision=float32",
        "policy.max_total_sequence_length=128",
        "--system=Add.",
        "--once=12+30=",
        "--temperature=0",
        "--max-new-tokens=12",
    )
    assert told.code == 0, told.output
    assert expected in told.output.splitlines()
