"""An answer's own figures, and how it ended, in words."""

from __future__ import annotations

from typing import Literal

from app.state.records import MessageView, RunRecord

Tone = Literal["", "warning", "danger"]


def format_ms(milliseconds: float) -> str:
    """A latency with three significant figures at most: "84 ms", "1.35 s"."""
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def format_rate(per_second: float) -> str:
    return f"{per_second:.0f} tok/s" if per_second >= 99.95 else f"{per_second:.1f} tok/s"


def stop_words(run: RunRecord) -> str:
    """Why the answer ended, as a short phrase; empty where a note says it or it has not ended."""
    if run.status != "finished":
        return ""
    if run.finish_reason == "length":
        return "reached the token limit"
    if run.finish_reason == "cancelled":
        return "stopped by you"
    if run.finish_reason != "stop":
        return ""
    if run.stop_reason is None:
        return "ended by itself"
    if isinstance(run.stop_reason, int):
        return f"ended by token {run.stop_reason}"
    return f"ended at “{_one_line(run.stop_reason)}”"


def figures(run: RunRecord) -> list[str]:
    """The line under an answer, most telling figure first; only its pace and length so far while it runs."""
    parts = []
    if run.tokens_per_second is not None:
        parts.append(format_rate(run.tokens_per_second))
    if run.ttft_ms is not None:
        parts.append(f"TTFT {format_ms(run.ttft_ms)}")
    if run.output_tokens is not None:
        parts.append(f"{run.output_tokens:,} token{'' if run.output_tokens == 1 else 's'}")
    if run.cached_tokens and not run.is_open:
        parts.append(f"{run.cached_tokens:,} cached")
    if run.drafted_tokens and not run.is_open:
        parts.append(f"draft {100 * run.accepted_tokens / run.drafted_tokens:.0f} % accepted")
    if words := stop_words(run):
        parts.append(words)
    return parts


def figures_in_full(run: RunRecord) -> str:
    """Everything that is known about a run, a line each, for a tooltip."""
    lines = [f"Model: {run.model}"] if run.model else []
    if run.ttft_ms is not None:
        lines.append(f"Time to first token: {format_ms(run.ttft_ms)}")
    if run.queue_ms is not None:
        lines.append(f"Of it waiting in the queue: {format_ms(run.queue_ms)}")
    if run.tpot_ms is not None:
        lines.append(f"Time per output token: {format_ms(run.tpot_ms)}")
    if run.prompt_tokens is not None:
        cached = f", {run.cached_tokens:,} of them from the prefix cache" if run.cached_tokens else ""
        lines.append(f"Prompt: {run.prompt_tokens:,} tokens{cached}")
    if run.output_tokens is not None:
        lines.append(f"Answer: {run.output_tokens:,} tokens")
    if run.drafted_tokens:
        lines.append(f"Draft tokens accepted: {run.accepted_tokens:,} of {run.drafted_tokens:,}")
    if run.preemptions:
        lines.append(f"Preempted: {run.preemptions} times")
    if run.seed is not None:
        lines.append(f"Seed: {run.seed}")
    if words := stop_words(run):
        lines.append(f"End: {words}")
    return "\n".join(lines)


def status_note(message: MessageView) -> tuple[str, Tone]:
    """What has to be said about an answer in a sentence of its own, and how loudly."""
    run = message.run
    if run is None:
        return "", ""
    if run.status == "failed":
        return run.error or "The engine failed without saying why.", "danger"
    if run.status == "interrupted":
        return f"Interrupted: {run.error or 'Kvasir was closed before this answer was complete.'}", "warning"
    if run.is_open and not message.text:
        return "Waiting for the first token…", ""
    if run.dropped_messages:
        many = run.dropped_messages != 1
        left_out = f"{run.dropped_messages} oldest messages were" if many else "The oldest message was"
        return f"{left_out} left out of the prompt, to fit the context.", "warning"
    if run.status == "finished" and not message.text:
        return "Stopped before the first token." if run.finish_reason == "cancelled" else "The answer is empty.", ""
    return "", ""


def _one_line(text: str, limit: int = 24) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= limit else text[: limit - 1] + "…"
