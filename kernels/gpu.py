"""Whether torch and the Triton kernels can compute on the GPU here, and if not, why and what to do about it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.version import Version

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""
LEAST_TRITON = Version("3.6")


class Obstacle(NamedTuple):
    """Why something cannot be, and what to do about it: half sentences without a full stop."""

    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}; {self.advice}" if self.advice else self.why


def is_interpreted() -> bool:
    """Whether Triton was asked to run kernels on the CPU, one program after another: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_usable() -> bool:
    """Whether torch sees a GPU here, can start it, and was built for it."""
    if not torch.cuda.is_available():
        return False
    try:
        return why_not_built_for(torch.cuda.get_device_capability()) is None
    except RuntimeError:  # CUDA does not start, such as on a GPU without any memory left
        return False


def why_not_built_for(capability: tuple[int, int]) -> Obstacle | None:
    """Why this torch has no code for GPUs of a compute capability; None when it has."""
    built_for = [_capability_of(name) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    portable = [_capability_of(name) for name in torch.cuda.get_arch_list() if name.startswith("compute_")]
    if not built_for and not portable:
        return None  # torch does not tell
    if any(major == capability[0] and minor <= capability[1] for major, minor in built_for):
        return None
    if any(least <= capability for least in portable):
        return None
    least, most = min(built_for + portable), max(built_for + portable)
    needs = f"it has compute capability {_dotted(capability)}"
    if capability < least:
        return Obstacle(
            f"{needs}, and torch {torch.__version__} needs {_dotted(least)} or more",
            "install an older torch for older CUDA, or use a newer GPU",
        )
    return Obstacle(f"{needs}, and torch {torch.__version__} knows GPUs up to {_dotted(most)}", "install a newer torch")


@functools.cache
def triton_obstacle() -> Obstacle | None:
    """Why the Triton kernels cannot run here; None when they can."""
    if importlib.util.find_spec("triton") is None:
        if sys.platform != "linux":
            return Obstacle(f"Triton is not made for {_PLATFORMS.get(sys.platform, sys.platform)}", _ON_LINUX)
        return Obstacle("Triton is missing", _install_triton())
    installed = _triton_version()
    if installed is not None and installed < LEAST_TRITON:
        return Obstacle(f"Triton {installed} is older than {LEAST_TRITON}", _install_triton())
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return Obstacle("torch sees no NVIDIA GPU", "")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return Obstacle(
            f"{torch.cuda.get_device_name()} has compute capability {_dotted(capability)}, and they need "
            f"{_dotted(LEAST_CAPABILITY)} (RTX 30 series, A100 or later)",
            "",
        )
    return _no_compiler()


def why_no_triton_kernels() -> str | None:
    """Why the Triton kernels cannot run here, and what to do, in words; None when they can."""
    obstacle = triton_obstacle()
    return None if obstacle is None else str(obstacle)


_PLATFORMS = {"win32": "Windows", "darwin": "macOS"}
_ON_LINUX = "use Linux, or on Windows the Windows Subsystem for Linux"


def _triton_requirement() -> str:
    """The Triton that this torch asks for, as its package says; where it says nothing, any that we know."""
    for line in importlib.metadata.requires("torch") or ():
        requirement = Requirement(line)
        if requirement.name == "triton" and not (requirement.marker and "extra" in str(requirement.marker)):
            return f"triton{requirement.specifier}"
    return f"triton>={LEAST_TRITON}"


def _install_triton() -> str:
    return f"{sys.executable} -m pip install '{_triton_requirement()}'"


def triton_mismatch() -> Obstacle | None:
    """Where the Triton installed is not the one this torch was released with; the kernels may run all the same."""
    installed, wanted = _triton_version(), Requirement(_triton_requirement())
    if installed is None or wanted.specifier.contains(installed, prereleases=True):
        return None
    return Obstacle(
        f"Triton {installed} is installed, and torch {torch.__version__} goes with {wanted}",
        _install_triton(),
    )


def _triton_version() -> Version | None:
    """None for a Triton from elsewhere than the registry, such as a build for Windows."""
    try:
        return Version(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _no_compiler() -> Obstacle | None:
    """Triton builds a small launcher for each kernel with the system's C compiler."""
    if sys.platform != "linux":
        return None
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return Obstacle("Triton finds no C compiler", "install gcc, or let CC name a compiler")
    # Debian's own scheme names a folder that Triton does not look into either.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not headers.exists() and not {"CPATH", "C_INCLUDE_PATH"} & os.environ.keys():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Obstacle(
            f"Triton finds no Python.h of Python {version}", f"install python{version}-dev (or python3-devel)"
        )
    return None


def _capability_of(name: str) -> tuple[int, int]:
    """sm_90a -> (9, 0), compute_120 -> (12, 0)."""
    digits = "".join(filter(str.isdigit, name.partition("_")[2]))
    return int(digits[:-1]), int(digits[-1])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
