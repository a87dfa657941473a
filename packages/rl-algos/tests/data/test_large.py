"""Datasets that are kept on disk: the same rows, the same tokens, and little memory."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rl_algos.data import encoding
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets, load_examples
from rl_algos.data.prompts import prompt_stream
from rl_algos.data.rows.preference import preference
from rl_algos.data.sources import files
from rl_algos.preference.data import pair_rows
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import prepare_examples
from rl_core.errors import DataError
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive

NUM = 50


@pytest.fixture(params=["held", "on disk"])
def size(request, monkeypatch):
    """Rows above which a dataset is kept on disk: more and less than there are."""
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setattr(encoding, "LARGE", NUM * 10 if request.param == "held" else 10)
    return request.param


def chats(path, num=NUM, bad=()):
    rows = [json.dumps({"prompt": f"{index}+1=", "completion": "x" * (index % 7 + 1)}) for index in range(num)]
    for index in bad:
        rows[index] = "{"
    path.write_text("\n".join(rows) + "\n")
    return {"data_path": str(path), "input_key": "prompt", "output_key": "completion"}


def rows_of(tokenizer, data, *, count=NUM * 2, state=None, **sft):
    policy = SimpleNamespace(max_total_sequence_length=64, train_global_batch_size=8)
    config = SimpleNamespace(data=DataConfig.model_validate(data), sft=SFTConfig(**sft), policy=policy)
    stream = prepare_examples(config, tokenizer, load_examples(config)).train
    if state is not None:
        stream.restore(json.loads(json.dumps(state)))
    return stream.take(count), stream


def shown(rows):
    return [(row.id, row.tokens.tolist(), row.loss_mask.tolist()) for row in rows]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_large_dataset_gives_the_rows_of_a_small_one(tmp_path, tokenizer, monkeypatch, num_workers):
    data = {"train": chats(tmp_path / "a.jsonl", bad=[3]), "malformed": "skip", "overlong": "skip"}
    data["max_input_seq_length"] = 12
    small, _ = rows_of(tokenizer, data, max_num_epochs=2)
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setattr(encoding, "LARGE", 10)
    large, _ = rows_of(tokenizer, {**data, "num_workers": num_workers}, max_num_epochs=2)
    assert shown(large) == shown(small)
    assert 0 < len(small) < 2 * (NUM - 1)


def test_tokens_are_taken_from_the_cache_until_the_rows_or_the_tokenizer_change(
    tmp_path, tokenizer, monkeypatch, cache
):
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setattr(encoding, "LARGE", 10)
    data = {"train": chats(tmp_path / "a.jsonl", num=32)}
    first, _ = rows_of(tokenizer, data)
    stored = {path: path.stat().st_mtime_ns for path in (cache / "encoded").rglob("*") if path.is_file()}
    assert len(stored) == 4
    monkeypatch.setattr(encoding, "_encode_chunk", lambda *_: pytest.fail("encoded again"))
    again, _ = rows_of(tokenizer, data)
    assert shown(again) == shown(first)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setattr(encoding, "LARGE", 10)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[9] = json.dumps({"prompt": "changed", "completion": "y"})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows_of(tokenizer, data)
    kept = {path for path in stored if path.stat().st_mtime_ns == stored[path]}
    now = {path for path in (cache / "encoded").rglob("*") if path.is_file()}
    assert kept == set(stored)
    assert len(now) == 5, "only the chunk with the changed row"
    rows_of(tokenizer, data, learn="last")
    assert len([path for path in (cache / "encoded").rglob("*") if path.is_file()]) == 9


def test_a_cache_is_found_by_another_process(tmp_path, cache):
    script = tmp_path / "run.py"
    script.write_text(CHILD.replace("LARGE_ROWS", "10"))
    path = chats(tmp_path / "a.jsonl")["data_path"]
    counts = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, script, path], check=True, env=environment, timeout=300, capture_output=True)
        counts.append(len([path for path in (cache / "encoded").rglob("*") if path.is_file()]))
    assert counts[0] == counts[1] > 0


def test_a_stream_goes_on_in_the_midst_of_an_epoch(tmp_path, tokenizer, size):
    data = {"train": chats(tmp_path / "a.jsonl")}
    whole, _ = rows_of(tokenizer, data, count=80, max_num_epochs=2)
    first, stream = rows_of(tokenizer, data, count=33, max_num_epochs=2)
    rest, _ = rows_of(tokenizer, data, count=47, state=stream.state(), max_num_epochs=2)
    assert shown([*first, *rest]) == shown(whole)


@pytest.mark.usefixtures("size")
def test_prompts_of_a_large_dataset_have_their_fields(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": f"{i}+1=", "answer": i + 1, "level": i}) + "\n" for i in range(NUM))
    )
    config = DataConfig.model_validate({"train": {"data_path": str(path), "env_name": "math"}, "shuffle": False})
    datasets = load_datasets(config, "train")
    prompts = prompt_stream(datasets, config, tokenizer, max_tokens=32, seed=0).take(NUM)
    assert [prompt.info["answer"] for prompt in prompts] == [prompt.info["level"] + 1 for prompt in prompts]
    assert prompts[7].id == "a.jsonl:train:7"
    assert datasets[0].environments() == {"math": "a.jsonl:train:0"}


@pytest.mark.usefixtures("size")
def test_a_row_that_only_the_tokenizer_refuses_is_named_or_left_out(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text("".join(json.dumps({"messages": good[: 1 if i == 20 else 2]}) + "\n" for i in range(NUM)))
    data = {"train": {"data_path": str(path)}}
    with pytest.raises(DataError, match=r"a\.jsonl, line 21: the conversation has no assistant message"):
        rows_of(tokenizer, data)
    rows, stream = rows_of(tokenizer, {**data, "malformed": "skip"}, max_num_epochs=1)
    assert stream.num_items == NUM - 1
    assert "a.jsonl:train:20" not in {row.id for row in rows}


@pytest.mark.usefixtures("size")
def test_pairs_of_a_large_dataset_are_numbered_within_their_row(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    three = [{"completion": "x" * size, "rank": size} for size in (1, 2, 3)]
    rows = [{"prompt": "a", "completions": three[: 3 if index % 2 else 2]} for index in range(NUM)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"train": {"data_path": str(path)}})
    [dataset] = load_datasets(config, "train", preference)
    pairs = pair_rows(dataset, config, tokenizer, 64, pairing="all")
    assert len(pairs) == NUM // 2 * (1 + 3)
    assert [pair.id for pair in pairs[:5]] == [
        "a.jsonl:train:0",
        *(f"a.jsonl:train:1/{number}" for number in range(3)),
        "a.jsonl:train:2",
    ]


def test_a_large_parquet_file_is_unpacked_once_and_mapped(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(files, "_IN_MEMORY_BYTES", 0)
    rows = [{"messages": [{"role": "user", "content": str(index)}], "answer": index} for index in range(3000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    for _ in range(2):
        found = files.read(tmp_path / "a.parquet")
        assert [found.rows[index] for index in (0, 699, 700, 2999)] == [rows[index] for index in (0, 699, 700, 2999)]
        assert len(list((cache / "unpacked").iterdir())) == 1


CHILD = """
import json, resource, sys, time
from types import SimpleNamespace

