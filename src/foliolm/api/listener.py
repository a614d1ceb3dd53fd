"""The socket that a server will listen on."""

from __future__ import annotations

import contextlib
import errno
import socket

from foliolm.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, before time is spent on loading a model.

    Args:
        host: a name or an address.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or the host is not one of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be from 0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host is {host!r}, which cannot be resolved: {error.strerror}") from None
    _refuse_taken(family, address, host, port)
    listener = socket.socket(family, kind, proto)
    try:
        # Without this, a server that was just stopped could not be started again for a minute or two.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port} on {host} is already in use; stop its owner or choose another") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.set_inheritable(False)
    return listener


def _refuse_taken(family: int, address: object, host: str, port: int) -> None:
    # Two sockets may both be bound with SO_REUSEADDR while neither listens, so bind alone does not see every owner;
    # a connection that is accepted does.
    if port == 0:
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.settimeout(0.5)
        if probe.connect_ex(address) == 0:  # type: ignore[arg-type]
            raise ConfigError(f"--port {port} on {host} is already in use; stop its owner or choose another")
