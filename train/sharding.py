"""FSDP2: tensors of which each process holds a part, and the way to whole ones and back.

States on disk are whole, so a run may go on with another number of processes, or without FSDP.
"""

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_kit.errors import KitError

FSDP_VARIABLE = "ACCELERATE_USE_FSDP"


def asked_for() -> bool:
    """Whether the launcher asks for FSDP."""
    return os.environ.get(FSDP_VARIABLE, "false").lower() == "true"


def settle(accelerator: Accelerator) -> None:
    """Check what the launcher asks of FSDP, and have it on CPUs, too, where accelerate would fall back to copies.

    Raises:
        KitError: FSDP 1, or layers wrapped one by one.
    """
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        for state in (AcceleratorState._shared_state, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise KitError("the launcher asks for FSDP 1; set fsdp_version to 2 (configs/accelerate/fsdp2.yaml)")
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    if policy != "NO_WRAP":
        raise KitError(
            f"fsdp_auto_wrap_policy is {policy}, but the context's keys are computed for all layers at once, so none can "
            "be wrapped alone; set it to NO_WRAP (configs/accelerate/fsdp2.yaml)"
        )


def gathered(value: Any) -> Any:
    """A tensor, or all tensors in dictionaries and lists, without parts elsewhere, on the CPU; all processes call it."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return [gathered(item) for item in value] if isinstance(value, list) else value


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as ``like`` is; the tensor itself where that is whole."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    part: Tensor = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return part


def parts_of_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole ``state_dict`` cut as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    cut = {
        place: {
            name: part_of(v, parameter) if isinstance(v, Tensor) else v for name, v in state["state"][place].items()
        }
        for place, parameter in zip(places, parameters, strict=True)
        if place in state["state"]
    }
    return {**state, "state": cut}