from rl_algos.data import encoding
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_examples
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import prepare_examples
from rl_algos.tiny_model import make_tokenizer

if __name__ == "__main__":
    encoding.LARGE = LARGE_ROWS
    tokenizer = make_tokenizer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    policy = SimpleNamespace(max_total_sequence_length=64, train_global_batch_size=64)
    train = {"data_path": sys.argv[1], "input_key": "prompt", "output_key": "completion"}
    config = SimpleNamespace(
        data=DataConfig.model_validate({"train": train}), sft=SFTConfig(max_num_epochs=1), policy=policy
    )
    stream = prepare_examples(config, tokenizer, load_examples(config)).train
    rows = stream.take(min(5000, stream.num_items))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"items": stream.num_items, "mib": (peak - before) / 1024, "first": rows[0].id}))
"""


def grown(tmp_path, num_rows, environment):
    """Memory that a process needs beyond what it needs without data, in MiB, and the items that it found."""
    path = tmp_path / f"{num_rows}.jsonl"
    with path.open("w") as file:
        for index in range(num_rows):
            file.write(json.dumps({"prompt": f"{index}+1=" + "y" * 20, "completion": "x" * (index % 7 + 1)}) + "\n")
    script = tmp_path / "run.py"
    script.write_text(CHILD.replace("LARGE_ROWS", "4000"))
    run = subprocess.run(
        [sys.executable, script, path], check=True, env=environment, timeout=1500, stdout=subprocess.PIPE, text=True
    )
    said = json.loads(run.stdout)
    assert said["items"] == num_rows
    return said["mib"]


@exhaustive
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """Six times the rows may cost what their positions need, not what rows and their tokens do."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    few, many = (grown(tmp_path, num_rows, environment) for num_rows in (5_000, 30_000))
    assert many - few < 16, f"{few:.0f} and {many:.0f} MiB"


