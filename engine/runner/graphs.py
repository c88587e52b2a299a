"""Steps of fixed sizes over tensors that stay where they are: what a CUDA graph can record and replay.

A GPU computes a small model's step faster than the host can ask for its kernels one by one. A recorded step is
asked for at once (https://docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA graphs), but its kernels, their
grids and the addresses they read are those of the recording. So a step is padded to one of a few sizes, with
sequences that read and write a block of their own, and kernels go by upper bounds of the lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from engine.graph_sizes import decode_sizes, length_bounds, verification_sizes
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.runner.rows import StepArrays, StepRows, StepShape
from engine.runner.staging import Staging, StepTensors, packed_words
from engine.scheduler import StepPlan

_NO_ROWS = StepRows(StepPlan([], []), all_logits=False, budget=0)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a computation over static tensors and returns what does the same over whatever they hold by then."""


def step_shapes(max_num_seqs: int, num_draft_tokens: int, longest: int) -> list[StepShape]:
    """The sizes to record, the cheapest first: next tokens alone, and with up to so many drafts for each sequence.

    `longest` is the most tokens of a sequence.
    """
    decodes = decode_sizes(max_num_seqs)
    verifications = verification_sizes(max_num_seqs, num_draft_tokens)
    shapes: list[StepShape] = []
    for bound in length_bounds(longest):
        shapes += [StepShape(size, size, 1, bound) for size in decodes]
        for size in verifications:
            # Room for every sequence, and for the padding where only few of the tokens are used.
            num_seqs = min(size, max_num_seqs) + -(-size // (1 + num_draft_tokens))
            shapes.append(StepShape(size, num_seqs, 1 + num_draft_tokens, bound))
    return sorted(shapes, key=lambda shape: (shape.max_query_len > 1, shape.num_tokens, shape.max_seq_len))


class StaticSteps:
    """Runs steps padded to one of `shapes` over one set of static tensors.

    Until `record` was called, layers are called one by one. The cache's last block takes the padding.
    Logits are those of the latest step; the next writes over them.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache, staging: Staging, shapes: list[StepShape]) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._staging = staging
        self._shapes = shapes
        self._replays: dict[StepShape, Callable[[], None]] = {}
        device = kv_cache.layers[0].data.device
        # Rows that are wanted or come from the step before may be as many as there are tokens.
        num_words = max(packed_words(self._arrays(_NO_ROWS, shape)) + 3 * (shape.num_tokens + 8) for shape in shapes)
        num_rows = max(shape.num_tokens for shape in shapes)
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._logits = torch.empty(num_rows, model.config.vocab_size, device=device)

    def shape_of(self, rows: StepRows) -> StepShape | None:
        """The cheapest size that holds the step; None where none does, as with a prompt in it."""
        step = rows.shape
        return next((shape for shape in self._shapes if shape.holds(step)), None)

    @torch.inference_mode()
    def prepare(
        self, shape: StepShape, rows: StepRows, token_ids: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """Puts a step into the static tensors; `token_ids` as in `Runner.execute`.

        What it returns computes the step: logits of the rows wanted, float32 [num_rows, vocab_size].
        """
        arrays = self._arrays(rows, shape)
        step = self._staging.upload(arrays, self._words)
        step.take_tokens(token_ids)
        replay = self._replays.get(shape) or functools.partial(self._compute, shape, arrays, step)

        def compute() -> torch.Tensor:
            replay()
            if len(rows.wanted_rows) == rows.num_tokens:
                return self._logits[: rows.num_tokens]
            return self._logits.index_select(0, step.wanted_rows)

        return compute

    @torch.inference_mode()
    def record(self, capture: Capture, on_graph: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Captures every size, the largest first, so that the others find room in its memory.

        Nothing but padding is computed meanwhile. Calls `on_graph(done, total)` before each.
        """
        order = sorted(self._shapes, key=lambda shape: (shape.num_tokens, shape.max_seq_len), reverse=True)
        for done, shape in enumerate(order):
            on_graph(done, len(order))
            arrays = self._arrays(_NO_ROWS, shape)
            step = self._staging.upload(arrays, self._words)
            self._replays[shape] = capture(functools.partial(self._compute, shape, arrays, step))

    def _arrays(self, rows: StepRows, shape: StepShape) -> StepArrays:
        cache = self._kv_cache
        return StepArrays.of(rows, self._model.config, cache.block_size, shape, dummy_block=cache.num_blocks - 1)

    def _compute(self, shape: StepShape, arrays: StepArrays, step: StepTensors) -> None:
        bounds = shape.max_query_len, shape.max_seq_len
        context = step.context(arrays, self._kv_cache.block_size, self._kv_cache.layers, bounds)
        self._model.logits(step.input_ids, step.positions, context, out=self._logits[: shape.num_tokens])


class CudaCapture:
    """Makes CUDA graphs that share one pool of memory: only one of them may run at a time.

    They share the workspace that cuBLAS has for their stream, too, and torch may drop it with the first graph that
    goes (https://github.com/pytorch/pytorch/issues/193402): all go together, and each capture has its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info(device)[0]

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Kernels are compiled and libraries take their memory in a run that is not captured.
        with torch.cuda.stream(self._stream):
            compute()
        graph = torch.cuda.CUDAGraph()
        # Another thread may ask how much memory is free while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        current.wait_stream(self._stream)
        return graph.replay

    def taken_bytes(self) -> int:
        """Memory of the device that was taken since the beginning: graphs, their pool, and kernels loaded for them."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return max(0, self._free - torch.cuda.mem_get_info(self._device)[0])
