#include "template.h"

#include "chat.h"
#include "json.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gantry {

namespace {

size_t line_of(const std::string & text, size_t pos) {
    return 1 + static_cast<size_t>(std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(std::min(pos, text.size())), '\n'));
}

[[noreturn]] void refuse(const std::string & text, size_t pos, const char * what, size_t most) {
    throw std::runtime_error("line " + std::to_string(line_of(text, pos)) + ": " + what + " than " + std::to_string(most));
}

// The parser calls itself for each bracket, block and `elif`, and for each operand of an expression the tree gets deeper,
// which is walked in the same way.
void check_nesting(const jinja::lexer_result & lexed, size_t max_nesting, size_t max_expression) {
    using jinja::token;
    const auto & tokens   = lexed.tokens;
    size_t brackets = 0, expression = 0, nesting = 0;
    std::vector<size_t> blocks; // what each open block adds to `nesting`
    for (size_t i = 0; i < tokens.size(); i++) {
        const auto & tok = tokens[i];
        switch (tok.t) {
            case token::open_statement: {
                const bool named = i + 1 < tokens.size() && tokens[i + 1].t == token::identifier;
                const std::string name = named ? tokens[i + 1].value : "";
                bool opens = name == "if" || name == "for" || name == "macro" || name == "call" || name == "filter" ||
                             name == "generation";
                if (name == "set") {
                    // A block unless it assigns.
                    opens = true;
                    for (size_t j = i; j < tokens.size() && tokens[j].t != token::close_statement; j++) {
                        opens = opens && tokens[j].t != token::equals;
                    }
                }
                if (opens) {
                    blocks.push_back(1);
                    nesting += 1;
                } else if (name == "elif" && !blocks.empty()) {
                    blocks.back() += 1;
                    nesting += 1;
                } else if (name.compare(0, 3, "end") == 0 && !blocks.empty()) {
                    nesting -= blocks.back();
                    blocks.pop_back();
                }
                if (nesting > max_nesting) {
                    refuse(lexed.source, tok.pos, "blocks nest deeper", max_nesting);
                }
                brackets = expression = 0;
                break;
            }
            case token::open_expression:
                brackets = expression = 0;
                break;
            case token::open_paren:
            case token::open_square_bracket:
            case token::open_curly_bracket:
                brackets += 1;
                if (brackets > max_nesting) {
                    refuse(lexed.source, tok.pos, "brackets nest deeper", max_nesting);
                }
                break;
            case token::close_paren:
            case token::close_square_bracket:
            case token::close_curly_bracket:
                brackets -= brackets > 0 ? 1 : 0;
                break;
            default:
                break;
        }
        expression += 1;
        if (tok.t == token::text || tok.t == token::comment) {
            expression = 0;
        } else if (expression > max_expression) {
            refuse(lexed.source, tok.pos, "an expression has more parts", max_expression);
        }
    }
}

// What the parser does not like it says without a place: it is the last of the fewest tokens of which it says the same.
// Said as the interpreter says it.
jinja::program parse(const jinja::lexer_result & lexed) {
    const auto refusal = [&](size_t count) -> std::string {
        const auto end = lexed.tokens.begin() + static_cast<ptrdiff_t>(count);
        try {
            (void) jinja::parse_from_tokens({{lexed.tokens.begin(), end}, lexed.source});
        } catch (const std::exception & e) {
            return e.what();
        }
        return "";
    };
    try {
        return jinja::parse_from_tokens(lexed);
    } catch (const jinja::parser_exception &) {
        throw; // says its place
    } catch (const std::exception & e) {
        const std::string what = e.what();
        size_t fine = 0, refused = lexed.tokens.size();
        while (refused - fine > 1) {
            const size_t half = fine + (refused - fine) / 2;
            (refusal(half) == what ? refused : fine) = half;
        }
        if (refused == 0) {
            throw;
        }
        const size_t pos   = std::min(lexed.tokens[refused - 1].pos, lexed.source.size());
        const size_t start = pos == 0 ? std::string::npos : lexed.source.rfind('\n', pos - 1);
        const size_t column = pos - (start == std::string::npos ? 0 : start + 1) + 1;
        // All that the standard library says of a number that is too large is the name of its function.
        const bool number = dynamic_cast<const std::out_of_range *>(&e) && what.rfind("sto", 0) == 0;
        throw std::runtime_error("While executing a template at line " + std::to_string(line_of(lexed.source, pos)) +
                                 ", column " + std::to_string(column) +
                                 " \nError: " + (number ? "the number is too large" : what));
    }
}

} // namespace

struct template_probe::parts {
    jinja::program program;
    std::string    text, bos, eos;
    bool           tools = false;
};

template_probe::template_probe(
    const std::string & text, std::string bos, std::string eos, size_t max_nesting, size_t max_expression)
    : parts_(nullptr) {
    auto made = std::make_unique<parts>();
    jinja::lexer lexer;
    auto lexed = lexer.tokenize(text);
    check_nesting(lexed, max_nesting, max_expression);
    made->program = parse(lexed);
    made->tools   = std::any_of(lexed.tokens.begin(), lexed.tokens.end(), [](const jinja::token & tok) {
        return tok.t == jinja::token::identifier && tok.value == "tools";
    });
    made->text = std::move(lexed.source);
    made->bos  = std::move(bos);
    made->eos  = std::move(eos);
    parts_     = made.release();
}

template_probe::~template_probe() { delete parts_; }

bool template_probe::knows_tools() const { return parts_->tools; }

void template_probe::render(const std::string & messages, const std::string & tools) const {
    jinja::context ctx(parts_->text);
    auto given = common_json::object({
        {"messages", common_json::parse(messages)},
        {"bos_token", parts_->bos},
        {"eos_token", parts_->eos},
        {"add_generation_prompt", true},
    });
    if (!tools.empty()) {
        given["tools"] = common_json::parse(tools);
    }
    jinja::global_from_json(ctx, given, true);
    jinja::runtime runtime(ctx);
    jinja::runtime::gather_string_parts(runtime.execute(parts_->program));
}

} // namespace gantry
