// How a program is linked that can load ggml's backends as modules at run time; for build scripts, by `include!`.

/// A module brings no other ggml with it: it takes the program's, which must export it. And whether the CPU backend that
/// is linked in takes part is decided at run time (shim/backends.cpp), before any of its code runs.
///
/// And how the cells of a cache are zeroed (shim/cells.cpp).
const LINK_ARGS: [&str; 5] = [
    "-Wl,--export-dynamic-symbol=ggml_*",
    "-Wl,--export-dynamic-symbol=quantize_*",
    "-Wl,--export-dynamic-symbol=dequantize_*",
    "-Wl,--wrap=ggml_backend_cpu_reg",
    "-Wl,--wrap=ggml_backend_buffer_clear",
];
