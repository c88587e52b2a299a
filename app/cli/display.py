"""Whether a window can open here, and what is missing if not. Imports no Qt: Qt aborts the process when it fails."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Debian's and Ubuntu's package of each library Qt's platform plugins need and pip does not bring.
SYSTEM_PACKAGES = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libGLX.so.0": "libglx0",
    "libOpenGL.so.0": "libopengl0",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libX11.so.6": "libx11-6",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-render.so.0": "libxcb-render0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-shm.so.0": "libxcb-shm0",
    "libxcb-sync.so.1": "libxcb-sync1",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xfixes.so.0": "libxcb-xfixes0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxcb.so.1": "libxcb1",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libwayland-client.so.0": "libwayland-client0",
    "libwayland-cursor.so.0": "libwayland-cursor0",
    "libwayland-egl.so.1": "libwayland-egl1",
}


def why_no_window(environment: Mapping[str, str] = os.environ) -> str | None:
    """The reason no window can open, with what to do, on one line; None if one can."""
    if importlib.util.find_spec("PySide6") is None:
        return "PySide6 is not installed: run `make setup`, or pip install PySide6-Essentials"
    if (missing := missing_libraries(environment)) is not None:
        return missing
    return why_no_display(environment)


def why_no_display(environment: Mapping[str, str] = os.environ) -> str | None:
    """Looks for a display server that answers. macOS and Windows always have one."""
    if sys.platform in ("win32", "darwin"):
        return None
    platform = environment.get("QT_QPA_PLATFORM", "").split(":")[0]
    if platform and platform not in ("xcb", "wayland"):
        return None  # offscreen, vnc and the like need no display server
    if wayland := environment.get("WAYLAND_DISPLAY"):
        path = Path(environment.get("XDG_RUNTIME_DIR", "/nonexistent")) / wayland
        if path.is_socket():
            return None
    display = environment.get("DISPLAY")
    if not display:
        return "there is no display (neither DISPLAY nor WAYLAND_DISPLAY leads to one)"
    if not _x_server_answers(display):
        return f"the display {display} does not answer"
    return None


def missing_libraries(environment: Mapping[str, str] = os.environ) -> str | None:
    """The system libraries that Qt needs and this machine lacks, with the command that installs them."""
    if not sys.platform.startswith("linux"):
        return None
    missing = _missing_by_loader(_qt_libraries(environment))
    if not missing:
        return None
    packages = sorted({SYSTEM_PACKAGES[name] for name in missing if name in SYSTEM_PACKAGES})
    advice = f": sudo apt-get install {' '.join(packages)}" if packages else ""
    return f"system libraries that Qt needs are missing ({', '.join(sorted(missing))}){advice}"


def _qt_libraries(environment: Mapping[str, str]) -> list[Path]:
    """The shared objects a window loads first: the widgets library and the plugin of the platform in use."""
    spec = importlib.util.find_spec("PySide6")
    if spec is None or spec.origin is None:
        return []
    qt = Path(spec.origin).parent / "Qt"
    platform = environment.get("QT_QPA_PLATFORM", "").split(":")[0] or (
        "wayland" if environment.get("WAYLAND_DISPLAY") and not environment.get("DISPLAY") else "xcb"
    )
    plugin = next(iter(sorted((qt / "plugins" / "platforms").glob(f"libq{platform}*.so"))), None)
    libraries = [qt / "lib" / "libQt6Widgets.so.6", plugin]
    return [library for library in libraries if library is not None and library.exists()]


def _missing_by_loader(libraries: list[Path]) -> set[str]:
    ldd = shutil.which("ldd")
    if ldd is None:
        candidates = ("libEGL.so.1", "libGL.so.1", "libxkbcommon.so.0", "libxcb-cursor.so.0", "libdbus-1.so.3")
        return {name for name in candidates if ctypes.util.find_library(name[3:].split(".so")[0]) is None}
    if not libraries:
        return set()
    output = subprocess.run([ldd, *map(str, libraries)], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in output.splitlines() if "not found" in line}


def _x_server_answers(display: str) -> bool:
    host, _, number = display.rpartition(":")
    number = number.split(".")[0]
    if not number.isdecimal():
        return False
    if host in ("", "unix"):
        path = f"/tmp/.X11-unix/X{number}"
        # Linux servers listen at an abstract address too; the file may belong to another mount namespace.
        addresses = [path, f"\0{path}"] if sys.platform.startswith("linux") else [path]
        return any(_connects(socket.AF_UNIX, address) for address in addresses)
    return _connects(socket.AF_INET, (host, 6000 + int(number)))


def _connects(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(address)
        except OSError:
            return False
        return True
