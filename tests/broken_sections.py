"""Sections of a GPU script that end in all ways there are, see tests/test_gpu_script.py. Imports no torch."""

from __future__ import annotations

import os
import signal
import time

from tests.gpu.report import Report


def reports(report: Report) -> None:
    report.check("first", True)


def raises(report: Report) -> None:
    report.check("first", True)
    raise ValueError("the model is gone")


def dies(report: Report) -> None:
    report.check("first", True)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(report: Report, code: int) -> None:
    os._exit(code)


def hangs(report: Report) -> None:
    report.check("first", True)
    time.sleep(600)


def captures(report: Report, cuda_graphs: bool = True) -> None:
    if cuda_graphs:
        raise RuntimeError("operation not permitted when stream is capturing")
    report.check("runs without", True)
