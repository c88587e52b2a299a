"""From the engine client's inbox to the GUI, once a frame."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from PySide6.QtCore import QObject, Qt, QTimer, Slot

from engine.protocol import Accepted, AnyCommand, AnyEvent, Delta, Event, Finished, merge_deltas

RequestEvent = Accepted | Delta | Finished
EventT = TypeVar("EventT", bound=Event)

FRAME_INTERVAL_MS = 16
IDLE_INTERVAL_MS = 50
IDLE_AFTER_S = 1.0
FRAME_BUDGET_S = 0.006


class InboxClient(Protocol):
    """What the bridge needs of an `engine.client.EngineClient`."""

    def send(self, command: AnyCommand) -> None: ...

    def take_events(self) -> list[AnyEvent]: ...


class _Route:
    """One request's handler and the events it has not seen yet, in order, neighbouring deltas merged."""

    def __init__(self, owner: str, handler: Callable[[RequestEvent], None]) -> None:
        self.owner = owner
        self.handler = handler
        self.events: deque[RequestEvent] = deque()
        self.deltas: list[Delta] = []

    def add(self, event: RequestEvent) -> None:
        if isinstance(event, Delta):
            self.deltas.append(event)
            return
        self._merge_deltas()
        self.events.append(event)

    def take(self) -> list[RequestEvent]:
        self._merge_deltas()
        events = list(self.events)
        self.events.clear()
        return events

    @property
    def is_waiting(self) -> bool:
        return bool(self.events or self.deltas)

    def _merge_deltas(self) -> None:
        if self.deltas:
            self.events.append(merge_deltas(self.deltas))
            self.deltas = []


class Bridge(QObject):
    """Drains the client's inbox on the GUI thread every 16 ms and hands each event to whoever asked for it.

    Within a frame's time budget the requests of the visible owner go first, the others in turn, at least one of
    them in every frame; one request's events never change their order. Everything a request's handler gets in
    one frame is at most one `Delta` between two other events.
    """

    def __init__(self, client: InboxClient, parent: QObject | None = None, *, budget_s: float = FRAME_BUDGET_S) -> None:
        super().__init__(parent)
        self._client = client
        self._budget_s = budget_s
        self._handlers: defaultdict[type[Event], list[Callable]] = defaultdict(list)
        self._routes: OrderedDict[str, _Route] = OrderedDict()
        self._visible_owner = ""
        self._last_activity = time.monotonic()
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.setInterval(FRAME_INTERVAL_MS)
        self._timer.timeout.connect(self._drain)

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()

    def send(self, command: AnyCommand) -> None:
        """Sends a command to the engine; raises what the client raises when there is no engine to take it."""
        self._client.send(command)
        self._wake()

    def subscribe(self, event_type: type[EventT], handler: Callable[[EventT], None]) -> None:
        """Calls `handler` with every event of that type. Events of a registered request go to its handler too."""
        self._handlers[event_type].append(handler)

    def register_request(self, request_id: str, handler: Callable[[RequestEvent], None], owner: str = "") -> None:
        """Routes a request's `Accepted`, `Delta` and `Finished` to `handler`; ends by itself after `Finished`."""
        self._routes[request_id] = _Route(owner, handler)
        self._wake()

    def unregister_request(self, request_id: str) -> None:
        self._routes.pop(request_id, None)

    def set_visible(self, owner: str) -> None:
        """Names the owner whose requests are served first."""
        self._visible_owner = owner

    @Slot()
    def _drain(self) -> None:
        deadline = time.perf_counter() + self._budget_s
        errors: list[Exception] = []
        general = self._sort(self._client.take_events())
        for event in general:
            for handler in tuple(self._handlers[type(event)]):
                _call(handler, event, errors)
        self._serve_requests(deadline, errors)
        self._set_pace(busy=bool(general) or bool(self._routes))
        if errors:
            raise errors[0]  # reaches the excepthook; the other events have been served

    def _sort(self, events: list[AnyEvent]) -> list[AnyEvent]:
        """Puts request events on their routes; returns the events that have subscribers."""
        general = []
        for event in events:
            if isinstance(event, RequestEvent) and (route := self._routes.get(event.request_id)) is not None:
                route.add(event)
            if self._handlers.get(type(event)):
                general.append(event)
        return general

    def _serve_requests(self, deadline: float, errors: list[Exception]) -> None:
        waiting = [request_id for request_id, route in self._routes.items() if route.is_waiting]
        visible = [i for i in waiting if self._routes[i].owner == self._visible_owner]
        others = [i for i in waiting if self._routes[i].owner != self._visible_owner]
        for request_id in visible:
            self._serve(request_id, errors)
        for number, request_id in enumerate(others):
            if number > 0 and time.perf_counter() >= deadline:
                break
            self._serve(request_id, errors)

    def _serve(self, request_id: str, errors: list[Exception]) -> None:
        route = self._routes.get(request_id)
        if route is None:  # an earlier handler of this frame unregistered it
            return
        self._routes.move_to_end(request_id)  # behind those that have not had their turn
        for event in route.take():
            if isinstance(event, Finished):
                self.unregister_request(request_id)
            _call(route.handler, event, errors)

    def _set_pace(self, *, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._last_activity = now
            interval = FRAME_INTERVAL_MS
        else:
            interval = FRAME_INTERVAL_MS if now - self._last_activity < IDLE_AFTER_S else IDLE_INTERVAL_MS
        if self._timer.interval() != interval:
            self._timer.setInterval(interval)

    def _wake(self) -> None:
        self._set_pace(busy=True)


def _call(handler: Callable[[EventT], None], event: EventT, errors: list[Exception]) -> None:
    try:
        handler(event)
    except Exception as error:
        errors.append(error)
