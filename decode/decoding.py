"""The evaluation command's live decoding, whatever the engine."""

import functools
from typing import Any

import torch

from dflash_kit.benchmark_prompts import BenchmarkPrompt, benchmark_label, load_benchmark
from dflash_kit.target import load_config, load_tokenizer

from .announce import announce, open_report
from .auto_report import keep_costs
from .batch_engine import BatchEngine
from .batch_live import BatchEvaluation, batch_sizes
from .batch_memory import describe_batch, require_batch_fits
from .engines import open_engine
from .fused_batch import FusedBatchEngine
from .illustrate import draw_live
from .inputs import Inputs
from .live import LiveEvaluation, require_prompts_fit
from .other_engines import OTHER_ENGINES, decode_elsewhere
from .progress import EvaluationProgress
from .results import Method, PromptResult, ResultStore
from .same_prompts import require_same_prompts
from .settings import EvalConfig

Benchmarks = dict[str, list[BenchmarkPrompt]]


def decode_live(
    config: EvalConfig, inputs: Inputs, store: ResultStore, methods: list[Method], device: str, dtype: str
) -> list[PromptResult] | None:
    """Decode what the store does not hold yet; None after a dry run."""
    benchmarks = {benchmark_label(name): load_benchmark(name, config.limit) for name in config.benchmark_names}
    require_same_prompts(benchmarks, store.results, str(config.out_folder))
    num_prompts = sum(len(prompts) for prompts in benchmarks.values())
    done = sum(store.has(name, prompt.id) for name, prompts in benchmarks.items() for prompt in prompts)
    announce(config, inputs, methods, device, dtype)
    print(f"prompts      {', '.join(f'{len(p)} of {name}' for name, p in benchmarks.items())}; {done} done before")
    tokenizer = load_tokenizer(inputs.target, config.target_revision)
    sizes: dict[str, int] = {}
    if done < num_prompts:
        require_prompts_fit(benchmarks, tokenizer, config, inputs.spec.max_position_embeddings)
        if config.batch_size > 1:
            sizes = batch_sizes(config, benchmarks, tokenizer, methods, num_prompts - done)
            text_config = load_config(inputs.target, config.target_revision).get_text_config()
            element_bytes = getattr(torch, dtype).itemsize
            words = describe_batch(text_config, inputs.drafter_config, **sizes, element_bytes=element_bytes)
            print(f"batch        {words}", flush=True)
    if config.dry_run:
        return None
    if done < num_prompts and config.engine in OTHER_ENGINES:
        open_report(config, store)
        decode_elsewhere(config, inputs, store, methods, dtype, benchmarks, tokenizer)
    elif done < num_prompts:
        engine = open_engine(config, inputs, methods, device, dtype, num_prompts - done)
        if isinstance(engine, FusedBatchEngine):
            engine.require_room(sizes["longest_prompt"], sizes["max_new_tokens"], inputs.spec.max_position_embeddings)
        elif isinstance(engine, BatchEngine):
            require_batch_fits(engine.target.model, inputs.drafter_config, **sizes)
        else:
            engine.auto_budget.on_calibration = functools.partial(keep_costs, config.out_folder)
        with EvaluationProgress(num_prompts, done) as progress:
            hooks: dict[str, Any] = {
                "on_response": lambda method, generation: progress.add_response(method, generation.log),
                "on_prompt": lambda result: progress.finish_prompt(f"{result.benchmark} {result.prompt_id}"),
            }
            settings = tokenizer, config, methods, getattr(torch, dtype)
            evaluation = (
                BatchEvaluation(engine, *settings, **hooks)
                if isinstance(engine, BatchEngine | FusedBatchEngine)
                else LiveEvaluation(engine, *settings, **hooks)
            )
            open_report(config, store)
            evaluation.run(benchmarks, store)
        draw_live(config, engine, tokenizer, store.results, benchmarks)
    return store.results
