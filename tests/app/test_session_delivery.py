"""Results of other threads come to the GUI thread, in order."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from pytestqt.qtbot import QtBot

from app.state.delivery import Delivery
from tests.app.app_parts import wait_until


def test_functions_from_another_thread_run_here_in_their_order(qapp: object) -> None:
    delivery = Delivery()
    ran: list[tuple[int, int]] = []

    def post_all() -> None:
        for number in range(100):
            delivery.post(lambda number=number: ran.append((number, threading.get_ident())))

    thread = threading.Thread(target=post_all)
    thread.start()
    thread.join()
    assert ran == [], "nothing runs before the event loop does"
    wait_until(lambda: len(ran) == 100)
    assert ran == [(number, threading.get_ident()) for number in range(100)]


def test_a_future_brings_its_result_or_its_error(qapp: object) -> None:
    delivery = Delivery()
    told: list[tuple[object, BaseException | None]] = []
    with ThreadPoolExecutor(1) as executor:
        good: Future[int] = executor.submit(lambda: 7)
        bad: Future[float] = executor.submit(lambda: 1 / 0)
        delivery.when_done(good, lambda result, error: told.append((result, error)))
        delivery.when_done(bad, lambda result, error: told.append((result, error)))
    wait_until(lambda: len(told) == 2)
    assert told[0] == (7, None)
    assert told[1][0] is None and isinstance(told[1][1], ZeroDivisionError)


def test_an_exception_in_one_function_leaves_the_others_their_turn(qtbot: QtBot) -> None:
    delivery = Delivery()
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("one function's own fault")

    with qtbot.captureExceptions() as caught:
        delivery.post(fail)
        delivery.post(lambda: ran.append("after"))
        wait_until(lambda: ran)
    assert [str(value) for _, value, _ in caught] == ["one function's own fault"]
