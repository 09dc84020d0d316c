"""Waits for events through nvidia-ml-py while the tool raises them."""

import threading

import simdriver
from simdriver import fails, same

import pynvml as nv

TYPES = nv.nvmlEventTypeXidCriticalError | nv.nvmlEventTypeGpuRecoveryAction

simdriver.init(2)
simdriver.set(1, recovery_action="reset")
simdriver.event(1, "xid=13")
nv.nvmlInit()
handle = nv.nvmlDeviceGetHandleByIndex(1)
events = nv.nvmlEventSetCreate()
nv.nvmlDeviceRegisterEvents(handle, TYPES, events)
fails("an event from before", nv.NVMLError_Timeout, nv.nvmlEventSetWait_v2, events, 0)

# The wait begins before the event or after it: either must end with the event.
raising = threading.Thread(target=simdriver.event, args=(1, "xid=79"))
raising.start()
data = nv.nvmlEventSetWait_v2(events, 30_000)
raising.join()
same("type", data.eventType, nv.nvmlEventTypeXidCriticalError)
same("xid", data.eventData, 79)
same("gpu", nv.nvmlDeviceGetUUID(data.device), simdriver.show()[1][1].uuid)

simdriver.event(0, "xid=48")
fails("another GPU's event", nv.NVMLError_Timeout, nv.nvmlEventSetWait_v2, events, 0)
simdriver.event(1, "single_bit_ecc")
fails("an event of another type", nv.NVMLError_Timeout, nv.nvmlEventSetWait_v2, events, 0)
simdriver.event(1, "recovery_action")
data = nv.nvmlEventSetWait_v2(events, 30_000)
same("type", data.eventType, nv.nvmlEventTypeGpuRecoveryAction)
same("action", data.eventData, nv.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
nv.nvmlEventSetFree(events)
nv.nvmlShutdown()
simdriver.finish(at_least=8)
