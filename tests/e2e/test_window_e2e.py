"""The real window with the real worker and the starter model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent

from app.application import Application
from app.settings import SettingsFile
from engine.protocol import EngineConfig, SamplingParams
from tests.app.app_parts import wait_until
from tests.app.window_parts import open_application

ROOT = Path(__file__).resolve().parents[2]
PAINT_BUDGET_S = 1.5
LOAD_TIMEOUT_S = 90.0


@pytest.fixture
def application(qapp: object, tmp_path: Path, starter_model: Path) -> Iterator[Application]:
    file = SettingsFile(tmp_path / "settings.json")
    file.settings.last_model = EngineConfig(model=str(starter_model), max_context=2048)
    application = Application(file, tmp_path / "kvasir.db")
    application.start()
    yield application
    application.quit()
    application.window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_a_person_chats_in_tabs_stops_one_and_survives_the_death_of_the_worker(
    application: Application,
) -> None:
    workspace, engine, window = application.workspace, application.engine, application.window
    wait_until(lambda: engine.status == "ready" and workspace.sessions, LOAD_TIMEOUT_S)
    first = workspace.current
    assert first is not None
    first.set_params(SamplingParams(temperature=0.0))
    assert first.send("What is the capital of Japan?")
    second = workspace.new_session()
    assert second.send("Tell me a long story about a raven.")
    wait_until(lambda: len(second.messages[-1].text) > 20, 60)
    second.stop()
    wait_until(lambda: not second.is_generating, 5)
    stopped = second.messages[-1]
    assert len(stopped.text) > 20, "what was written before the stop stays"
    assert stopped.run is not None
    assert stopped.run.finish_reason == "cancelled"
    wait_until(lambda: not first.is_generating, 60)
    assert "Tokyo" in first.messages[-1].text
    run = first.messages[-1].run
    assert run is not None
    assert run.ttft_ms is not None
    assert run.output_tokens

    assert second.send("Tell me another one.")
    wait_until(lambda: second.messages[-1].text, 60)
    assert engine.worker is not None
    os.kill(engine.worker.pid, signal.SIGKILL)
    wait_until(lambda: engine.status == "dead", 10)
    assert window.pages.banner.isVisible()
    assert "SIGKILL" in window.pages.banner.text.text()
    kept = second.messages[-1].text
    assert kept, "the partial answer stays"
    window.pages.banner.restart_button.click()
    wait_until(lambda: engine.status == "ready", LOAD_TIMEOUT_S)
    assert second.regenerate(second.messages[-1].id)
    wait_until(lambda: second.messages[-1].text, 60)
    assert second.messages[-1].sibling_count == 2, "the interrupted answer is still there, beside the new one"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_killed_while_five_tabs_stream_the_window_brings_every_word_back(qapp: object, tmp_path: Path) -> None:
    environment = {**os.environ, "KVASIR_DATA": str(tmp_path), "QT_QPA_PLATFORM": "offscreen"}
    command = [sys.executable, "-m", "tests.e2e.window_driver", "5"]
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    said: dict[str, float] = {}
    assert driver.stdout is not None
    for line in driver.stdout:
        event = json.loads(line)
        said[event["what"]] = event["seconds"]
        if event["what"] == "streaming":
            break
    driver.kill()
    driver.wait(10)
    driver.stdout.close()
    assert "streaming" in said, f"the window ended early, having said {said}"
    print(f"window painted after {said['painted']:.2f} s (budget {PAINT_BUDGET_S} s)")  # noqa: T201
    print(f"model ready after {said['ready']:.2f} s")  # noqa: T201
    assert said["painted"] <= 3 * PAINT_BUDGET_S

    with open_application(tmp_path, ready=False) as application:
        sessions = application.workspace.sessions
        assert len(sessions) == 5
        for number, session in enumerate(sessions):
            question, answer = session.messages
            assert question.text == f"Tell me a long story about the sea, number {number}."
            assert answer.text, "the answer up to its last second"
            assert answer.run is not None
            assert answer.run.status == "interrupted"
