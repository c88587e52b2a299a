"""What each precision costs in quality, on one text: `python -m tests.benchmarks.quality`.

Rows are compared with the same model unpacked to float32: perplexity, the mean Kullback-Leibler divergence
of the next token's distribution from float32's in nats, and how often the likeliest token is the same.
The starter model's file is itself in 4-bit groups of 32 (Q4_1): int4-g32 finds its numbers again, so that row says
nothing of full precision files, and the coarser groups round what was rounded already. With `--kernels cpu` the
rows also bear what the native kernels round in activations, and "KV int8" keeps the file's own weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine import catalog
from engine.llm import LLM
from kernels import ops

TEXT = Path(__file__).parent / "quality_text.txt"
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"quantization": "int8"},
    "int4-g128": {"quantization": "int4", "quantization_group_size": 128},
    "int4-g64": {"quantization": "int4", "quantization_group_size": 64},
    "int4-g32": {"quantization": "int4", "quantization_group_size": 32},
    "KV int8": {"kv_dtype": "int8"},
}


@dataclass(frozen=True)
class Quality:
    name: str
    weight_bytes: int
    perplexity: float
    divergence: float
    agreement: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=catalog.starter_model())
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens that are predicted from each other")
    parser.add_argument("--tokens", type=int, help="use this many of the text")
    parser.add_argument("--kernels", default="reference", choices=ops.BACKENDS, help="what computes the rows")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="rows to compute beside fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    expected: list[torch.Tensor] = []
    rows = []
    for name, options in VARIANTS.items():
        if args.only and name != "fp32" and name not in args.only:
            continue
        os.environ[ops.BACKEND_VARIABLE] = "reference" if name == "fp32" else args.kernels
        row = measure(name, args, options, expected)
        _print_row(row, rows[0] if rows else row)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(name: str, args: argparse.Namespace, options: dict[str, Any], expected: list[torch.Tensor]) -> Quality:
    """Teacher-forced over the text's windows. The first call fills `expected` with its log-probabilities."""
    is_first = not expected
    surprise, divergence, same, count = 0.0, 0.0, 0, 0
    with LLM(args.model, device="cpu", dtype="fp32", max_num_seqs=1, **options) as llm:
        for index, window in enumerate(_windows(llm, args)):
            found = llm.logits(window)[:-1].log_softmax(-1)
            if is_first:
                expected.append(found)
            reference = expected[index]
            surprise -= found.gather(1, torch.tensor(window[1:]).unsqueeze(1)).double().sum().item()
            divergence += (reference.exp() * (reference - found)).double().sum().item()
            same += int((reference.argmax(-1) == found.argmax(-1)).sum())
            count += found.shape[0]
        return Quality(name, llm.info.weight_bytes, math.exp(surprise / count), divergence / count, same / count)


def _windows(llm: LLM, args: argparse.Namespace) -> Iterator[list[int]]:
    token_ids = llm.engine.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    for first in range(0, len(token_ids) - 1, args.window):
        window = token_ids[first : first + args.window]
        if len(window) > 1:
            yield window


def _print_row(row: Quality, fp32: Quality) -> None:
    if row is fp32:
        print(f"{'':10} {'weights':>11} {'perplexity':>11} {'to fp32':>9} {'KL':>9} {'same top token':>15}")
    change = row.perplexity / fp32.perplexity - 1
    print(
        f"{row.name:10} {row.weight_bytes / 2**20:7.1f} MiB {row.perplexity:11.3f} {change:+9.2%} "
        f"{row.divergence:9.5f} {row.agreement:15.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
