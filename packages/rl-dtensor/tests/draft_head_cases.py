"""Heads on disk, and a plain float64 computation of their losses."""

import json
import tempfile
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.model import draft_losses
from rl_core.torch.loss import LossSums, MetricSum
from rl_dtensor.draft_head import head

WIDTH, VOCABULARY, HEADS, KV_HEADS, DIM = 32, 101, 4, 2, 8
AUX = [0, 1, 2]


def write_head(folder, *, own_head=True, own_embedding=False, drafted=None, seed=3, **fields):
    """A random head for `rl_core.selfcheck.torch.tiny_model`, by the names of vLLM's `LlamaForCausalLMEagle3`."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(shape, generator=random) * 0.2

    weights = {
        "fc.weight": weight(WIDTH, len(AUX) * WIDTH),
        "midlayer.hidden_norm.weight": 1 + weight(WIDTH),
        "midlayer.input_layernorm.weight": 1 + weight(WIDTH),
        "midlayer.post_attention_layernorm.weight": 1 + weight(WIDTH),
        "midlayer.self_attn.q_proj.weight": weight(HEADS * DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": weight(KV_HEADS * DIM, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": weight(KV_HEADS * DIM, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": weight(WIDTH, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": weight(48, WIDTH),
        "midlayer.mlp.up_proj.weight": weight(48, WIDTH),
        "midlayer.mlp.down_proj.weight": weight(WIDTH, 48),
        "norm.weight": 1 + weight(WIDTH),
    }
    num_drafted = VOCABULARY if drafted is None else len(drafted)
    if own_head:
        weights["lm_head.weight"] = weight(num_drafted, WIDTH)
    if own_embedding:
        weights["embed_tokens.weight"] = weight(VOCABULARY, WIDTH)
    if drafted is not None:
        weights["d2t"] = torch.tensor(drafted) - torch.arange(num_drafted)
        weights["t2d"] = torch.isin(torch.arange(VOCABULARY), torch.tensor(drafted))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "draft_vocab_size": num_drafted,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX},
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x, places):
    """`[tokens, heads, dim]`, each half of the dims with the other."""
    angles = places[:, None].double() / 10000.0 ** (torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = (torch.cat([each, each], -1)[:, None] for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def reference_losses(policy_folder, head_folder, rows, num_tokens):
    """Losses of drafts, float64 `[tokens, num_tokens]` of each row, one draft after another as an engine makes them:
    the keys and values of a row up to where a draft begins, then those of its own tokens."""
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64)
    head = {name: value.double() for name, value in load_file(head_folder / "model.safetensors").items()}
    config = json.loads((head_folder / "config.json").read_text())
    embedding = head.get("embed_tokens.weight", policy.get_input_embeddings().weight.detach())
    output = head.get("lm_head.weight", policy.get_output_embeddings().weight.detach())
    ids = torch.arange(len(output)) + head.get("d2t", torch.zeros(len(output))).long()

    def part(name):
        return head[f"midlayer.{name}.weight"]

    def inputs(hidden, token, place):
        """One token's residual, query, key and value."""
        own = normed(hidden, part("hidden_norm"))
        both = torch.cat([normed(embedding[token], part("input_layernorm")), own])
        query, key, value = ((part(f"self_attn.{name}_proj") @ both).view(1, -1, DIM) for name in ("q", "k", "v"))
        place = torch.tensor([place])
        residual = own if config.get("norm_before_residual") else hidden
        return residual, rotated(query, place), rotated(key, place), value

    def layer(residual, query, keys, values):
        keys, values = (torch.cat(each).repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / DIM**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten()
        residual = residual + part("self_attn.o_proj") @ attended
        x = normed(residual, part("post_attention_layernorm"))
        gate, up = part("mlp.gate_proj") @ x, part("mlp.up_proj") @ x
        return residual + part("mlp.down_proj") @ (F.silu(gate) * up)

    found = []
    for row in rows:
        tokens = torch.as_tensor(row).long()
        with torch.no_grad():
            out = policy(tokens[None], output_hidden_states=True)
            entered = []
            hook = policy.model.layers[-1].register_forward_hook(
                lambda _, __, output, kept=entered: kept.append(
                    output if isinstance(output, torch.Tensor) else output[0]
                )
            )
            policy(tokens[None])
            hook.remove()
        states = [*out.hidden_states[:-1], entered[0]]
        joined = torch.cat([states[number][0] for number in AUX], -1)
        fused = joined @ head["fc.weight"].T
        targets = out.logits[0].softmax(-1)[:, ids]
        losses = torch.zeros(len(tokens), num_tokens, dtype=torch.float64)
        keys, values = [], []
        for start in range(len(tokens) - 1):
            hidden = fused[start]
            residual, query, key, value = inputs(hidden, tokens[start + 1], start)
            keys, values = [*keys, key], [*values, value]
            own_keys, own_values = list(keys), list(values)
            for step in range(num_tokens):
                target = start + 2 + step
                if target >= len(tokens):
                    break
                if step:
                    residual, query, key, value = inputs(hidden, tokens[start + 1 + step], start + step)
                    own_keys.append(key)
                    own_values.append(value)
                hidden = layer(residual, query, own_keys, own_values)
                logprobs = (output @ normed(hidden, head["norm.weight"])).log_softmax(-1)
                losses[target, step] = -(targets[target - 1] * logprobs).sum()
        found.append(losses)
    return found


OF_FAMILY = {
    "glm4_moe": {"num_key_value_heads": KV_HEADS, "head_dim": DIM},
    "deepseek_v3": {
        "num_key_value_heads": HEADS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": DIM,
        "qk_rope_head_dim": DIM,
        "v_head_dim": DIM,
        "n_group": 1,
        "topk_group": 1,
    },
}


def write_mtp(folder, family="glm4_moe", *, seed=5):
    """A random model with a layer for multi-token prediction, by the names of its published files."""
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        num_nextn_predict_layers=1,
        **OF_FAMILY[family],
    )
    random = torch.Generator().manual_seed(seed)
    longer = AutoModelForCausalLM.from_config(_longer(config)).float()
    for parameter in longer.parameters():
        noise = torch.randn(parameter.shape, generator=random) * 0.2
        parameter.data = noise if parameter.dim() > 1 else 1 + noise
    for layer in longer.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(4, generator=random) * 0.2)
    longer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [type(longer).__name__]}))
    weights = load_file(folder / "model.safetensors")
    own = {"eh_proj": torch.randn(WIDTH, 2 * WIDTH, generator=random) * 0.2}
    own |= {name: 1 + torch.randn(WIDTH, generator=random) * 0.2 for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {"embed_tokens": weights["model.embed_tokens.weight"], "shared_head.head": weights["lm_head.weight"]}
    weights |= {f"{OF_HEAD}{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OF_HEAD = "model.layers.2."


def _longer(config):
    return type(config).from_dict({**config.to_dict(), "num_hidden_layers": config.num_hidden_layers + 1})


def reference_mtp_losses(policy_folder, head_folder, rows, num_tokens):
    """As `reference_losses`, of a layer for multi-token prediction: each draft is a row of its own, of the inputs of
    the row up to where it begins and those of its tokens."""
    precise = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, **precise)
    weights = load_file(head_folder / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        # the last layer of a model with one layer more
        others = load_file(policy_folder / "model.safetensors")
        of_layer = {name: tensor for name, tensor in weights.items() if name.startswith(OF_HEAD)}
        _longer(policy.config).save_pretrained(folder)
        save_file(others | of_layer, f"{folder}/model.safetensors", metadata={"format": "pt"})
        longer = AutoModelForCausalLM.from_pretrained(folder, **precise)
    own = {name.removeprefix(OF_HEAD): tensor.double() for name, tensor in weights.items()}
    embedding, output = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
    eps = policy.config.rms_norm_eps

    def scaled(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * own[f"{name}.weight"]

    def joined(hidden, token, place):
        embedded = embedding[token] if place else torch.zeros(WIDTH, dtype=torch.float64)
        return own["eh_proj.weight"] @ torch.cat([scaled(embedded, "enorm"), scaled(hidden, "hnorm")])

    found = []
    for row in rows:
        tokens = torch.as_tensor(row).long()
        with torch.no_grad():
            out = policy(tokens[None], output_hidden_states=True)
            targets, last = out.logits[0].softmax(-1), out.hidden_states[-1][0]
            losses = torch.zeros(len(tokens), num_tokens, dtype=torch.float64)
            of_row = [joined(last[place], tokens[place + 1], place) for place in range(len(tokens) - 1)]
            for start in range(len(tokens) - 1):
                inputs, hidden = of_row[: start + 1], last[start]
                for step in range(min(num_tokens, len(tokens) - start - 2)):
                    if step:
                        inputs.append(joined(hidden, tokens[start + 1 + step], start + step))
                    states = torch.stack(inputs)[None]
                    length = states.shape[1]
                    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
                    cos_sin = longer.model.rotary_emb(states, torch.arange(length)[None])
                    given = longer.model.layers[-1](states, attention_mask=mask, position_embeddings=cos_sin)
                    hidden = (given if isinstance(given, torch.Tensor) else given[0])[0, -1]
                    logprobs = (output @ scaled(hidden, "shared_head.norm")).log_softmax(-1)
                    target = start + 2 + step
                    losses[target, step] = -(targets[target - 1] * logprobs).sum()
        found.append(losses)
    return found


@dataclass(frozen=True)
class HeadLoss:
    """The mean of the losses of drafts under the mask; those of each token of a draft are metrics."""

    num_tokens: int = 3
    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ("loss_mask",)
    implementation: ClassVar[str] = "draft_head_cases:compute"

    @property
    def reads(self):
        return (draft_losses(self.num_tokens),)

    def totals(self, batch):
        return {"tokens": float(batch.ragged("loss_mask").values.sum())}


def compute(loss, reads, rows):
    losses = reads["draft_losses"]
    metrics = {f"loss_{place}": MetricSum(losses[:, place].sum(), "tokens") for place in range(loss.num_tokens)}
    return LossSums({"tokens": losses.sum() / loss.num_tokens}, metrics)


def attend_in_parts(rank, size):
    """Have this process attend from drafts of `size` tokens at a time."""
    head.CHUNK = size
