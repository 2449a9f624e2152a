"""Capture by transformers, for machines without vLLM: the same rows, one batch after the other.

Responses come from ``generate`` on a left-padded batch; the states of each conversation then come from a
pass of its own without padding, so that no padding can leak into them. The last token of a response is not
fed, as in vLLM.

Shape legend: B batch, T tokens, K taps, D hidden size.
"""

import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from dflash_kit.shards import NO_NEXT_TOKEN, Row, ShardWriter
from dflash_kit.spool_room import POLL_S
from dflash_kit.target import TapRecorder, load_target

from .capture import Job, Progress
from .prompts import Sample


def engine_version() -> str:
    """Version of transformers."""
    import transformers

    return str(transformers.__version__)


def capture(job: Job, samples: list[Sample], summary: dict[str, Any]) -> Generator[Progress, None, None]:
    """Answer the samples that ask for it and write the rows of all; see ``Capture``.

    Raises:
        KitError: an unreadable target, a broken capture, or a full disk.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, job.header.compute_dtype)
    with ShardWriter(job.folder, job.header, **job.writer_settings) as writer:
        target = load_target(job.spec.name, dtype=dtype, device=device, revision=job.spec.revision)
        # Samples of similar length share a batch, so that little of it is padding.
        ordered = sorted(samples, key=lambda sample: (sample.loss_spans is None, len(sample.token_ids)))
        if job.spool_bytes:  # what is trained on in this order must not be sorted
            ordered = samples
        for start in range(0, len(ordered), job.max_num_seqs):
            batch = ordered[start : start + job.max_num_seqs]
            responses = _answer(target, job, [sample for sample in batch if sample.loss_spans is None])
            for sample in batch:
                row = _row(target, job, sample, responses.get(sample.id))
                while not writer.has_room(row):
                    yield Progress(0, 0, writer.num_bytes, is_waiting=True)
                    time.sleep(POLL_S)
                writer.add(row)
                yield Progress(1, len(row.input_ids), writer.num_bytes)
        writer.flush()
        writer.write_summary(summary)
        yield Progress(0, 0, writer.num_bytes)


@torch.inference_mode()
def _answer(target: Any, job: Job, samples: list[Sample]) -> dict[str, list[int]]:
    """Responses by sample id; each ends with an end token or at its length limit."""
    if not samples:
        return {}
    longest = max(len(sample.token_ids) for sample in samples)
    pad_id = job.spec.eos_token_ids[0] if job.spec.eos_token_ids else 0
    padded = [[pad_id] * (longest - len(sample.token_ids)) + sample.token_ids for sample in samples]
    mask = [[0] * (longest - len(sample.token_ids)) + [1] * len(sample.token_ids) for sample in samples]
    sampling = job.header.sampling
    greedy = sampling["temperature"] == 0
    if not greedy:
        torch.manual_seed(sampling["seed"] + int(samples[0].id[:8], 16))
    output_BT: Tensor = target.generate(
        input_ids=torch.tensor(padded, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        max_new_tokens=max(sample.max_new_tokens for sample in samples),
        do_sample=not greedy,
        temperature=None if greedy else sampling["temperature"],
        top_p=None if greedy else sampling["top_p"],
        top_k=None if greedy else sampling["top_k"],
        repetition_penalty=1.0,
        eos_token_id=list(job.spec.eos_token_ids) or None,
        pad_token_id=pad_id,
    )
    answers = output_BT[:, longest:].tolist()
    return {s.id: _cut(a, s, job.spec.eos_token_ids) for s, a in zip(samples, answers, strict=True)}


def _cut(answer: list[int], sample: Sample, eos_token_ids: tuple[int, ...]) -> list[int]:
    """The answer up to its end token or limit, without the padding that others in the batch needed."""
    answer = answer[: sample.max_new_tokens]
    ends = [i for i, token in enumerate(answer) if token in eos_token_ids]
    return answer[: ends[0] + 1] if ends else answer


@torch.inference_mode()
def _row(target: Any, job: Job, sample: Sample, response: list[int] | None) -> Row:
    next_token, token_ids, spans = NO_NEXT_TOKEN, sample.token_ids, sample.loss_spans or []
    if response is not None:
        token_ids, next_token = sample.token_ids + response[:-1], response[-1]
        spans = [(len(sample.token_ids), len(token_ids))]
    ids_BT = torch.tensor([token_ids], device=target.device)
    with TapRecorder(target, job.header.target_layer_ids) as recorder:
        target(input_ids=ids_BT, use_cache=False, logits_to_keep=1)
        states_TF = recorder.taps()[0]
    mask = torch.zeros(len(token_ids), dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return Row(
        id=sample.id,
        input_ids=ids_BT[0].cpu(),
        loss_mask=mask,
        hidden_states=states_TF.clone(),  # leave inference mode
        next_token=next_token,
    )
