"""The private pipe between a client and its worker process.

The client listens at an address only its user can reach and hands address and key to the
worker on stdin, so that neither shows up in a process list. One message is one frame of
`multiprocessing.connection`; what is in it is `engine.protocol`'s business.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import BinaryIO

import msgspec

# sun_path holds 104 bytes on macOS and 108 on Linux, with the closing zero.
MAX_SOCKET_PATH = 100


class Handshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line a worker reads from stdin: where to connect and the shared key (hexadecimal)."""

    address: str
    family: str
    key: str


def _private_folder() -> str:
    """Makes a folder of mode 0700 whose path leaves room for a socket's name."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not parent or len(os.fsencode(parent)) > MAX_SOCKET_PATH - 32:
            continue
        try:
            return tempfile.mkdtemp(prefix="kvasir-", dir=parent)
        except OSError:
            continue
    raise OSError("no folder for the engine's socket: XDG_RUNTIME_DIR, TMPDIR and /tmp are all unusable")


class Rendezvous:
    """Waits for exactly one worker that knows the key.

    `accept` blocks; `abort`, called from another thread, ends it on every platform by
    connecting to the own address.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._folder: str | None = None
        self._aborted = False
        if sys.platform == "win32":
            self._family = "AF_PIPE"
            self._listener = Listener(None, self._family, authkey=self._key)
        else:
            self._family = "AF_UNIX"
            self._folder = _private_folder()
            self._listener = Listener(os.path.join(self._folder, "s"), self._family, authkey=self._key)
        self._address = str(self._listener.address)

    def handshake_line(self) -> bytes:
        return msgspec.json.encode(Handshake(self._address, self._family, self._key.hex())) + b"\n"

    def accept(self) -> Connection | None:
        """Returns the worker's connection, or None after `abort`."""
        while not self._aborted:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionResetError, BrokenPipeError):
                continue  # somebody without the key, or a worker that died while connecting
            if not self._aborted:
                return connection
            connection.close()
        return None

    def abort(self) -> None:
        self._aborted = True
        try:
            Client(self._address, self._family, authkey=self._key).close()
        except (OSError, EOFError, AuthenticationError):
            pass  # nobody is waiting any more

    def close(self) -> None:
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def connect(stdin: BinaryIO) -> Connection:
    """Connects a worker to the client that wrote the handshake line to its stdin.

    Raises `ValueError` if there is no such line and `OSError`/`EOFError` if the client is gone.
    """
    line = stdin.readline()
    try:
        handshake = msgspec.json.decode(line, type=Handshake)
        key = bytes.fromhex(handshake.key)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError("the engine worker is started by Kvasir and expects a handshake on stdin") from error
    return Client(handshake.address, handshake.family, authkey=key)
