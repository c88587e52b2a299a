"""The whole application is killed in the middle of everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.app.app_parts import AppParts
from tests.fake_engine.script import DEFAULT_ANSWER

ROOT = Path(__file__).resolve().parents[2]

# Five chats, each with an answer that grows; every 50 ms the length of each on the screen goes to standard output.
CHILD = """
import sys, time
from pathlib import Path
from PySide6.QtCore import QCoreApplication, QTimer
from tests.app.app_parts import AppParts, wait_until

app = QCoreApplication([])
parts = AppParts(Path(sys.argv[1]), tokens_per_second=120, repeat=200).start()
sessions = [parts.workspace.new_session() for _ in range(5)]
for number, session in enumerate(sessions):
    assert session.send(f"Question {number}"), parts.errors
sessions[0].set_draft("typed meanwhile")
timer = QTimer()
timer.timeout.connect(
    lambda: print(time.time(), *(len(session.messages[-1].text) for session in sessions), flush=True)
)
timer.start(50)
app.exec()
"""


def test_after_a_kill_every_question_is_there_and_every_answer_up_to_its_last_second(
    make_parts: Callable[..., AppParts], tmp_path: Path
) -> None:
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "kvasir.db")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    assert child.stdout is not None
    shown: list[tuple[float, list[int]]] = []
    try:
        # Until all answers grow and the oldest report is a good while ago.
        while not shown or min(shown[-1][1]) == 0 or shown[-1][0] - shown[0][0] < 2.5:
            at, *lengths = child.stdout.readline().split()
            shown.append((float(at), [int(length) for length in lengths]))
        child.send_signal(signal.SIGKILL)
        killed_at = time.time()
        shown += [(float(at), [int(n) for n in ns]) for at, *ns in map(str.split, child.stdout) if len(ns) == 5]
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.stdout.close()

    parts = make_parts()
    sessions = parts.workspace.sessions
    assert [session.messages[0].text for session in sessions] == [f"Question {number}" for number in range(5)]
    assert sessions[0].draft == "typed meanwhile"
    # One second, and half of one for a machine that is busy with other tests.
    earlier = [lengths for at, lengths in shown if at <= killed_at - 1.5]
    assert earlier, "the child streamed long enough for the test to mean something"
    for number, session in enumerate(sessions):
        answer = session.messages[-1]
        assert answer.run is not None
        assert (answer.run.status, answer.is_streaming) == ("interrupted", False)
        assert len(answer.text) >= earlier[-1][number] > 0
        assert (DEFAULT_ANSWER * 200).startswith(answer.text)
    assert parts.ask(sessions[2], "Go on?"), "chatting goes on"
