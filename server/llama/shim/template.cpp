#include "template.h"

#include "chat.h"
#include "guard.h"
#include "json.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gantry {

namespace {

size_t line_of(const std::string & text, size_t pos) {
    return 1 + static_cast<size_t>(std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(std::min(pos, text.size())), '\n'));
}

// What is computed to find the place of a limit, and in the last look for it.
constexpr uint64_t LOOKS_CPU_MS = 400;

// Said as the interpreter says it.
[[noreturn]] void refuse_at(const std::string & text, size_t pos, const std::string & what) {
    pos                 = std::min(pos, text.size());
    const size_t start  = pos == 0 ? std::string::npos : text.rfind('\n', pos - 1);
    const size_t column = pos - (start == std::string::npos ? 0 : start + 1) + 1;
    throw std::runtime_error("While executing a template at line " + std::to_string(line_of(text, pos)) + ", column " +
                             std::to_string(column) + " \nError: " + what);
}

// The memory that was not enough for all of `most` is not enough for this many, and is for one less, where there is time to find those;
// 0: that cannot be told. `first` gives so many of them, and `make` made something of all.
template <typename First, typename Make>
size_t fewest_too_many(size_t most, int64_t bytes, First first, Make make) {
    // The guard outside is broken by now.
    guard  beside(LOOKS_CPU_MS, INT64_MAX);
    size_t fine = 0, refused = most;
    try {
        while (refused - fine > 1) {
            const size_t half = fine + (refused - fine) / 2;
            const auto   part = first(half);
            guard        look(LOOKS_CPU_MS, static_cast<uint64_t>(std::max<int64_t>(bytes, 0)));
            try {
                make(part);
            } catch (const std::bad_alloc &) {
                // Refused by the guard, or by the system, of which the guard knows nothing.
                if (look.broken() == limit::none) {
                    return 0;
                }
            } catch (const std::exception &) {
                // A part of a template is none.
            }
            if (look.broken() == limit::time) {
                break;
            }
            (look.broken() == limit::none ? fine : refused) = half;
        }
    } catch (const limit_exceeded &) {
        // The time for all looks is over.
    }
    return refused;
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

// A limit that is passed here is told by where in the text.
jinja::lexer_result lex(const std::string & text) {
    const auto bytes = guard::memory_left();
    try {
        return jinja::lexer().tokenize(text);
    } catch (const limit_exceeded & e) {
        const auto first = [&](size_t count) { return text.substr(0, count); };
        const auto make  = [](const std::string & part) { (void) jinja::lexer().tokenize(part); };
        const size_t refused = e.which == limit::memory ? fewest_too_many(text.size(), bytes, first, make) : 0;
        if (refused == 0) {
            throw;
        }
        refuse_at(text, refused - 1, e.what());
    }
}

// What the parser does not like it says without a line: it is the last of the fewest tokens of which it says the same.
jinja::program parse(const jinja::lexer_result & lexed) {
    const auto bytes = guard::memory_left();
    const auto first = [&](size_t count) -> jinja::lexer_result {
        return {{lexed.tokens.begin(), lexed.tokens.begin() + static_cast<ptrdiff_t>(count)}, lexed.source};
    };
    const auto refusal = [&](size_t count) -> std::string {
        try {
            (void) jinja::parse_from_tokens(first(count));
        } catch (const std::exception & e) {
            return e.what();
        }
        return "";
    };
    try {
        return jinja::parse_from_tokens(lexed);
    } catch (const limit_exceeded & e) {
        const auto make = [](const jinja::lexer_result & part) { (void) jinja::parse_from_tokens(part); };
        const size_t refused = e.which == limit::memory ? fewest_too_many(lexed.tokens.size(), bytes, first, make) : 0;
        if (refused == 0) {
            throw;
        }
        refuse_at(lexed.source, lexed.tokens[refused - 1].pos, e.what());
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
        // All that the standard library says of a number that is too large is the name of its function.
        const bool number = dynamic_cast<const std::out_of_range *>(&e) && what.rfind("sto", 0) == 0;
        // Behind the first line is some of the text.
        refuse_at(lexed.source, lexed.tokens[refused - 1].pos, number ? "the number is too large" : what.substr(0, what.find('\n')));
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
    auto lexed = lex(text);
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
