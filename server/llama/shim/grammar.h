// llama.cpp's grammar language: its GBNF parser, without its matcher (src/grammar.rs says why). No exception crosses into Rust. Mirrored by src/shim.rs.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// Parses GBNF that the caller has bounded and that starts with a rule's name. Answers uint32_t words: the number of the
// rule `root`, then for each rule its elements (a llama_gretype and a value), the last of which is LLAMA_GRETYPE_END.
// `names` gets the rules' names, a line each. On an error `rule_at` is where the rule at fault begins.
struct gantry_text gantry_grammar_parse(
    const struct llama_vocab * vocab, const char * text, struct gantry_text * names, size_t * rule_at);

#ifdef __cplusplus
}
#endif
