//! Makes messages and service of `microserving.proto`, with a compiler that is a library: no `protoc` is needed.

#![allow(clippy::print_stdout, reason = "cargo reads it")]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const ROOT: &str = "../protocol/proto";
    let file = format!("{ROOT}/microserving/v1/microserving.proto");
    println!("cargo::rerun-if-changed={file}");
    let files = protox::compile([file], [ROOT])?;
    tonic_prost_build::configure().build_transport(false).btree_map(".").compile_fds(files)?;
    Ok(())
}
