// Reads what a model answers: what it thought, what it says, which tools it calls. Mirrored by src/shim.rs.
#pragma once

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

struct gantry_answer_parser;

// Makes one of what gantry_chat_template_apply tells as "form". Returns null where that is none, and fills `reason`.
struct gantry_answer_parser * gantry_answer_parser_new(const char * form, size_t form_len, struct gantry_text * reason);
void gantry_answer_parser_free(struct gantry_answer_parser * parser);

// Reads the beginning of an answer, or all of it, in at most so much computing and memory (guard.h). Answers {"reasoning": "...",
// "content": "...", "calls": [{"id": "...", "name": "...", "arguments": "..."}], "whole": b, "open": "reasoning", "content" or "",
// "held": "..."}: the last call's arguments may be the beginning of some; whole: nothing need follow; open: what the text ends in;
// held: what follows the last of what was thought or said.
struct gantry_text gantry_answer_parse(
    const struct gantry_answer_parser * parser, const char * text, size_t text_len, uint64_t cpu_ms, uint64_t memory_bytes);

#ifdef __cplusplus
}
#endif
