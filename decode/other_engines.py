"""Evaluation by engines of others: vLLM, and transformers' ``generate``. They decode autoregressively and the chain."""

import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from typing import Any

import torch

from dflash_kit.acceptance import AR, CHAIN
from dflash_kit.benchmark_prompts import BenchmarkPrompt
from dflash_kit.errors import KitError
from dflash_kit.hf_assistant import DFlashAssistant
from dflash_kit.target import load_target
from dflash_kit.vllm_version import installed_vllm

from .engine import Generation
from .generate_engine import GenerateEngine
from .inputs import Inputs
from .live import LiveEvaluation, open_conversation, response_seed
from .progress import EvaluationProgress
from .results import Method, PromptResult, ResultStore
from .same_prompts import require_same_prompts
from .settings import EvalConfig
from .vllm_engine import VllmEngine, VllmSetup, reason_against_vllm, start_vllm

VLLM, GENERATE = "vllm", "transformers-generate"
OTHER_ENGINES = (VLLM, GENERATE)
BASELINE_NAME = "baseline"
"""Folder in the report's, for autoregressive responses whose chain is not decoded yet: vLLM runs once for each."""

Benchmarks = dict[str, list[BenchmarkPrompt]]


def engine_label(config: EvalConfig) -> str:
    """What decodes, with its version, for the report."""
    if config.engine == VLLM:
        return f"vllm {installed_vllm()}"
    if config.engine == GENERATE:
        return f"transformers {metadata.version('transformers')} generate"
    return f"dflash-kit ({config.engine})"


def possible_methods(config: EvalConfig, inputs: Inputs, methods: list[Method], device: str) -> list[Method]:
    """The methods that another engine has; says what is left out.

    Raises:
        KitError: none is left, or the engine cannot decode with this drafter, on this device, or is not installed.
    """
    possible = [method for method in methods if method[0] in (AR, CHAIN)]
    if not possible:
        raise KitError(
            f"engine {config.engine} verifies no trees: methods needs ar or chain, or leave --engine out for ddtree"
        )
    if config.engine == VLLM:
        _require_vllm(inputs, possible, device)
    else:
        _require_generate()
    if len(possible) < len(methods):
        print(f"ddtree is left out: engine {config.engine} verifies no trees")
    return possible


def decode_elsewhere(
    config: EvalConfig,
    inputs: Inputs,
    store: ResultStore,
    methods: list[Method],
    dtype: str,
    benchmarks: Benchmarks,
    tokenizer: Any,
) -> None:
    """Decode what the open store does not hold yet."""
    run = _Run(config, inputs, dtype, benchmarks, tokenizer)
    if config.engine == GENERATE:
        run.decode(_generate_engine(config, inputs, dtype), methods, store)
        return
    earlier: dict[int, Generation] = {}
    names = [name for name, _ in methods]
    if names == [AR, CHAIN]:
        with closing(store.inner(BASELINE_NAME)) as baseline:
            baseline.open()
            require_same_prompts(benchmarks, baseline.results, str(config.out_folder / BASELINE_NAME))
            if run.num_missing(baseline):
                run.decode_by_vllm(AR, methods[:1], baseline)
            earlier = _by_seed(config, baseline.results)
    run.decode_by_vllm(names[-1], methods, store, earlier)


