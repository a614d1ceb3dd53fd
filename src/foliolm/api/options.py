"""The settings of the HTTP side as a user gives them, and the checks that need nothing else."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from foliolm.core.errors import ConfigError

KEY_VARIABLE = "FOLIOLM_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What concerns the HTTP side alone.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        shutdown_timeout: seconds that open requests may take to end after a first Ctrl-C or SIGTERM.
        api_key: keys that clients may use, as a bearer token; none: everybody may. FOLIOLM_API_KEY (several with
            commas between) adds to them, unseen by other users of the machine.
        ssl_keyfile: file with the TLS key, in PEM.
        ssl_certfile: file with the TLS certificate chain, in PEM.
        allowed_origins: origins that a browser may call from (CORS); * is every one; none: no browser may.
        allowed_methods: methods that they may use; none: GET and POST.
        allowed_headers: headers that they may send; none: every one.
        allow_credentials: browsers may send cookies and the like.
        max_body_bytes: longest body of a request; a longer one is a 413.
        request_timeout: seconds that a request may take from arrival to end; unset: any time. A request may ask for
            less.
        queue_timeout: seconds that a request may wait to be run first; unset: any time.
        sse_heartbeat: seconds of silence after which a stream sends a comment; 0: never.
        engine_restarts: how often in ten minutes an engine whose process has died is started again.
        engine_stuck_timeout: seconds of silence after which an engine is called stuck; after twice as long it is killed
            and started again. 0: never.
        request_log: file that gets a line of JSON for each request; - is stderr; unset: none.
        otlp_traces_endpoint: URL of an OpenTelemetry collector's traces over HTTP, such as
            http://127.0.0.1:4318/v1/traces, that gets a span for each request; unset: none.

    Raises:
        ConfigError: a value is out of range or contradicts another; the message names the flag, value and limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: float = 30.0
    api_key: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ()
    allowed_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    max_body_bytes: int = 32 << 20
    request_timeout: float | None = None
    queue_timeout: float | None = None
    sse_heartbeat: float = 15.0
    engine_restarts: int = 5
    engine_stuck_timeout: float = 60.0
    request_log: str | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("shutdown_timeout", 0, 86_400),
            ("max_body_bytes", 1024, 1 << 32),
            ("request_timeout", 0.001, 86_400),
            ("queue_timeout", 0.001, 86_400),
            ("sse_heartbeat", 0, 86_400),
            ("engine_restarts", 0, 1000),
            ("engine_stuck_timeout", 0, 86_400),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be from {low} to {high}")
        if self.otlp_traces_endpoint is not None:
            check_http_url("--otlp-traces-endpoint", self.otlp_traces_endpoint)
        for key in self.keys():
            if not key.isascii() or not key.isprintable() or key.strip() != key or not key:
                # The key itself is not repeated: messages end up in logs.
                raise ConfigError("an --api-key is empty, or has spaces around it or characters that are not ASCII")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "--ssl-certfile" if self.ssl_certfile is None else "--ssl-keyfile"
            raise ConfigError(f"{missing} is not set; TLS needs both --ssl-keyfile and --ssl-certfile")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials is set and --allowed-origins is *; browsers refuse that")
        if not self.allowed_origins and (self.allowed_methods or self.allowed_headers or self.allow_credentials):
            raise ConfigError("CORS flags are set, but --allowed-origins is not; nothing would be allowed")
        if self.ssl_keyfile is not None and self.ssl_certfile is not None:
            _check_tls(self.ssl_keyfile, self.ssl_certfile)

    def keys(self) -> tuple[str, ...]:
        """Every key that clients may use: those of the flag, and those of the environment."""
        named = os.environ.get(KEY_VARIABLE, "")
        return (*self.api_key, *(named.split(",") if named else ()))

    @property
    def scheme(self) -> str:
        """``https`` where there is TLS, else ``http``."""
        return "http" if self.ssl_certfile is None else "https"


def check_http_url(flag: str, url: str) -> None:
    """Refuse what is no URL of HTTP.

    Raises:
        ConfigError: with the flag's name.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} is {url!r}; it must be a URL that begins with http:// or https://")


def _check_tls(keyfile: str, certfile: str) -> None:
    import ssl

    for flag, path in (("--ssl-keyfile", keyfile), ("--ssl-certfile", certfile)):
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{flag} is {path!r}, which cannot be read")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ssl-certfile {certfile!r} and --ssl-keyfile {keyfile!r} make no pair: {error}") from None
