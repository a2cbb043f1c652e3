//! Makes the messages of gRPC from their `.proto`, and what reflection tells of them, without protoc.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const PROTO: &str = "gantry/inference/v1/inference.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile([PROTO], ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    std::fs::write(out.join("inference.bin"), files.encode_to_vec())?;
    prost_build::Config::new().compile_fds(files)?;
    Ok(())
}
