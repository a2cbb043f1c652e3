#include "backends.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "text.h"

#include <dlfcn.h>

namespace {

bool use_builtin_cpu = true;

} // namespace

extern "C" {

// Linked with --wrap=ggml_backend_cpu_reg, the registry asks the function below for the CPU backend that is linked in, and
// __real_ is ggml's own. Linked without, nobody calls it and __real_ is null.
ggml_backend_reg_t __real_ggml_backend_cpu_reg(void) __attribute__((weak));
ggml_backend_reg_t __wrap_ggml_backend_cpu_reg(void);

// A weak reference takes nothing out of an archive; this one, to the same object file, does.
extern ggml_backend_t (*const gantry_keep_builtin_cpu)(void);
ggml_backend_t (*const gantry_keep_builtin_cpu)(void) = ggml_backend_cpu_init;

ggml_backend_reg_t __wrap_ggml_backend_cpu_reg(void) {
    return use_builtin_cpu && __real_ggml_backend_cpu_reg != nullptr ? __real_ggml_backend_cpu_reg() : nullptr;
}

void gantry_builtin_cpu(bool use) { use_builtin_cpu = use; }

void gantry_register_builtin_cpu(void) {
    use_builtin_cpu = true;
    ggml_backend_register(ggml_backend_cpu_reg());
}

int32_t gantry_backend_score(const char * path, gantry_text * reason) {
    void * module = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (module == nullptr) {
        const char * error = dlerror();
        *reason            = gantry::to_error(error != nullptr ? error : "dlopen gave no reason");
        return -1;
    }
    const auto    score  = reinterpret_cast<int (*)(void)>(dlsym(module, "ggml_backend_score"));
    const int32_t result = score != nullptr ? score() : 1;
    dlclose(module);
    return result;
}

bool gantry_backend_load(const char * path) {
    try {
        return ggml_backend_load(path) != nullptr;
    } catch (...) {
        return false;
    }
}

} // extern "C"
