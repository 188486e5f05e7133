// SPDX-License-Identifier: Apache-2.0
//
// Jinja's grammar, as its manual and its own parser have it: filters bind closer than arithmetic, `not` less than comparisons,
// a test takes one argument without brackets.
#include <algorithm>
#include <charconv>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/jinja/syntax.hpp>

namespace kvpolicy::reference::jinja {
namespace {

using Ends = std::vector<std::string_view>;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_{tokens_of(source)} {}

  NodePtr run() {
    NodePtr all = body({});
    return all;
  }

 private:
  using Mutable = std::unique_ptr<Node>;

  template <class... Parts>
  [[noreturn]] void fail_here(const Parts&... parts) const {
    fail<FormatError>("the chat template, line ", now().line, ": ", parts...);
  }

  // --- Tokens ---
  [[nodiscard]] const Token& now() const { return tokens_[at_]; }
  [[nodiscard]] const Token& after(std::size_t tokens) const {
    return tokens_[std::min(at_ + tokens, tokens_.size() - 1)];
  }
  [[nodiscard]] bool sees(TokenKind kind) const { return now().kind == kind; }
  [[nodiscard]] bool sees_sign(std::string_view sign) const { return now().is(TokenKind::sign, sign); }
  [[nodiscard]] bool sees_name(std::string_view name) const { return now().is(TokenKind::name, name); }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_sign(std::string_view sign) { return sees_sign(sign) && (++at_, true); }
  bool skip_name(std::string_view name) { return sees_name(name) && (++at_, true); }
  [[nodiscard]] std::string shown() const {
    return sees(TokenKind::name) || sees(TokenKind::sign)             ? io::in_quotes(now().text)
           : sees(TokenKind::end)                                     ? std::string{"the template's end"}
           : sees(TokenKind::data)                                    ? std::string{"text"}
           : sees(TokenKind::block_end) || sees(TokenKind::print_end) ? std::string{"the tag's end"}
                                                                      : std::string{"a literal"};
  }
  void need_sign(std::string_view sign) {
    if (!skip_sign(sign)) fail_here("'", sign, "' is missing before ", shown());
  }
  std::string need_name() {
    if (!sees(TokenKind::name)) fail_here("a name is missing before ", shown());
    return take().text;
  }
  void need(TokenKind kind) {
    if (!sees(kind)) fail_here("the tag should end before ", shown());
    ++at_;
  }

  // --- Nodes ---
  [[nodiscard]] Mutable make(Kind kind) const {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->line = now().line;
    return node;
  }
  void add(Mutable& to, NodePtr child) const {
    if (child) to->depth = std::max(to->depth, child->depth + 1);
    if (to->depth > most_depth) fail_here("it is nested more than ", most_depth, " deep");
    to->children.push_back(std::move(child));
  }
  template <class... Children>
  [[nodiscard]] Mutable make(Kind kind, std::string name, Children... children) const {
    Mutable node = make(kind);
    if (!name.empty()) node->names.push_back(std::move(name));
    (add(node, std::move(children)), ...);
    return node;
  }

  /// One call of a function that calls itself.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_{&parser} {
      if (++parser_->level_ > most_depth) parser_->fail_here("it is nested more than ", most_depth, " deep");
    }
    ~Level() { --parser_->level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser* parser_;
  };

