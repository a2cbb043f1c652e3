#include "grammar.h"

#include "llama-grammar.h"
#include "text.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

using gantry::to_error;
using gantry::to_text;

extern "C" {

gantry_text gantry_grammar_parse(const llama_vocab * vocab, const char * text, gantry_text * names, size_t * rule_at) {
    try {
        // Rule by rule, because llama_grammar_parser::parse prints its errors instead of throwing them.
        llama_grammar_parser parser(vocab);
        for (const char * pos = text; *pos != 0;) {
            *rule_at = static_cast<size_t>(pos - text);
            pos      = parser.parse_rule(pos);
        }
        *rule_at = 0;
        const auto root = parser.symbol_ids.find("root");
        if (root == parser.symbol_ids.end()) {
            throw std::runtime_error("there is no rule 'root'");
        }
        std::vector<std::string> names_by_id(parser.rules.size());
        for (const auto & symbol : parser.symbol_ids) {
            if (symbol.second >= parser.rules.size() || parser.rules[symbol.second].empty()) {
                throw std::runtime_error("undefined rule '" + symbol.first + "'");
            }
            names_by_id[symbol.second] = symbol.first;
        }
        std::string lines;
        for (const auto & name : names_by_id) {
            lines += name;
            lines += '\n';
        }
        std::vector<uint32_t> words{root->second};
        for (const auto & rule : parser.rules) {
            for (const auto & element : rule) {
                words.push_back(static_cast<uint32_t>(element.type));
                words.push_back(element.value);
            }
        }
        *names = to_text(lines.data(), lines.size(), false);
        return to_text(words.data(), words.size() * sizeof(uint32_t), false);
    } catch (const std::exception & e) {
        return to_error(e.what());
    } catch (...) {
        return {nullptr, 0, true};
    }
}
}
