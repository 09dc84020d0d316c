//! The bus between the GPU and its host.

use super::super::protocol::SlowSet;
use super::fault::Fault;
use super::query::Query;

pub(super) fn slow(query: &mut Query<'_>, set: &mut SlowSet) -> Result<(), Fault> {
    let replays = query.told("nvmlDeviceGetPcieReplayCounter", |_, device| device.pcie_replay_counter())?;
    set.pcie_replays = replays.map(u64::from);
    set.pcie_gen =
        query.told("nvmlDeviceGetCurrPcieLinkGeneration", |_, device| device.current_pcie_link_gen())?;
    set.pcie_gen_max =
        query.told("nvmlDeviceGetMaxPcieLinkGeneration", |_, device| device.max_pcie_link_gen())?;
    set.pcie_width =
        query.told("nvmlDeviceGetCurrPcieLinkWidth", |_, device| device.current_pcie_link_width())?;
    set.pcie_width_max =
        query.told("nvmlDeviceGetMaxPcieLinkWidth", |_, device| device.max_pcie_link_width())?;
    Ok(())
}
