"""nvitop's snapshot of every device must agree with what `reknit-simdriver show` says."""

import simdriver
from simdriver import same

from nvitop import Device

simdriver.init(4)
for gpu in range(4):
    simdriver.set(gpu, temperature=40 + gpu, power_mw=120_000 + gpu, power_limit_mw=300_000 + gpu,
                  utilization=10 + gpu, ecc_uncorrected=5 + gpu, memory_bytes=(40 + gpu) << 30,
                  name=f"GPU of place {gpu}", nvlinks=4 + gpu)
_, gpus = simdriver.show()

devices = Device.all()
same("devices", len(devices), len(gpus))
for device, said in zip(devices, gpus):
    snapshot = device.as_snapshot()
    for key, want in [
        ("uuid", said.uuid),
        ("name", said.name),
        ("bus_id", said.pci_bus_id),
        ("temperature", said.temperature),
        ("power_usage", said.power_mw),
        ("power_limit", said.power_limit_mw),
        ("gpu_utilization", said.utilization),
        ("memory_total", said.memory_bytes),
        ("total_volatile_uncorrected_ecc_errors", said.ecc_uncorrected),
        ("cuda_compute_capability", (9, 0)),
        ("performance_state", "P0"),
    ]:
        same(key, getattr(snapshot, key), want)
    same("serial", device.serial(), said.serial)
    same("links", device.nvlink_link_count(), said.nvlinks)
    same("processes", device.processes(), {})
simdriver.finish(at_least=57)
