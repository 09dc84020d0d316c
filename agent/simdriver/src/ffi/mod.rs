//! NVML's C interface.
//!
//! Pointers come from the client, who answers for them as with the real library: each is null, which is
//! refused, or valid for what the header says. They are read and written only by the functions of this
//! file and where a call says how many structs it was given.

#![allow(unsafe_code)]

mod events;
mod fields;
mod identity;
mod links;
mod memory;
mod sensors;
mod setters;
mod system;

use crate::abi::Code;
use std::ffi::{CStr, c_char, c_uint};

/// Defines NVML calls on a device. Each first asks the driver, under its own name, how the GPU behaves,
/// and the body answers for the GPU.
macro_rules! device_calls {
    ($($(#[$doc:meta])* fn $name:ident($gpu:ident $(, $argument:ident: $type:ty)*) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: $crate::abi::DeviceHandle $(, $argument: $type)*) -> ::std::ffi::c_uint {
            let gpu = $crate::driver::gpu(device, stringify!($name));
            $crate::ffi::answer(gpu.and_then(|$gpu| $body))
        }
    )*};
}
use device_calls;

fn answer(result: Result<(), Code>) -> c_uint {
    match result {
        Ok(()) => Code::SUCCESS.0,
        Err(code) => code.0,
    }
}

fn put<T>(out: *mut T, value: T) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the client gave it as room for a `T`.
    unsafe { out.write(value) };
    Ok(())
}

fn put_text(out: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: the client gave `length` bytes; the text and its final zero fit, as was just checked.
    unsafe {
        out.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

fn text_at<'a>(text: *const c_char) -> Result<&'a str, Code> {
    if text.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the client gave a C string that outlives the call.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code::INVALID_ARGUMENT)
}

/// What the client put where the call's answer goes.
fn given<T: Copy>(at: *const T) -> Result<T, Code> {
    if at.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the client filled it in before the call, as the header tells it to.
    Ok(unsafe { at.read() })
}

/// Writes a struct that begins with its version, if the client asks for that version.
fn put_versioned<T>(out: *mut T, version: c_uint, value: T) -> Result<(), Code> {
    if given(out.cast::<c_uint>())? == version {
        put(out, value)
    } else {
        Err(Code::ARGUMENT_VERSION_MISMATCH)
    }
}