SHUFFLED = """
import json, resource, sys
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.stream import Stream

def stream():
    return Stream([dataset.examples.values_in_order for dataset in datasets], seed=5, max_num_epochs=2)

def asked(rows):
    return [row.messages[0]["content"] for row in rows]

if __name__ == "__main__":
    settings = {"data_path": sys.argv[1], "input_key": "prompt", "output_key": "completion"}
    config = DataConfig.model_validate({"train": settings})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    datasets = load_datasets(config, "train")
    whole = stream()
    drawn = asked(whole.take(10_000))
    state = json.loads(json.dumps(whole.state()))
    expected = asked(whole.take(1000))
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    resumed = stream()
    resumed.restore(state)
    # the batches of another number of ranks are cut from the same draws
    found = [row for size in (300, 500, 200) for row in asked(resumed.take(size))]
    print(json.dumps({"items": whole.num_items, "mib": mib, "same": found == expected, "first": drawn[:5],
                      "distinct": len({*drawn, *expected})}))
"""


@pytest.mark.parametrize("num_rows", partly_exhaustive([50_000, 200_000, 1_000_000], always=[50_000]))
def test_many_rows_are_shuffled_in_little_memory_and_resumed_in_the_midst_of_an_epoch(tmp_path, num_rows):
    """Held as examples they would take a KiB each; positions and one order take a tenth of it."""
    path, script = tmp_path / "rows.jsonl", tmp_path / "run.py"
    with path.open("w") as file:
        file.writelines(f'{{"prompt": "{index}+1=", "completion": "{index + 1}"}}\n' for index in range(num_rows))
    script.write_text(SHUFFLED)
    run = subprocess.run([sys.executable, script, path], check=True, timeout=1500, stdout=subprocess.PIPE, text=True)
    said = json.loads(run.stdout)
    assert (said["items"], said["same"], said["distinct"]) == (num_rows, True, 11_000)
    assert said["first"] != [f"{index}+1=" for index in range(5)]
    assert said["mib"] < 30 + num_rows * 120 / 2**20, f"{said['mib']:.0f} MiB"


def test_positions_of_a_shuffled_stream_are_exact(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setattr(encoding, "LARGE", 10)
    rows, stream = rows_of(tokenizer, {"train": chats(tmp_path / "a.jsonl")}, count=NUM, max_num_epochs=1)
    assert sorted(int(row.id.rpartition(":")[2]) for row in rows) == list(range(NUM))
    assert stream.num_left == 0
    assert not np.array_equal([int(row.id.rpartition(":")[2]) for row in rows], np.arange(NUM))
