"""One window for one data folder: a second start brings the first one to the front."""

from __future__ import annotations

import getpass
import hashlib
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

ANSWER_TIMEOUT_MS = 3000
_ASK = b"focus\n"
_ANSWER = b"done\n"


class SingleInstance(QObject):
    """Holds the data folder's lock, or knows that another process does.

    The lock decides who is first, so two starts at the same moment cannot both be; a lock left by a
    process that is gone is taken over. The socket only carries the request to come to the front.
    """

    focus_requested = Signal()

    def __init__(self, folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        # Short and without the folder's own name: socket paths may have no more than about 100 bytes.
        digest = hashlib.sha256(f"{getpass.getuser()}\0{folder.resolve()}".encode()).hexdigest()[:20]
        self.server_name = f"kvasir-{digest}"
        self._lock = QLockFile(str(folder / "window.lock"))
        self._lock.setStaleLockTime(0)
        self._server: QLocalServer | None = None

    def acquire(self) -> bool:
        """Makes this process the first one. Returns False if another one is.

        Raises `OSError` if the folder cannot be written.
        """
        if not self._lock.tryLock(0):
            if self._lock.error() == QLockFile.LockError.LockFailedError:
                return False
            raise OSError(f"cannot lock {self._lock.fileName()}: the folder cannot be written")
        QLocalServer.removeServer(self.server_name)
        server = QLocalServer(self)
        server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        server.newConnection.connect(self._serve)
        if server.listen(self.server_name):
            self._server = server
        return True

    def ask_first_to_focus(self, timeout_ms: int = ANSWER_TIMEOUT_MS) -> bool:
        """Asks the process that holds the lock to show its window. Returns whether it answered."""
        socket = QLocalSocket()
        socket.connectToServer(self.server_name)
        if not socket.waitForConnected(timeout_ms):
            return False
        socket.write(_ASK)
        socket.flush()
        while not socket.canReadLine():
            if not socket.waitForReadyRead(timeout_ms):
                return False
        return bytes(socket.readLine().data()) == _ANSWER

    def release(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._lock.unlock()

    def _serve(self) -> None:
        """Takes new connections, which are the server's children.

        Nothing connected to their signals may hold this object: were a socket the last to hold it, deleting the
        socket would delete this object, the server and then the socket once more.
        """
        assert self._server is not None
        while (socket := self._server.nextPendingConnection()) is not None:
            socket.readyRead.connect(self._answer)
            socket.disconnected.connect(socket.deleteLater)
        self._answer()

    def _answer(self) -> None:
        if self._server is None:
            return
        for socket in self._server.findChildren(QLocalSocket):
            while socket.canReadLine():
                if bytes(socket.readLine().data()) == _ASK:
                    self.focus_requested.emit()
                    socket.write(_ANSWER)
                    socket.flush()
