//! Which GPU it is.

use super::{device_calls, put, put_text};
use crate::abi::{BRAND, Code, PciInfo};
use crate::state::{Architecture, BusNumbers, Gpu};
use std::ffi::{c_char, c_int, c_uint};

/// `pciDeviceId` and `pciSubSystemId`: an H100's.
const PCI_DEVICE: c_uint = 0x2330_10de;
const PCI_SUB_SYSTEM: c_uint = 0x16c1_10de;

device_calls! {
    fn nvmlDeviceGetUUID(gpu, out: *mut c_char, length: c_uint) { put_text(out, length, &gpu.uuid) }
    fn nvmlDeviceGetName(gpu, out: *mut c_char, length: c_uint) { put_text(out, length, &gpu.name) }
    fn nvmlDeviceGetSerial(gpu, out: *mut c_char, length: c_uint) { put_text(out, length, &gpu.serial) }
    fn nvmlDeviceGetBrand(_gpu, out: *mut c_uint) { put(out, BRAND) }
    fn nvmlDeviceGetIndex(gpu, out: *mut c_uint) { put(out, gpu.index() as c_uint) }
    fn nvmlDeviceGetMinorNumber(gpu, out: *mut c_uint) { put(out, gpu.place as c_uint) }
    fn nvmlDeviceGetPciInfo(gpu, out: *mut PciInfo) { put(out, pci_info(&gpu)?) }
    fn nvmlDeviceGetPciInfo_v2(gpu, out: *mut PciInfo) { put(out, pci_info(&gpu)?) }
    fn nvmlDeviceGetPciInfo_v3(gpu, out: *mut PciInfo) { put(out, pci_info(&gpu)?) }
    fn nvmlDeviceGetArchitecture(gpu, out: *mut c_uint) { put(out, gpu.architecture as c_uint) }
    fn nvmlDeviceGetCudaComputeCapability(gpu, major: *mut c_int, minor: *mut c_int) {
        let (first, second) = compute_capability(gpu.architecture);
        put(major, first).and(put(minor, second))
    }
    fn nvmlDeviceGetComputeMode(_gpu, out: *mut c_uint) { put(out, 0) }
    fn nvmlDeviceGetPersistenceMode(_gpu, out: *mut c_uint) { put(out, 1) }
    fn nvmlDeviceGetPerformanceState(_gpu, out: *mut c_uint) { put(out, 0) }
}

/// Of the data-centre GPU of that architecture.
fn compute_capability(architecture: Architecture) -> (c_int, c_int) {
    match architecture {
        Architecture::Volta => (7, 0),
        Architecture::Turing => (7, 5),
        Architecture::Ampere => (8, 0),
        Architecture::Ada => (8, 9),
        Architecture::Hopper => (9, 0),
        Architecture::Blackwell => (10, 0),
    }
}

fn pci_info(gpu: &Gpu) -> Result<PciInfo, Code> {
    let BusNumbers { domain, bus, device } = gpu.bus_numbers().map_err(|_| Code::UNKNOWN)?;
    let mut info = PciInfo {
        bus_id_legacy: [0; 16],
        domain,
        bus,
        device,
        pci_device_id: PCI_DEVICE,
        pci_sub_system_id: PCI_SUB_SYSTEM,
        bus_id: [0; 32],
    };
    let legacy = format!("{domain:04X}:{bus:02X}:{device:02X}.0");
    put_text(info.bus_id_legacy.as_mut_ptr(), 16, &legacy)?;
    let bus_id = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
    put_text(info.bus_id.as_mut_ptr(), 32, &bus_id)?;
    Ok(info)
}
