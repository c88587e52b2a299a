"""Where the time of a step goes: `python -m engine.profile --concurrency N --input-tokens N CONFIG_JSON [--json]`.

The engine is loaded in this process and stepped as the worker steps it, its client a file that takes everything. Every
figure is measured twice: plainly, and with the parts timed; both totals are told.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import TYPE_CHECKING

import msgspec

from engine.failures import explain_load_failure
from engine.openmp import limit_spinning
from engine.protocol import EngineConfig

if TYPE_CHECKING:  # what brings torch along is imported once `limit_spinning` was called
    from engine.profiler import Breakdown, Profile


def profile(config: EngineConfig, concurrency: int, input_tokens: int) -> Profile:
    """Loads the model and measures. Raises as `Engine.load`, and `ValueError` for what does not fit."""
    from engine.engine import Engine
    from engine.machine import num_compute_threads
    from engine.profiler import Profile, Profiler
    from kernels import ops

    ops.set_num_threads(num_compute_threads())
    engine = Engine.load(msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, concurrency)))
    gc.collect()
    gc.freeze()  # as the worker does
    profiler = Profiler(engine)
    try:
        prefill = profiler.prefill(input_tokens)
        decode = profiler.decode(concurrency, input_tokens)
        return Profile(model=engine.info, input_tokens=input_tokens, prefill=prefill, decode=decode)
    finally:
        profiler.close()
        engine.close()


def describe(result: Profile) -> str:
    """The profile as a table for people."""
    model, decode = result.model, result.decode
    sequences = "one sequence" if decode.sequences == 1 else f"{decode.sequences} sequences"
    return "\n".join(
        [
            f"{model.name} ({model.format}, {model.kernels}, KV {model.kv_dtype}) on {model.device}",
            "",
            f"Prefill of {result.input_tokens} tokens",
            *_lines(result.prefill),
            "",
            f"A decode step of {sequences} after {result.input_tokens} tokens",
            *_lines(decode),
        ]
    )


def _lines(breakdown: Breakdown) -> list[str]:
    added = breakdown.profiled_ms / breakdown.plain_ms - 1
    lines = [
        f"  {breakdown.plain_ms:.3f} ms, {breakdown.tokens / breakdown.plain_ms * 1e3:.1f} tokens/s; "
        f"{breakdown.profiled_ms:.3f} ms with its parts timed ({added:+.1%})"
    ]
    for part in breakdown.parts:
        lines.append(f"  {part.name:<32}{part.ms:>11.3f} ms{part.share:>8.1%}")
        for kind, ms in sorted(part.kinds.items(), key=lambda item: -item[1]):
            lines.append(f"    {kind:<30}{ms:>11.3f} ms{ms / breakdown.profiled_ms:>8.1%}")
    if breakdown.outside_native is None:
        lines.append("  This model does not run as one list of native kernels: its forward pass is timed as a whole.")
    else:
        lines.append(f"  {'outside native kernels':<46}{breakdown.outside_native:>8.1%}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profile", description="Where the time of a step goes.")
    parser.add_argument("config", metavar="CONFIG_JSON", help="an EngineConfig as JSON")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="sequences in a decode step")
    parser.add_argument("--input-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    if options.concurrency < 1 or options.input_tokens < 1:
        parser.error("--concurrency and --input-tokens must be at least 1")
    try:
        config = msgspec.json.decode(options.config, type=EngineConfig)
    except msgspec.DecodeError as error:
        parser.error(f"CONFIG_JSON is no EngineConfig: {error}")
    limit_spinning()  # before torch is imported
    try:
        result = profile(config, options.concurrency, options.input_tokens)
    except (ValueError, LookupError, OSError, MemoryError) as error:
        sys.stderr.write(f"kvasir: {' '.join(explain_load_failure(error).split())}\n")
        return 1
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() if options.json else describe(result)
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
