"""dflash-kit: extract, train and evaluate DFlash block-diffusion drafters for one target."""

__version__ = "0.1.0"
