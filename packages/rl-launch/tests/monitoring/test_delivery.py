"""Notifications arrive as JSON, are tried again, and never show a secret in the log."""

import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_core.config import Config, load, resolve
from rl_core.errors import ConfigError
from rl_launch.monitoring.notifications import CommandDelivery, DeliveryError, Outbox, WebhookDelivery, check_command
from rl_launch.run_session.config import LoggerConfig, NotifyConfig

SECRET = "T0K3N-of-mine"
NOTIFICATION = {"event": "failed", "text": "my run: failed", "run": "my run", "step": 7}


class Settings(Config):
    logger: LoggerConfig = LoggerConfig()


class Receiver:
    """A webhook that answers with these codes, the last one again and again."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.received = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.send_response(receiver.codes.pop(0) if len(receiver.codes) > 1 else receiver.codes[0])
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/{SECRET}?key={SECRET}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver():
    made = []

    def make(*codes):
        made.append(Receiver(*codes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_webhook_gets_the_notification_as_json(receiver):
    hook = receiver(200)
    WebhookDelivery(hook.url, timeout_s=10).deliver(NOTIFICATION)
    assert hook.received == [(f"/hooks/{SECRET}?key={SECRET}", "application/json", NOTIFICATION)]


@pytest.mark.parametrize(("code", "is_final"), [(503, False), (429, False), (404, True), (302, True)])
def test_an_answer_that_is_not_a_success_is_an_error_without_the_url(receiver, code, is_final):
    hook = receiver(code)
    with pytest.raises(DeliveryError, match=f"answered {code}") as refused:
        WebhookDelivery(hook.url, timeout_s=10).deliver(NOTIFICATION)
    assert refused.value.is_final is is_final
    assert SECRET not in f"{refused.value}{WebhookDelivery(hook.url, timeout_s=1)}"
    assert len(hook.received) == 1


def test_a_webhook_that_cannot_be_reached_is_an_error_without_the_url(receiver):
    hook = receiver(200)
    url = hook.url
    hook.server.socket.close()
    with pytest.raises(DeliveryError) as refused:
        WebhookDelivery(url.replace(str(hook.server.server_port), "1"), timeout_s=10).deliver(NOTIFICATION)
    assert not refused.value.is_final
    assert SECRET not in str(refused.value)


def test_deliveries_are_tried_again_in_the_background(receiver):
    hook = receiver(500, 503, 200)
    outbox = Outbox([WebhookDelivery(hook.url, timeout_s=10)], attempts_after_s=(0.0, 0.0))
    outbox.send(NOTIFICATION)
    _delivered(outbox)
    assert [body for _, _, body in hook.received] == [NOTIFICATION] * 3


def test_a_delivery_that_fails_is_one_warning_without_secrets_and_the_next_is_delivered(receiver, caplog):
    hook = receiver(500, 500, 200)
    outbox = Outbox([WebhookDelivery(hook.url, timeout_s=10)], attempts_after_s=(0.0,))
    outbox.send(NOTIFICATION)
    outbox.send({"event": "finished"})
    _delivered(outbox)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the webhook at 127.0.0.1 did not get the notification 'failed' after 2 attempt(s): it answered 500"
    ]
    assert hook.received[-1][2] == {"event": "finished"}
    assert SECRET not in caplog.text


def test_a_run_that_ends_waits_for_no_further_attempt(receiver):
    hook = receiver(503)
    outbox = Outbox([WebhookDelivery(hook.url, timeout_s=10)], attempts_after_s=(3600.0,))
    outbox.send(NOTIFICATION)
    outbox.finish(60)
    assert len(hook.received) == 1


def test_nobody_waits_for_a_delivery_that_hangs(caplog):
    class Hanging:
        def __str__(self):
            return "it"

        def deliver(self, notification):
            threading.Event().wait()

    outbox = Outbox([Hanging()])
    outbox.send(NOTIFICATION)
    outbox.finish(0.01)
    assert "1 notification(s) were not delivered in time" in caplog.text


def test_a_command_gets_json_and_variables(tmp_path):
    program = (
        "import json, os, sys; print(json.load(sys.stdin)['step'], os.environ['RL_EVENT'], os.environ['RL_STEP'],"
        f" file=open({str(tmp_path / 'said')!r}, 'w'))"
    )
    CommandDelivery([sys.executable, "-c", program], timeout_s=60).deliver(NOTIFICATION)
    assert (tmp_path / "said").read_text() == "7 failed 7\n"


@pytest.mark.parametrize(
    ("program", "said"),
    [("import sys; sys.exit(3)", "exit code is 3"), ("import time; time.sleep(600)", "longer than")],
)
def test_a_command_that_fails_or_hangs_is_an_error_without_its_arguments(program, said):
    command = CommandDelivery([sys.executable, "-c", program, SECRET], timeout_s=5 if "exit" in program else 0.2)
    with pytest.raises(DeliveryError, match=said) as refused:
        command.deliver(NOTIFICATION)
    assert SECRET not in f"{refused.value}{command}"


def test_a_command_that_does_not_exist_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"logger\.notify\.command: /no/such/program is not a program"):
        check_command(NotifyConfig(command=["/no/such/program"]))


@pytest.mark.parametrize("url", [f"ftp://host/{SECRET}", f"hooks.example/{SECRET}", f"https:///{SECRET}"])
def test_a_url_that_is_none_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match=r"logger\.notify\.url.* is not a URL; allowed: http://HOST/") as refused:
        resolve(load({"logger": {"notify": {"url": url}}}), Settings)
    assert SECRET not in str(refused.value)


def _delivered(outbox):
    """Wait until everything is delivered, without telling the outbox that the run ends."""
    with outbox._changed:
        assert outbox._changed.wait_for(lambda: outbox._num_open == 0, 60)
