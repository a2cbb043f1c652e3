#include "shim.h"

#include "chat-auto-parser.h"
#include "chat.h"
#include "common.h"
#include "ggml-backend.h"
#include "json.h"
#include "llama-ext.h"
#include "log.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

struct gantry_chat_template {
    common_chat_templates_ptr templates;
    // llama.cpp has code of its own for this template, which may change messages before they are rendered.
    bool specialized;
    // What ends an answer in this format; a specialized one says it with each prompt.
    std::vector<std::string> stops;
};

namespace {

gantry_text to_text(const std::string & s, bool error) noexcept {
    auto * data = static_cast<char *>(std::malloc(s.empty() ? 1 : s.size()));
    if (data == nullptr) {
        return {nullptr, 0, true};
    }
    std::memcpy(data, s.data(), s.size());
    return {data, s.size(), error};
}

// Runs `f`; whatever it throws becomes an error text.
template <typename F> gantry_text guarded(F f) noexcept {
    try {
        return f();
    } catch (const std::exception & e) {
        try {
            return to_text(e.what(), true);
        } catch (...) {
            return {nullptr, 0, true};
        }
    } catch (...) {
        return {nullptr, 0, true};
    }
}

common_chat_templates_inputs inputs_of(const std::string & messages) {
    common_chat_templates_inputs inputs;
    inputs.messages              = common_chat_msgs_parse_oaicompat(common_json::parse(messages));
    inputs.add_generation_prompt = true;
    inputs.use_jinja             = true;
    return inputs;
}

const char * const GREETING = R"([{"role": "user", "content": "Hello"}])";

// Whether llama.cpp knows the template by its source. One that it knows and that refuses a greeting counts as well.
bool is_specialized(const common_chat_templates * templates) {
    const auto source = common_chat_templates_source(templates);
    autoparser::generation_params params;
    params.messages              = common_json::parse(GREETING);
    params.add_generation_prompt = true;
    try {
        return common_chat_try_specialized_template(common_chat_template(source, "", ""), source, params).has_value();
    } catch (const std::exception &) {
        return true;
    }
}

} // namespace

extern "C" {

void gantry_text_free(gantry_text text) { std::free(text.data); }

void gantry_common_log_off(void) {
    // Below every level that the library's macros test against.
    common_log_set_verbosity_thold(-1);
}

void gantry_return_large_blocks(int bytes) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, bytes);
    mallopt(M_TRIM_THRESHOLD, 2 * bytes);
#else
    (void) bytes;
#endif
}

void gantry_return_free_memory(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

gantry_chat_template * gantry_chat_template_new(const llama_model * model, gantry_text * reason) {
    gantry_chat_template * made = nullptr;
    *reason = guarded([&] {
        // common_chat_templates_init loses the parser's message on its way out, so the template is parsed here first.
        if (const char * source = llama_model_chat_template(model, nullptr)) {
            common_chat_template(source, "", "");
        }
        auto templates   = common_chat_templates_init(model, "");
        bool specialized = is_specialized(templates.get());
        std::vector<std::string> stops;
        if (!specialized) {
            try {
                // The only time that the template is analysed: that renders it dozens of times.
                stops = common_chat_templates_apply(templates.get(), inputs_of(GREETING)).additional_stops;
            } catch (const std::exception &) {
                // What cannot be analysed, or refuses a greeting, has no stops beside the model's own.
            }
        }
        made = new gantry_chat_template{std::move(templates), specialized, std::move(stops)};
        return gantry_text{nullptr, 0, false};
    });
    return made;
}

void gantry_chat_template_free(gantry_chat_template * tmpl) { delete tmpl; }

gantry_text gantry_chat_template_apply(const gantry_chat_template * tmpl, const char * messages, size_t messages_len) {
    return guarded([&] {
        auto inputs = inputs_of(std::string(messages, messages_len));
        // The prompt is the same either way; without this the template is analysed anew for a parser that nobody asks for.
        inputs.force_pure_content = !tmpl->specialized;
        const auto params = common_chat_templates_apply(tmpl->templates.get(), inputs);
        auto stops = common_json::array();
        for (const auto & stop : tmpl->specialized ? params.additional_stops : tmpl->stops) {
            stops.push_back(stop);
        }
        return to_text(common_json::object({{"prompt", params.prompt}, {"stops", stops}}).dump_safe(), false);
    });
}

int32_t gantry_decode(llama_context * ctx, const llama_batch * batch) {
    try {
        return llama_decode(ctx, *batch);
    } catch (...) {
        return GANTRY_THROWN;
    }
}

int32_t gantry_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                        int32_t n_tokens_max, bool add_special, bool parse_special) {
    try {
        return llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special, parse_special);
    } catch (...) {
        // A count so negative cannot be confused with "that many tokens are needed": texts are bounded far below it.
        return INT32_MIN;
    }
}

int32_t gantry_token_to_piece(const llama_vocab * vocab, llama_token token, char * buf, int32_t length, bool special) {
    try {
        return llama_token_to_piece(vocab, token, buf, length, 0, special);
    } catch (...) {
        return INT32_MIN;
    }
}

llama_model * gantry_model_load(const char * path, const llama_model_params * params) {
    try {
        return llama_model_load_from_file(path, *params);
    } catch (...) {
        return nullptr;
    }
}

llama_context * gantry_context_new(llama_model * model, const llama_context_params * params) {
    try {
        return llama_init_from_model(model, *params);
    } catch (...) {
        return nullptr;
    }
}

uint64_t gantry_compute_bytes(const llama_context * ctx) {
    try {
        uint64_t bytes = 0;
        for (const auto & [type, memory] : llama_get_memory_breakdown(ctx)) {
            bytes += ggml_backend_buft_is_host(type) ? memory.compute : 0;
        }
        return bytes;
    } catch (...) {
        return 0;
    }
}
}
