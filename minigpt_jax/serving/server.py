"""A server on one address: the socket, and an end in bounded time. Framework-free."""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket

import uvicorn
from fastapi import FastAPI

from minigpt_jax.errors import UserError
from minigpt_jax.serving.batcher import Batcher

GRACE_SECONDS = 5.0
"""How long running requests may go on after Ctrl-C; then they fail."""

BACKLOG = 128
"""Connections that may wait to be taken."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens where nobody else does; port 0 takes any free one.

    Who connects before the server runs waits for it.

    Raises:
        UserError: the address is not this machine's, or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address: {error}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        whys = {
            errno.EADDRINUSE: f"port {port} of {host} is in use; choose another --port, or stop who has it",
            errno.EACCES: f"port {port} needs more rights; choose a --port of 1024 or more",
            errno.EADDRNOTAVAIL: f"--host {host} is not an address of this machine",
        }
        raise UserError(whys.get(error.errno or 0, f"cannot listen at {host}:{port}: {error.strerror}")) from error
    return listening


def address_of(host: str, listening: socket.socket) -> str:
    """What to type into a browser."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def local_names(host: str) -> frozenset[str] | None:
    """The names by which a server at `host` may be addressed; None for any, where others reach it."""
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if is_loopback(host) else None


class Server(uvicorn.Server):
    """Serves an application until it is told to stop; then running requests have GRACE_SECONDS.

    Args:
        app: the application.
        batcher: what answers; closed at the end.
    """

    def __init__(self, app: FastAPI, batcher: Batcher):
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                log_config=None,
                server_header=False,
                proxy_headers=False,
                # Clients that neither send nor read are not waited for either.
                timeout_graceful_shutdown=int(GRACE_SECONDS) + 2,
            )
        )
        self._batcher = batcher

    def run_until_told(self, listening: socket.socket) -> None:
        """Serve at a socket until Ctrl-C or SIGTERM. A second Ctrl-C does not wait for running requests."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn raises the signal once more when it is done: this handler, still set, takes it. A signal that
            # comes before uvicorn listens is not lost either.
            signal.signal(number, self.handle_exit)
        try:
            self.run(sockets=[listening])
        finally:
            self._batcher.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits for every request."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await asyncio.to_thread(self._batcher.close)