  // --- Expressions, from the loosest to the closest ---
  NodePtr expression() {
    const Level level{*this};
    NodePtr value = either();
    while (skip_name("if")) {
      NodePtr condition = either();
      NodePtr otherwise = skip_name("else") ? expression() : nullptr;
      value = make(Kind::conditional, "", std::move(value), std::move(condition), std::move(otherwise));
    }
    return value;
  }
  NodePtr either() {
    NodePtr left = both();
    while (skip_name("or")) left = make(Kind::either, "", std::move(left), both());
    return left;
  }
  NodePtr both() {
    NodePtr left = negation();
    while (skip_name("and")) left = make(Kind::both, "", std::move(left), negation());
    return left;
  }
  NodePtr negation() {
    const Level level{*this};
    if (skip_name("not")) return make(Kind::not_of, "", negation());
    return comparison();
  }
  NodePtr comparison() {
    NodePtr first = sum();
    Mutable compared;
    while (true) {
      std::string sign;
      if (sees(TokenKind::sign)) {
        static const Ends signs{"==", "!=", "<", "<=", ">", ">="};
        if (std::ranges::find(signs, now().text) != signs.end()) sign = take().text;
      } else if (skip_name("in")) {
        sign = "in";
      } else if (sees_name("not") && after(1).is(TokenKind::name, "in")) {
        at_ += 2;
        sign = "not in";
      }
      if (sign.empty()) break;
      if (!compared) compared = make(Kind::compare, "", std::move(first));
      compared->names.push_back(sign);
      add(compared, sum());
    }
    return compared ? NodePtr{std::move(compared)} : std::move(first);
  }
  NodePtr chain(const Ends& signs, NodePtr (Parser::*next)()) {
    NodePtr left = (this->*next)();
    while (sees(TokenKind::sign) && std::ranges::find(signs, now().text) != signs.end()) {
      std::string sign = take().text;
      left = make(Kind::arithmetic, std::move(sign), std::move(left), (this->*next)());
    }
    return left;
  }
  NodePtr sum() { return chain({"+", "-"}, &Parser::joined); }
  NodePtr joined() {
    NodePtr first = product();
    if (!sees_sign("~")) return first;
    Mutable node = make(Kind::concat, "", std::move(first));
    while (skip_sign("~")) add(node, product());
    return node;
  }
  NodePtr product() { return chain({"*", "/", "//", "%"}, &Parser::power); }
  NodePtr power() { return chain({"**"}, &Parser::filtered_unary); }
  NodePtr filtered_unary() { return filtered(unary()); }
  NodePtr unary() {
    const Level level{*this};
    if (skip_sign("-")) return postfix(make(Kind::negative, "", unary()));
    if (skip_sign("+")) return postfix(make(Kind::positive, "", unary()));
    return postfix(primary());
  }
  NodePtr filtered(NodePtr value) {
    while (true) {
      if (sees_sign("|")) {
        value = filter(std::move(value));
      } else if (skip_name("is")) {
        value = test(std::move(value));
      } else if (sees_sign("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }
  NodePtr postfix(NodePtr value) {
    while (true) {
      if (skip_sign(".")) {
        if (sees(TokenKind::integer)) {
          value = make(Kind::item, "", std::move(value), primary());
        } else {
          std::string name = need_name();
          value = make(Kind::attribute, std::move(name), std::move(value));
        }
      } else if (skip_sign("[")) {
        value = subscript(std::move(value));
      } else if (sees_sign("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }
  NodePtr subscript(NodePtr value) {
    NodePtr begin = sees_sign(":") ? nullptr : expression();
    if (!skip_sign(":")) {
      need_sign("]");
      return make(Kind::item, "", std::move(value), std::move(begin));
    }
    NodePtr end = sees_sign(":") || sees_sign("]") ? nullptr : expression();
    NodePtr step = skip_sign(":") && !sees_sign("]") ? expression() : nullptr;
    need_sign("]");
    return make(Kind::slice, "", std::move(value), std::move(begin), std::move(end), std::move(step));
  }
  NodePtr primary() {
    const Level level{*this};
    Mutable node = make(Kind::constant);
    if (sees(TokenKind::text)) {
      std::string text;
      while (sees(TokenKind::text)) text += take().text;
      node->value = Value{std::move(text)};
    } else if (sees(TokenKind::integer)) {
      std::int64_t number = 0;
      const std::string digits = take().text;
      const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), number);
      if (read.ec != std::errc{} || (digits.size() > 1 && digits[0] == '0' && number != 0)) {
        fail_here(io::in_quotes(digits), " is no number of 64 bits");
      }
      node->value = Value{number};
    } else if (sees(TokenKind::real)) {
      double number = 0.0;
      const std::string digits = take().text;
      std::from_chars(digits.data(), digits.data() + digits.size(), number);
      node->value = Value{number};
    } else if (sees(TokenKind::name)) {
      const std::string name = take().text;
      if (name == "true" || name == "True" || name == "false" || name == "False") {
        node->value = Value{name == "true" || name == "True"};
      } else if (name == "none" || name == "None") {
        node->value = Value{None{}};
      } else {
        node->kind = Kind::name;
        node->names.push_back(name);
      }
    } else if (skip_sign("(")) {
      NodePtr inside = tuple(true, [&] { return expression(); });
      need_sign(")");
      return inside;
    } else if (skip_sign("[")) {
      node->kind = Kind::list;
      while (!sees_sign("]")) {
        add(node, expression());
        if (!sees_sign("]")) need_sign(",");
      }
      need_sign("]");
    } else if (skip_sign("{")) {
      node->kind = Kind::dict;
      while (!sees_sign("}")) {
        add(node, expression());
        need_sign(":");
        add(node, expression());
        if (!sees_sign("}")) need_sign(",");
      }
      need_sign("}");
    } else {
      fail_here("an expression is missing before ", shown());
    }
    return node;
  }
  /// One value, or a tuple of several.
  template <class One>
  NodePtr tuple(bool in_brackets, One one) {
    const auto ends = [&] {
      return sees(TokenKind::block_end) || sees(TokenKind::print_end) || sees_sign(")") || sees_name("in") ||
             sees_sign("=");
    };
    if (in_brackets && sees_sign(")")) return make(Kind::tuple);
    NodePtr first = one();
    if (!sees_sign(",")) return first;
    Mutable all = make(Kind::tuple, "", std::move(first));
    while (skip_sign(",") && !ends()) add(all, one());
    return all;
  }
  /// "( ... )" after the children that stand already.
  void arguments(Mutable& node) {
    need_sign("(");
    bool named = false;
    while (!sees_sign(")")) {
      std::string name;
      if (skip_sign("**")) {
        name = "**";
      } else if (skip_sign("*")) {
        name = "*";
      } else if (sees(TokenKind::name) && after(1).is(TokenKind::sign, "=")) {
        name = take().text;
        ++at_;
      } else if (named) {
        fail_here("an argument without a name follows one with a name");
      }
      named = named || (!name.empty() && name != "*");
      node->names.push_back(std::move(name));
      add(node, expression());
      if (!sees_sign(")")) need_sign(",");
    }
    need_sign(")");
  }
  NodePtr call(NodePtr callee) {
    Mutable node = make(Kind::call, "", std::move(callee));
    arguments(node);
    return node;
  }
  std::string dotted_name() {
    std::string name = need_name();
    while (skip_sign(".")) name.append(".").append(need_name());
    return name;
  }
  NodePtr filter(NodePtr value) {
    need_sign("|");
    return filter_of(std::move(value));
  }
  NodePtr filter_of(NodePtr value) {
    Mutable node = make(Kind::filter);
    add(node, std::move(value));
    node->names.push_back(dotted_name());
    if (sees_sign("(")) arguments(node);
    return node;
  }
  NodePtr test(NodePtr value) {
    const bool negated = skip_name("not");
    Mutable node = make(Kind::test, "", std::move(value));
    node->names.push_back(dotted_name());
    const bool literal = sees(TokenKind::text) || sees(TokenKind::integer) || sees(TokenKind::real);
    const bool name = sees(TokenKind::name) && !sees_name("else") && !sees_name("or") && !sees_name("and");
    if (sees_sign("(")) {
      arguments(node);
    } else if (sees_name("is")) {
      fail_here("a test follows a test; use brackets");
    } else if (literal || name || sees_sign("[") || sees_sign("{")) {
      node->names.emplace_back();
      add(node, postfix(primary()));
    }
    if (!negated) return node;
    return make(Kind::not_of, "", NodePtr{std::move(node)});
  }

  // --- Statements ---
  /// Statements up to a tag that begins with one of these names, which is not taken; to the template's end for none.
  NodePtr body(const Ends& ends) {
    const Level level{*this};
    Mutable all = make(Kind::block);
    while (!sees(TokenKind::end)) {
      if (sees(TokenKind::data)) {
        Mutable text = make(Kind::text);
        text->value = Value{take().text};
        add(all, std::move(text));
      } else if (sees(TokenKind::print_begin)) {
        ++at_;
        NodePtr printed = tuple(false, [&] { return expression(); });
        add(all, make(Kind::print, "", std::move(printed)));
        need(TokenKind::print_end);
      } else {
        const bool ended = std::ranges::any_of(
            ends, [&](std::string_view end) { return after(1).is(TokenKind::name, end); });
        if (ended) return all;
        ++at_;
        add(all, statement());
      }
    }
    if (!ends.empty()) fail_here("it ends without ", ends.back());
    return all;
  }
  /// After a body: the tag that ended it, taken with its name.
  std::string end_name() {
    ++at_;
    return need_name();
  }
  NodePtr body_to(std::string_view end) {
    NodePtr inside = body({end});
    end_name();
    return inside;
  }
  void end_tag() { need(TokenKind::block_end); }

  NodePtr statement() {
    const std::string name = need_name();
    NodePtr node = name == "for"          ? loop()
                   : name == "if"         ? choice()
                   : name == "set"        ? assignment()
                   : name == "macro"      ? macro()
                   : name == "call"       ? call_block()
                   : name == "filter"     ? filter_block()
                   : name == "with"       ? with()
                   : name == "generation" ? marked("endgeneration")
                   : name == "break"      ? NodePtr{make(Kind::break_loop)}
                   : name == "continue"   ? NodePtr{make(Kind::continue_loop)}
                                          : nullptr;
    if (!node) {
      static const Ends known{"extends",    "block", "include", "import", "from",
                              "autoescape", "do",    "trans",   "debug"};
      if (std::ranges::find(known, name) != known.end())
        fail_here("the statement '", name, "' is not carried out here");
      fail_here("the tag ", io::in_quotes(name), " is not one of a template, or closes nothing");
    }
    if ((name == "break" || name == "continue") && loops_ == 0)
      fail_here("'", name, "' stands outside of a loop");
    end_tag();
    return node;
  }
  NodePtr target() {
    return tuple(false, [&]() -> NodePtr {
      if (skip_sign("(")) {
        NodePtr inside = target();
        need_sign(")");
        return inside;
      }
      std::string name = need_name();
      if (skip_sign(".")) {
        Mutable node = make(Kind::member, std::move(name));
        node->names.push_back(need_name());
        return node;
      }
      return make(Kind::name, std::move(name));
    });
  }
  NodePtr loop() {
    Mutable node = make(Kind::each, "", target());
    if (!skip_name("in")) fail_here("'in' is missing before ", shown());
    add(node, tuple(false, [&] { return either(); }));
    add(node, skip_name("if") ? expression() : nullptr);
    if (skip_name("recursive")) node->kind = Kind::recursive;
    end_tag();
    ++loops_;
    add(node, body({"else", "endfor"}));
    --loops_;
    const bool has_else = end_name() == "else";
    if (has_else) end_tag();
    add(node, has_else ? body_to("endfor") : nullptr);
    return node;
  }
  NodePtr choice() {
    Mutable node = make(Kind::choice);
    while (true) {
      add(node, tuple(false, [&] { return expression(); }));
      end_tag();
      add(node, body({"elif", "else", "endif"}));
      const std::string next = end_name();
      if (next == "elif") continue;
      if (next == "else") {
        end_tag();
        add(node, body_to("endif"));
      }
      return node;
    }
  }
  NodePtr filters() {
    if (!sees_sign("|")) return nullptr;
    NodePtr value = filter(nullptr);
    while (sees_sign("|")) value = filter(std::move(value));
    return value;
  }
  NodePtr assignment() {
    NodePtr to = target();
    if (skip_sign("=")) {
      NodePtr value = tuple(false, [&] { return expression(); });
      return make(Kind::set, "", std::move(to), std::move(value));
    }
    NodePtr applied = filters();
    end_tag();
    NodePtr inside = inner_body("endset");
    return make(Kind::set_block, "", std::move(to), std::move(inside), std::move(applied));
  }
  /// "(a, b = 1)": names into `node`; the defaults are returned, to be added after its other children.
  std::vector<NodePtr> parameters(Mutable& node) {
    std::vector<NodePtr> defaults;
    need_sign("(");
    while (!sees_sign(")")) {
      node->names.push_back(need_name());
      if (skip_sign("=")) {
        defaults.push_back(expression());
      } else if (!defaults.empty() && defaults.back()) {
        fail_here("a parameter without a default follows one with a default");
      } else {
        defaults.push_back(nullptr);
      }
      if (!sees_sign(")")) need_sign(",");
    }
    need_sign(")");
    return defaults;
  }
  NodePtr inner_body(std::string_view end) {
    const std::size_t loops = std::exchange(loops_, 0);
    NodePtr inside = body_to(end);
    loops_ = loops;
    return inside;
  }
  NodePtr macro() {
    Mutable node = make(Kind::macro, need_name());
    std::vector<NodePtr> defaults = parameters(node);
    end_tag();
    add(node, inner_body("endmacro"));
    if (sees(TokenKind::name)) ++at_;  // its name again
    for (NodePtr& one : defaults) add(node, std::move(one));
    return node;
  }
  NodePtr call_block() {
    Mutable node = make(Kind::call_block);
    std::vector<NodePtr> defaults;
    if (sees_sign("(")) defaults = parameters(node);
    NodePtr called = expression();
    if (called->kind != Kind::call) fail_here("a call block calls no function");
    end_tag();
    add(node, inner_body("endcall"));
    add(node, std::move(called));
    for (NodePtr& one : defaults) add(node, std::move(one));
    return node;
  }
  NodePtr filter_block() {
    NodePtr applied = filter_of(nullptr);
    while (sees_sign("|")) applied = filter(std::move(applied));
    end_tag();
    NodePtr inside = inner_body("endfilter");
    return make(Kind::filter_block, "", std::move(inside), std::move(applied));
  }
  NodePtr with() {
    Mutable node = make(Kind::with);
    while (!sees(TokenKind::block_end)) {
      add(node, make(Kind::name, need_name()));
      need_sign("=");
      add(node, expression());
      if (!sees(TokenKind::block_end)) need_sign(",");
    }
    end_tag();
    add(node, body_to("endwith"));
    return node;
  }
  NodePtr marked(std::string_view end) {
    end_tag();
    return make(Kind::scope, "", body_to(end));
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  std::size_t level_ = 0;
  std::size_t loops_ = 0;
};

}  // namespace

NodePtr parse(std::string_view source) { return Parser{source}.run(); }

}  // namespace kvpolicy::reference::jinja
