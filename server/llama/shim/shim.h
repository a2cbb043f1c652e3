// C entry points whose C++ side may throw: no exception crosses into Rust. Mirrored by src/shim.rs.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The result of a call that answers with text: `error` says whether it is the answer or the reason of a failure.
// `data` is freed with gantry_text_free; it is null when not even the text could be allocated.
struct gantry_text {
    char * data;
    size_t len;
    bool   error;
};

struct gantry_chat_template;

void gantry_text_free(struct gantry_text text);

// llama.cpp's helper library logs on its own to standard error; errors come back as text, so that is turned off.
void gantry_common_log_off(void);

// Has glibc give back what blocks of at least so many bytes took as soon as they are freed: by itself it keeps, once one has been
// freed, up to 64 MiB of such for each arena. Of a process; does nothing with another C library.
void gantry_return_large_blocks(int bytes);

// Has glibc give back all pages that only freed blocks are on. Of a process, each arena locked meanwhile; does nothing with
// another C library.
void gantry_return_free_memory(void);

// What one call may take of the calling thread's time, and of memory (guard.h), and a template of nesting and length.
struct gantry_template_limits {
    uint64_t cpu_ms;
    uint64_t memory_bytes;
    uint64_t nesting;
    uint64_t expression_parts;
};

// Answers what a model says of its chat template: {"text": "...", "bos": "...", "eos": "...", "add_bos": b, "add_eos": b}.
struct gantry_text gantry_chat_template_source(const struct llama_model * model);

// Parses a template and looks at what it can do. `source` is what gantry_chat_template_source answers, with the chats that it is
// tried with first: "samples": [{"messages": "[...]", "tools": "[...]" or ""}]. Returns null where
// that fails, and fills `reason`: {"limit": "time", "memory", "stack" or "", "message": "..."}.
struct gantry_chat_template * gantry_chat_template_new(
    const char * source, size_t source_len, const struct gantry_template_limits * limits, struct gantry_text * reason);
void gantry_chat_template_free(struct gantry_chat_template * tmpl);
// Whether the template looks at tools.
bool gantry_chat_template_knows_tools(const struct gantry_chat_template * tmpl);
// Whether what a model thinks has a place of its own in the answers that the template is for.
bool gantry_chat_template_thinks(const struct gantry_chat_template * tmpl);

// Renders a chat: an array of messages, or {"messages": [...]} with any of "tools": [...] (as OpenAI has them), "callable": [...]
// (those of them that may be called, as calls are bound by them; all), "required": b (one must be), "parallel": b (several may be), "thinking": b (it may;
// true), "variables": {...} (further ones of the template), "parsed": b (say what answers look like), "bound": b (what is said in
// them is of a form), "continued": b (the prompt ends with the text of the last message, and no turn is opened).
// Answers {"prompt": "...", "stops": ["..."]}, and where that was asked for and is known {"form": {"markup": ["..."], "grammar":
// "..." or "", "lazy": b, "triggers": ["..."], "whole": "...", "calls": "...", "lead": {"at_once": "...", "after_thought": "..."}
// or null, "thought": {"begin": "...", "ends": ["..."], "closing": "..."} or null}} with what
// gantry_answer_parser_new takes: "markup" are reserved tokens that an answer is read by; the grammar is there where a tool may be
// called, and is one of calls alone, the first of which begins with one of "triggers", if it is lazy; otherwise it begins with
// "prefix". Where no text tells that a call begins, there are no "triggers", and of a lazy one "whole" is the grammar of whole
// answers, "prefix" included, but for what rules of the same names in "grammar" say of arguments; of another one "calls" is that
// of calls alone, without what may be said before them. "lead" is what stands before what is said, where it may be known and
// matter. A thought stands between "begin" and the first of "ends" that comes, and "closing"
// ends it. An error is as gantry_chat_template_new has it.
struct gantry_text gantry_chat_template_apply(
    const struct gantry_chat_template * tmpl, const char * chat, size_t chat_len,
    const struct gantry_template_limits * limits);

// Has the process end with GANTRY_EXIT_LIMIT, and 1, 2 or 3 more where time, memory or stack was the limit that was passed,
// when C++ code throws where nothing may be thrown.
#define GANTRY_EXIT_LIMIT (80)
void gantry_exit_on_terminate(void);

// Ends the process once it has computed for so long; 0: not any more.
void gantry_end_after_cpu_ms(uint64_t ms);

// As the llama.cpp functions of these names; where they throw: GANTRY_THROWN, INT32_MIN (tokenize, token_to_piece), null.
#define GANTRY_THROWN (-1000000)
int32_t gantry_decode(struct llama_context * ctx, const struct llama_batch * batch);
int32_t gantry_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                        int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t gantry_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length,
                              bool special);
struct llama_model *   gantry_model_load(const char * path, const struct llama_model_params * params);
struct llama_context * gantry_context_new(struct llama_model * model, const struct llama_context_params * params);

// Bytes of main memory that a context has set aside to compute in; 0 where llama.cpp cannot tell.
uint64_t gantry_compute_bytes(const struct llama_context * ctx);

#ifdef __cplusplus
}
#endif
