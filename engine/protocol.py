"""What travels down the pipe between the window and the engine worker.

Every struct is encoded with msgspec as MessagePack and tagged with its type, so a
reader that meets an unknown field or a value of the wrong type gets a
`msgspec.ValidationError` instead of a half-understood message. Times are seconds
unless a name ends in `_ms`; sizes are bytes; `timestamp` fields are `time.time()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.parameters import PARAMETER_RANGES as PARAMETER_RANGES
from engine.parameters import OverflowPolicy as OverflowPolicy
from engine.parameters import ParameterRange as ParameterRange
from engine.parameters import SamplingParams, Struct

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "cancelled", "error"]
Role = Literal["system", "user", "assistant"]


class ChatMessage(Struct, frozen=True):
    """One turn of a conversation as a chat template sees it."""

    role: Role
    content: str


class EngineConfig(Struct, frozen=True):
    """What to load and how: the keyword arguments of `engine.llm.LLM`, field for field."""

    model: str
    device: str = "auto"
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    backend: Literal["auto", "native", "transformers"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_dtype: Literal["auto", "fp32", "fp16", "bf16", "int8"] = "auto"
    max_context: int | None = None
    max_num_seqs: int = 8
    max_batched_tokens: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    prefix_caching: bool = True
    speculation: Literal["ngram", "draft"] | None = None
    draft_model: str | None = None
    num_draft_tokens: int = 4
    quantization_group_size: Literal[32, 64, 128] = 32
    """Weights that share a scale and a zero point where `quantization` is "int4"."""
    gpu_memory_share: float = 0.9
    """The part of a GPU's memory that may be in use once the model is loaded, by all programs together: the KV cache
    is cut to it. `num_kv_blocks` overrides it."""
    cuda_graphs: bool = True
    """Whether steps of usual sizes are captured while loading, on a GPU: each is then one call instead of hundreds."""

    @property
    def most_drafts(self) -> int:
        """Tokens drafted for a sequence in a step at most."""
        return self.num_draft_tokens if self.speculation is not None else 0


# ---------------------------------------------------------------- commands


class Command(Struct, tag_field="type", tag=True, frozen=True):
    """Sent by the client to the worker."""


class LoadModel(Command, frozen=True):
    """Loads a model; the one loaded before is unloaded first and its requests cancelled."""

    config: EngineConfig


class UnloadModel(Command, frozen=True):
    pass


class Generate(Command, frozen=True):
    """Starts one generation. Exactly one of `messages`, `prompt` and `token_ids` is given.

    `owner` names whose request it is (a chat tab); the block map is coloured by it.
    """

    request_id: str
    owner: str
    params: SamplingParams
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None


class Cancel(Command, frozen=True):
    request_id: str


class CountTokens(Command, frozen=True):
    """Asks how many tokens a conversation takes after the chat template; answered by `TokenCount`."""

    query_id: str
    messages: list[ChatMessage]


class Shutdown(Command, frozen=True):
    pass


AnyCommand = LoadModel | UnloadModel | Generate | Cancel | CountTokens | Shutdown


# ---------------------------------------------------------------- events


class Event(Struct, tag_field="type", tag=True, frozen=True):
    """Sent by the worker to the client, or made by the client itself where a docstring says so."""


class WorkerStarted(Event, frozen=True):
    """First event of a worker: what it runs on. `kernels` is reference, cpu or triton."""

    pid: int
    protocol_version: int
    kernels: str
    device: str
    device_name: str
    versions: dict[str, str]
    warnings: list[str] = []


class LoadProgress(Event, frozen=True):
    """`stage` is a short phrase for people; `done_bytes` of `total_bytes` weights are ready."""

    stage: str
    done_bytes: int
    total_bytes: int


class ModelInfo(Struct, frozen=True):
    """What is loaded, as the window shows it. `kv_bytes_per_token` covers all layers, K and V;
    `kernels` names what computes it, such as "native avx2"."""

    name: str
    path: str
    architecture: str
    format: str
    num_parameters: int
    num_layers: int
    vocab_size: int
    max_context: int
    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    load_seconds: float
    supports_system_role: bool = True
    backend: Literal["native", "transformers"] = "native"
    """Whose decoder computes: our own, or the model's code in transformers."""
    quantization: Literal["int8", "int4"] | None = None
    """What the weights were quantised to while loading."""
    speculation: Literal["ngram", "draft"] | None = None
    draft_model: str | None = None
    warnings: list[str] = []
    """What people should know of where it runs, such as why a GPU is not used."""


class ModelLoaded(Event, frozen=True):
    info: ModelInfo


class ModelUnloaded(Event, frozen=True):
    pass


class LoadFailed(Event, frozen=True):
    """`message` says what is wrong and what to do, in words for people."""

    model: str
    message: str


class Accepted(Event, frozen=True):
    """The request got into the engine. `dropped_messages` counts turns left out by the overflow policy."""

    request_id: str
    prompt_tokens: int
    seed: int
    max_tokens: int
    dropped_messages: int = 0


class TokenLogprob(Struct, frozen=True):
    """The chosen token, its text, its log-probability (natural log, of the raw model distribution
    before penalties, temperature and filters) and the likeliest alternatives, best first."""

    token_id: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = []


