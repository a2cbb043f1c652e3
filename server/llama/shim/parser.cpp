#include "parser.h"

#include "chat-peg-parser.h"
#include "chat.h"
#include "guard.h"
#include "json.h"
#include "peg-parser.h"
#include "text.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

struct gantry_answer_parser {
    common_chat_format format;
    // What the prompt ends with that the parser reads first.
    std::string      prefix;
    common_peg_arena arena;
};

namespace {

using gantry::guarded;
using gantry::to_text;

// What llama.cpp makes of a parse in this format.
std::unique_ptr<common_chat_peg_mapper> mapper_of(common_chat_format format, common_chat_msg & message) {
    switch (format) {
        case COMMON_CHAT_FORMAT_PEG_GEMMA4: return std::make_unique<common_chat_peg_gemma4_mapper>(message);
        case COMMON_CHAT_FORMAT_PEG_MINIMAX_M3: return std::make_unique<common_chat_peg_minimax_m3_mapper>(message);
        default: return std::make_unique<common_chat_peg_mapper>(message);
    }
}

std::string parsed(const gantry_answer_parser & parser, const std::string & text) {
    common_peg_parse_context context(parser.prefix + text, COMMON_PEG_PARSE_FLAG_LENIENT);
    const auto result = parser.arena.parse(context);
    if (result.fail() && result.end == 0) {
        throw std::runtime_error("the answer is not of the form that the template is for");
    }
    common_chat_msg message;
    mapper_of(parser.format, message)->from_ast(context.ast, result);
    std::string last;
    size_t last_end = std::min(parser.prefix.size(), context.input.size());
    context.ast.visit(result, [&](const common_peg_ast_node & node) {
        const bool is_text = node.tag == common_chat_peg_builder::CONTENT || node.tag == common_chat_peg_builder::REASONING;
        if (is_text && node.end >= last_end) {
            last     = node.tag;
            last_end = node.end;
        }
    });
    const bool open = last_end == context.input.size();
    auto calls = common_json::array();
    for (const auto & call : message.tool_calls) {
        calls.push_back(common_json::object({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}}));
    }
    return common_json::object({
        {"reasoning", message.reasoning_content},
        {"content", message.content},
        {"calls", calls},
        {"whole", result.success()},
        {"open", open ? last : ""},
        {"held", context.input.substr(std::min(last_end, context.input.size()))},
    }).dump_safe();
}

} // namespace

extern "C" {

gantry_answer_parser * gantry_answer_parser_new(const char * form_json, size_t form_len, gantry_text * reason) {
    std::unique_ptr<gantry_answer_parser> made;
    *reason = guarded([&] {
        const auto form = common_json::parse(std::string(form_json, form_len));
        const auto format = form.at("format").get<int>();
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            throw std::runtime_error("there is no such format");
        }
        made         = std::make_unique<gantry_answer_parser>();
        made->format = static_cast<common_chat_format>(format);
        made->prefix = form.at("prefix").get<std::string>();
        made->arena.load(form.at("parser").get<std::string>());
        return to_text(std::string(), false);
    });
    return reason->error ? nullptr : made.release();
}

void gantry_answer_parser_free(gantry_answer_parser * parser) { delete parser; }

gantry_text gantry_answer_parse(
    const gantry_answer_parser * parser, const char * text, size_t text_len, uint64_t cpu_ms, uint64_t memory_bytes) {
    return guarded([&] {
        std::string answer;
        gantry::guard guard(cpu_ms, memory_bytes);
        answer = parsed(*parser, std::string(text, text_len));
        guard.lift();
        if (guard.broken() != gantry::limit::none) {
            throw std::runtime_error(std::string("reading the answer takes too much ") + gantry::name(guard.broken()));
        }
        return to_text(answer, false);
    });
}
}
