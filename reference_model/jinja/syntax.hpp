// SPDX-License-Identifier: Apache-2.0
//
// A template as a tree, and what makes one of a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/jinja/value.hpp>

namespace kvpolicy::reference::jinja {

struct Node;
using NodePtr = std::unique_ptr<const Node>;

/// What a node is, and what its children and names are.
enum class Kind : std::uint8_t {
  // Expressions.
  constant,   // value
  name,       // names[0]
  list,       // children
  tuple,      // children
  dict,       // children: key, value, key, value, ...
  attribute,  // children[0] . names[0]
  item,       // children[0] [ children[1] ]
  slice,      // children[0] [ begin : end : step ], children 1 to 3; null where nothing stands
  call,  // children[0] ( arguments ); names[i] is what argument i + 1 is called: "" by its place, "*", "**", or a name
  filter,       // children[0] | names[0] ( arguments ), called names[1], names[2], ...
  test,         // children[0] is names[0] ( arguments ), likewise
  not_of,       // children[0]
  negative,     // children[0]
  positive,     // children[0]
  both,         // children[0] and children[1]
  either,       // children[0] or children[1]
  arithmetic,   // children[0] names[0] children[1]
  concat,       // children, joined as texts
  compare,      // children[0] names[0] children[1] names[1] children[2] ...
  conditional,  // children: value, condition, otherwise; the last may be null
  // Statements.
  text,       // value
  print,      // children[0]
  each,       // target, iterable, filter (may be null), body, else (may be null)
  recursive,  // each, with loop(...)
  choice,     // children: condition, body, condition, body, ..., body of else
  block,      // children, one after the other
  set,        // target, value
  set_block,  // target, body; filters follow as a filter node over null (may be null)
  macro,  // names: its own, then its parameters'; children: body, then the defaults (null where there is none)
  call_block,    // names: parameters; children: body, call, then the defaults
  filter_block,  // body, filter over null
  with,          // children: target, value, ..., body
  scope,         // body
  break_loop,
  continue_loop,
  // Targets, beside name and tuple.
  member,  // names[0] . names[1], of a namespace
};

struct Node {
  Kind kind = Kind::constant;
  std::size_t line = 0;
  std::size_t depth = 1;  ///< of the tree from here
  Value value;
  std::vector<std::string> names;
  std::vector<NodePtr> children;
};

/// How deep a tree may be: whoever walks it needs that many calls.
inline constexpr std::size_t most_depth = 200;

/// With trim_blocks and lstrip_blocks, as transformers reads templates.
/// @throws FormatError, with the line, for what is not Jinja, and for statements that are not carried out, by name
[[nodiscard]] NodePtr parse(std::string_view source);

enum class TokenKind : std::uint8_t {
  data,
  print_begin,
  print_end,
  block_begin,
  block_end,
  name,
  text,
  integer,
  real,
  sign,
  end
};

struct Token {
  TokenKind kind = TokenKind::end;
  std::size_t line = 1;
  std::string text;  ///< a text's without its quotes and escapes

  [[nodiscard]] bool is(TokenKind of, std::string_view spelling) const {
    return kind == of && text == spelling;
  }
};

/// @throws FormatError, with the line
[[nodiscard]] std::vector<Token> tokens_of(std::string_view source);

}  // namespace kvpolicy::reference::jinja
