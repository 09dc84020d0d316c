//! NVLink: which links are up, and how well they carry.

use super::super::protocol::{FastSet, SlowSet};
use super::fault::Fault;
use super::query::{Field, Query};
use nvml_wrapper::error::{nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings as sys;
use sys::field_id;

/// Links that are told apart: the bits of `FastSet::links_active`.
const LINKS_LIMIT: u32 = 32;

/// How many links the GPU has: NVML knows no link past the last.
pub(super) fn count(query: &mut Query<'_>) -> Result<u32, Fault> {
    for link in 0..LINKS_LIMIT {
        if active(query, link)?.is_none() {
            return Ok(link);
        }
    }
    Ok(LINKS_LIMIT)
}

pub(super) fn fast(query: &mut Query<'_>, links: u32, set: &mut FastSet) -> Result<(), Fault> {
    let mut bits = None;
    for link in 0..links {
        if let Some(active) = active(query, link)? {
            *bits.get_or_insert(0) |= u32::from(active) << link;
        }
    }
    set.links_active = bits;
    Ok(())
}

fn active(query: &mut Query<'_>, link: u32) -> Result<Option<bool>, Fault> {
    query.told("nvmlDeviceGetNvLinkState", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetNvLinkState.as_ref())?;
        let mut state = 0;
        // SAFETY: the handle is a live device's, and `state` outlives the call.
        nvml_try(unsafe { call(device.handle(), link, &raw mut state) })?;
        Ok(state == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    })
}

/// The fields read of each link. 161 to 163 are NVLink 4's and older, the others NVLink 5's.
const FIELDS: [u32; 6] = [
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
    field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    field_id::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER,
];

pub(super) fn slow(query: &mut Query<'_>, links: u32, set: &mut SlowSet) -> Result<(), Fault> {
    if links == 0 {
        return Ok(());
    }
    let wanted: Vec<Field> = (0..links).flat_map(|link| FIELDS.map(|id| Field { id, scope: link })).collect();
    let values = query.fields(&wanted)?;
    let of = |field: usize| values.iter().skip(field).step_by(FIELDS.len()).copied();
    let sum = |field| total(of(field));
    let [replays, recoveries, crc] = [sum(0), sum(1), sum(2)];
    let recovery_events = sum(3);
    set.link_recovery_failures = sum(4);
    set.link_ber = of(5).flatten().map(bit_error_rate).reduce(f64::max);
    if replays.is_none() && recoveries.is_none() && crc.is_none() && recovery_events.is_none() {
        return older_counters(query, links, set);
    }
    set.link_replays = replays;
    set.link_recoveries = recoveries.or(recovery_events);
    set.link_crc_errors = crc;
    Ok(())
}

/// Drivers that do not know the fields have a call.
fn older_counters(query: &mut Query<'_>, links: u32, set: &mut SlowSet) -> Result<(), Fault> {
    let mut sum = |counter| {
        let values: Result<Vec<_>, Fault> = (0..links).map(|link| counted(query, link, counter)).collect();
        Ok(total(values?.into_iter()))
    };
    set.link_replays = sum(sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_REPLAY)?;
    set.link_recoveries = sum(sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_RECOVERY)?;
    let flits = sum(sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_CRC_FLIT)?;
    let data = sum(sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_CRC_DATA)?;
    set.link_crc_errors = match (flits, data) {
        (Some(flits), Some(data)) => Some(flits.saturating_add(data)),
        (one, other) => one.or(other),
    };
    Ok(())
}

fn counted(
    query: &mut Query<'_>,
    link: u32,
    counter: sys::nvmlNvLinkErrorCounter_t,
) -> Result<Option<i64>, Fault> {
    let value = query.told("nvmlDeviceGetNvLinkErrorCounter", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetNvLinkErrorCounter.as_ref())?;
        let mut value = 0;
        // SAFETY: the handle is a live device's, and `value` outlives the call.
        nvml_try(unsafe { call(device.handle(), link, counter, &raw mut value) })?;
        Ok(value)
    })?;
    Ok(value.map(|value| i64::try_from(value).unwrap_or(i64::MAX)))
}

/// The sum of what is told, or nothing where no link tells.
fn total(values: impl Iterator<Item = Option<i64>>) -> Option<u64> {
    values.flatten().map(|value| u64::try_from(value).unwrap_or(0)).reduce(u64::saturating_add)
}

/// NVML packs a rate into bits 8 to 11, the mantissa, and 0 to 7, the negative power of ten.
/// Source: `nvml.h`, `NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER`.
fn bit_error_rate(packed: i64) -> f64 {
    let mantissa = i32::try_from(packed >> 8 & 0xf).unwrap_or(0);
    let exponent = i32::try_from(packed & 0xff).unwrap_or(0);
    f64::from(mantissa) * 10_f64.powi(-exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_rate_is_mantissa_and_negative_power_of_ten() {
        for (packed, rate) in [(0x30c, 3e-12), (0x10f, 1e-15), (0xf00, 15.0), (0, 0.0)] {
            let read = bit_error_rate(packed);
            assert!((read - rate).abs() <= rate * 1e-12, "{packed:#x} is {read}, not {rate}");
        }
        // What a link without any error tells: 15e-255.
        let clean = bit_error_rate(0xfff);
        assert!(clean > 0.0 && clean < 1e-250);
    }

    #[test]
    fn a_total_of_nothing_is_nothing() {
        assert_eq!(total([None, None].into_iter()), None);
        assert_eq!(total([None, Some(2), Some(3)].into_iter()), Some(5));
        assert_eq!(total([Some(-1)].into_iter()), Some(0));
    }
}
