"""GPUHealthCheck of NVIDIA's resiliency extension sees the recovery action and a lost GPU."""

import logging

import simdriver
from simdriver import same

from nvidia_resiliency_ext.shared_utils.health_check import GPUHealthCheck

logging.getLogger("nvidia_resiliency_ext.shared_utils.health_check").setLevel(logging.CRITICAL)
simdriver.init(8)
check = GPUHealthCheck()
same("the check is on", check.enabled, True)
same("healthy", check(), True)
for action in ["reset", "reboot", "drain_p2p", "drain_and_reset"]:
    simdriver.set(5, recovery_action=action)
    same(action, check(), False)
    simdriver.set(5, recovery_action="none")
    same(f"after {action}", check(), True)
simdriver.set(5, lost=True)
same("lost", check(), False)
simdriver.set(5, lost=False)
same("after lost", check(), True)
simdriver.finish(at_least=12)
