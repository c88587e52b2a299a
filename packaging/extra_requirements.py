"""Prints what an extra of the installed package needs, a requirement a line: `extra_requirements.py test`.

Installing the package itself once more with the extra would compile its native kernels once more.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("kvasir") or []:
    requirement = Requirement(line)
    marker, requirement.marker = requirement.marker, None
    if marker is not None and "extra" in str(marker) and marker.evaluate({"extra": sys.argv[1]}):
        sys.stdout.write(f"{requirement}\n")
