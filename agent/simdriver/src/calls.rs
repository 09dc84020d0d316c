//! The names of NVML's calls: those that this driver answers, and the others of the header, which a
//! client may look up and which answer that they are not supported.

#![allow(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::ffi::c_uint;

macro_rules! calls {
    (answered: $($answered:ident)* ; not_supported: $($stub:ident)*) => {
        /// The calls that answer from the control file.
        pub(crate) const ANSWERED: &[&str] = &[$(stringify!($answered)),*];

        $(#[unsafe(no_mangle)]
        extern "C" fn $stub() -> c_uint {
            crate::abi::Code::NOT_SUPPORTED.0
        })*
    };
}

/// The name of a call that this driver answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Call(String);

/// The name of a call that this driver answers, or `*` for all of them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AnyCall(String);

impl TryFrom<String> for Call {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if ANSWERED.contains(&name.as_str()) {
            Ok(Self(name))
        } else {
            Err(format!("the simulated driver answers no call `{name}`"))
        }
    }
}

impl TryFrom<String> for AnyCall {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if name == "*" { Ok(Self(name)) } else { Call::try_from(name).map(|call| Self(call.0)) }
    }
}

impl From<Call> for String {
    fn from(call: Call) -> Self {
        call.0
    }
}

impl From<AnyCall> for String {
    fn from(call: AnyCall) -> Self {
        call.0
    }
}

