"""``--doctor``: why is acceptance bad?

The target answers a few prompts once, with the states of all layers kept; then the drafter is replayed on them as configured and under
each hypothesis (``hypotheses``). The largest gain that is beyond chance is the cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_kit.acceptance import Acceptance
from dflash_kit.benchmark_prompts import BenchmarkPrompt, load_benchmark
from dflash_kit.checkpoint import read_config, read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.errors import require_dir_empty, require_free_bytes
from dflash_kit.target import load_config, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds

from .diagnosis import Diagnosis, diagnose
from .doctor_answers import CONFIGURED, OTHER_FORMS, Answer, answer_prompts, prompt_token_ids
from .doctor_progress import DoctorProgress
from .doctor_race import Measured, Race, num_replays
from .doctor_report import build_doctor_report, print_doctor_report, write_doctor_report
from .doctor_settings import PROMPTS_OF_EACH, tokens_of_an_answer
from .hypotheses import Facts, Hypothesis, list_hypotheses, reserved_token_ids
from .inputs import Inputs
from .settings import EvalConfig

EXPECTED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A checkpoint, the prompts in all forms, and what may be wrong."""

    inputs: Inputs
    names: list[str]
    """Of the prompts."""
    prompts: dict[str, list[list[int]]]
    """Form → token ids of each prompt."""
    max_new_tokens: int
    hypotheses: list[Hypothesis]
    not_measurable: list[str]
    notes: list[str]
    """What differs from the training, as the checkpoint records it."""
    recorded: float | None
    """Acceptance length of the chain that training measured."""


def run_doctor(config: EvalConfig, inputs: Inputs, device: str, dtype: str, argv: list[str] | None) -> int:
    """Examine a checkpoint, print and write the report; 0 when it is healthy, else 1.

    Raises:
        KitError: a report folder that holds something, a prompt that does not fit, an unusable target.
    """
    require_dir_empty(config.out_folder, "report folder")
    case = open_case(config, inputs)
    _announce(config, case, device, dtype)
    if config.dry_run:
        for hypothesis in case.hypotheses:
            print(f"would try    {hypothesis.family}: {hypothesis.name}")
        for note in case.not_measurable:
            print(f"cannot try   {note}")
        return 0
    require_free_bytes(config.out_folder, EXPECTED_BYTES, "the report")
    torch_dtype = getattr(torch, dtype)
    drafter = Drafter.from_pretrained(config.ckpt, dtype=torch_dtype, device=device)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights; the doctor shows its own
    model = load_target(inputs.target, dtype=torch_dtype, device=device, revision=config.target_revision)
    with DoctorProgress(len(case.prompts), num_replays(len(case.hypotheses), case.max_new_tokens)) as progress:
        answers = take_answers(case, model, progress.begin_form)
        race = Race(drafter, TargetEnds.from_model(model), answers, inputs.spec.eos_token_ids, progress.begin_replay)
        configured, measured, diagnosis = examine(case, race)
    report = build_doctor_report(config, case, device, dtype, configured, measured, diagnosis, argv)
    write_doctor_report(config.out_folder, report)
    print_doctor_report(report)
    print(f"report: {config.out_folder / 'doctor.json'}")
    return exit_status(diagnosis)


def examine(case: Case, race: Race) -> tuple[Acceptance, list[Measured], Diagnosis]:
    """Acceptance as configured, every hypothesis measured, and what that says."""
    configured, measured = race.run(case.hypotheses, case.max_new_tokens)
    return configured, measured, diagnose(configured, measured, recorded=case.recorded, mismatches=case.notes)


def exit_status(diagnosis: Diagnosis) -> int:
    """0: nothing is wrong; 1: a cause was found, or acceptance is bad without one."""
    return 0 if diagnosis.status == "healthy" else 1


