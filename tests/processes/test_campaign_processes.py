"""Processes of a campaign end when it does."""

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tests.support.waiting import wait_until

_POOL = """
import os
from time import sleep
from lab import tether
from lab.proof.__main__ import _in_processes
tether.unwind_on_signals()
os.register_at_fork(after_in_parent=lambda: print("a hook ran", flush=True))
list(_in_processes(sleep, "", [300] * 9))
"""
_CHECKER = """
from pathlib import Path
from lab import tether
from lab.folders import temporary_folder
from lab.proof.specification import execute
tether.unwind_on_signals()
with temporary_folder() as folder:
    execute("sleep", "300", folder=folder)
"""


@pytest.mark.parametrize("campaign", [_POOL, _CHECKER], ids=["pool", "checker"])
@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_none_is_left_by_a_campaign_that_is_ended(campaign: str, end: str) -> None:
    """Each notices by itself that its parent is gone, whatever it is at; no hook swallows what a signal raises."""
    with subprocess.Popen([sys.executable, "-c", campaign], stdout=-1) as process:
        children = wait_until(lambda: psutil.Process(process.pid).children(recursive=True), "its processes")
        getattr(process, end)()
        assert process.wait(30)
        assert process.communicate()[0].count(b"a hook ran") == 0
    try:
        assert not psutil.wait_procs(children, 30)[1]
    finally:
        for each in children:
            with suppress(psutil.NoSuchProcess):
                each.kill()
