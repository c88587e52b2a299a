"""How long OpenMP threads spin while they wait for each other. Torch-free: it must be said before torch is loaded."""

from __future__ import annotations

import os

# A thread that waits at the end of a parallel region spins by default for milliseconds. With any other program on
# the same cores (the window is one) it spins away the very time slice that the thread it waits for needs: decoding
# on two busy cores was 10 to 20 times slower. These values are about 10 microseconds (GNU) and 1 millisecond (Intel).
_SETTINGS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def limit_spinning() -> None:
    """Sets the environment of this process accordingly, unless the user has said something about it.

    Has no effect once torch is imported.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
