// Which of ggml's backends take part, where that is decided at run time. Mirrored by src/shim.rs.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether ggml's registry, which is made when it is first used, has the CPU backend that is linked into the program.
// Otherwise that backend's code, which is built for a newer processor than the rest, never runs.
void gantry_builtin_cpu(bool use);
// Puts it into the registry after all.
void gantry_register_builtin_cpu(void);

// What a module thinks of this machine: 0, it cannot run here; the higher the better, and 1 where it does not say.
// Negative: it cannot be opened, and `reason` is filled; nothing is logged.
int32_t gantry_backend_score(const char * path, struct gantry_text * reason);

// As ggml_backend_load, which logs why it failed.
bool gantry_backend_load(const char * path);

#ifdef __cplusplus
}
#endif
