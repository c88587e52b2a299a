#!/bin/sh
# Says in words why a Python cannot be used, before pip would in riddles.
python=$1
if ! command -v "$python" >/dev/null 2>&1; then
    echo "Kvasir needs Python 3.11 or newer, and '$python' is not installed." >&2
    echo "Install it, or name another one: make PYTHON=python3.12 setup" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Kvasir needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1)." >&2
    echo "Install a newer one and name it: make PYTHON=python3.12 setup" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "'$python' has no venv module (Debian and Ubuntu ship it apart)." >&2
    echo "Install it, for example: sudo apt-get install python3-venv" >&2
    exit 1
fi
