//! No code: the crates that depend on this one see the same features of the same dependencies, so that building or
//! testing one of them alone reuses what a build of the whole workspace compiled (the idea of cargo-hakari).
