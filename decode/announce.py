"""What an evaluation says before it begins, and the report folder that it opens then."""

from dflash_kit.config import save_config

from .inputs import Inputs
from .live import method_label
from .results import Method, ResultStore
from .settings import EvalConfig

CONFIG_NAME = "eval.yaml"


def open_report(config: EvalConfig, store: ResultStore) -> None:
    """Open the report folder for results, with the settings beside them."""
    store.open()
    save_config(config, config.out_folder / CONFIG_NAME)


def announce(config: EvalConfig, inputs: Inputs, methods: list[Method], device: str, dtype: str) -> None:
    """What is about to be done."""
    reason = " (on a CPU everything runs in float32: bfloat16 is many times slower there)" if device == "cpu" else ""
    drafter = inputs.drafter_config
    print(f"target       {inputs.target}: {inputs.spec.num_layers} layers, width {inputs.spec.hidden_size}")
    print(
        f"drafter      {inputs.checkpoint}: {drafter.num_hidden_layers} layers, block {drafter.block_size}, "
        f"taps {list(drafter.target_layer_ids)}"
    )
    print(f"running      {', '.join(method_label(m) for m in methods)} on {device} in {dtype}{reason}")
    print(f"report       {config.out_folder}", flush=True)
