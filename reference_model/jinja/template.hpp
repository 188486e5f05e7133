// SPDX-License-Identifier: Apache-2.0
//
// Jinja, as far as the templates of conversations need it, with the settings of transformers' apply_chat_template:
//
//   const jinja::Template hello{"Hello {{ name }}!"};
//   const jinja::Text text = hello.render({{"name", "world"}});
//
// It has expressions, filters, tests, loops, macros, namespaces, white space control, raise_exception and strftime_now. What it
// does not have it refuses by name; it never prints something else than Jinja. A template is a file from outside: how deep
// it nests, what it does and what it prints are bounded.
#pragma once

#include <cstddef>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <reference_model/jinja/value.hpp>

namespace kvpolicy::reference::jinja {

struct Node;

struct RenderOptions {
  /// The time of strftime_now; without one the function is not defined, and templates that ask whether it is say a fixed date.
  std::optional<std::tm> now;
  std::size_t steps = 20'000'000;  ///< A step is an expression, a loop's turn, or some work of a filter.
};

/// Threads may share one.
class Template {
 public:
  /// @throws FormatError, with the line, if `source` is not a template or has a statement that is not carried out
  explicit Template(std::string_view source);

  /// @throws ConfigError if the template refuses (raise_exception), does what cannot be done, or uses what is not carried out
  [[nodiscard]] Text render(std::map<std::string, Value, std::less<>> names,
                            const RenderOptions& options = {}) const;

 private:
  std::shared_ptr<const Node> all_;
};

}  // namespace kvpolicy::reference::jinja
