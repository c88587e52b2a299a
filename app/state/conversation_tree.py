"""A conversation's messages as a tree, and the path through it that is visible. No Qt, no database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from app.state.records import MessageRecord, MessageRole, MessageView, RunRecord


@dataclass(eq=False, slots=True)
class Node:
    """One message; the only mutable form of it. `children` are alternatives to each other, oldest first."""

    id: int
    parent: Node | None
    role: MessageRole
    text: str
    created_at: float
    run: RunRecord | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def is_streaming(self) -> bool:
        return self.run is not None and self.run.is_open

    def record(self) -> MessageRecord:
        parent_id = None if self.parent is None else self.parent.id
        return MessageRecord(self.id, parent_id, self.role, self.text, self.created_at, not self.is_streaming, self.run)


class ConversationTree:
    """All messages of a conversation. The visible path runs from a root to the active leaf.

    Message ids are unique and rise with age. Methods that take an id raise `KeyError` for one that is not there.
    """

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.visited: dict[int, float] = {}
        """When each leaf was last visible; decides where switching to a sibling leads."""
        self._nodes: dict[int, Node] = {}
        self._path: list[Node] = []

    @classmethod
    def from_records(
        cls,
        records: Iterable[MessageRecord],
        active_leaf_id: int | None = None,
        visited: dict[int, float] | None = None,
    ) -> ConversationTree:
        """Builds the tree; messages whose parent is missing are left out. An unknown active leaf means the newest."""
        tree = cls()
        for record in sorted(records, key=lambda record: record.id):
            parent = tree._nodes.get(record.parent_id) if record.parent_id is not None else None
            if record.parent_id is None or parent is not None:
                tree._attach(Node(record.id, parent, record.role, record.text, record.created_at, record.run))
        tree.visited = {leaf: at for leaf, at in (visited or {}).items() if leaf in tree._nodes}
        leaf = tree._nodes.get(active_leaf_id) if active_leaf_id is not None else None
        if leaf is None and tree._nodes:
            leaf = tree._nodes[max(tree._nodes)]
        tree._show(leaf)
        return tree

    def __contains__(self, message_id: int) -> bool:
        return message_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, message_id: int) -> Node:
        return self._nodes[message_id]

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        return iter(self._nodes.values())

    @property
    def path(self) -> Sequence[Node]:
        """The visible messages, root first."""
        return self._path

    @property
    def active_leaf(self) -> Node | None:
        return self._path[-1] if self._path else None

    def is_visible(self, node: Node) -> bool:
        # Paths are long and the question is asked for every delta: look from the end, where answers grow.
        return any(node is other for other in reversed(self._path))

    def siblings(self, node: Node) -> list[Node]:
        return self.roots if node.parent is None else node.parent.children

    def add(self, node: Node) -> bool:
        """Adds a node under its parent and shows the path to it. Returns whether the path merely grew by it."""
        grew = node.parent is self.active_leaf
        self._attach(node)
        if grew:
            self._path.append(node)
        else:
            self._show(node)
        return grew

    def show(self, message_id: int) -> bool:
        """Shows the branch through a message, and below it what was visible last. Returns whether the path changed."""
        leaf = self._last_visited_leaf(self._nodes[message_id])
        if leaf is self.active_leaf:
            return False
        self._show(leaf)
        return True

    def switch_sibling(self, message_id: int, delta: int) -> bool:
        """Shows the sibling `delta` places on; returns whether there is one."""
        node = self._nodes[message_id]
        siblings = self.siblings(node)
        index = siblings.index(node) + delta
        return 0 <= index < len(siblings) and self.show(siblings[index].id)

    def remove(self, message_id: int) -> list[Node]:
        """Takes out a message and all below it. Returns the nodes, the message first, for `put_back`.

        If the visible path went through it, the next visible leaf is a sibling's or else the parent.
        """
        node = self._nodes[message_id]
        was_visible = self.is_visible(node)
        siblings = self.siblings(node)
        index = siblings.index(node)
        siblings.pop(index)
        removed = list(_subtree(node))
        for gone in removed:
            del self._nodes[gone.id]
        if was_visible:
            neighbour = siblings[min(index, len(siblings) - 1)] if siblings else None
            self._show(self._last_visited_leaf(neighbour) if neighbour is not None else node.parent)
        return removed

    def put_back(self, removed: list[Node]) -> bool:
        """Undoes `remove` and shows the message again; returns False if its parent is gone too."""
        top = removed[0]
        if top.parent is not None and top.parent.id not in self._nodes:
            return False
        siblings = self.siblings(top)
        siblings.append(top)
        siblings.sort(key=lambda node: node.id)
        for node in removed:
            self._nodes[node.id] = node
        self._show(self._last_visited_leaf(top))
        return True

    def view(self, node: Node) -> MessageView:
        siblings = self.siblings(node)
        index = siblings.index(node) if len(siblings) > 1 else 0
        return MessageView(
            node.id, node.role, node.text, node.run, index, len(siblings), node.is_streaming, node.created_at
        )

    def _attach(self, node: Node) -> None:
        assert node.id not in self._nodes
        self._nodes[node.id] = node
        self.siblings(node).append(node)

    def _show(self, leaf: Node | None) -> None:
        path = []
        node = leaf
        while node is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        self._path = path

    def _last_visited_leaf(self, node: Node) -> Node:
        leaves = [below for below in _subtree(node) if not below.children]
        return max(leaves, key=lambda leaf: (self.visited.get(leaf.id, 0.0), leaf.id))


class VisibleMessages(Sequence[MessageView]):
    """The visible path as `MessageView`s, made only for the places that are asked for."""

    def __init__(self, tree: ConversationTree) -> None:
        self._tree = tree

    def __len__(self) -> int:
        return len(self._tree.path)

    @overload
    def __getitem__(self, index: int) -> MessageView: ...
    @overload
    def __getitem__(self, index: slice) -> list[MessageView]: ...
    def __getitem__(self, index: int | slice) -> MessageView | list[MessageView]:
        if isinstance(index, slice):
            return [self._tree.view(node) for node in self._tree.path[index]]
        return self._tree.view(self._tree.path[index])


def _subtree(top: Node) -> Iterator[Node]:
    """`top` and all below it, parents first; not recursive, as a chat is a chain of any length."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))
