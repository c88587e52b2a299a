"""Kvasir, llama.cpp and Hugging Face on the same file, in turn, in one run: `python -m tests.benchmarks.peers`.

Every measurement is a process of its own. Only the ratios of one run mean anything: the machine's
speed drifts, and all engines drift with it. llama-cpp-python comes with `pip install -e .[bench]`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from engine import catalog
from tests.benchmarks.measurement import Workload

PEERS = ("kvasir", "llama_cpp", "transformers")
TITLES = {"kvasir": "Kvasir", "llama_cpp": "llama.cpp", "transformers": "Hugging Face"}
LOAD, LOADS_A_ROUND = "load_to_first_token_s", 3
ROWS = {
    "prefill_tok_s": ("prefill 512", "tok/s", 1.0),
    "decode_1_tok_s": ("decode, one chat", "tok/s", 1.0),
    "decode_4_tok_s": ("decode, four chats", "tok/s", 1.0),
    "decode_8_tok_s": ("decode, eight chats", "tok/s", 1.0),
    LOAD: ("load to first token", "s", 1.0),
    "verify_steps": ("verifying 4 drafts", "steps", 1.0),
    "busy_ttft_s": ("TTFT of 512 tokens beside 7 decodes", "s", 1.0),
    "peak_memory": ("peak memory", "MiB", 2.0**20),
    "import_memory": ("of it after imports", "MiB", 2.0**20),
}
TEXT = Path(__file__).parents[2] / "LICENSE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=catalog.starter_model())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("PEER", "TASK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _run_one(args.one[0], args.one[1], args.model, args.threads)
        return
    rounds, loads = {peer: [] for peer in args.peers}, {peer: [] for peer in args.peers}
    # What the one before it leaves of memory and caches decides how fast a process begins: each order has its turn.
    orders = list(itertools.permutations(args.peers))
    for number in range(args.rounds):
        order = orders[number % len(orders)]
        for peer in order:
            print(f"round {number + 1} of {args.rounds}: {TITLES[peer]}", file=sys.stderr)
            rounds[peer].append(json.loads(_spawn(peer, "measure", args)))
            loads[peer].append(rounds[peer][-1][LOAD])
        # A load is short, and what the host does meanwhile moves it most: it takes more than one a round.
        for peer in LOADS_A_ROUND * order:
            loads[peer].append(json.loads(_spawn(peer, "load", args))[LOAD])
    medians = {
        peer: {key: statistics.median(figures[key] for figures in all_figures) for key in all_figures[0]}
        | {LOAD: statistics.median(loads[peer])}
        for peer, all_figures in rounds.items()
    }
    accuracy = _accuracy(args)
    _print_table(medians, accuracy)
    if args.json:
        report = {"machine": platform.processor() or platform.machine(), "threads": args.threads}
        args.json.write_text(
            json.dumps(report | {"rounds": rounds, "loads": loads, "medians": medians, "accuracy": accuracy}, indent=2)
        )


def _run_one(peer: str, task: str, model: Path, threads: int) -> None:
    module = importlib.import_module(f"tests.benchmarks.peer_{peer}")
    token_ids = _token_ids(model)
    if task in ("measure", "load"):
        print(json.dumps(module.measure(model, threads, Workload.from_text(token_ids, only_load=task == "load"))))
    else:
        np.save(task, module.logits(model, threads, token_ids[:512]))


def _token_ids(model: Path) -> list[int]:
    from engine.text.load import load_tokenizer

    return load_tokenizer(model).encode(TEXT.read_text())


def _spawn(peer: str, task: str, args: argparse.Namespace) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.peers", "--one", peer, task]
    command += ["--model", str(args.model), "--threads", str(args.threads)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().split("\n")[-1]


def _accuracy(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Mean KL divergence (nats) and share of equal top tokens, against Hugging Face in float32."""
    with tempfile.TemporaryDirectory() as folder:
        logits = {}
        for peer in dict.fromkeys(["transformers", *args.peers]):
            path = Path(folder) / f"{peer}.npy"
            _spawn(peer, str(path), args)
            logits[peer] = np.load(path)
        exact = _log_softmax(logits.pop("transformers"))
        return {peer: _compare(exact, _log_softmax(values)) for peer, values in logits.items()}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _compare(exact: np.ndarray, other: np.ndarray) -> dict[str, float]:
    return {
        "mean_kl": float((np.exp(exact) * (exact - other)).sum(-1).mean()),
        "top1_agreement": float((exact.argmax(-1) == other.argmax(-1)).mean()),
    }


def _print_table(medians: dict[str, dict[str, float]], accuracy: dict[str, dict[str, float]]) -> None:
    peers = list(medians)
    print(f"{'median':38}" + "".join(f"{TITLES[peer]:>16}" for peer in peers) + f"{'Kvasir / llama.cpp':>20}")
    for key, (title, unit, divisor) in ROWS.items():
        cells = [f"{medians[p][key] / divisor:.4g} {unit}" if key in medians[p] else "-" for p in peers]
        both = all(key in medians.get(peer, {}) for peer in ("kvasir", "llama_cpp"))
        ratio = f"{medians['kvasir'][key] / medians['llama_cpp'][key]:.2f}" if both else ""
        print(f"{title:38}" + "".join(f"{cell:>16}" for cell in cells) + f"{ratio:>20}")
    for peer, figures in accuracy.items():
        print(f"{TITLES[peer]}: mean KL to float32 {figures['mean_kl']:.5f}, top-1 {figures['top1_agreement']:.4f}")


if __name__ == "__main__":
    main()
