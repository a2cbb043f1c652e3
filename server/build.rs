//! Links the program so that it can load ggml's backends at run time.

include!("llama/link_args.rs");

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=llama/link_args.rs");
    for arg in LINK_ARGS {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
}
