"""Reads every value through nvidia-ml-py and compares it with what `reknit-simdriver show` says."""

import ctypes

import simdriver
from simdriver import fails, same

import pynvml as nv

simdriver.init(3)
for gpu in range(3):
    # Values that no other key of this or another GPU has, so that a mix-up shows.
    distinct = iter(range(1000 * (gpu + 1), 1000 * (gpu + 2)))
    simdriver.set(gpu, **{key: next(distinct) for key in [
        "temperature", "memory_temperature", "slowdown_temperature", "shutdown_temperature",
        "utilization", "power_mw", "power_limit_mw", "power_limit_enforced_mw", "power_limit_default_mw",
        "power_limit_min_mw", "power_limit_max_mw", "ecc_corrected", "ecc_uncorrected",
        "remapped_correctable", "remapped_uncorrectable", "nvlink_replays", "nvlink_recoveries",
        "nvlink_crc_errors", "pcie_replays", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max",
        "memory_bytes",
    ]}, name=f"GPU of place {gpu}")
simdriver.set(0, architecture="hopper", throttle=["hw_slowdown", "power_brake"], remap_pending=True,
              ecc_sram_threshold=True, recovery_action="drain_p2p", nvlink_down=[3, 17], nvlink_ber=3.2e-11,
              nvlink_recovery_failures=77, power_limit_enforced_mw=None, memory_unrepairable=True)
simdriver.set(1, architecture="blackwell", nvlink_version=5, throttle="sw_power_cap", remap_failure=True,
              recovery_action=4, nvlink_down=5, nvlinks=12, nvlink_ber=4e-8,
              fabric={"state": "completed", "route_unhealthy": True, "clique": 9})
simdriver.set(2, architecture="volta", nvlink_version=2, nvlinks=6, nvlink_down=True, ecc_mode=False,
              retired_single=3, retired_double=2, retired_pending=True, fabric_bandwidth_degraded=True)
node, gpus = simdriver.show()

NVLINK = {2: nv.NVML_NVLINK_VERSION_2_0, 4: nv.NVML_NVLINK_VERSION_4_0, 5: nv.NVML_NVLINK_VERSION_5_0}
ARCHITECTURE = {"volta": nv.NVML_DEVICE_ARCH_VOLTA, "hopper": nv.NVML_DEVICE_ARCH_HOPPER,
                "blackwell": nv.NVML_DEVICE_ARCH_BLACKWELL}
ACTION = {"none": nv.NVML_GPU_RECOVERY_ACTION_NONE, "drain_p2p": nv.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P,
          "drain_and_reset": nv.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET}
REASON = {"none": 0, "sw_power_cap": nv.nvmlClocksEventReasonSwPowerCap,
          "hw_slowdown": nv.nvmlClocksThrottleReasonHwSlowdown,
          "power_brake": nv.nvmlClocksThrottleReasonHwPowerBrakeSlowdown}
FABRIC_STATE = {"completed": nv.NVML_GPU_FABRIC_STATE_COMPLETED}


def field(handle, number, link=0):
    value = nv.nvmlDeviceGetFieldValues(handle, [(number, link)])[0]
    nv._nvmlCheckReturn(value.nvmlReturn)
    types = {nv.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal", nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal"}
    return getattr(value.value, types[value.valueType])


def rate(packed):
    """A bit error rate, as the header's macro takes it apart."""
    return (packed >> 8 & 0xF) * 10.0 ** -(packed & 0xFF)


def down(said, link):
    which = said.nvlink_down
    if isinstance(which, list):
        return link in which
    return which if isinstance(which, bool) else link < which


