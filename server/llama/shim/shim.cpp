#include "shim.h"

#include "chat-auto-parser-helpers.h"
#include "chat-auto-parser.h"
#include "chat.h"
#include "common.h"
#include "ggml-backend.h"
#include "guard.h"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "llama-ext.h"
#include "log.h"
#include "peg-parser.h"
#include "template.h"
#include "text.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <sys/time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

struct gantry_chat_template {
    common_chat_templates_ptr templates;
    // Written before and after every prompt by whoever tokenises it.
    std::string bos, eos;
    bool knows_tools;
    // llama.cpp has code of its own for this template, which may change messages before they are rendered.
    bool specialized;
    // Whether what the model thinks stands in a place of its own in its answers.
    bool thinks = false;
    // What ends an answer in this format; a specialized one says it with each prompt.
    std::vector<std::string> stops;
    // What llama.cpp found out about answers in this format, by rendering dozens of chats; none of a specialized one, and of one
    // that it can make nothing of.
    std::unique_ptr<common_chat_template> analysed;
    autoparser::autoparser analysis;
};

namespace {

using gantry::guarded;
using gantry::to_text;

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

const char * const GREETING = R"([{"role": "user", "content": "Hello"}])";

// A chat as shim.h has it, with messages alone or with all that is said beside them.
common_json chat_of(const std::string & text) {
    auto chat = common_json::parse(text);
    return chat.is_array() ? common_json::object({{"messages", chat}}) : chat;
}

common_chat_tool_choice choice_of(const common_json & chat) {
    // Where no tool may be called, one that is called all the same must be known for what it is.
    return chat.value("required", false) ? COMMON_CHAT_TOOL_CHOICE_REQUIRED : COMMON_CHAT_TOOL_CHOICE_AUTO;
}

bool is_set(const common_json & chat, const char * name) { return chat.value(name, false); }

bool may_think(const common_json & chat) { return chat.value("thinking", true); }

bool continues(const common_json & chat) { return is_set(chat, "continued"); }

// What stands behind the text of a message that is to be continued, until it is rendered: a character that no template
// writes, so that the last one of a prompt is this one, whatever the messages say. Templates trim texts, and add markup to
// them; what comes before it is what the message has come to.
const char * const END_OF_CONTINUED = "\xf4\x8f\xbf\xbd"; // U+10FFFD, of a private use area

void mark_end(common_chat_msg & message) {
    (message.content_parts.empty() ? message.content : message.content_parts.back().text) += END_OF_CONTINUED;
}

void cut_at_end(std::string & prompt) {
    const auto end = prompt.rfind(END_OF_CONTINUED);
    if (end == std::string::npos) {
        throw std::runtime_error("the template leaves out the text of the last message, so that it cannot be continued");
    }
    prompt.resize(end);
}

common_chat_templates_inputs inputs_of(const common_json & chat) {
    common_chat_templates_inputs inputs;
    inputs.messages              = common_chat_msgs_parse_oaicompat(chat.at("messages"));
    inputs.add_generation_prompt = !continues(chat);
    if (continues(chat) && !inputs.messages.empty()) {
        mark_end(inputs.messages.back());
    }
    inputs.use_jinja             = true;
    if (chat.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(chat.at("tools"));
    }
    inputs.parallel_tool_calls = is_set(chat, "parallel");
    inputs.enable_thinking     = may_think(chat);
    if (chat.contains("variables")) {
        for (const auto & [name, value] : chat.at("variables").items()) {
            inputs.chat_template_kwargs[name] = value.dump();
        }
    }
    return inputs;
}

// The tools that may be called, which need not be all that the model is told of; null for none.
common_json callable_of(const common_json & chat) {
    return chat.contains("callable") ? chat.at("callable") : chat.contains("tools") ? chat.at("tools") : common_json();
}

// What answers to a chat look like, for a template that was analysed. It depends on the tools, and not on what was said.
common_chat_params answers_to(const gantry_chat_template & tmpl, const common_json & chat) {
    autoparser::generation_params params;
    params.messages = common_json::parse(GREETING);
    if (const auto callable = callable_of(chat); callable.is_array() && !callable.empty()) {
        params.tools = callable;
    }
    params.tool_choice           = choice_of(chat);
    params.parallel_tool_calls   = is_set(chat, "parallel");
    params.reasoning_format      = COMMON_REASONING_FORMAT_DEEPSEEK;
    params.enable_thinking       = may_think(chat);
    params.add_generation_prompt = true;
    params.now                   = std::chrono::system_clock::now();
    params.extra_context         = chat.contains("variables") ? chat.at("variables") : common_json::object();
    return autoparser::peg_generator::generate_parser(*tmpl.analysed, params, tmpl.analysis);
}

common_json strings(const std::vector<std::string> & texts) {
    auto array = common_json::array();
    for (const auto & text : texts) {
        array.push_back(text);
    }
    return array;
}

// The words of which one begins what a lazy grammar binds; none where it is told by patterns: see `whole_grammar`.
common_json triggers_of(const common_chat_params & answers) {
    std::vector<std::string> words;
    for (const auto & trigger : answers.grammar_triggers) {
        if (trigger.type != COMMON_GRAMMAR_TRIGGER_TYPE_WORD || trigger.value.empty()) {
            return common_json::array();
        }
        words.push_back(trigger.value);
    }
    return strings(words);
}

// The grammar of whole answers, calls and all else, in which arguments are any JSON: a parser that was saved knows no schemas.
std::string whole_grammar(const common_chat_params & answers) {
    common_peg_arena arena;
    arena.load(answers.parser);
    return build_grammar([&](const common_grammar_builder & builder) { arena.build_grammar(builder, false); });
}

// What stands before the text of an answer, behind the prompt and behind a thought's end; null where that is not known.
common_json lead_of(const gantry_chat_template & tmpl, common_chat_templates_inputs inputs, const common_chat_params & answers) {
    common_chat_msg said;
    said.role    = "assistant";
    said.content = END_OF_CONTINUED;
    inputs.messages = common_chat_msgs_parse_oaicompat(common_json::parse(GREETING));
    inputs.messages.push_back(said);
    inputs.tools.clear();
    inputs.continue_final_message = COMMON_CHAT_CONTINUATION_CONTENT;
    std::string continued;
    try {
        continued = common_chat_templates_apply(tmpl.templates.get(), inputs).generation_prompt;
    } catch (const std::exception &) {
        // It refuses a greeting.
        return nullptr;
    }
    const auto behind = [&](const std::string & text) -> std::string {
        const auto end = continued.rfind(END_OF_CONTINUED);
        const auto at  = text.empty() || end == std::string::npos ? std::string::npos : continued.rfind(text, end);
        return at == std::string::npos ? std::string() : continued.substr(at + text.size(), end - at - text.size());
    };
    const auto after_thought = answers.thinking_end_tags.empty() ? std::string() : behind(answers.thinking_end_tags.front());
    const auto at_once       = behind(answers.generation_prompt);
    if (at_once.empty()) {
        return nullptr;
    }
    return common_json::object({{"at_once", at_once}, {"after_thought", after_thought.empty() ? at_once : after_thought}});
}

// What a thought stands between, and what ends one that the model does not end; empty where it has no place of its own, or begins
// with nothing.
common_json thought_of(const gantry_chat_template & tmpl, const common_chat_params & answers) {
    std::string begin = answers.thinking_start_tag, closing;
    std::vector<std::string> ends = answers.thinking_end_tags;
    if (!tmpl.specialized) {
        begin   = trim_whitespace(tmpl.analysis.reasoning.start);
        closing = tmpl.analysis.reasoning.end;
        ends    = {trim_whitespace(closing)};
    } else if (!ends.empty()) {
        closing = ends.front();
    }
    ends.erase(std::remove(ends.begin(), ends.end(), std::string()), ends.end());
    if (begin.empty() || ends.empty()) {
        return nullptr;
    }
    return common_json::object({{"begin", begin}, {"ends", strings(ends)}, {"closing", closing}});
}

// Whether llama.cpp knows the template by its source, and, if so, whether it thinks. One that it knows and that refuses a
// greeting counts as well.
std::pair<bool, bool> is_specialized(const common_chat_templates * templates) {
    const auto source = common_chat_templates_source(templates);
    autoparser::generation_params params;
    params.messages              = common_json::parse(GREETING);
    params.add_generation_prompt = true;
    params.reasoning_format      = COMMON_REASONING_FORMAT_DEEPSEEK;
    try {
        const auto known = common_chat_try_specialized_template(common_chat_template(source, "", ""), source, params);
        return {known.has_value(), known.has_value() && known->supports_thinking};
    } catch (const std::exception &) {
        return {true, false};
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
        std::tie(made->specialized, made->thinks) = is_specialized(made->templates.get());
        if (!made->specialized) {
            try {
                // The only time that the template is analysed: that renders it dozens of times.
                auto parsed = std::make_unique<common_chat_template>(text, bos, eos);
                made->analysis.analyze_template(*parsed);
                made->analysed = std::move(parsed);
                answers_to(*made, common_json::object());
                made->stops  = made->analysis.additional_stops;
                made->thinks = made->analysis.reasoning.mode != autoparser::reasoning_mode::NONE;
            } catch (const std::exception &) {
                // What cannot be analysed, or refuses a greeting, has no stops beside the model's own.
                made->analysed.reset();
            }
        }
        return std::string();
    });
    return analysed ? made.release() : nullptr;
}

