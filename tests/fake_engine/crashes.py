"""Ways for the fake worker to die."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from typing import NoReturn

from tests.fake_engine.script import Crash


def die(how: Crash) -> NoReturn:
    """Ends this process the way a real one ends in that case."""
    sys.stderr.flush()
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    if how == "segfault":
        faulthandler._sigsegv()  # pyright: ignore[reportAttributeAccessIssue]
    if how == "abort":
        os.abort()
    try:
        if how == "memory":
            raise MemoryError("could not allocate 123456789 bytes")
        if how == "missing_torch":
            sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
            try:
                importlib.import_module("torch")
            except ImportError:
                raise ModuleNotFoundError("No module named 'torch'", name="torch") from None
        raise RuntimeError("the script told the fake engine to fail")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        sys.stderr.flush()
        os._exit(1)