def check_identity(place, handle, said):
    same("uuid", nv.nvmlDeviceGetUUID(handle), said.uuid)
    same("name", nv.nvmlDeviceGetName(handle), said.name)
    same("serial", nv.nvmlDeviceGetSerial(handle), said.serial)
    same("index", nv.nvmlDeviceGetIndex(handle), place)
    same("minor", nv.nvmlDeviceGetMinorNumber(handle), place)
    pci = nv.nvmlDeviceGetPciInfo(handle)
    same("bus id", pci.busId, said.pci_bus_id)
    same("bus", f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0", said.pci_bus_id)
    same("architecture", nv.nvmlDeviceGetArchitecture(handle), ARCHITECTURE[said.architecture])
    for find, by in [(nv.nvmlDeviceGetHandleByUUID, said.uuid), (nv.nvmlDeviceGetHandleBySerial, said.serial),
                     (nv.nvmlDeviceGetHandleByPciBusId, said.pci_bus_id)]:
        same(find.__name__, nv.nvmlDeviceGetUUID(find(by.encode())), said.uuid)


def check_sensors(handle, said):
    same("temperature", nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU), said.temperature)
    same("temperature", nv.nvmlDeviceGetTemperatureV(handle, nv.NVML_TEMPERATURE_GPU), said.temperature)
    same("memory temperature", field(handle, nv.NVML_FI_DEV_MEMORY_TEMP), said.memory_temperature)
    for threshold, want in [(nv.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, said.slowdown_temperature),
                            (nv.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, said.shutdown_temperature)]:
        same("temperature threshold", nv.nvmlDeviceGetTemperatureThreshold(handle, threshold), want)
    same("utilization", nv.nvmlDeviceGetUtilizationRates(handle).gpu, said.utilization)
    same("power", nv.nvmlDeviceGetPowerUsage(handle), said.power_mw)
    same("power, average", field(handle, nv.NVML_FI_DEV_POWER_AVERAGE), said.power_mw)
    same("power, instant", field(handle, nv.NVML_FI_DEV_POWER_INSTANT), said.power_mw)
    requested, bounds = said.power_limit_mw, [said.power_limit_min_mw, said.power_limit_max_mw]
    enforced = said.power_limit_enforced_mw or requested
    same("power limit", nv.nvmlDeviceGetPowerManagementLimit(handle), requested)
    same("power limit, field", field(handle, nv.NVML_FI_DEV_POWER_REQUESTED_LIMIT), requested)
    same("power limit enforced", nv.nvmlDeviceGetEnforcedPowerLimit(handle), enforced)
    same("power limit enforced, field", field(handle, nv.NVML_FI_DEV_POWER_CURRENT_LIMIT), enforced)
    same("power limit default", nv.nvmlDeviceGetPowerManagementDefaultLimit(handle), said.power_limit_default_mw)
    same("power limit default, field", field(handle, nv.NVML_FI_DEV_POWER_DEFAULT_LIMIT), said.power_limit_default_mw)
    same("power limit bounds", nv.nvmlDeviceGetPowerManagementLimitConstraints(handle), bounds)
    same("power limit bounds, fields",
         [field(handle, nv.NVML_FI_DEV_POWER_MIN_LIMIT), field(handle, nv.NVML_FI_DEV_POWER_MAX_LIMIT)], bounds)
    names = said.throttle if isinstance(said.throttle, list) else [said.throttle]
    mask = sum(REASON[name] for name in names)
    same("throttle", nv.nvmlDeviceGetCurrentClocksEventReasons(handle), mask)
    same("throttle", nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle), mask)
    same("pcie", [nv.nvmlDeviceGetCurrPcieLinkGeneration(handle), nv.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                  nv.nvmlDeviceGetCurrPcieLinkWidth(handle), nv.nvmlDeviceGetMaxPcieLinkWidth(handle)],
         [said.pcie_gen, said.pcie_gen_max, said.pcie_width, said.pcie_width_max])
    same("pcie replays", nv.nvmlDeviceGetPcieReplayCounter(handle), said.pcie_replays)
    for number in [nv.NVML_FI_DEV_PCIE_REPLAY_COUNTER, nv.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS,
                   nv.NVML_FI_DEV_PCIE_COUNT_NAKS_RECEIVED]:
        same("pcie replays, field", field(handle, number), said.pcie_replays)
    same("recovery action", field(handle, nv.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION), ACTION[said.recovery_action])