class Delta(Event, frozen=True):
    """New text of one request. Deltas of a request arrive in order; neighbours may be merged.

    `text` may be empty while bytes or a possible stop string are held back.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Joins neighbouring deltas of one request, at least one, in their order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        request_id=deltas[0].request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
    )


class RequestMetrics(Struct, frozen=True):
    """One request's own figures. `ttft_ms` counts from arrival in the worker; `tpot_ms` is the mean
    time per output token after the first, None for fewer than two tokens."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Finished(Event, frozen=True):
    """Last event of a request, always sent exactly once per `Generate`.

    `stop_reason` is the stop string or token id that ended it, None for an end-of-text token.
    `error` is set when `finish_reason` is "error"; `metrics` is None if it never reached the engine.
    """

    request_id: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


class TokenCount(Event, frozen=True):
    """Answer to `CountTokens`; `count` is None and `error` set when no count could be made."""

    query_id: str
    count: int | None
    error: str | None = None


class WorkerDied(Event, frozen=True):
    """Made by the client when the worker process is gone without having been asked to.

    `reason` is one sentence for people; `detail` holds the end of its stderr and faulthandler
    output; `lost_requests` are those that were under way (each also gets a `Finished` with error).
    """

    reason: str
    detail: str
    exit_code: int | None
    out_of_memory: bool = False
    lost_requests: list[str] = []


# ---------------------------------------------------------------- telemetry


class MemoryBreakdown(Struct, frozen=True):
    """Where the memory of one device is. The parts add up to `total`.

    `kind` is "VRAM" on a GPU and "RAM" on a CPU. `workspace` is activations, scratch and captured graphs,
    `runtime` is interpreter, libraries and driver context of the worker, `other` what
    other processes (and the window) hold.
    """

    kind: Literal["RAM", "VRAM"]
    total: int
    weights: int
    kv_cache: int
    workspace: int
    runtime: int
    other: int
    free: int


# A block's state is one byte, used as it is as a palette index: kind in the two high bits,
# owner slot in the six low ones. Slots are handed out by the worker, see Telemetry.owners.
BLOCK_FREE = 0  # never written, or its content is no longer findable
BLOCK_ACTIVE = 1  # held by one owner's running request
BLOCK_SHARED = 2  # held by more than one running request (shared prefix)
BLOCK_CACHED = 3  # held by none; its prefix can still be hit until it is evicted
NUM_OWNER_SLOTS = 64


def pack_block_state(kind: int, owner_slot: int) -> int:
    return kind << 6 | owner_slot


def unpack_block_state(state: int) -> tuple[int, int]:
    """Returns (kind, owner slot)."""
    return state >> 6, state & 63


class BlockMapUpdate(Struct, frozen=True):
    """Blocks whose state changed since the last telemetry. `full` resets the map first.

    `block_ids` are little-endian uint32, `states` one byte for each.
    """

    num_blocks: int
    full: bool
    block_ids: bytes
    states: bytes


class StepEntry(Struct, array_like=True, frozen=True):
    """One request's share of a step, in tokens. Several `decode_tokens` are those of as many steps in a row."""

    request_id: str
    owner_slot: int
    prefill_tokens: int
    decode_tokens: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


class StepRecord(Struct, array_like=True, frozen=True):
    """One engine step, or several in a row. `start` and `end` are seconds on the worker's monotonic clock."""

    index: int
    start: float
    end: float
    entries: list[StepEntry]
    preempted: int = 0


class Distribution(Struct, frozen=True):
    """A rolling window of one latency in milliseconds; percentiles are None while it is empty."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    last: float | None = None
    bucket_bounds_ms: list[float] = []
    bucket_counts: list[int] = []


class Telemetry(Event, frozen=True):
    """Sent 10 to 20 times a second while a model is loaded; the latest replaces older ones.

    `steps` holds the step records since the last telemetry (bounded; oldest dropped).
    Rates are per second over the last second. `owners` maps owner slot to owner name.
    """

    timestamp: float
    memory: MemoryBreakdown
    blocks: BlockMapUpdate
    owners: dict[int, str]
    running: int
    waiting: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft: Distribution
    tpot: Distribution
    queue: Distribution
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    steps: list[StepRecord] = []
    request_rates: dict[str, float] = {}
    """Decode tokens per second of each running request."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = []
    """How often a draft was verified as the first, second ... after its request's latest token; since loading."""
    accepted_by_position: list[int] = []
    speculation_note: str = ""
    """For people: what speculation does now, such as that it paused because it lost time."""


AnyEvent = (
    WorkerStarted
    | LoadProgress
    | ModelLoaded
    | ModelUnloaded
    | LoadFailed
    | Accepted
    | Delta
    | Finished
    | TokenCount
    | WorkerDied
    | Telemetry
)

_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_event_decoder = msgspec.msgpack.Decoder(AnyEvent)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> AnyCommand:
    """Raises `msgspec.ValidationError` on anything that is not a valid command."""
    return _command_decoder.decode(data)


def decode_event(data: bytes) -> AnyEvent:
    """Raises `msgspec.ValidationError` on anything that is not a valid event."""
    return _event_decoder.decode(data)