def open_case(config: EvalConfig, inputs: Inputs) -> Case:
    """Read prompts, tokenizer and configurations; no weights."""
    named = [(name, prompt) for name in config.benchmark_names for prompt in _few(name, config.limit)]
    tokenizer = load_tokenizer(inputs.target, config.target_revision)
    prompts = _all_forms(tokenizer, named, enable_thinking=config.enable_thinking)
    max_new_tokens = tokens_of_an_answer(config)
    target = load_config(inputs.target, config.target_revision)
    facts = Facts(
        config=inputs.drafter_config,
        raw_config=read_config(config.ckpt),
        spec=inputs.spec,
        target_rope=_rope_parameters(target.get_text_config()),
        reserved_ids=reserved_token_ids(tokenizer, inputs.spec),
        forms=tuple(form for form in prompts if form != CONFIGURED),
        longest_context=max(map(len, prompts[CONFIGURED])) + max_new_tokens,
    )
    hypotheses, not_measurable = list_hypotheses(facts)
    return Case(
        inputs=inputs,
        names=[f"{prompt.id} of {benchmark}" for benchmark, prompt in named],
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        hypotheses=hypotheses,
        not_measurable=not_measurable,
        notes=[*inputs.warnings, *_quantisation(target)],
        recorded=_recorded_length(config.ckpt),
    )


def take_answers(case: Case, model: Any, on_form: Any = lambda form: None) -> dict[str, list[Answer]]:
    """Answers in all forms; the configured one keeps every layer that a hypothesis taps."""
    found = {}
    tapped = case.inputs.drafter_config.target_layer_ids
    for form, prompts in case.prompts.items():
        on_form(form)
        layers = {layer for h in case.hypotheses if h.change.form == form for layer in h.change.layers}
        found[form] = answer_prompts(
            model,
            case.names,
            prompts,
            layer_ids={*layers, *tapped},
            max_new_tokens=case.max_new_tokens,
            eos_token_ids=case.inputs.spec.eos_token_ids,
            max_context=case.inputs.spec.max_position_embeddings,
        )
    return found


def _few(benchmark: str, limit: int | None) -> list[BenchmarkPrompt]:
    return load_benchmark(benchmark, PROMPTS_OF_EACH if limit is None else limit)


def _all_forms(
    tokenizer: Any, named: Sequence[tuple[str, BenchmarkPrompt]], *, enable_thinking: bool
) -> dict[str, list[list[int]]]:
    """Forms whose token ids differ from those before them."""
    found: dict[str, list[list[int]]] = {}
    for form in (CONFIGURED, *OTHER_FORMS):
        ids = prompt_token_ids(tokenizer, named, form, enable_thinking=enable_thinking)
        if ids is not None and all(ids) and ids not in found.values():
            found[form] = ids
    return found


def _rope_parameters(text: Any) -> dict[str, Any]:
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters and "rope_theta" not in parameters:  # one entry per layer type: full attention decides
        parameters = parameters.get("full_attention") or next(iter(parameters.values()))
    return dict(parameters)


def _quantisation(target: Any) -> list[str]:
    settings = getattr(target, "quantization_config", None)
    if not settings:
        return []
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return [f"the target is quantised ({method}); a drafter trained on other weights sees other states"]


def _recorded_length(ckpt: str) -> float | None:
    """Replayed acceptance length of the chain at the end of training, where the checkpoint records it."""
    lengths = (read_provenance(ckpt).get("metrics") or {}).get("replay_acceptance_length")
    value = lengths.get("chain") if isinstance(lengths, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _announce(config: EvalConfig, case: Case, device: str, dtype: str) -> None:
    replays = num_replays(len(case.hypotheses), case.max_new_tokens)
    print(f"target       {case.inputs.target}")
    print(f"drafter      {config.ckpt}")
    print(
        f"prompts      {len(case.names)} in {len(case.prompts)} forms, {case.max_new_tokens} tokens an answer at most"
    )
    print(f"hypotheses   {len(case.hypotheses)}, {replays} replays on {device} in {dtype}")
    print(f"report       {config.out_folder}", flush=True)