void gantry_chat_template_free(gantry_chat_template * tmpl) { delete tmpl; }

bool gantry_chat_template_knows_tools(const gantry_chat_template * tmpl) { return tmpl->knows_tools; }

bool gantry_chat_template_thinks(const gantry_chat_template * tmpl) { return tmpl->thinks; }

gantry_text gantry_chat_template_apply(
    const gantry_chat_template * tmpl, const char * chat_json, size_t chat_len, const gantry_template_limits * limits) {
    auto passed = gantry::limit::none;
    return bounded(*limits, passed, [&] {
        const auto chat = chat_of(std::string(chat_json, chat_len));
        auto inputs     = inputs_of(chat);
        // The prompt is the same either way; without this the template is analysed anew.
        inputs.force_pure_content = !tmpl->specialized;
        const bool parsed         = is_set(chat, "parsed");
        inputs.reasoning_format   = parsed ? COMMON_REASONING_FORMAT_DEEPSEEK : COMMON_REASONING_FORMAT_NONE;
        // Nothing is made of the schemas of the tools that are shown, which may be any.
        const bool binds   = chat.contains("callable");
        inputs.tool_choice = binds ? COMMON_CHAT_TOOL_CHOICE_NONE : choice_of(chat);
        auto params = common_chat_templates_apply(tmpl->templates.get(), inputs);
        strip(params.prompt, tmpl->bos, tmpl->eos);
        if (continues(chat)) {
            cut_at_end(params.prompt);
        }
        auto answer = common_json::object({
            {"prompt", params.prompt},
            {"stops", strings(tmpl->specialized ? params.additional_stops : tmpl->stops)},
        });
        if (parsed && (tmpl->specialized || tmpl->analysed)) {
            if (tmpl->specialized && binds) {
                inputs.tool_choice = choice_of(chat);
                inputs.tools       = common_chat_tools_parse_oaicompat(chat.at("callable"));
                params             = common_chat_templates_apply(tmpl->templates.get(), inputs);
            }
            const auto answers  = tmpl->specialized ? params : answers_to(*tmpl, chat);
            const auto triggers = triggers_of(answers);
            // llama.cpp finds calls by patterns.
            const bool by_pattern = tmpl->specialized && !answers.grammar.empty() && triggers.empty();
            const bool is_whole   = by_pattern && answers.grammar_lazy;
            const bool is_led     = tmpl->specialized && !continues(chat) && (by_pattern || is_set(chat, "bound"));
            std::string calls;
            if (by_pattern && !answers.grammar_lazy) {
                inputs.tool_choice = COMMON_CHAT_TOOL_CHOICE_AUTO;
                calls              = common_chat_templates_apply(tmpl->templates.get(), inputs).grammar;
            }
            answer["form"] = common_json::object({
                {"format", static_cast<int>(answers.format)},
                {"prefix", answers.generation_prompt},
                {"parser", answers.parser},
                {"markup", strings(answers.preserved_tokens)},
                {"grammar", answers.grammar},
                {"lazy", answers.grammar_lazy},
                {"triggers", triggers},
                {"whole", is_whole ? whole_grammar(answers) : std::string()},
                {"calls", calls},
                {"lead", is_led ? lead_of(*tmpl, inputs, answers) : common_json()},
                {"thought", thought_of(*tmpl, answers)},
            });
        }
        return answer.dump_safe();
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
