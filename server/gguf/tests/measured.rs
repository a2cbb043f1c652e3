//! The memory arithmetic held against what the pinned llama.cpp reported for models of these shapes, on a CPU with flash
//! attention and without: its "KV buffer size" to the byte, its "compute" and "output buffer size" within a margin above.
#![allow(clippy::unwrap_used)]

mod common;

use common::{F16, Gguf, Q8_0, Shape};
use gantry_gguf::fit::{FitInput, estimate};
use gantry_gguf::read_header_prefix;

const MIB: f64 = 1024.0 * 1024.0;

/// Context, sequences, ubatch, outputs (0 is all), then what llama.cpp said in MiB: KV cache, compute with output.
type Measured = (u32, u32, u32, u32, f64, f64);

fn check(name: &str, shape: &Shape, measured: &[Measured]) {
    check_with(name, shape, true, measured);
}

fn check_with(name: &str, shape: &Shape, flash_attention: bool, measured: &[Measured]) {
    let (bytes, file_bytes) = Gguf::model(shape).header();
    let header = read_header_prefix(&bytes, file_bytes).unwrap();
    for &(ctx_size, parallel, n_ubatch, n_outputs_max, kv_cache, compute) in measured {
        let input = FitInput {
            ctx_size,
            parallel,
            n_batch: n_ubatch,
            n_ubatch,
            n_outputs_max,
            flash_attention,
            ..FitInput::default()
        };
        let memory = estimate(header.summary(), &input);
        assert_eq!(memory.kv_cache_bytes as f64 / MIB, kv_cache, "{name} {input:?}");
        let predicted = memory.compute_bytes as f64 / MIB;
        assert!(predicted >= compute, "{name} {input:?}: {predicted} MiB, measured {compute}");
        assert!(predicted <= compute * 1.6, "{name} {input:?}: {predicted} MiB, measured {compute}");
    }
}

#[test]
fn predictions_lie_at_or_a_little_above_what_llama_cpp_takes() {
    let billion = Shape {
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head: 64,
        hidden: 8192,
        vocabulary: 128_256,
        context: 131_072,
        kind: Q8_0,
        ..Shape::default()
    };
    check(
        "Llama 1B",
        &billion,
        &[
            (4096, 8, 512, 0, 128.0, 271.02 + 3.91),
            (8192, 1, 512, 0, 256.0, 282.52 + 0.49),
            (32_768, 8, 256, 0, 1024.0, 137.26 + 3.91),
            (4096, 16, 512, 16, 128.0, 68.27 + 7.83),
        ],
    );
    let half =
        Shape { layers: 24, heads: 14, kv_heads: 2, hidden: 4864, vocabulary: 151_936, context: 32_768, ..billion };
    check(
        "Qwen 0.5B",
        &half,
        &[
            (4096, 8, 512, 0, 48.0, 306.02 + 4.64),
            (32_768, 8, 256, 0, 384.0, 154.76 + 4.64),
            (4096, 16, 512, 16, 48.0, 37.52 + 9.27),
            (4096, 8, 128, 8, 48.0, 9.44 + 4.64),
            (8192, 1, 512, 1, 96.0, 45.27 + 0.58),
        ],
    );
    check_with(
        "Qwen 0.5B without flash attention",
        &half,
        false,
        &[
            (8192, 8, 128, 8, 96.0, 10.25 + 4.64),
            (32_768, 8, 128, 8, 384.0, 32.75 + 4.64),
            (20_480, 5, 128, 5, 240.0, 33.27 + 2.90),
            (16_384, 16, 128, 16, 192.0, 12.09 + 9.27),
        ],
    );
    let large = Shape { layers: 4, head: 128, hidden: 14_336, tied: false, ..billion };
    check(
        "Llama 8B, 4 layers",
        &large,
        &[(4096, 8, 512, 0, 64.0, 291.02 + 3.91), (4096, 16, 512, 16, 64.0, 124.27 + 7.83)],
    );
    let wide = Shape {
        layers: 2,
        kv_heads: 32,
        hidden: 1024,
        vocabulary: 1000,
        context: 8192,
        kind: F16,
        file_type: 1,
        ..billion
    };
    check(
        "attention wider than the rest",
        &wide,
        &[(8192, 1, 512, 0, 128.0, 40.02), (32_768, 8, 256, 0, 512.0, 18.01 + 0.03)],
    );
}
