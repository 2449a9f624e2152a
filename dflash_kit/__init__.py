"""dflash-kit: extract, train and evaluate DFlash block-diffusion drafters for one target."""

import logging
import os

__version__ = "0.1.0"

# vLLM's processes remark on what is not installed before they set their loggers up; those that we start import this first.
if os.environ.get("VLLM_LOGGING_LEVEL") == "ERROR":
    logging.getLogger("vllm").setLevel(logging.ERROR)
