"""Entry of `python -m app` and of the console script `kvasir`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from app.cli.arguments import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an emoji must not end an answer on a terminal that has none
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as with `kvasir models | head -1`. What is left must go
        # nowhere, or the interpreter complains about it while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
