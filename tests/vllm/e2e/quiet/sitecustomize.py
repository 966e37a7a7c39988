"""Makes waiting processes leave their core, in every Python that has this folder on its PYTHONPATH, as these checks'
engines have.

vLLM's processes wait for each other by calling sched_yield for up to a second. Three of them on two cores keep all else
on the machine from running, now and then for the better part of a minute (seen with Linux 6.18): the cluster, and
every process that must answer by a deadline.
"""

import os
import select

PAUSE_S = 5e-5


def _pause() -> None:
    select.select([], [], [], PAUSE_S)


os.sched_yield = _pause
