"""Failures a command ends with: one line on standard error and an exit code."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable


class CommandError(Exception):
    """The command cannot go on. The message is for people, on one line."""

    exit_code = 1


class UsageError(CommandError):
    exit_code = 2


class Interrupted(CommandError):
    exit_code = 130


def reports_failures(run: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """Makes a command print a `CommandError` as one line instead of a traceback."""

    @functools.wraps(run)
    def wrapped(arguments: Namespace) -> int:
        try:
            return run(arguments)
        except CommandError as error:
            sys.stdout.flush()
            print(f"kvasir: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code

    return wrapped
