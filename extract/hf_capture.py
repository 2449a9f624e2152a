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

from dflash_kit.shard_states import split_captured
from dflash_kit.shards import NO_NEXT_TOKEN, Row, ShardWriter
from dflash_kit.spool_room import POLL_S
from dflash_kit.target import TapRecorder, load_target

from .capture import Job, Progress
from .failures import Failures
from .prompts import Sample, answer_seed

# What libraries raise for a sample that they cannot do, memory that is not enough for it included.
ENGINE_FAULTS = (RuntimeError, ValueError, LookupError, ArithmeticError)


def engine_version() -> str:
    """Version of transformers."""
    import transformers

    return str(transformers.__version__)


def capture(job: Job, samples: list[Sample], summary: dict[str, Any]) -> Generator[Progress, None, None]:
    """Answer the samples that ask for it and write the rows of all; see ``Capture``.

    Raises:
        KitError: an unreadable target, a sample at which it fails, a broken capture, or a full disk.
    """
    failures = Failures(skip=job.skip_errors)
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
            responses = _answers(target, job, [sample for sample in batch if sample.loss_spans is None], failures)
            for sample in batch:
                if sample.loss_spans is None and sample.id not in responses:
                    continue
                try:
                    row = _row(target, job, sample, responses.get(sample.id))
                except ENGINE_FAULTS as error:
                    failures.take(sample, error)
                    continue
                failures.end_row()
                while not writer.has_room(row):
                    yield Progress(0, 0, writer.num_bytes, is_waiting=True)
                    time.sleep(POLL_S)
                writer.add(row)
                yield Progress(1, len(row.input_ids), writer.num_bytes, num_failed=failures.take_count())
            if failures.must_stop:
                break
        writer.flush()
        writer.write_summary(failures.settle(summary))
        yield Progress(0, 0, writer.num_bytes, num_failed=failures.take_count())


def _answers(target: Any, job: Job, samples: list[Sample], failures: Failures) -> dict[str, list[int]]:
    """``_answer``, where the batch fails one sample at a time; those that fail alone have no response."""
    try:
        return _answer(target, job, samples)
    except ENGINE_FAULTS as error:
        if len(samples) == 1:
            failures.take(samples[0], error)
            return {}
    responses = {}
    for sample in samples:
        responses.update(_answers(target, job, [sample], failures))
    return responses


@torch.inference_mode()
def _answer(target: Any, job: Job, samples: list[Sample]) -> dict[str, list[int]]:
    """Responses by sample id; each ends with an end token or at its length limit."""
    if not samples:
        return {}
    longest = max(len(sample.token_ids) for sample in samples)
    pad_id = job.spec.eos_token_ids[0] if job.spec.eos_token_ids else 0
    padded = [[pad_id] * (longest - len(sample.token_ids)) + sample.token_ids for sample in samples]
    mask = [[0] * (longest - len(sample.token_ids)) + [1] * len(sample.token_ids) for sample in samples]
    draws = [] if job.header.sampling["temperature"] == 0 else [_Draws(job, samples, target.device)]
    output_BT: Tensor = target.generate(
        input_ids=torch.tensor(padded, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        max_new_tokens=max(sample.max_new_tokens for sample in samples),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        logits_processor=draws,
        repetition_penalty=1.0,
        eos_token_id=list(job.spec.eos_token_ids) or None,
        pad_token_id=pad_id,
    )
    answers = output_BT[:, longest:].tolist()
    return {s.id: _cut(a, s, job.spec.eos_token_ids) for s, a in zip(samples, answers, strict=True)}


class _Draws:
    """Sampling with a generator for each row, so that an answer does not depend on the batch in which a resumed run puts it.

    Adding Gumbel noise to log-probabilities makes the likeliest token a draw from them.
    """

    def __init__(self, job: Job, samples: list[Sample], device: torch.device) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        sampling = job.header.sampling
        self._warpers: list[Any] = [TemperatureLogitsWarper(float(sampling["temperature"]))]
        if sampling["top_k"]:
            self._warpers.append(TopKLogitsWarper(sampling["top_k"]))
        if sampling["top_p"] < 1:
            self._warpers.append(TopPLogitsWarper(sampling["top_p"]))
        seeds = [answer_seed(sampling["seed"], sample.id) for sample in samples]
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores_BV: Tensor) -> Tensor:
        for warper in self._warpers:
            scores_BV = warper(input_ids, scores_BV)
        waits = [torch.empty_like(scores_BV[0]).exponential_(generator=generator) for generator in self._generators]
        return scores_BV - torch.stack(waits).log()


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
    with TapRecorder(target, job.captured_layer_ids) as recorder:
        target(input_ids=ids_BT, use_cache=False, logits_to_keep=1)
        taps_TF, last_TD = split_captured(recorder.taps()[0], job.header)
    mask = torch.zeros(len(token_ids), dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return Row(
        id=sample.id,
        input_ids=ids_BT[0].cpu(),
        loss_mask=mask,
        hidden_states=taps_TF.clone(),  # leave inference mode
        last_hidden=None if last_TD is None else last_TD.clone(),
        next_token=next_token,
    )
