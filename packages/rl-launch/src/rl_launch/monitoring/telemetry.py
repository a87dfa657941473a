"""Spans of a run for an OpenTelemetry collector."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_core.rollouts.group import RolloutGroup
from rl_core.run import RunEnd
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.observer import ObservedRun, RunObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

SERVICE = "rl"
"""`service.name` unless OTEL_SERVICE_NAME sets another."""

CLOSE_TIMEOUT_S = 5.0
"""Maximum time that a run which ends waits until its last spans are sent."""


class Telemetry(RunObserver):
    """Makes a span of the run, and a trace of every step: its phases, the weight sync among them, and its rollouts.

    A step is a trace, and not part of one of the whole run, because viewers do not show traces of 100,000 spans; it
    links to the span of the run. Spans are sent in the background, and are dropped if the collector does not keep up.

    Args:
        processor: Takes the spans that have ended.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._api = trace
        # its hook at the end of the process would wait for the collector once more
        resource = Resource.create({"service.name": SERVICE})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rl_launch")
        self._run: Span | None = None
        self._step: Span | None = None
        self._phases: list[Span] = []
        self._attributes: dict[str, Any] = {}

    @classmethod
    def to(cls, endpoint: str) -> Telemetry:
        """Return telemetry whose spans are sent to a collector.

        Args:
            endpoint: Its URL; `/v1/traces` is added.
        """
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # it warns several times of each batch
        logging.getLogger(trace_exporter.__name__).setLevel(logging.CRITICAL)
        exporter = trace_exporter.OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        reporting: Any = ReportingExporter(exporter, endpoint)
        return cls(BatchSpanProcessor(reporting))

    def begin(self, run: ObservedRun) -> None:
        self._attributes = {"rl.run": run.name}
        self._run = self._tracer.start_span("run", context=self._api.set_span_in_context(self._api.INVALID_SPAN))
        self._run.set_attributes({**self._attributes, "rl.run_dir": str(run.run_dir), "rl.step": run.step})

    def begin_step(self, step: int) -> None:
        links = [self._api.Link(self._run.get_span_context())] if self._run is not None else []
        nowhere = self._api.set_span_in_context(self._api.INVALID_SPAN)
        attributes = {**self._attributes, "rl.step": step}
        self._step = self._tracer.start_span("step", context=nowhere, links=links, attributes=attributes)

    def begin_phase(self, name: str) -> None:
        self._phases.append(self._tracer.start_span(name, context=self._within(), attributes=self._attributes))

    def end_phase(self, name: str) -> None:
        if self._phases:
            self._phases.pop().end()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._step is not None:
            shown = ("reward/mean", "train/loss", "generation/num_tokens", "train/num_tokens")
            self._step.set_attributes({f"rl.{name}": metrics[name] for name in shown if name in metrics})
            self._step.end()
        self._step = None

    def end_group(self, group: RolloutGroup, submitted_ns: int, replica: int) -> None:
        """Make a span from the submission to the end, within the phase that takes the group. With asynchronous rollouts
        it begins before the step."""
        attributes = {
            **self._attributes,
            "rl.prompt": group.prompt.id,
            "rl.replica": replica,
            "rl.num_rollouts": len(group.rollouts),
            "rl.num_sampled": sum(group.rollouts.num_sampled),
            "rl.num_failed": group.rollouts.status.count("failed"),
        }
        within = self._within()
        self._tracer.start_span("rollouts", context=within, start_time=submitted_ns, attributes=attributes).end()

    def end(self, state: RunEnd) -> None:
        status = self._api.Status(self._api.StatusCode.ERROR, state.reason)
        for span in (*reversed(self._phases), self._step, self._run):
            if span is not None:
                if state.status == "failed":
                    span.set_status(status)
                span.end()
        self._phases, self._step, self._run = [], None, None

    def close(self) -> None:
        """Send the spans that are left, for a limited time: the SDK takes a timeout and does not keep it."""

        def send() -> None:
            self._provider.force_flush()
            self._provider.shutdown()

        sending = threading.Thread(target=send, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_S)
        if sending.is_alive():
            _log.warning("the last spans were not sent within %g s", CLOSE_TIMEOUT_S)

    def _within(self) -> Any:
        """Context of the innermost span that is open."""
        open_spans: Sequence[Span | None] = (self._run, self._step, *self._phases)
        innermost = [span for span in open_spans if span is not None]
        return self._api.set_span_in_context(innermost[-1] if innermost else self._api.INVALID_SPAN)


class ReportingExporter:
    """An exporter of OpenTelemetry's SDK that reports in the log when the collector stops to take spans, and when it
    takes them again.

    Args:
        exporter: Sends the spans.
        endpoint: URL of the collector; the log shows its host.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._host = urlsplit(endpoint).hostname
        self._is_told = False
        self.shutdown = exporter.shutdown

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        result = self._exporter.export(spans)
        has_failed = result.name != "SUCCESS"
        if has_failed and not self._is_told:
            _log.warning("the collector of traces at %s takes no spans; they are dropped until it does", self._host)
        elif self._is_told and not has_failed:
            _log.info("the collector of traces at %s takes spans again", self._host)
        self._is_told = has_failed
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what is left."""
        return bool(self._exporter.force_flush(timeout_millis))


def check_telemetry(config: LoggerConfig) -> None:
    """Refuse a config whose exporter is not installed.

    Raises:
        ConfigError: naming the extra.
    """
    if config.otel_endpoint is None:
        return
    names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
    try:
        is_installed = all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise ConfigError(
            f"logger.otel_endpoint is set, but OpenTelemetry is not installed: {install_command('rl-launch[otel]')}"
        )
