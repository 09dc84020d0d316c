//! What NVML's errors mean, in one table.

use super::super::protocol::Reading;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) meaning: Meaning,
    /// For people: the code, the call, NVML's words.
    pub(crate) text: String,
}

/// What a failed call says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The GPU is off the bus.
    Gone,
    /// The GPU is there and unusable.
    ResetRequired,
    /// It may be anything.
    Suspect,
    /// The handle is of a time before the GPU was reset, or an argument is none for this GPU.
    Stale,
    /// The driver is the trouble.
    Blind,
    /// Only root may ask.
    Withheld,
    /// There is no such thing.
    NotFound,
    /// This library has no such call.
    NoSuchCall,
    /// This GPU or driver does not tell.
    NotTold,
}

impl Meaning {
    /// The table. Source of the numbers: `nvml.h`, release 13.0.
    const fn of_code(code: u32) -> Self {
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST | sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND => {
                Self::Gone
            }
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Self::ResetRequired,
            sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN
            | sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE
            | sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT
            | sys::nvmlReturn_enum_NVML_ERROR_NOT_READY => Self::Suspect,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => Self::Stale,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
            | sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH
            | sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
            | sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => Self::Blind,
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Self::Withheld,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => Self::NotFound,
            sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => Self::NoSuchCall,
            _ => Self::NotTold,
        }
    }
}

impl Fault {
    pub(super) fn new(call: &str, error: NvmlError) -> Self {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the wrapper's own errors are named; all others are NVML's codes"
        )]
        let meaning = match &error {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => Meaning::NoSuchCall,
            NvmlError::Utf8Error(_)
            | NvmlError::NulError(_)
            | NvmlError::StringTooLong { .. }
            | NvmlError::IncorrectBits(_)
            | NvmlError::SetReleaseFailed
            | NvmlError::GetPciInfoFailed
            | NvmlError::PciInfoToCFailed => Meaning::NotTold,
            _ => {
                let words = error.to_string();
                let code = u32::from(error);
                let text = format!("NVML code {code} from {call}: {words}");
                return Self { meaning: Meaning::of_code(code), text };
            }
        };
        Self { meaning, text: format!("{call}: {error}") }
    }

    /// What it says about the GPU, where the call was one that every healthy GPU answers.
    pub(crate) fn reading(self) -> Reading {
        let error = self.text;
        match self.meaning {
            Meaning::Gone | Meaning::NotFound => Reading::Gone { error },
            Meaning::ResetRequired => Reading::ResetRequired,
            Meaning::Suspect | Meaning::Stale | Meaning::NotTold => Reading::Suspect { error },
            Meaning::Blind | Meaning::Withheld | Meaning::NoSuchCall => Reading::Blind { error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(code: u32) -> Meaning {
        Fault::new("nvmlX", NvmlError::from(code)).meaning
    }

    #[test]
    fn each_code_means_what_the_table_says() {
        let table = [
            (Meaning::Gone, vec![15, 28]),
            (Meaning::ResetRequired, vec![16]),
            (Meaning::Suspect, vec![10, 11, 27, 999]),
            (Meaning::Stale, vec![2]),
            (Meaning::Blind, vec![1, 9, 17, 18]),
            (Meaning::Withheld, vec![4]),
            (Meaning::NotFound, vec![6]),
            (Meaning::NoSuchCall, vec![13]),
            (Meaning::NotTold, vec![3, 5, 7, 8, 12, 14, 19, 20, 21, 22, 23, 24, 25, 26, 29, 30, 31, 4711]),
        ];
        for (wanted, codes) in table {
            for code in codes {
                assert_eq!(meaning(code), wanted, "code {code}");
            }
        }
        let missing = NvmlError::FailedToLoadSymbol("nvmlX".to_owned());
        assert_eq!(Fault::new("nvmlX", missing).meaning, Meaning::NoSuchCall);
    }

    #[test]
    fn a_fault_names_its_code_and_its_call() {
        let fault = Fault::new("nvmlDeviceGetUUID", NvmlError::GpuLost);
        assert!(fault.text.starts_with("NVML code 15 from nvmlDeviceGetUUID: "), "{}", fault.text);
        assert!(matches!(fault.reading(), Reading::Gone { .. }));
    }
}