impl Borrow<str> for Call {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for AnyCall {
    fn borrow(&self) -> &str {
        &self.0
    }
}

calls! {
    answered:
        nvmlInit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlErrorString nvmlSystemGetDriverVersion
        nvmlSystemGetNVMLVersion nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2
        nvmlDeviceGetCount nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2
        nvmlDeviceGetHandleByUUID nvmlDeviceGetHandleBySerial nvmlDeviceGetHandleByPciBusId
        nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetName nvmlDeviceGetBrand nvmlDeviceGetIndex
        nvmlDeviceGetSerial nvmlDeviceGetUUID nvmlDeviceGetMinorNumber nvmlDeviceGetPciInfo
        nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo_v3 nvmlDeviceGetArchitecture
        nvmlDeviceGetCudaComputeCapability nvmlDeviceGetComputeMode nvmlDeviceGetPersistenceMode
        nvmlDeviceGetPerformanceState nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth
        nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetGpuMaxPcieLinkGeneration
        nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetPcieReplayCounter nvmlDeviceGetTemperature
        nvmlDeviceGetTemperatureV nvmlDeviceGetTemperatureThreshold nvmlDeviceGetCurrentClocksEventReasons
        nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetSupportedClocksEventReasons
        nvmlDeviceGetSupportedClocksThrottleReasons nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo
        nvmlDeviceGetPowerUsage nvmlDeviceGetPowerManagementMode nvmlDeviceGetPowerManagementLimit
        nvmlDeviceGetPowerManagementLimitConstraints nvmlDeviceGetPowerManagementDefaultLimit
        nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2
        nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetUtilizationRates nvmlDeviceGetEccMode
        nvmlDeviceGetDefaultEccMode nvmlDeviceGetTotalEccErrors nvmlDeviceGetMemoryErrorCounter
        nvmlDeviceGetSramEccErrorStatus nvmlDeviceGetUnrepairableMemoryFlag_v1 nvmlDeviceGetRepairStatus
        nvmlDeviceGetRemappedRows nvmlDeviceGetRemappedRows_v2 nvmlDeviceGetRowRemapperHistogram
        nvmlDeviceGetRetiredPages nvmlDeviceGetRetiredPages_v2 nvmlDeviceGetRetiredPagesPendingStatus
        nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvLinkCapability
        nvmlDeviceGetNvLinkErrorCounter nvmlDeviceGetGpuFabricInfo nvmlDeviceGetGpuFabricInfoV
        nvmlDeviceGetFieldValues nvmlDeviceGetComputeRunningProcesses
        nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3
        nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2
        nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses
        nvmlDeviceGetMPSComputeRunningProcesses_v2 nvmlDeviceGetMPSComputeRunningProcesses_v3
        nvmlDeviceGetSupportedEventTypes nvmlDeviceRegisterEvents nvmlEventSetCreate nvmlEventSetWait
        nvmlEventSetWait_v2 nvmlEventSetFree nvmlDeviceSetPowerManagementLimit
        nvmlDeviceSetPowerManagementLimit_v2 nvmlDeviceSetPersistenceMode nvmlDeviceSetComputeMode
        nvmlDeviceSetEccMode nvmlDeviceClearEccErrorCounts;
    not_supported:
        nvmlComputeInstanceDestroy nvmlComputeInstanceGetInfo nvmlComputeInstanceGetInfo_v2
        nvmlDeviceClearAccountingPids nvmlDeviceClearCpuAffinity nvmlDeviceClearFieldValues
        nvmlDeviceCreateGpuInstance nvmlDeviceCreateGpuInstanceWithPlacement nvmlDeviceDiscoverGpus
        nvmlDeviceFreezeNvLinkUtilizationCounter nvmlDeviceGetAPIRestriction
        nvmlDeviceGetAccountingBufferSize nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingPids
        nvmlDeviceGetAccountingStats nvmlDeviceGetAccountingStats_v2 nvmlDeviceGetActiveVgpus
        nvmlDeviceGetAdaptiveClockInfoStatus nvmlDeviceGetAdaptiveTgpModeInfo_v1 nvmlDeviceGetAddressingMode
        nvmlDeviceGetApplicationsClock nvmlDeviceGetAttributes nvmlDeviceGetAttributes_v2
        nvmlDeviceGetAutoBoostedClocksEnabled nvmlDeviceGetBBXTimeData_v1 nvmlDeviceGetBankRemapperStatus_v1
        nvmlDeviceGetBoardId nvmlDeviceGetBoardPartNumber nvmlDeviceGetBridgeChipInfo nvmlDeviceGetBusType
        nvmlDeviceGetC2cModeInfoV nvmlDeviceGetCapabilities nvmlDeviceGetClkMonStatus nvmlDeviceGetClock
        nvmlDeviceGetClockOffsets nvmlDeviceGetComputeInstanceId
        nvmlDeviceGetConfComputeGpuAttestationReport nvmlDeviceGetConfComputeGpuCertificate
        nvmlDeviceGetConfComputeMemSizeInfo nvmlDeviceGetConfComputeProtectedMemoryUsage
        nvmlDeviceGetCoolerInfo nvmlDeviceGetCpuAffinity nvmlDeviceGetCpuAffinityWithinScope
        nvmlDeviceGetCreatableVgpus nvmlDeviceGetCurrentClockFreqs nvmlDeviceGetDecoderUtilization
        nvmlDeviceGetDefaultApplicationsClock nvmlDeviceGetDetailedEccErrors
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle nvmlDeviceGetDisplayActive nvmlDeviceGetDisplayMode
        nvmlDeviceGetDramEncryptionMode nvmlDeviceGetDriverModel nvmlDeviceGetDriverModel_v2
        nvmlDeviceGetDynamicPstatesInfo nvmlDeviceGetEncoderCapacity nvmlDeviceGetEncoderSessions
        nvmlDeviceGetEncoderStats nvmlDeviceGetEncoderUtilization nvmlDeviceGetFBCSessions
        nvmlDeviceGetFBCStats nvmlDeviceGetFanControlPolicy_v2 nvmlDeviceGetFanSpeed
        nvmlDeviceGetFanSpeedRPM nvmlDeviceGetFanSpeed_v2 nvmlDeviceGetGpcClkMinMaxVfOffset
        nvmlDeviceGetGpcClkVfOffset nvmlDeviceGetGpuFabricInfo_v4 nvmlDeviceGetGpuInstanceById
        nvmlDeviceGetGpuInstanceId nvmlDeviceGetGpuInstancePossiblePlacements
        nvmlDeviceGetGpuInstancePossiblePlacements_v2 nvmlDeviceGetGpuInstanceProfileInfo
        nvmlDeviceGetGpuInstanceProfileInfoByIdV nvmlDeviceGetGpuInstanceProfileInfoV
        nvmlDeviceGetGpuInstanceRemainingCapacity nvmlDeviceGetGpuInstances nvmlDeviceGetGpuOperationMode
        nvmlDeviceGetGpuUptime_v1 nvmlDeviceGetGridLicensableFeatures nvmlDeviceGetGridLicensableFeatures_v2
        nvmlDeviceGetGridLicensableFeatures_v3 nvmlDeviceGetGridLicensableFeatures_v4
        nvmlDeviceGetGspFirmwareMode nvmlDeviceGetGspFirmwareVersion nvmlDeviceGetHandleByUUIDV
        nvmlDeviceGetHostVgpuMode nvmlDeviceGetHostname_v1 nvmlDeviceGetInforomConfigurationChecksum
        nvmlDeviceGetInforomImageVersion nvmlDeviceGetInforomVersion nvmlDeviceGetIrqNum
        nvmlDeviceGetJpgUtilization nvmlDeviceGetLastBBXFlushTime nvmlDeviceGetMarginTemperature
        nvmlDeviceGetMaxCustomerBoostClock nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMemClkMinMaxVfOffset
        nvmlDeviceGetMemClkVfOffset nvmlDeviceGetMemoryAffinity nvmlDeviceGetMemoryBusWidth
        nvmlDeviceGetMemoryLimits_v1 nvmlDeviceGetMigDeviceHandleByIndex nvmlDeviceGetMigMode
        nvmlDeviceGetMinMaxClockOfPState nvmlDeviceGetMinMaxFanSpeed nvmlDeviceGetModuleId
        nvmlDeviceGetMultiGpuBoard nvmlDeviceGetNumFans nvmlDeviceGetNumGpuCores nvmlDeviceGetNumaNodeId
        nvmlDeviceGetNvLinkInfo nvmlDeviceGetNvLinkInfo_v3 nvmlDeviceGetNvLinkRemoteDeviceType
        nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2
        nvmlDeviceGetNvLinkTelemetrySamples_v1 nvmlDeviceGetNvLinkUtilizationControl
        nvmlDeviceGetNvLinkUtilizationCounter nvmlDeviceGetNvlinkBwMode
        nvmlDeviceGetNvlinkNvlePrivateInfo_v1 nvmlDeviceGetNvlinkRemapTableInfo_v1
        nvmlDeviceGetNvlinkSupportedBwModes nvmlDeviceGetOfaUtilization nvmlDeviceGetP2PStatus
        nvmlDeviceGetPciInfoExt nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetPcieSpeed
        nvmlDeviceGetPcieThroughput nvmlDeviceGetPdi nvmlDeviceGetPerformanceModes
        nvmlDeviceGetPgpuMetadataString nvmlDeviceGetPlatformInfo nvmlDeviceGetPowerMizerMode_v1
        nvmlDeviceGetPowerSource nvmlDeviceGetPowerState nvmlDeviceGetProcessUtilization
        nvmlDeviceGetProcessesUtilizationInfo nvmlDeviceGetRunningProcessDetailList nvmlDeviceGetSamples
        nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts nvmlDeviceGetSupportedGraphicsClocks
        nvmlDeviceGetSupportedMemoryClocks nvmlDeviceGetSupportedPerformanceStates
        nvmlDeviceGetSupportedVgpus nvmlDeviceGetTargetFanSpeed nvmlDeviceGetThermalSettings
        nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetTopologyNearestGpus
        nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetVbiosVersion nvmlDeviceGetVgpuCapabilities
        nvmlDeviceGetVgpuHeterogeneousMode nvmlDeviceGetVgpuInstancesUtilizationInfo
        nvmlDeviceGetVgpuMetadata nvmlDeviceGetVgpuProcessUtilization
        nvmlDeviceGetVgpuProcessesUtilizationInfo nvmlDeviceGetVgpuSchedulerCapabilities
        nvmlDeviceGetVgpuSchedulerLog nvmlDeviceGetVgpuSchedulerLog_v2 nvmlDeviceGetVgpuSchedulerState
        nvmlDeviceGetVgpuSchedulerState_v2 nvmlDeviceGetVgpuTypeCreatablePlacements
        nvmlDeviceGetVgpuTypeSupportedPlacements nvmlDeviceGetVgpuUtilization nvmlDeviceGetViolationStatus
        nvmlDeviceGetVirtualizationMode nvmlDeviceIsMigDeviceHandle nvmlDeviceLockNvlinkRemapTable_v1
        nvmlDeviceModifyDrainState nvmlDeviceOnSameBoard nvmlDevicePerfMetricsGetSamples_v1
        nvmlDevicePowerSmoothingActivatePresetProfile nvmlDevicePowerSmoothingSetState
        nvmlDevicePowerSmoothingUpdatePresetProfileParam nvmlDeviceQueryDrainState
        nvmlDeviceReadPRMCounters_v1 nvmlDeviceReadWritePRM_v1 nvmlDeviceRemoveGpu nvmlDeviceRemoveGpu_v2
        nvmlDeviceResetApplicationsClocks nvmlDeviceResetGpuLockedClocks nvmlDeviceResetMemoryLockedClocks
        nvmlDeviceResetNvLinkErrorCounters nvmlDeviceResetNvLinkUtilizationCounter
        nvmlDeviceSetAPIRestriction nvmlDeviceSetAccountingMode nvmlDeviceSetAdaptiveTgpMode_v1
        nvmlDeviceSetApplicationsClocks nvmlDeviceSetAutoBoostedClocksEnabled nvmlDeviceSetClockOffsets
        nvmlDeviceSetConfComputeUnprotectedMemSize nvmlDeviceSetCpuAffinity
        nvmlDeviceSetDefaultAutoBoostedClocksEnabled nvmlDeviceSetDefaultFanSpeed_v2
        nvmlDeviceSetDramEncryptionMode nvmlDeviceSetDriverModel nvmlDeviceSetFanControlPolicy
        nvmlDeviceSetFanSpeed_v2 nvmlDeviceSetGpcClkVfOffset nvmlDeviceSetGpuLockedClocks
        nvmlDeviceSetGpuOperationMode nvmlDeviceSetHostname_v1 nvmlDeviceSetMemClkVfOffset
        nvmlDeviceSetMemoryLimits_v1 nvmlDeviceSetMemoryLockedClocks nvmlDeviceSetMigMode
        nvmlDeviceSetNvLinkDeviceLowPowerThreshold nvmlDeviceSetNvLinkUtilizationControl
        nvmlDeviceSetNvlinkBwMode nvmlDeviceSetNvlinkBwModeAsync_v1 nvmlDeviceSetNvlinkNvleReady_v1
        nvmlDeviceSetPowerMizerMode_v1 nvmlDeviceSetRusdSettings_v1 nvmlDeviceSetTemperatureThreshold
        nvmlDeviceSetVgpuCapabilities nvmlDeviceSetVgpuHeterogeneousMode nvmlDeviceSetVgpuSchedulerState
        nvmlDeviceSetVgpuSchedulerState_v2 nvmlDeviceSetVirtualizationMode
        nvmlDeviceSetupNvlinkNvleEncryptionKey_v1 nvmlDeviceValidateInforom nvmlDeviceVgpuForceGspUnload
        nvmlDeviceWorkloadPowerProfileClearRequestedProfiles
        nvmlDeviceWorkloadPowerProfileGetCurrentProfiles nvmlDeviceWorkloadPowerProfileGetProfilesInfo
        nvmlDeviceWorkloadPowerProfileSetRequestedProfiles nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1
        nvmlEventSetGetContextCount_v1 nvmlEventSetGetContextData_v1 nvmlEventSetGetContextInfo_v1
        nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1 nvmlEventSetRegisterGpuOperationalEvents_v1
        nvmlEventSetWait_v3 nvmlGetExcludedDeviceCount nvmlGetExcludedDeviceInfoByIndex
        nvmlGetVgpuCompatibility nvmlGetVgpuDriverCapabilities nvmlGetVgpuVersion nvmlGpmMetricsGet
        nvmlGpmMigSampleGet nvmlGpmQueryDeviceSupport nvmlGpmQueryIfStreamingEnabled nvmlGpmSampleAlloc
        nvmlGpmSampleFree nvmlGpmSampleGet nvmlGpmSetStreamingEnabled nvmlGpuInstanceCreateComputeInstance
        nvmlGpuInstanceCreateComputeInstanceWithPlacement nvmlGpuInstanceDestroy
        nvmlGpuInstanceGetActiveVgpus nvmlGpuInstanceGetComputeInstanceById
        nvmlGpuInstanceGetComputeInstancePossiblePlacements nvmlGpuInstanceGetComputeInstanceProfileInfo
        nvmlGpuInstanceGetComputeInstanceProfileInfoV nvmlGpuInstanceGetComputeInstanceRemainingCapacity
        nvmlGpuInstanceGetComputeInstances nvmlGpuInstanceGetCreatableVgpus nvmlGpuInstanceGetInfo
        nvmlGpuInstanceGetVgpuHeterogeneousMode nvmlGpuInstanceGetVgpuSchedulerLog
        nvmlGpuInstanceGetVgpuSchedulerLog_v2 nvmlGpuInstanceGetVgpuSchedulerState
        nvmlGpuInstanceGetVgpuSchedulerState_v2 nvmlGpuInstanceGetVgpuTypeCreatablePlacements
        nvmlGpuInstanceSetVgpuHeterogeneousMode nvmlGpuInstanceSetVgpuSchedulerState
        nvmlGpuInstanceSetVgpuSchedulerState_v2 nvmlSetVgpuVersion nvmlSystemEventSetCreate
        nvmlSystemEventSetFree nvmlSystemEventSetWait nvmlSystemGetCPER_v1
        nvmlSystemGetConfComputeCapabilities nvmlSystemGetConfComputeGpusReadyState
        nvmlSystemGetConfComputeKeyRotationThresholdInfo nvmlSystemGetConfComputeSettings
        nvmlSystemGetConfComputeSettings_v2 nvmlSystemGetConfComputeState nvmlSystemGetDriverBranch
        nvmlSystemGetHicVersion nvmlSystemGetNvlinkBwMode nvmlSystemGetProcessName
        nvmlSystemGetTopologyGpuSet nvmlSystemRegisterEvents nvmlSystemSetConfComputeGpusReadyState
        nvmlSystemSetConfComputeKeyRotationThresholdInfo nvmlSystemSetNvlinkBwMode nvmlUnitGetCount
        nvmlUnitGetDevices nvmlUnitGetFanSpeedInfo nvmlUnitGetHandleByIndex nvmlUnitGetLedState
        nvmlUnitGetPsuInfo nvmlUnitGetTemperature nvmlUnitGetUnitInfo nvmlUnitSetLedState
        nvmlVgpuInstanceClearAccountingPids nvmlVgpuInstanceGetAccountingMode
        nvmlVgpuInstanceGetAccountingPids nvmlVgpuInstanceGetAccountingStats nvmlVgpuInstanceGetEccMode
        nvmlVgpuInstanceGetEncoderCapacity nvmlVgpuInstanceGetEncoderSessions
        nvmlVgpuInstanceGetEncoderStats nvmlVgpuInstanceGetFBCSessions nvmlVgpuInstanceGetFBCStats
        nvmlVgpuInstanceGetFbUsage nvmlVgpuInstanceGetFrameRateLimit nvmlVgpuInstanceGetGpuInstanceId
        nvmlVgpuInstanceGetGpuPciId nvmlVgpuInstanceGetLicenseInfo nvmlVgpuInstanceGetLicenseInfo_v2
        nvmlVgpuInstanceGetLicenseStatus nvmlVgpuInstanceGetMdevUUID nvmlVgpuInstanceGetMetadata
        nvmlVgpuInstanceGetPlacementId nvmlVgpuInstanceGetRuntimeStateSize nvmlVgpuInstanceGetType
        nvmlVgpuInstanceGetUUID nvmlVgpuInstanceGetVmDriverVersion nvmlVgpuInstanceGetVmID
        nvmlVgpuInstanceSetEncoderCapacity nvmlVgpuTypeGetBAR1Info nvmlVgpuTypeGetCapabilities
        nvmlVgpuTypeGetClass nvmlVgpuTypeGetDeviceID nvmlVgpuTypeGetFbReservation
        nvmlVgpuTypeGetFrameRateLimit nvmlVgpuTypeGetFramebufferSize nvmlVgpuTypeGetGpuInstanceProfileId
        nvmlVgpuTypeGetGspHeapSize nvmlVgpuTypeGetLicense nvmlVgpuTypeGetMaxInstances
        nvmlVgpuTypeGetMaxInstancesPerGpuInstance nvmlVgpuTypeGetMaxInstancesPerVm nvmlVgpuTypeGetName
        nvmlVgpuTypeGetNumDisplayHeads nvmlVgpuTypeGetResolution
}
