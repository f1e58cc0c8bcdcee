"""Processes of a campaign end when it does."""

import subprocess
import sys
from contextlib import suppress

import psutil

from tests.support.waiting import wait_until

_CAMPAIGN = """
from time import sleep
from lab.proof.__main__ import _in_processes
list(_in_processes(sleep, "", [300] * 9))
"""


def test_none_is_left_by_a_campaign_that_is_killed() -> None:
    """Each notices by itself that its parent is gone, whatever it is at."""
    with subprocess.Popen([sys.executable, "-c", _CAMPAIGN]) as campaign:
        children = wait_until(psutil.Process(campaign.pid).children, "its processes")
        campaign.kill()
    try:
        assert not psutil.wait_procs(children, 30)[1]
    finally:
        for each in children:
            with suppress(psutil.NoSuchProcess):
                each.kill()
