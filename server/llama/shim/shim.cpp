#include "shim.h"

#include "chat-auto-parser.h"
#include "chat.h"
#include "common.h"
#include "ggml-backend.h"
#include "guard.h"
#include "json.h"
#include "llama-ext.h"
#include "log.h"
#include "template.h"
#include "text.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <sys/time.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct gantry_chat_template {
    common_chat_templates_ptr templates;
    // Written before and after every prompt by whoever tokenises it.
    std::string bos, eos;
    bool knows_tools;
    // llama.cpp has code of its own for this template, which may change messages before they are rendered.
    bool specialized;
    // What ends an answer in this format; a specialized one says it with each prompt.
    std::vector<std::string> stops;
};

namespace {

using gantry::to_text;

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

// Runs `f`, which makes a text, within limits; what it throws, and a limit that was passed though nothing was thrown of it,
// becomes an error as shim.h has it.
template <typename F>
gantry_text bounded(const gantry_template_limits & limits, gantry::limit & passed, F f) noexcept {
    return guarded([&] {
        std::string text, failure;
        bool failed = false;
        gantry::guard guard(limits.cpu_ms, limits.memory_bytes);
        try {
            text = f();
            guard.lift();
        } catch (const std::exception & e) {
            guard.lift();
            failed  = true;
            failure = e.what();
        }
        passed = guard.broken();
        if (!failed && passed == gantry::limit::none) {
            return to_text(text, false);
        }
        return to_text(common_json::object({{"limit", gantry::name(passed)}, {"message", failure}}).dump_safe(), true);
    });
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

// What whoever tokenises a prompt puts around it, the template must not.
void strip(std::string & prompt, const std::string & bos, const std::string & eos) {
    if (!bos.empty() && prompt.compare(0, bos.size(), bos) == 0) {
        prompt.erase(0, bos.size());
    }
    if (!eos.empty() && prompt.size() >= eos.size() && prompt.compare(prompt.size() - eos.size(), eos.size(), eos) == 0) {
        prompt.erase(prompt.size() - eos.size());
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

gantry_text gantry_chat_template_source(const llama_model * model) {
    return guarded([&] {
        const auto * vocab = llama_model_get_vocab(model);
        const auto piece = [&](llama_token token) {
            return token == LLAMA_TOKEN_NULL ? std::string() : common_token_to_piece(vocab, token, true);
        };
        const char * text = llama_model_chat_template(model, nullptr);
        return to_text(
            common_json::object({
                {"text", text == nullptr ? "" : text},
                {"bos", piece(llama_vocab_bos(vocab))},
                {"eos", piece(llama_vocab_eos(vocab))},
                {"add_bos", llama_vocab_get_add_bos(vocab)},
                {"add_eos", llama_vocab_get_add_eos(vocab)},
            }).dump_safe(),
            false);
    });
}

gantry_chat_template * gantry_chat_template_new(
    const char * source_json, size_t source_len, const gantry_template_limits * limits, gantry_text * reason) {
    auto made = std::unique_ptr<gantry_chat_template>();
    std::unique_ptr<gantry::template_probe> probe;
    std::string text, bos, eos;
    std::vector<std::pair<std::string, std::string>> samples;
    // Each step has the limits to itself.
    auto passed     = gantry::limit::none;
    const auto step = [&](auto f) {
        gantry_text_free(*reason);
        passed  = gantry::limit::none;
        *reason = bounded(*limits, passed, f);
        return !reason->error;
    };
    *reason = {nullptr, 0, false};
    if (!step([&] {
            const auto source = common_json::parse(std::string(source_json, source_len));
            made = std::make_unique<gantry_chat_template>();
            text = source.at("text").get<std::string>();
            bos  = source.at("bos").get<std::string>();
            eos  = source.at("eos").get<std::string>();
            made->bos = source.at("add_bos").get<bool>() ? bos : "";
            made->eos = source.at("add_eos").get<bool>() ? eos : "";
            probe = std::make_unique<gantry::template_probe>(text, bos, eos, limits->nesting, limits->expression_parts);
            made->knows_tools = probe->knows_tools();
            for (const auto & sample : source.at("samples")) {
                samples.emplace_back(sample.at("messages").get<std::string>(), sample.at("tools").get<std::string>());
            }
            return std::string();
        })) {
        return nullptr;
    }
    // llama.cpp looks at what a template does with chats of many kinds, and takes what goes wrong for an answer. What takes
    // too much is found here, where it says what it was doing.
    for (const auto & [messages, tools] : samples) {
        if (!tools.empty() && !probe->knows_tools()) {
            continue;
        }
        const bool rendered = step([&, &messages = messages, &tools = tools] {
            probe->render(messages, tools);
            return std::string();
        });
        if (!rendered && passed != gantry::limit::none) {
            return nullptr;
        }
    }
    const bool analysed = step([&] {
        made->templates   = common_chat_templates_init(nullptr, text, bos, eos);
        made->specialized = is_specialized(made->templates.get());
        if (!made->specialized) {
            try {
                // The only time that the template is analysed: that renders it dozens of times.
                made->stops = common_chat_templates_apply(made->templates.get(), inputs_of(GREETING)).additional_stops;
            } catch (const std::exception &) {
                // What cannot be analysed, or refuses a greeting, has no stops beside the model's own.
            }
        }
        return std::string();
    });
    return analysed ? made.release() : nullptr;
}

void gantry_chat_template_free(gantry_chat_template * tmpl) { delete tmpl; }

bool gantry_chat_template_knows_tools(const gantry_chat_template * tmpl) { return tmpl->knows_tools; }

gantry_text gantry_chat_template_apply(
    const gantry_chat_template * tmpl, const char * messages, size_t messages_len, const char * tools, size_t tools_len,
    const gantry_template_limits * limits) {
    auto passed = gantry::limit::none;
    return bounded(*limits, passed, [&] {
        auto inputs = inputs_of(std::string(messages, messages_len));
        if (tools_len > 0) {
            inputs.tools = common_chat_tools_parse_oaicompat(common_json::parse(std::string(tools, tools_len)));
        }
        // The prompt is the same either way; without this the template is analysed anew for a parser that nobody asks for.
        inputs.force_pure_content = !tmpl->specialized;
        auto params = common_chat_templates_apply(tmpl->templates.get(), inputs);
        strip(params.prompt, tmpl->bos, tmpl->eos);
        auto stops = common_json::array();
        for (const auto & stop : tmpl->specialized ? params.additional_stops : tmpl->stops) {
            stops.push_back(stop);
        }
        return common_json::object({{"prompt", params.prompt}, {"stops", stops}}).dump_safe();
    });
}

void gantry_end_after_cpu_ms(uint64_t ms) {
    itimerval timer{};
    timer.it_value.tv_sec  = static_cast<time_t>(ms / 1000);
    timer.it_value.tv_usec = static_cast<suseconds_t>(ms % 1000 * 1000);
    setitimer(ITIMER_PROF, &timer, nullptr);
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
