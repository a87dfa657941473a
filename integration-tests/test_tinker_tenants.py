"""Tenants of `rl serve tinker` who train at the same time: each as if alone, whatever is killed."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from rl_core.selfcheck.rank_pool import free_port
from rl_core.testing.exhaustive import exhaustive

pytestmark = [
    exhaustive,
    pytest.mark.skipif(find_spec("tinker") is None, reason="the extra rl-launch[tinker] is not installed"),
]

MODEL = "tiny-arithmetic"
STEPS = 6

TENANTS = {
    "ada": {"rank": 8, "rate": 3e-3, "loss": "cross_entropy"},
    "bob": {"rank": 4, "rate": 1e-3, "loss": "importance_sampling"},
    "eve": {"rank": 16, "rate": 1e-2, "loss": "ppo"},
}
"""Ranks, learning rates and losses of the tenants."""


def datums(tenant: str, step: int) -> list:
    from tinker import types

    rng = np.random.default_rng([step, *tenant.encode()])
    found = []
    for _ in range(3):
        tokens = rng.integers(3, 60, 12)
        inputs = {"target_tokens": tokens[1:].astype(np.int64)}
        if TENANTS[tenant]["loss"] == "cross_entropy":
            inputs["weights"] = np.ones(11, dtype=np.float32)
        else:
            inputs["logprobs"] = np.full(11, -4.5, dtype=np.float32)
            inputs["advantages"] = rng.normal(size=11).astype(np.float32)
        found.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return found


class Server:
    """A server in a process of its own, which is started again after it was killed."""

    def __init__(self, folder: Path, port: int) -> None:
        keys = {name: {"sha256": hashlib.sha256(f"tml-{name}".encode()).hexdigest()} for name in TENANTS}
        (folder / "keys.json").write_text(json.dumps(keys))
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self._command = [
            *(str(Path(sys.executable).with_name("rl")), "serve", "tinker", "grpo-arithmetic", f"tinker.port={port}"),
            *(f"tinker.keys_file={folder / 'keys.json'}", "tinker.save_every=2", f"run_dir={folder / 'run'}"),
            *(f"policy.model_name={MODEL}", "policy.lora_cfg.max_adapters=3", "policy.lora_cfg.dim=16"),
        ]
        self.start()

    def start(self) -> None:
        log = (self.folder / "server.log").open("a")
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("export "):
                return
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def process_of(self, log: str) -> psutil.Process:
        """The process that writes a log of the run."""
        path = str((self.folder / "run/logs" / log).resolve())
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if "ray::" in " ".join(each.cmdline()) and any(file.path == path for file in each.open_files()):
                    return each
        raise AssertionError(f"no process writes {log}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(180) == 0


def curve(server: Server, tenant: str, before_step=lambda step: None) -> list[float]:
    """Train a tenant's adapter; returns its loss by step, and what it samples in the end."""
    import tinker
    from tinker import types

    settings = TENANTS[tenant]
    service = tinker.ServiceClient(base_url=server.url, api_key=f"tml-{tenant}")
    training = service.create_lora_training_client(base_model=MODEL, rank=settings["rank"], seed=5).result()
    losses = []
    for step in range(STEPS):
        before_step(step)
        passed = training.forward_backward(datums(tenant, step), settings["loss"])
        training.optim_step(types.AdamParams(learning_rate=settings["rate"], eps=1e-6)).result()
        losses.append(passed.result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(list(range(3, 15)))).result()
    return [*losses, *scores[1:]]


@contextmanager
def served(folder: Path, port: int):
    server = Server(folder, port)
    try:
        yield server
        server.end()
    finally:
        server.process.kill()


def at_once(server: Server, before_step=lambda step: None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}

    def run(tenant: str) -> None:
        found[tenant] = curve(server, tenant, before_step if tenant == "ada" else lambda step: None)

    threads = [threading.Thread(target=run, args=(tenant,)) for tenant in TENANTS]
    for each in threads:
        each.start()
    for each in threads:
        each.join(900)
    return found


def test_tenants_train_as_if_alone_whatever_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with served(tmp_path, free_port()) as server:
        alone = {tenant: curve(server, tenant) for tenant in TENANTS}
        together = at_once(server)
        for tenant, expected in alone.items():
            np.testing.assert_allclose(together[tenant], expected, rtol=1e-4, atol=1e-4, err_msg=tenant)

        def strike(step: int) -> None:
            if step in (1, 3):
                server.process_of("policy-0.log" if step == 1 else "rollout-worker-0.log").kill()
            elif step == 5:
                server.process.kill()
                server.process.wait()
                server.start()

        struck = at_once(server, strike)
        for tenant, expected in alone.items():
            np.testing.assert_allclose(struck[tenant], expected, rtol=1e-4, atol=1e-4, err_msg=tenant)
