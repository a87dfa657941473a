"""Deliveries of notifications: webhooks and commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from rl_core.errors import ConfigError
from rl_launch.session.config import NotifyConfig


class DeliveryError(Exception):
    """A notification was not delivered. Its text contains no secret.

    Args:
        text: Why.
        is_final: True if another attempt would fail, too.
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class NotificationDelivery(Protocol):
    """One way to notify somebody."""

    def __str__(self) -> str:
        """Name for the log, without secrets."""

    def deliver(self, notification: Mapping[str, Any]) -> None:
        """Deliver a notification; raises `DeliveryError`."""


class WebhookDelivery:
    """POSTs JSON to a URL, and follows no redirection.

    Args:
        url: The webhook, which may contain a secret.
        timeout_s: Timeout of an attempt.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirection())

    def __str__(self) -> str:
        return f"the webhook at {urlsplit(self._url).hostname}"

    def deliver(self, notification: Mapping[str, Any]) -> None:
        body = json.dumps(notification).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "rl-launch"}
        try:
            request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
            with self._opener.open(request, timeout=self._timeout_s) as response:
                response.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            is_final = 300 <= error.code < 500 and error.code not in (408, 425, 429)
            raise DeliveryError(f"it answered {error.code}", is_final=is_final) from None
        except urllib.error.URLError as error:
            raise DeliveryError(f"no connection: {_without(self._url, str(error.reason))}") from None
        except (OSError, ValueError) as error:
            raise DeliveryError(f"{type(error).__name__}: {_without(self._url, str(error))}") from None


class CommandDelivery:
    """Runs a program with JSON on its standard input.

    Args:
        arguments: Program and arguments.
        timeout_s: Time limit in seconds; then it is killed with its children.
    """

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        self._arguments = list(arguments)
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        # arguments may hold secrets
        return f"the command {self._arguments[0]}"

    def deliver(self, notification: Mapping[str, Any]) -> None:
        variables = {f"RL_{name.upper()}": str(value) for name, value in notification.items()}
        try:
            # a session of its own: Ctrl-C in the terminal is not meant for it
            process = subprocess.Popen(
                self._arguments,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            raise DeliveryError(f"it was not started: {error.strerror}", is_final=True) from None
        try:
            process.communicate(json.dumps(notification), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise DeliveryError(f"it took longer than {self._timeout_s:g} s") from None
        if process.returncode:
            raise DeliveryError(f"its exit code is {process.returncode}")


def deliveries(config: NotifyConfig) -> list[NotificationDelivery]:
    """Return the deliveries that a config chooses."""
    found: list[NotificationDelivery] = []
    if config.url:
        found.append(WebhookDelivery(config.url, timeout_s=config.timeout_s))
    if config.command:
        found.append(CommandDelivery(config.command, timeout_s=config.timeout_s))
    return found


def check_command(config: NotifyConfig) -> None:
    """Refuse a program that does not exist.

    Raises:
        ConfigError: naming it.
    """
    if config.command and shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"logger.notify.command: {config.command[0]} is not a program on PATH. Pass a list of the program and its "
            "arguments, such as [/home/me/notify.sh, --quiet]"
        )


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Takes a redirection as an error, because following it would turn the POST into a GET without its body."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _without(url: str, text: str) -> str:
    """Return a message without the URL, or its part after the host."""
    parts = urlsplit(url)
    for secret in (url, parts.path + (f"?{parts.query}" if parts.query else ""), parts.path, parts.query):
        if len(secret) > 1:
            text = text.replace(secret, "...")
    return text
