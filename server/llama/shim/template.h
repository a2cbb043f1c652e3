// What a chat template is asked before llama.cpp analyses it, within limits: what passes here cannot surprise it much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gantry {

// A template, parsed once to be looked at. Throws what llama.cpp's lexer and parser throw, and of a template that nests too
// deeply for these to be asked.
class template_probe {
  public:
    template_probe(const std::string & text, std::string bos, std::string eos, size_t max_nesting, size_t max_expression);
    ~template_probe();

    // Renders messages, without llama.cpp's preparations, which swallow what goes wrong. `tools` may be empty. Throws what the
    // template throws.
    void render(const std::string & messages, const std::string & tools) const;
    // Whether the template looks at tools.
    bool knows_tools() const;

  private:
    struct parts;
    parts * parts_;
};

} // namespace gantry
