"""A machine that is not the run's alone: a cluster that is gone, packages out of reach."""

import time

import psutil

NOWHERE = "http://127.0.0.1:9"
"""A proxy that refuses every connection."""


def test_a_cluster_that_is_gone_is_named_at_once(rl, tmp_path):
    started = time.monotonic()
    result = rl("train", "sft-arithmetic", f"run_dir={tmp_path / 'run'}", RAY_ADDRESS="127.0.0.1:9")
    assert time.monotonic() - started < 20
    assert result.code == 2
    (message, remedy) = result.output.splitlines()[-2:]
    assert message == "error: RAY_ADDRESS is 127.0.0.1:9, but no Ray cluster answers there"
    assert "unset RAY_ADDRESS" in remedy
    assert not (tmp_path / "run").exists()


def test_a_worker_environment_that_cannot_be_built_ends_the_command_with_one_message(rl, tmp_path):
    out_of_reach = {
        **dict.fromkeys(["ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy", "https_proxy"], NOWHERE),
        **dict.fromkeys(["NO_PROXY", "no_proxy"], ""),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_HTTP_RETRIES": "0",
        "RL_HOME": str(tmp_path / "home"),
    }
    arguments = ["sft-arithmetic", "cluster.worker_envs=isolated", f"run_dir={tmp_path / 'run'}"]
    result = rl("train", *arguments, **out_of_reach)
    assert result.code == 2
    _, _, message = result.output.partition("\nerror: ")
    assert message.startswith("environment rl-dtensor.worker failed after ")
    assert "Failed to fetch" in message
    assert "Check the network and the disk, then start again" in message.splitlines()[-1]
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
    assert [path for path in (tmp_path / "home" / "envs").iterdir() if path.is_dir()] == []
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
