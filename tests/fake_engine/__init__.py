"""A scriptable engine for tests: a real process that speaks the real protocol, without model or torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from engine.client import LocalEngineClient
from tests.fake_engine.script import FakeScript as FakeScript

ROOT = Path(__file__).resolve().parent.parent.parent


def fake_client(log_path: str | Path | None = None, start_timeout: float = 30.0, **script: Any) -> LocalEngineClient:
    """A client of the fake engine; the keyword arguments are the fields of `FakeScript`.

    Not started yet: call `start()`, then send `LoadModel` (any model name) as to the real one.
    """
    fields = msgspec.json.encode(FakeScript(**script)).decode()
    return LocalEngineClient(
        [sys.executable, "-m", "tests.fake_engine.worker", fields],
        log_path=log_path,
        start_timeout=start_timeout,
    )
