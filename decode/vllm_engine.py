"""vLLM as an engine of the evaluation: its own chain (method ``dflash``), or its own autoregressive decoding.

See ``vllm_rounds`` for how its rounds are counted.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_kit.acceptance import CHAIN, RoundLog
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.driver_watch import DRIVER_VARIABLE
from dflash_kit.errors import KitError
from dflash_kit.vllm_calls import ask, stop
from dflash_kit.vllm_environment import check_engine_args, prepare_environment

from .engine import Generation, Method, require_context, require_finite
from .float32_pass import PlainLogits
from .prompt_prefix import PromptPrefix
from .sampling import GREEDY, Sampling
from .vllm_rounds import Counters, read_rounds

DRAFT_ROOM_BLOCKS = 2
"""Blocks behind the last token without which vLLM drafts nothing: the one that is verified and the one that is drafted."""
MENDED = (
    "note: vLLM's kernel here norms the context keys of all drafter layers by the first layer's weights; mended for this run "
    "alone, a server of this vLLM accepts other draft tokens"
)
NOT_DECODED = Generation([], RoundLog(num_accepted=()))


class VllmEngine:
    """One running vLLM engine; it decodes one prompt at a time.

    Args:
        engine: vLLM's ``LLMEngine``, started by ``start_vllm``.
        name: the method that it decodes, ``ar`` or ``chain``.
        eos_token_ids: tokens that end a response.
        max_context: tokens of prompt and response together, at most.
        earlier: responses of the other method, by the seed of their stream, decoded by an engine that has ended.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        *,
        eos_token_ids: tuple[int, ...],
        max_context: int,
        earlier: Mapping[int, Generation] | None = None,
    ) -> None:
        self.target = SimpleNamespace(device=torch.device("cpu"))
        """Where the evaluation keeps its generator of seeds."""
        self.num_disagreements = 0
        """Responses whose rounds vLLM's counters do not confirm."""
        self._engine, self._name = engine, name
        self._eos_token_ids, self._max_context = list(eos_token_ids), max_context
        self._earlier = earlier or {}
        self._request_ids = map(str, itertools.count())

    def prefill(self, prompt_ids: list[int], max_new_tokens: int, max_budget: int, prompt_id: str = "") -> PromptPrefix:
        """Keep a prompt; arguments as for ``Engine.prefill``.

        Raises:
            KitError: the prompt fills the context.
        """
        require_context(len(prompt_ids), self._max_context, prompt_id)
        room = self._max_context - len(prompt_ids)
        return PromptPrefix(prompt_ids, min(max_new_tokens, room), self._logits)

    def decode(
        self,
        prefix: PromptPrefix,
        method: Method,
        *,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        prompt_id: str = "",
        on_round: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decode one response; arguments as for ``Engine.decode``, of the generator only its seed is taken.

        Raises:
            KitError: vLLM gives no response.
        """
        seed = generator.initial_seed() if generator is not None else None
        if method.name != self._name:
            return NOT_DECODED if seed is None else self._earlier[seed]
        before = self._count()
        steps, last = self._run(prefix.prompt_ids, self._params(prefix.max_new_tokens, sampling, seed), prompt_id)
        reason = last.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            raise KitError(f"vLLM ended prompt {prompt_id} with {reason!r} instead of an answer")
        if on_round is not None:
            for step in steps[1:]:
                on_round(len(step))
        rounds = read_rounds([len(step) for step in steps], self._count().since(before))
        self.num_disagreements += not rounds.agrees
        token_ids = [token for step in steps for token in step]
        log = RoundLog(
            prompt_id=prompt_id,
            num_accepted=rounds.num_accepted,
            cut={"stop": "eos", "length": "length"}[reason] if rounds.is_cut else None,
            decode_s=last.metrics.last_token_ts - last.metrics.first_token_ts,
        )
        assert log.new_tokens == len(token_ids), "rounds and tokens disagree: a bug"
        return Generation(token_ids, log)

    def plain_logits(self, token_ids: list[int], _num_last: int) -> PlainLogits:
        """Behind the last token alone, by a prefill of vLLM's in its dtype, which stands for float32 as well."""
        logits = self._logits(token_ids)[None]
        return PlainLogits(logits, lambda: logits)

    def close(self) -> None:
        """End vLLM's processes."""
        stop(self._engine)

    def _params(self, max_new_tokens: int, sampling: Sampling, seed: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if sampling.temperature == 0 else seed,
            max_tokens=max_new_tokens,
            ignore_eos=True,  # the end tokens are exactly the target's, not the tokenizer's as well
            stop_token_ids=self._eos_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _run(self, prompt_ids: list[int], params: Any, prompt_id: str) -> tuple[list[list[int]], Any]:
        """Tokens of each step, and vLLM's last output."""
        steps: list[list[int]] = []
        last = None
        try:
            self._engine.add_request(next(self._request_ids), {"prompt_token_ids": prompt_ids}, params)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    last = output
                    if output.outputs[0].token_ids:
                        steps.append(list(output.outputs[0].token_ids))
        except Exception as error:  # of a dead engine, too, which has a class of its own
            raise KitError(
                f"vLLM failed at prompt {prompt_id} ({error or type(error).__name__}; its own messages stand above); finished "
                "prompts are kept: run the same command again to resume"
            ) from error
        assert last is not None
        return steps, last

    def _count(self) -> Counters:
        return Counters.read(self._engine.get_metrics())

    def _logits(self, prompt_ids: list[int]) -> Tensor:
        """Logits (V,) behind the last token, in float32; the engine was started to hand out raw ones."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)
        _, last = self._run(prompt_ids, params, "")
        values = last.outputs[0].logprobs[0]
        logits = torch.full((max(values) + 1,), -torch.inf)
        logits[list(values)] = torch.tensor([entry.logprob for entry in values.values()])
        require_finite(logits, "")
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSetup:
    """What an evaluation's vLLM engines share."""

    target: str
    """Folder or hub id."""
    revision: str | None = None
    """Of a hub id."""
    ckpt: str
    """The drafter, as it is."""
    num_draft_tokens: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    dtype: str
    """Of target and drafter."""
    max_context: int
    """Tokens of prompt and response together, at most."""
    max_positions: int
    """The target's context: vLLM takes no more."""
    num_cores: int | None = None
    """CPU cores to run on; None: all."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """The user's further arguments of vLLM's engine."""


def start_vllm(setup: VllmSetup, name: str, earlier: Mapping[int, Generation] | None = None) -> VllmEngine:
    """Start vLLM with the drafter (``chain``) or without (``ar``).

    Args:
        setup: what to start.
        name: the method.
        earlier: see ``VllmEngine``.

    Raises:
        KitError: it does not start; vLLM has logged the reason.
    """
    num_ranks = setup.engine_args.get("tensor_parallel_size", 1)
    if type(num_ranks) is not int or num_ranks < 1:
        raise KitError(f"engine_args.tensor_parallel_size is {num_ranks!r}; a whole number from 1 on is needed")
    if setup.num_cores is not None:
        cores = sorted(os.sched_getaffinity(0))[: setup.num_cores]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ[DRIVER_VARIABLE] = str(os.getpid())
    prepare_environment(num_ranks, dtype=setup.dtype)
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    own: dict[str, Any] = {
        "model": setup.target,
        "revision": setup.revision,
        "skip_tokenizer_init": True,
        "dtype": setup.dtype,
        "enforce_eager": current_platform.is_cpu(),
        "max_model_len": min(setup.max_positions, setup.max_context + DRAFT_ROOM_BLOCKS * (setup.num_draft_tokens + 1)),
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # its counters
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "speculative_config": chain_method(setup) if name == CHAIN else None,
        "worker_extension_cls": "dflash_kit.vllm_drafter.DrafterAccess",
    }
    check_engine_args(setup.engine_args, own, [f.name for f in fields(EngineArgs)], "the evaluation")
    shown = {} if "use_tqdm_on_load" in setup.engine_args else {"use_tqdm_on_load": False}
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**own, **shown, **setup.engine_args))
        is_mended = name == CHAIN and any(ask(engine, "norm_each_layer"))
    except (RuntimeError, ValueError, OSError) as error:  # what is not implemented is a RuntimeError
        raise KitError(f"vLLM does not start: {error}; its own message stands above") from error
    if is_mended:
        print(MENDED, flush=True)
    return VllmEngine(engine, name, eos_token_ids=setup.eos_token_ids, max_context=setup.max_context, earlier=earlier)


def chain_method(setup: VllmSetup) -> dict[str, Any]:
    """Argument ``speculative_config``: the checkpoint as it is, and as many drafts as its blocks have."""
    return {"method": "dflash", "model": setup.ckpt, "num_speculative_tokens": setup.num_draft_tokens}


def reason_against_vllm(drafter: DrafterConfig, *, on_cpu: bool) -> str | None:
    """Why vLLM cannot decode with this drafter as it was trained; None where it can."""
    if on_cpu and len(set(drafter.layer_types)) > 1:
        return (
            "vLLM drafts with sliding and full layers together on GPUs only (its V2 runner), and this drafter has "
            f"{', '.join(drafter.layer_types)}"
        )
    if DrafterConfig.from_dict(_without_layer_causal(drafter.to_dict())) != drafter:
        return (
            "vLLM knows one causal flag for all layers, or causal sliding and bidirectional full ones; this drafter has "
            f"layer_causal = {list(drafter.layer_causal)}"
        )
    return None


def _without_layer_causal(raw: dict[str, Any]) -> dict[str, Any]:
    """The config as vLLM reads it: ``layer_causal`` is a key of ours."""
    return raw | {"dflash_config": {k: v for k, v in raw["dflash_config"].items() if k != "layer_causal"}}
