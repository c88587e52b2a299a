"""Failures inside a living worker, in words for people. Torch-free."""

from __future__ import annotations

from engine.exit_reason import SMALLER

MAX_MESSAGE_CHARS = 1000
"""A damaged file may have any number of characters where its message quotes a name."""
_LOST_CONTEXT_PHRASES = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "launch failure",
    "device-side assert",
)
_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "_alloc_failed")


def describe_error(error: BaseException) -> str:
    """The message of an error meant for people, or the kind of one that is not."""
    message = presentable(str(error))
    if isinstance(error, (ValueError, LookupError)) and message and not isinstance(error, KeyError):
        return message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def presentable(message: str) -> str:
    """A message that may quote a damaged file: beginning and end of one too long to be read, and nothing but text."""
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[: MAX_MESSAGE_CHARS - 200]} ... {message[-190:]}"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _MEMORY_PHRASES)


def is_fatal(message: str) -> bool:
    """Whether the process can compute nothing any more: after such an error every CUDA call fails.

    Who meets it first may be Triton, whose other errors are of one kernel alone.
    """
    if "Triton Error [CUDA]" in message:
        return any(phrase in message for phrase in _LOST_CONTEXT_PHRASES)
    return "CUDA error" in message and "out of memory" not in message


def explain_load_failure(error: BaseException) -> str:
    if is_out_of_memory(error):
        return f"There is not enough memory for this model. {SMALLER}. ({describe_error(error)})"
    return describe_error(error)
