"""The tree of a conversation: branches are never lost, and the visible path always is one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.state.conversation_tree import ConversationTree, Node, VisibleMessages
from app.state.prompt import build_messages, clean_text, title_from_question
from engine.protocol import ChatMessage


def node(id_: int, parent: Node | None, text: str = "") -> Node:
    role = "user" if parent is None or parent.role == "assistant" else "assistant"
    return Node(id_, parent, role, text, float(id_))


def chain(tree: ConversationTree, *ids: int) -> None:
    for id_ in ids:
        tree.add(node(id_, tree.active_leaf))


def path(tree: ConversationTree) -> list[int]:
    return [node.id for node in tree.path]


def test_an_edited_question_is_a_sibling_and_the_old_branch_is_reached_through_it() -> None:
    tree = ConversationTree()
    chain(tree, 1, 2, 3, 4)
    edited = node(5, tree.node(2))
    tree.add(edited)
    tree.add(node(6, edited))
    assert path(tree) == [1, 2, 5, 6]
    view = tree.view(edited)
    assert (view.sibling_index, view.sibling_count) == (1, 2)
    assert tree.switch_sibling(5, -1)
    assert path(tree) == [1, 2, 3, 4]
    assert not tree.switch_sibling(3, -1), "there is none further left"
    assert path(tree) == [1, 2, 3, 4]


def test_switching_to_a_sibling_shows_what_was_visible_below_it_last() -> None:
    tree = ConversationTree()
    chain(tree, 1, 2)
    for answer in (3, 4):
        tree.add(node(answer, tree.node(1)))
    tree.visited = {2: 10.0, 3: 30.0, 4: 20.0}
    tree.add(node(5, None))
    assert tree.switch_sibling(5, -1)
    assert path(tree) == [1, 3]


def test_deleting_a_visible_branch_shows_its_neighbour_or_else_the_parent() -> None:
    tree = ConversationTree()
    chain(tree, 1, 2, 3, 4)
    tree.add(node(5, tree.node(1)))
    removed = tree.remove(5)
    assert path(tree) == [1, 2, 3, 4]
    assert tree.put_back(removed) and path(tree) == [1, 5]
    tree.show(4)
    below = tree.remove(3)
    assert [gone.id for gone in below] == [3, 4]
    assert path(tree) == [1, 2]
    everything = tree.remove(1)
    assert path(tree) == [] and len(tree) == 0
    assert not tree.put_back(below), "its parent is gone"
    assert tree.put_back(everything) and tree.put_back(below)
    assert path(tree) == [1, 2, 3, 4]


def test_records_whose_parent_is_missing_do_not_break_the_rest() -> None:
    tree = ConversationTree()
    chain(tree, 1, 2)
    records = [*(n.record() for n in tree.nodes()), node(9, node(8, None)).record()]
    again = ConversationTree.from_records(records, active_leaf_id=9)
    assert path(again) == [1, 2]


class TreeMachine(RuleBasedStateMachine):
    """Adds, switches, deletes and restores at random."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = ConversationTree()
        self.next_id = 1
        self.removed: list[list[Node]] = []
        self.alive: set[int] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        parent = None
        if self.alive and data.draw(st.booleans()):
            parent = self.tree.node(data.draw(st.sampled_from(sorted(self.alive))))
        self.tree.add(node(self.next_id, parent))
        self.alive.add(self.next_id)
        self.next_id += 1
        assert self.tree.active_leaf is not None and self.tree.active_leaf.id == self.next_id - 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), delta=st.sampled_from([-1, 1]))
    def switch(self, data: st.DataObject, delta: int) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.alive)))
        siblings = [sibling.id for sibling in self.tree.siblings(self.tree.node(chosen))]
        target = siblings.index(chosen) + delta
        self.tree.switch_sibling(chosen, delta)
        if 0 <= target < len(siblings):
            assert siblings[target] in path(self.tree)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        removed = self.tree.remove(data.draw(st.sampled_from(sorted(self.alive))))
        self.removed.append(removed)
        self.alive -= {gone.id for gone in removed}

    @precondition(lambda self: self.removed)
    @rule()
    def put_back(self) -> None:
        removed = self.removed.pop()
        assert self.tree.put_back(removed), "undoing in reverse order always finds the parent"
        self.alive |= {back.id for back in removed}

    @invariant()
    def the_tree_is_whole(self) -> None:
        assert {n.id for n in self.tree.nodes()} == self.alive
        shown = self.tree.path
        assert bool(shown) == bool(self.alive)
        for parent, child in zip([None, *shown], shown):
            assert child.parent is parent
            assert child in self.tree.siblings(child)
        if shown:
            assert not shown[-1].children
        again = ConversationTree.from_records(
            [n.record() for n in self.tree.nodes()], shown[-1].id if shown else None, self.tree.visited
        )
        assert path(again) == path(self.tree)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_ten_thousand_messages_are_a_chain_of_any_depth() -> None:
    tree = ConversationTree()
    chain(tree, *range(1, 10_001))
    again = ConversationTree.from_records([n.record() for n in tree.nodes()])
    messages = VisibleMessages(again)
    assert len(messages) == 10_000
    assert messages[-1].id == 10_000
    assert [view.id for view in messages[10:12]] == [11, 12]
    assert len(again.remove(2)) == 9_999


def asked(system: str, *turns: str) -> list[ChatMessage]:
    tree = ConversationTree()
    for number, text in enumerate(turns, start=1):
        tree.add(node(number, tree.active_leaf, text))
    return build_messages(system, tree.path)


def message(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)  # type: ignore[arg-type]


def test_the_model_is_asked_the_system_prompt_and_the_visible_turns() -> None:
    assert asked("Be brief.", "Hi", "Hello", "Why?") == [
        message("system", "Be brief."),
        message("user", "Hi"),
        message("assistant", "Hello"),
        message("user", "Why?"),
    ]
    assert asked(" \n ", "Hi") == [message("user", "Hi")]


def test_a_partial_answer_stays_a_turn_and_an_empty_one_joins_the_questions_around_it() -> None:
    assert asked("", "One?", "Half an ans", "Two?")[1] == message("assistant", "Half an ans")
    assert asked("", "One?", "", "Two?", " \n", "Three?") == [message("user", "One?\n\nTwo?\n\nThree?")]
    roles = [m.role for m in asked("s", "One?", "", "Two?", "yes", "Three?", "")]
    assert roles == ["system", "user", "assistant", "user"], "turns alternate for every template"


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("What is the capital of France?", "What is the capital of France?"),
        ("\n\n  # A *heading*  \nmore", "A heading"),
        ("```python\nprint(1)\n```", "python"),
        ("word " * 40, "word word word word word word word word word…"),
        ("法" * 100, "法" * 48 + "…"),
        ("x" * 60, "x" * 48 + "…"),
        ("snake_case stays", "snake_case stays"),
        ("   \n\t", ""),
        ("***", ""),
        ("😀", "😀"),
    ],
)
def test_the_first_question_makes_a_title(question: str, title: str) -> None:
    assert title_from_question(question) == title


def test_text_that_cannot_be_stored_is_made_storable() -> None:
    assert clean_text("a\ud800b\0c 😀\ud83d\ude00") == "a\ufffdb\ufffdc 😀😀"