def check_memory(handle, said):
    same("memory", nv.nvmlDeviceGetMemoryInfo(handle).total, said.memory_bytes)
    same("memory", nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2).total, said.memory_bytes)
    same("ecc mode", nv.nvmlDeviceGetEccMode(handle), [said.ecc_mode, said.ecc_mode])
    for kind, want, numbers in [
        (nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, said.ecc_corrected,
         [nv.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, nv.NVML_FI_DEV_ECC_SBE_AGG_TOTAL]),
        (nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, said.ecc_uncorrected,
         [nv.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, nv.NVML_FI_DEV_ECC_DBE_AGG_TOTAL]),
    ]:
        for counter in [nv.NVML_VOLATILE_ECC, nv.NVML_AGGREGATE_ECC]:
            dram = (handle, kind, counter, nv.NVML_MEMORY_LOCATION_DRAM)
            if said.ecc_mode:
                same("ecc", nv.nvmlDeviceGetTotalEccErrors(handle, kind, counter), want)
                same("ecc, dram", nv.nvmlDeviceGetMemoryErrorCounter(*dram), want)
                same("ecc, field", field(handle, numbers[counter]), want)
            else:
                fails("ecc", nv.NVMLError_NotSupported, nv.nvmlDeviceGetTotalEccErrors, handle, kind, counter)
    sram = nv.c_nvmlEccSramErrorStatus_v1_t()
    nv.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(sram))
    same("sram threshold", bool(sram.bThresholdExceeded), said.ecc_sram_threshold)
    # By hand: the binding's struct begins with a version, which the header's has not.
    unrepairable = ctypes.c_uint()
    nv._nvmlCheckReturn(nv._nvmlGetFunctionPointer("nvmlDeviceGetUnrepairableMemoryFlag_v1")(
        handle, ctypes.byref(unrepairable)))
    same("unrepairable memory", bool(unrepairable.value), said.memory_unrepairable)
    rows = [said.remapped_correctable, said.remapped_uncorrectable, said.remap_pending, said.remap_failure]
    same("remapped rows", list(nv.nvmlDeviceGetRemappedRows(handle)), rows)
    same("remapped rows, fields", [field(handle, number) for number in [
        nv.NVML_FI_DEV_REMAPPED_COR, nv.NVML_FI_DEV_REMAPPED_UNC, nv.NVML_FI_DEV_REMAPPED_PENDING,
        nv.NVML_FI_DEV_REMAPPED_FAILURE]], rows)
    causes = [(nv.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, said.retired_single,
               nv.NVML_FI_DEV_RETIRED_SBE),
              (nv.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR, said.retired_double, nv.NVML_FI_DEV_RETIRED_DBE)]
    for cause, want, number in causes:
        if want is None:
            fails("retired pages", nv.NVMLError_NotSupported, nv.nvmlDeviceGetRetiredPages, handle, cause)
        else:
            same("retired pages", len(nv.nvmlDeviceGetRetiredPages(handle, cause)), want)
            same("retired pages", len(nv.nvmlDeviceGetRetiredPages_v2(handle, cause)), want)
            same("retired pages, field", field(handle, number), want)
    if said.retired_pending is None:
        fails("retired pages", nv.NVMLError_NotSupported, nv.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    else:
        same("retired pages", bool(nv.nvmlDeviceGetRetiredPagesPendingStatus(handle)), said.retired_pending)


def check_links(handle, said):
    same("links", field(handle, nv.NVML_FI_DEV_NVLINK_LINK_COUNT), said.nvlinks)
    for link in range(said.nvlinks):
        same(f"link {link}", bool(nv.nvmlDeviceGetNvLinkState(handle, link)), not down(said, link))
        same(f"link {link}, field", field(handle, nv.NVML_FI_DEV_NVLINK_GET_STATE, link), not down(said, link))
        same(f"link {link}, version", nv.nvmlDeviceGetNvLinkVersion(handle, link), NVLINK[said.nvlink_version])
        same(f"link {link}, version field", field(handle, nv.NVML_FI_DEV_NVLINK_GET_VERSION, link),
             NVLINK[said.nvlink_version])
    fails("a link too many", nv.NVMLError_NotSupported, nv.nvmlDeviceGetNvLinkState, handle, said.nvlinks)
    for link in [0, 1]:
        of_first = lambda count: count if link == 0 else 0
        for counter, want, number in [
            (nv.NVML_NVLINK_ERROR_DL_REPLAY, said.nvlink_replays, nv.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY),
            (nv.NVML_NVLINK_ERROR_DL_RECOVERY, said.nvlink_recoveries, nv.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY),
            (nv.NVML_NVLINK_ERROR_DL_CRC_FLIT, said.nvlink_crc_errors, nv.NVML_FI_DEV_NVLINK_ERROR_DL_CRC),
        ]:
            if said.nvlink_version < 5:
                same("link errors", nv.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter), of_first(want))
                same("link errors, field", field(handle, number, link), of_first(want))
            else:
                fails("link errors", nv.NVMLError_NotSupported, nv.nvmlDeviceGetNvLinkErrorCounter,
                      handle, link, counter)
                fails("link errors, field", nv.NVMLError_NotSupported, field, handle, number, link)
        same("link receive errors", field(handle, nv.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, link),
             of_first(said.nvlink_crc_errors))
        same("link recoveries failed", field(handle, nv.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, link),
             of_first(said.nvlink_recovery_failures))
        same("link recoveries", field(handle, nv.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, link),
             of_first(said.nvlink_recoveries))
        ber = rate(field(handle, nv.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER, link))
        same("link bit error rate to one digit", f"{ber:.0e}", f"{of_first(said.nvlink_ber):.0e}")
    info = nv.c_nvmlGpuFabricInfo_v3_t()
    nv.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    if said.fabric is None:
        same("fabric", info.state, nv.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
    else:
        bits = lambda shift: info.healthMask >> shift & 3
        yes_or_no = lambda flag: nv.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE if flag else \
            nv.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_FALSE
        same("fabric", [info.state, info.cliqueId], [FABRIC_STATE[said.fabric["state"]], said.fabric["clique"]])
        same("fabric route", bits(nv.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY),
             yes_or_no(said.fabric["route_unhealthy"]))
        same("fabric bandwidth", bits(nv.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW),
             yes_or_no(said.fabric["bandwidth_degraded"]))


def check_faults(handle, said):
    """Each fault comes and goes; `said` is what the healed GPU says."""
    healed = {key: getattr(said, key) for key in
              ["lost", "reset_required", "absent", "errors", "generation", "delays_ms", "hangs", "hang"]}
    for fault, error in [({"lost": True}, nv.NVMLError_GpuIsLost),
                         ({"reset_required": True}, nv.NVMLError_ResetRequired),
                         ({"absent": True}, nv.NVMLError_InvalidArgument),
                         ({"generation": 7}, nv.NVMLError_InvalidArgument),
                         ({"errors": {"nvmlDeviceGetPowerUsage": 999}}, nv.NVMLError_Unknown),
                         ({"errors": {"*": 11}}, nv.NVMLError_IrqIssue)]:
        simdriver.set(0, **fault)
        fails(f"{fault}", error, nv.nvmlDeviceGetPowerUsage, handle)
        simdriver.set(0, **healed)
        same(f"after {fault}", nv.nvmlDeviceGetPowerUsage(handle), said.power_mw)


def check_setters(handle):
    simdriver.set(0, power_limit_min_mw=200_000, power_limit_max_mw=700_000)
    nv.nvmlDeviceSetPowerManagementLimit(handle, 450_000)
    same("power limit set", simdriver.show()[1][0].power_limit_mw, 450_000)
    nv.nvmlDeviceSetPowerManagementLimit_v2(handle, nv.NVML_POWER_SCOPE_GPU, 460_000)
    same("power limit set", simdriver.show()[1][0].power_limit_mw, 460_000)
    fails("power limit too low", nv.NVMLError_InvalidArgument, nv.nvmlDeviceSetPowerManagementLimit, handle, 199_999)
    same("power limit kept", nv.nvmlDeviceGetPowerManagementLimit(handle), 460_000)


nv.nvmlInit()
same("driver version", nv.nvmlSystemGetDriverVersion(), node["driver_version"])
same("count", nv.nvmlDeviceGetCount(), len(gpus))
handles = [nv.nvmlDeviceGetHandleByIndex(place) for place in range(len(gpus))]
for place, (handle, said) in enumerate(zip(handles, gpus)):
    check_identity(place, handle, said)
    check_sensors(handle, said)
    check_memory(handle, said)
    check_links(handle, said)
check_faults(handles[0], gpus[0])
same("keys of the file that nothing was compared with", gpus[0].never_asked(), [])
check_setters(handles[0])
nv.nvmlShutdown()
simdriver.finish(at_least=400)
