"""vLLM's workers end when the evaluation that started them is killed, from the moment that they load our class."""

import os
import select
import signal
import subprocess
import sys

from dflash_kit.driver_watch import DRIVER_VARIABLE
from helpers import REPO

WORKER = "import dflash_kit.vllm_drafter, os, time; print(os.getpid(), flush=True); time.sleep(60)"
DRIVER = f"""
import os, subprocess, sys, time
os.environ["{DRIVER_VARIABLE}"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", "{WORKER}"])
time.sleep(60)
"""


def test_a_worker_ends_with_a_killed_driver() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env=environment)
    assert driver.stdout is not None
    worker = os.pidfd_open(int(driver.stdout.readline()))
    try:
        assert not select.select([worker], [], [], 0)[0], "it lives while the driver does"
        driver.kill()
        driver.wait()
        assert select.select([worker], [], [], 20)[0], "the worker outlives its driver"
    finally:
        if not select.select([worker], [], [], 0)[0]:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        driver.kill()
        driver.stdout.close()
