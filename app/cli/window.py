"""`kvasir` without a command: the window; where none can open, a chat in the terminal."""

from __future__ import annotations

import argparse
import sys

from app.cli.display import why_no_window


def run(arguments: argparse.Namespace) -> int:
    reason = why_no_window()
    if reason is not None:
        from app.cli.arguments import build_parser

        print(f"kvasir: no window: {reason}. Chatting in the terminal instead.", file=sys.stderr, flush=True)
        chat = build_parser().parse_args(["chat"])
        return chat.run(chat)
    from app import application

    return application.run()
