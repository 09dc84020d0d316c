//! `nvmlDeviceGetFieldValues`: values by number.

use super::{device_calls, links};
use crate::abi::*;
use crate::state::Gpu;
use std::ffi::{c_int, c_uint};
use std::time::{SystemTime, UNIX_EPOCH};

device_calls! {
    fn nvmlDeviceGetFieldValues(gpu, count: c_int, values: *mut FieldValue) {
        let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
        if values.is_null() || count == 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the client gave `count` structs with the field numbers filled in.
        let values = unsafe { std::slice::from_raw_parts_mut(values, count) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for value in values {
            value.timestamp = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
            value.latency_usec = 0;
            value.code = match read(&gpu, value.field, value.scope) {
                Ok(Field::U32(number)) => {
                    value.value_type = VALUE_UNSIGNED_INT;
                    value.value = Value { unsigned_int: number };
                    Code::SUCCESS.0
                }
                Ok(Field::U64(number)) => {
                    value.value_type = VALUE_UNSIGNED_LONG_LONG;
                    value.value = Value { unsigned_long_long: number };
                    Code::SUCCESS.0
                }
                Err(code) => code.0,
            };
        }
        Ok(())
    }
}

enum Field {
    U32(u32),
    U64(u64),
}

/// The field's value. `scope` is the link of the fields that are a link's.
fn read(gpu: &Gpu, field: c_uint, scope: c_uint) -> Result<Field, Code> {
    let ecc = |count| if gpu.ecc_mode { Ok(Field::U64(count)) } else { Err(Code::NOT_SUPPORTED) };
    let retired = gpu.retired().ok_or(Code::NOT_SUPPORTED);
    let data_layer = |counter| links::data_layer_errors(gpu, scope, counter).map(Field::U64);
    let all_links = |counter| links::data_layer_errors(gpu, 0, counter).map(Field::U64);
    let of_first = |count| links::of_first(gpu, scope, count).map(Field::U64);
    match field {
        FIELD_ECC_CURRENT | FIELD_ECC_PENDING => Ok(Field::U32(gpu.ecc_mode.into())),
        FIELD_ECC_CORRECTED | FIELD_ECC_CORRECTED_AGGREGATE => ecc(gpu.ecc_corrected),
        FIELD_ECC_UNCORRECTED | FIELD_ECC_UNCORRECTED_AGGREGATE => ecc(gpu.ecc_uncorrected),
        FIELD_RETIRED_SINGLE => retired.map(|(single, _, _)| Field::U32(single)),
        FIELD_RETIRED_DOUBLE => retired.map(|(_, double, _)| Field::U32(double)),
        FIELD_RETIRED_PENDING => retired.map(|(_, _, pending)| Field::U32(pending.into())),
        FIELD_REMAPPED_CORRECTABLE => Ok(Field::U32(gpu.remapped_correctable)),
        FIELD_REMAPPED_UNCORRECTABLE => Ok(Field::U32(gpu.remapped_uncorrectable)),
        FIELD_REMAP_PENDING => Ok(Field::U32(gpu.remap_pending.into())),
        FIELD_REMAP_FAILURE => Ok(Field::U32(gpu.remap_failure.into())),

        FIELD_MEMORY_TEMPERATURE => Ok(Field::U32(gpu.memory_temperature)),
        FIELD_POWER_AVERAGE | FIELD_POWER_INSTANT => Ok(Field::U32(gpu.power_mw)),
        FIELD_POWER_MIN_LIMIT => Ok(Field::U32(gpu.power_limit_min_mw)),
        FIELD_POWER_MAX_LIMIT => Ok(Field::U32(gpu.power_limit_max_mw)),
        FIELD_POWER_DEFAULT_LIMIT => Ok(Field::U32(gpu.power_limit_default_mw)),
        FIELD_POWER_CURRENT_LIMIT => Ok(Field::U32(gpu.enforced_limit())),
        FIELD_POWER_REQUESTED_LIMIT => Ok(Field::U32(gpu.power_limit_mw)),
        FIELD_RECOVERY_ACTION => Ok(Field::U32(gpu.recovery_action as u32)),

        // A replay is a correctable error, and answers a NAK from the link's other end.
        FIELD_PCIE_REPLAYS | FIELD_PCIE_CORRECTABLE | FIELD_PCIE_NAKS_RECEIVED => {
            Ok(Field::U32(gpu.pcie_replays))
        }
        FIELD_PCIE_RECEIVER_ERROR..=FIELD_PCIE_LANE_ERROR => Ok(Field::U32(0)),

        FIELD_NVLINK_COUNT => Ok(Field::U32(gpu.nvlinks)),
        FIELD_NVLINK_SPEED_COMMON => Ok(Field::U32(links::speed(gpu))),
        FIELD_NVLINK_CRC_FLIT_TOTAL => all_links(NVLINK_CRC_FLIT),
        FIELD_NVLINK_REPLAY_TOTAL => all_links(NVLINK_REPLAY),
        FIELD_NVLINK_RECOVERY_TOTAL => all_links(NVLINK_RECOVERY),
        FIELD_NVLINK_REPLAYS => data_layer(NVLINK_REPLAY),
        FIELD_NVLINK_RECOVERIES => data_layer(NVLINK_RECOVERY),
        FIELD_NVLINK_CRC => data_layer(NVLINK_CRC_FLIT),
        FIELD_NVLINK_SPEED => {
            links::is_up(gpu, scope).map(|up| Field::U32(if up { links::speed(gpu) } else { 0 }))
        }
        FIELD_NVLINK_STATE => {
            links::is_up(gpu, scope).map(|up| Field::U32(if up { NVLINK_ACTIVE } else { 0 }))
        }
        FIELD_NVLINK_VERSION => links::is_up(gpu, scope).map(|_| Field::U32(links::version(gpu))),
        FIELD_NVLINK_RECEIVE_ERRORS => of_first(gpu.nvlink_crc_errors),
        FIELD_NVLINK_MALFORMED..=FIELD_NVLINK_DISCARDS => of_first(0),
        FIELD_NVLINK_RECOVERED => {
            of_first(gpu.nvlink_recoveries.saturating_sub(gpu.nvlink_recovery_failures))
        }
        FIELD_NVLINK_RECOVERY_FAILED => of_first(gpu.nvlink_recovery_failures),
        FIELD_NVLINK_RECOVERY_EVENTS => of_first(gpu.nvlink_recoveries.max(gpu.nvlink_recovery_failures)),
        FIELD_NVLINK_EFFECTIVE_ERRORS | FIELD_NVLINK_SYMBOL_ERRORS => of_first(gpu.nvlink_crc_errors),
        FIELD_NVLINK_EFFECTIVE_BER | FIELD_NVLINK_SYMBOL_BER => of_first(packed_ber(gpu.nvlink_ber)),
        FIELD_NVLINK_FEC_FIRST..=FIELD_NVLINK_FEC_LAST => of_first(0),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// A bit error rate as the header packs it: one decimal digit times ten to minus the exponent, the exponent
/// in bits 0 to 7 and the digit in bits 8 to 11. 0 is no errors, and rates of one and more are 1.
fn packed_ber(rate: f64) -> u64 {
    if rate.is_nan() || rate <= 0.0 {
        return 0;
    }
    let mut exponent = (-rate.log10().floor()).clamp(0.0, f64::from(BER_EXPONENT_MASK)) as i32;
    let mut digit = (rate * 10f64.powi(exponent)).round() as u64;
    if digit >= 10 {
        exponent -= 1;
        digit = 1;
    }
    let (exponent, digit) = if exponent < 0 || rate >= 1.0 { (0, 1) } else { (exponent, digit) };
    (digit & u64::from(BER_MANTISSA_MASK)) << BER_MANTISSA_SHIFT | exponent as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_error_rate_is_a_digit_and_an_exponent() {
        for (rate, digit, exponent) in [
            (0.0, 0, 0),
            (-1.0, 0, 0),
            (f64::NAN, 0, 0),
            (1e-12, 1, 12),
            (3.2e-11, 3, 11),
            (9.6e-9, 1, 8),
            (0.5, 5, 1),
            (0.97, 1, 0),
            (1.0, 1, 0),
            (40.0, 1, 0),
            (1e-300, 0, 255),
        ] {
            assert_eq!(packed_ber(rate), digit << 8 | exponent, "{rate}");
        }
    }
}
