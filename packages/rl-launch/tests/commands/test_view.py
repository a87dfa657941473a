"""`rl view` as a process."""

import signal
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_address_is_printed_and_a_signal_ends_the_server(tmp_path, ending):
    command = [sys.executable, "-m", "rl_launch.cli", "view", str(tmp_path)]

    def interruptible():
        # what starts the tests in the background may have had SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=interruptible, **pipes) as process:
        url = urlsplit(process.stdout.readline().strip())
        token = parse_qs(url.query)["token"][0]
        request = Request(f"http://{url.netloc}/api/runs", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=30) as answer:
            assert answer.read() == b'{"runs":[],"keys":[],"others":[]}'

        process.send_signal(ending)

        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""


def test_a_port_that_is_in_use_is_one_message(tmp_path):
    command = [sys.executable, "-m", "rl_launch.cli", "view", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = urlsplit(process.stdout.readline().strip()).port
        second = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=60)
        process.terminate()
    assert second.returncode == 2
    assert second.stderr == f"error: --port: port {port} cannot be used: Address already in use. Choose another one.\n"
