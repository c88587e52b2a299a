"""From parsed arguments to what the engine understands."""

from __future__ import annotations

import argparse
from typing import Any

from app.cli.failure import UsageError
from engine.protocol import PARAMETER_RANGES, EngineConfig, SamplingParams


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises `UsageError` where parameters, each allowed alone, contradict each other."""
    names = (*PARAMETER_RANGES, "ignore_eos", "temperature_last", "overflow")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        return SamplingParams(
            **given,
            stop=tuple(check_text(text, "--stop") for text in arguments.stop or ()),
            stop_token_ids=tuple(arguments.stop_token_ids or ()),
            logit_bias=dict(arguments.logit_bias or ()),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def engine_config(arguments: argparse.Namespace, model: str, draft_model: str | None = None) -> EngineConfig:
    """For one request at a time: the KV cache is as large as one context needs. Raises `UsageError`."""
    speculation = arguments.speculation or ("draft" if draft_model is not None else None)
    if speculation == "draft" and draft_model is None:
        raise UsageError("--speculation draft needs --draft-model")
    if speculation == "ngram" and draft_model is not None:
        raise UsageError("--speculation ngram and --draft-model exclude each other")
    return EngineConfig(
        model=check_text(model, "the model's path"),
        device=check_text(arguments.device, "--device"),
        dtype=arguments.dtype,
        backend=arguments.backend,
        speculation=speculation,
        draft_model=draft_model,
        num_draft_tokens=arguments.num_draft_tokens,
        cuda_graphs=not arguments.no_cuda_graphs,
        **memory_options(arguments),
    )


def memory_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What decides how much memory a model takes for one request at a time, as `EngineConfig` names it."""
    return {
        "kv_dtype": arguments.kv_dtype,
        "quantization": arguments.quantization,
        "quantization_group_size": arguments.group_size,
        "max_context": arguments.max_context,
        "gpu_memory_share": arguments.gpu_memory_share,
        "max_num_seqs": 1,
    }


def check_text(text: str, what: str) -> str:
    """Raises `UsageError` for text that is no Unicode, as a terminal of another encoding may deliver it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8 text") from None
    return text
