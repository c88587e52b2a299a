"""Why a worker process ended, in words for people."""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from engine.protocol import PROTOCOL_VERSION

SMALLER = "Choose a smaller model, a shorter context or fewer KV blocks, or close other programs"

_WINDOWS_CODES = {
    0xC0000005: "it touched memory that is not its own (access violation)",
    0xC000001D: "this processor lacks an instruction it needs (illegal instruction)",
    0xC0000135: "a library it needs is missing (DLL not found)",
    0xC0000409: "it corrupted its own stack",
    0xC000013A: "it was interrupted",
}

_SIGNAL_CAUSES = {
    "SIGSEGV": "it touched memory that is not its own, mostly a fault of a driver or a native kernel",
    "SIGBUS": "a mapped file was cut short or its disk failed; is the model file complete?",
    "SIGILL": "this processor lacks an instruction that a native library needs; "
    "KVASIR_KERNELS=reference avoids Kvasir's own native kernels",
    "SIGABRT": "a native library gave up",
    "SIGFPE": "a native library divided by zero",
    "SIGTERM": "another program asked it to end",
    "SIGHUP": "its session ended",
    "SIGINT": "it was interrupted",
    "SIGXCPU": "it used up its limit of processor time",
}

_OUT_OF_MEMORY = re.compile(
    r"^(MemoryError\b.*|.*\bOutOfMemoryError\b.*|.*CUDA out of memory.*|.*can't allocate memory.*|.*std::bad_alloc.*"
    r"|.*[Cc]annot allocate memory.*|.*CUDA error: out of memory.*)$",
    re.MULTILINE,
)
_MISSING_MODULE = re.compile(r"^(?:.*: )?(?:ModuleNotFoundError: )?No module named '?([\w.]+)'?", re.MULTILINE)
_OTHER_IMPORT_ERROR = re.compile(r"^ImportError: (.+)$", re.MULTILINE)
_MISSING_LIBRARY = re.compile(r"(\S+\.so[\w.]*): cannot open shared object file")
_EXCEPTION_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$", re.MULTILINE)
_MODULE_PATH = re.compile(r"^(?:\w+\.)+(?=\w+\b)")


@dataclass(frozen=True)
class ExitReason:
    """One sentence for people, and whether memory ran out."""

    text: str
    out_of_memory: bool = False


def explain_exit(exit_code: int, stderr: str, python: str, oom_kills: int = 0) -> ExitReason:
    """Says what an unexpected end means.

    `exit_code` is `Popen.returncode` (negative: the signal), `oom_kills` how many processes the
    kernel killed for want of memory while the worker lived, see `count_oom_kills`.
    """
    name = _signal_name(exit_code)
    if name == "SIGKILL":
        if oom_kills > 0:
            return ExitReason(f"The system ran out of memory and ended the engine (SIGKILL). {SMALLER}.", True)
        return ExitReason(
            "The engine was killed from outside (SIGKILL): by a user, by a task manager, or by the system "
            f"because memory ran out. If nobody killed it: {SMALLER[0].lower()}{SMALLER[1:]}."
        )
    if exit_code != 0 and (match := _OUT_OF_MEMORY.search(stderr)):
        where = "GPU memory" if "CUDA" in match[0] or "OutOfMemoryError" in match[0] else "memory"
        return ExitReason(f"The engine ran out of {where}: {match[0].strip()}. {SMALLER}.", True)
    if name is not None:
        cause = _SIGNAL_CAUSES.get(name, "no more is known")
        return ExitReason(f"The engine crashed ({name}): {cause}.")
    if exit_code & 0xFFFFFFFF in _WINDOWS_CODES:
        return ExitReason(f"The engine crashed: {_WINDOWS_CODES[exit_code & 0xFFFFFFFF]}.")
    if exit_code == 0:
        return ExitReason("The engine ended by itself without being asked to.")
    return ExitReason(_explain_python_failure(exit_code, stderr, python))


def explain_spawn_failure(error: OSError, python: str) -> ExitReason:
    """Says why the worker could not even be started."""
    if isinstance(error, FileNotFoundError):
        return ExitReason(
            f"The engine's Python was not found: {python}. Choose another one in the settings, or install Kvasir again."
        )
    if isinstance(error, PermissionError):
        return ExitReason(f"The engine's Python may not be run: {python} ({error.strerror}).")
    if error.errno == errno.ENOMEM:
        return ExitReason(f"There is not enough memory to start the engine. {SMALLER}.", True)
    return ExitReason(f"The engine could not be started: {error}.")


def explain_no_answer(seconds: float) -> ExitReason:
    return ExitReason(f"The engine started but did not answer within {seconds:g} seconds and was stopped.")


def explain_wrong_version(version: int) -> ExitReason:
    return ExitReason(
        f"The engine speaks protocol version {version}, this program version {PROTOCOL_VERSION}: "
        "update both to the same version of Kvasir."
    )


def explain_bad_message(error: Exception) -> ExitReason:
    return ExitReason(
        f"The engine sent a message that this program does not understand ({error}): "
        "update both to the same version of Kvasir."
    )


def count_oom_kills() -> int:
    """Processes that Linux killed so far for want of memory, machine-wide and in this control group."""
    total = 0
    for path, key in (("/proc/vmstat", "oom_kill"), ("/sys/fs/cgroup/memory.events", "oom_kill")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        total += sum(int(fields[1]) for line in lines if (fields := line.split())[:1] == [key])
    return total


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _explain_python_failure(exit_code: int, stderr: str, python: str) -> str:
    if match := _MISSING_MODULE.search(stderr):
        package = match[1].split(".")[0]
        if package in ("engine", "kernels"):
            return f"The engine's Python ({python}) does not have Kvasir's engine: install Kvasir into it."
        return (
            f"The engine's Python ({python}) lacks the package {package}. "
            f"Install it with: {python} -m pip install {package}"
        )
    if match := _MISSING_LIBRARY.search(stderr):
        return f"The engine could not start: the system library {match[1]} is missing. Install the package that has it."
    if match := _OTHER_IMPORT_ERROR.search(stderr):
        return f"The engine could not start, an import failed: {match[1]}"
    lines = _EXCEPTION_LINE.findall(stderr)
    if lines:
        return f"The engine failed: {_MODULE_PATH.sub('', lines[-1].strip())}"
    return f"The engine ended with exit code {exit_code}."
