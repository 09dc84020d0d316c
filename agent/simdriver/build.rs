//! How the library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // As NVIDIA's own is named, so that a client that checks SONAME takes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // A client may unload it while a thread of its own that called it lives on: Rust's runtime leaves that
    // thread something to run at its end, which must still be there.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