class _Run:
    """What all passes of one evaluation share."""

    def __init__(self, config: EvalConfig, inputs: Inputs, dtype: str, benchmarks: Benchmarks, tokenizer: Any) -> None:
        self._config, self._inputs, self._dtype = config, inputs, dtype
        self._benchmarks, self._tokenizer = benchmarks, tokenizer

    def num_missing(self, store: ResultStore) -> int:
        """Prompts that a store does not hold yet."""
        return sum(not store.has(name, prompt.id) for name, prompts in self._benchmarks.items() for prompt in prompts)

    def decode_by_vllm(
        self, name: str, methods: Sequence[Method], store: ResultStore, earlier: dict[int, Generation] | None = None
    ) -> None:
        """Start vLLM for one method, decode, and end it."""
        print(f"engine       {engine_label(self._config)}, {name}: starting", flush=True)
        engine = start_vllm(self._setup(), name, earlier)
        with closing(engine):
            self.decode(engine, methods, store)
        if engine.num_disagreements:
            print(
                f"warning: in {engine.num_disagreements} responses vLLM's counters do not confirm the rounds that its tokens "
                "show; whether their last round was cut is unknown, and it counts as not cut",
                file=sys.stderr,
            )

    def _setup(self) -> VllmSetup:
        config, inputs = self._config, self._inputs
        return VllmSetup(
            target=inputs.target,
            revision=config.target_revision,
            ckpt=config.ckpt,
            num_draft_tokens=inputs.drafter_config.num_draft_tokens,
            eos_token_ids=inputs.spec.eos_token_ids,
            dtype=self._dtype,
            max_context=longest_context(config, inputs, self._benchmarks, self._tokenizer),
            max_positions=inputs.spec.max_position_embeddings,
            num_cores=config.cpu_threads,
            engine_args=config.engine_args,
        )

    def decode(self, engine: VllmEngine | GenerateEngine, methods: Sequence[Method], store: ResultStore) -> None:
        """Decode with an engine what the store does not hold yet."""
        missing = self.num_missing(store)
        num_prompts = sum(map(len, self._benchmarks.values()))
        with EvaluationProgress(num_prompts, num_prompts - missing) as progress:
            LiveEvaluation(
                engine,
                self._tokenizer,
                self._config,
                methods,
                getattr(torch, self._dtype),
                on_response=lambda method, generation: progress.add_response(method, generation.log),
                on_prompt=lambda result: progress.finish_prompt(f"{result.benchmark} {result.prompt_id}"),
            ).run(self._benchmarks, store)


def longest_context(config: EvalConfig, inputs: Inputs, benchmarks: Benchmarks, tokenizer: Any) -> int:
    """Tokens for which vLLM keeps room: the longest conversation with answers of full length, or the target's context."""
    longest = 0
    for name, prompts in benchmarks.items():
        for prompt in prompts:
            conversation = open_conversation(tokenizer, config, name, prompt)
            for turn in range(len(prompt.turns)):
                num_tokens = len(conversation.ask(turn))
                conversation.answer([])
            # Tokenized again in its conversation, an answer of broken characters has three tokens where one stood.
            answers = (len(prompt.turns) - 1) * (3 * config.max_new_tokens + 16) + config.max_new_tokens
            longest = max(longest, num_tokens + answers)
    return min(inputs.spec.max_position_embeddings, longest)


def _by_seed(config: EvalConfig, results: Sequence[PromptResult]) -> dict[int, Generation]:
    """Recorded responses by the seed of their stream, which is another for each."""
    return {
        response_seed(config.seed, result.benchmark, result.prompt_id, response.turn, response.method): Generation(
            list(response.token_ids), response.log
        )
        for result in results
        for response in result.responses
    }


def _generate_engine(config: EvalConfig, inputs: Inputs, dtype: str) -> GenerateEngine:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch_dtype = getattr(torch, dtype)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    print(f"engine       {engine_label(config)}", flush=True)
    model = load_target(inputs.target, dtype=torch_dtype, device=device, revision=config.target_revision)
    assistant = DFlashAssistant.from_pretrained(config.ckpt, dtype=torch_dtype, device=device)
    eos_token_ids, max_context = inputs.spec.eos_token_ids, inputs.spec.max_position_embeddings
    return GenerateEngine(model, assistant, eos_token_ids=eos_token_ids, max_context=max_context)


def _require_vllm(inputs: Inputs, methods: Sequence[Method], device: str) -> None:
    if installed_vllm() is None:
        raise KitError("vLLM is not installed; install it (pip install '.[vllm]'), or leave --engine out")
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu != (device == "cpu"):
        where = "a CPU" if on_cpu else "GPUs"
        raise KitError(
            f"the installed vLLM runs on {where} and device is {device}; use --device {'cpu' if on_cpu else 'cuda'}"
        )
    reason = reason_against_vllm(inputs.drafter_config, on_cpu=on_cpu)
    if reason and any(name == CHAIN for name, _ in methods):
        raise KitError(f"engine vllm cannot be used: {reason}; use --engine portable")


def _require_generate() -> None:
    import transformers.generation as generation

    if not hasattr(generation, "DFlashTokenCandidateGenerator"):
        raise KitError(
            f"transformers {metadata.version('transformers')} has no speculation_type 'dflash'; 5.17 or newer is needed"
        )
