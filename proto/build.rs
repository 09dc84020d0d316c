//! Compiles the protocol without needing `protoc`, and keeps the descriptor set for reflection.

use prost::Message;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["common", "admin", "agent", "worker"].map(|name| format!("reknit/v1/{name}.proto"));
    for file in &files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(&files, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("reknit.v1.bin"), descriptors.encode_to_vec())?;
    // One buffer for all who get the same.
    tonic_prost_build::configure().bytes(".reknit.v1.Prepare").compile_fds(descriptors)?;
    Ok(())
}
