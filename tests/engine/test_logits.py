"""The starter model, teacher-forced through the paged path, against Hugging Face in float32."""

from __future__ import annotations

import pytest
import torch

from tests.engine.hugging_face import hugging_face_llama
from tests.engine.tiny_llama import Harness, load, oracle_logits, random_tokens


@pytest.mark.timeout(400)
def test_logits_are_within_a_thousandth_of_hugging_faces_on_512_tokens(starter_model):
    token_ids = random_tokens(512, vocab_size=49152, seed=3)
    expected = oracle_logits(hugging_face_llama(starter_model), token_ids)
    loaded = load(starter_model)
    for block_size, chunk in ((16, None), (7, 100)):
        logits = Harness(loaded, block_size, num_blocks=600 // block_size).logits(token_ids, chunk)
        assert (logits - expected).abs().max().item() < 1e-3
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
