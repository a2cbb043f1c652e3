//! Prints what a GGUF file's header says, or why it is refused: `cargo run --example inspect -- model.gguf [ctx] [parallel]`.

use std::process::ExitCode;

use gantry_gguf::fit::FitInput;
use gantry_gguf::{Report, read_header};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let input = FitInput { ctx_size: number(0), parallel: number(1), ..FitInput::default() };
    match read_header(&path) {
        Ok(header) => {
            println!("{}", Report::new(path, &header, input));
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{path}: {error}");
            ExitCode::FAILURE
        }
    }
}
