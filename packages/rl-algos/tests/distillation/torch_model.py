"""A small language model in this process, read and trained as workers do it."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.data.batch import TOKENS, Batch
from rl_core.metrics import Metric
from rl_core.model import read_columns
from rl_core.plugins import resolve
from rl_core.testing.fakes import FakeModel
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import language_reads
from rl_core.torch.rows import to_rows


class TorchModel(FakeModel):
    """A `Model` of real weights: `infer`, `evaluate` and `train_step` compute, the rest is that of the fake.

    Args:
        vocab_size: of the model.
        hidden_size: a teacher's may differ from the student's.
        seed: of the weights.
        scale: of the head; a large one makes a model that is sure of its next token.
        lr: of Adam.
    """

    def __init__(self, vocab_size, *, hidden_size=32, seed=0, scale=1.0, lr=1e-2):
        super().__init__()
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = Qwen3ForCausalLM(config)
        with torch.no_grad():
            self.net.lm_head.weight *= scale
        self._optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)

    def infer(self, batch, reads, *, reference=False, temperature=1.0):
        self.calls.append(("infer", batch))
        tokens = batch.ragged(TOKENS)
        with torch.no_grad():
            _, found = self._reads(batch, reads, temperature)
        return Batch({name: tokens.like(column.numpy()) for name, column in found.items()})

    def evaluate(self, batch, loss):
        self.calls.append(("evaluate", batch))
        with torch.no_grad():
            return self._computed(batch, loss)[1]

    def train_step(self, batch, loss):
        self.calls.append(("train_step", batch))
        share, metrics = self._computed(batch, loss)
        self._optimizer.zero_grad()
        share.backward()
        self._optimizer.step()
        self.num_steps += 1
        return {**metrics, "grad_norm": Metric(1.0), "lr": Metric(1.0, over_updates="last")}

    def _computed(self, batch, loss):
        rows, reads = self._reads(batch, loss.reads, loss.temperature, loss.columns)
        totals = loss.totals(batch)
        sums = resolve(loss.implementation)(loss, reads, rows)
        share = sums.loss(totals)
        metrics = {
            name: Metric(part.value.item(), totals.get(part.denominator, 1.0), part.reduction)
            for name, part in sums.metrics.items()
        }
        num_tokens = Metric(float(len(rows[TOKENS])), reduction="sum")
        return share, {**metrics, "loss": Metric(share.item(), reduction="sum"), "num_tokens": num_tokens}

    def _reads(self, batch, reads, temperature, columns=()):
        rows = to_rows(batch.only(list(dict.fromkeys([TOKENS, *columns, *read_columns(reads)]))), torch.device("cpu"))
        lengths = np.diff(batch.ragged(TOKENS).offsets).tolist()
        padded = pad_sequence(rows[TOKENS].split(lengths), batch_first=True)
        hidden = self.net.model(padded).last_hidden_state  # causal: what is padded on the right changes nothing
        flat = torch.cat([row[:length] for row, length in zip(hidden, lengths, strict=True)])
        head = Head(self.net.lm_head.weight)
        return rows, language_reads(flat, rows, head, reads, temperature=temperature, chunk_size=16)
