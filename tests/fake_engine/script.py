"""What the fake engine is told to do."""

from __future__ import annotations

from typing import Literal

import msgspec

Crash = Literal["kill", "segfault", "abort", "exit", "exception", "memory", "missing_torch"]

DEFAULT_ANSWER = """Kvasir is a name from the Norse tales. Here is what the **fake engine** can write:

1. A list with `inline code`.
2. Another line of it.

```python
def greet(name: str) -> str:
    return f"Hello, {name}!"
```

| token | probability |
|-------|-------------|
| yes   | 0.75        |
| no    | 0.25        |

And a last sentence with an emoji 🦉 and some 中文.
"""


class FakeScript(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Times in seconds unless named otherwise; rates in tokens per second per request.

    An answer is the first entry of `answers` whose key occurs in the last user message (or the
    prompt), else `text`; `repeat` writes it that many times over. It ends at its end ("stop")
    or at the request's `max_tokens` ("length").
    """

    text: str = DEFAULT_ANSWER
    answers: dict[str, str] = {}
    repeat: int = 1
    tokens_per_second: float = 100.0
    ttft_ms: float = 20.0
    max_num_seqs: int = 8
    errors: dict[str, str] = {}
    """Requests whose last message contains the key fail with the value as the error."""

    model_name: str = "fake-135M"
    max_context: int = 8192
    load_seconds: float = 0.05
    load_error: str | None = None

    start_delay: float = 0.0
    start_crash: Crash | None = None
    start_hang: bool = False
    protocol_version: int | None = None
    warnings: list[str] = []

    crash_at_delta: int | None = None
    """Crashes instead of sending this delta (counted over all requests from 1)."""
    crash_on: dict[str, Crash] = {}
    """Crashes on a `Generate` whose last message contains the key."""
    crash: Crash = "kill"
    ignore_shutdown: bool = False
    garbage_at_delta: int | None = None
    """Sends bytes that are no message instead of this delta."""

    draft_acceptance: list[float] = []
    """Of a model that was loaded with speculation: the share of drafts accepted by position; its length is the
    number of drafts in each step."""
    speculation_note: str = ""

    telemetry: bool = True
    telemetry_hz: float = 15.0
    num_kv_blocks: int = 1024
    memory_total: int = 16 << 30
    memory_kind: Literal["RAM", "VRAM"] = "RAM"
    stderr: str = ""
    """Written to the error output at the start."""
