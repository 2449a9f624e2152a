"""vLLM's workers end when the evaluation that started them is killed, from the moment that they load our class."""

import os
import select
import signal
import subprocess
import sys

import pytest

from dflash_kit.driver_watch import DRIVER_VARIABLE
from helpers import REPO

WORKER = "import dflash_kit.vllm_drafter, os, time; print(os.getpid(), flush=True); time.sleep(600)"
DRIVER = f"""
import os, subprocess, sys, time
os.environ["{DRIVER_VARIABLE}"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", "{WORKER}"])
time.sleep(600)
"""
LATE = 'while os.path.exists(f"/proc/{driver}"): time.sleep(0.01)'
FORKING_DRIVER = """
import multiprocessing, os, time
from dflash_kit.driver_watch import end_with_driver

def work(driver):
    {before}
    end_with_driver(driver, {finish})
    time.sleep(600)

worker = multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(),))
worker.start()
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "program",
    [
        DRIVER,
        FORKING_DRIVER.format(before="pass", finish="lambda: 1 / 0"),
        FORKING_DRIVER.format(before=LATE, finish="lambda: None"),
    ],
    ids=["in order", "shards that cannot be finished", "before the worker watches"],
)
def test_a_worker_ends_with_a_killed_driver(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert driver.stdout is not None
    worker = os.pidfd_open(int(driver.stdout.readline()))
    try:
        assert not select.select([worker], [], [], 0)[0], "it lives while the driver does"
        driver.kill()
        driver.wait()
        assert select.select([worker], [], [], 120)[0], "the worker outlives its driver"
    finally:
        if not select.select([worker], [], [], 0)[0]:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        driver.kill()
        driver.stdout.close()
