// SPDX-License-Identifier: Apache-2.0
//
// A radix tree over the tokens of texts: what is known of some of their prefixes. An edge carries the tokens
// by which a text goes on until it ends or another one branches off.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>

namespace kvpolicy::detail {

/// Maps token sequences to values. Not synchronised.
template <class Value>
class PrefixTree {
 public:
  using Token = std::int32_t;

  class Node {
   public:
    Node() = default;
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

    /// Tokens from the root to here.
    [[nodiscard]] std::size_t depth() const noexcept { return depth_; }
    /// All of them. @throws std::bad_alloc
    [[nodiscard]] std::vector<Token> tokens() const {
      std::vector<Token> all(depth_);
      for (const Node* node = this; node->parent_ != nullptr; node = node->parent_) {
        std::ranges::copy(node->edge_, all.begin() + static_cast<std::ptrdiff_t>(node->parent_->depth_));
      }
      return all;
    }
    /// The nearest node with a value on the way to the root; null if there is none.
    [[nodiscard]] const Node* above() const noexcept {
      const Node* node = parent_;
      while (node != nullptr && !node->value) node = node->parent_;
      return node;
    }

    std::optional<Value> value = {};

   private:
    friend class PrefixTree;

    std::vector<Token> edge_ = {};  // from the parent to here; empty at the root alone
    std::size_t depth_ = 0;
    Node* parent_ = nullptr;
    std::vector<std::unique_ptr<Node>> children_ = {};  // ascending by the first token of their edges
  };

  /// How far a text is known.
  struct Match {
    const Node* longest = nullptr;  ///< the deepest node with a value whose tokens the text begins with
    std::size_t tokens = 0;         ///< with which the text and some other one begin, at or after `longest`
    const Node* beyond = nullptr;   ///< a node with a value that begins with all of them
  };

  PrefixTree() : root_{std::make_unique<Node>()} {}
  PrefixTree(PrefixTree&&) noexcept = default;
  PrefixTree& operator=(PrefixTree&&) noexcept = default;

  [[nodiscard]] Match match(std::span<const Token> tokens) const {
    Match found;
    const Node* node = root_.get();
    for (;;) {
      if (node->value) found.longest = node;
      found.tokens = node->depth_;
      const Node* child = find_child(*node, tokens.subspan(node->depth_));
      if (child == nullptr) break;
      const std::size_t common = common_length(child->edge_, tokens.subspan(node->depth_));
      found.tokens = node->depth_ + common;
      node = child;
      if (common < child->edge_.size()) break;
    }
    found.beyond = first_value(*node);
    return found;
  }

  /// The node of these tokens, new if there is none. The caller gives a new one a value, or calls `prune`.
  /// @throws std::bad_alloc, with the tree as it was
  [[nodiscard]] Node& at(std::span<const Token> tokens) {
    Node* node = root_.get();
    while (node->depth_ < tokens.size()) {
      const std::span<const Token> rest = tokens.subspan(node->depth_);
      const auto place = child_at(*node, rest.front());
      const bool is_known = place != node->children_.end() && (*place)->edge_.front() == rest.front();
      if (!is_known) {
        auto added = std::make_unique<Node>();
        added->edge_.assign(rest.begin(), rest.end());
        added->depth_ = tokens.size();
        added->parent_ = node;
        return **node->children_.insert(place, std::move(added));
      }
      const std::size_t common = common_length((*place)->edge_, rest);
      if (common < (*place)->edge_.size()) split(*place, common);
      node = place->get();
    }
    return *node;
  }

  /// Removes what a node without a value no longer needs: itself, or a branch with one way to go.
  void prune(Node& node) noexcept {
    Node* now = &node;
    while (now->parent_ != nullptr && !now->value && now->children_.empty()) {
      Node* parent = now->parent_;
      std::erase_if(parent->children_, [&](const auto& child) { return child.get() == now; });
      now = parent;
    }
    if (now->parent_ != nullptr && !now->value && now->children_.size() == 1) merge(*now);
  }

  /// visit(node) for each node with a value, before those that begin with its tokens.
  template <class Visit>
  void for_each(Visit visit) const {
    std::vector<Node*> open{root_.get()};
    while (!open.empty()) {
      Node* node = open.back();
      open.pop_back();
      if (node->value) visit(*node);
      for (auto child = node->children_.rbegin(); child != node->children_.rend(); ++child) {
        open.push_back(child->get());
      }
    }
  }

 private:
  using Children = std::vector<std::unique_ptr<Node>>;

  [[nodiscard]] static std::size_t common_length(std::span<const Token> a, std::span<const Token> b) {
    return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  }
  [[nodiscard]] static typename Children::iterator child_at(Node& node, Token first) {
    return std::ranges::lower_bound(node.children_, first, {},
                                    [](const auto& child) { return child->edge_.front(); });
  }
  [[nodiscard]] static const Node* find_child(const Node& node, std::span<const Token> rest) {
    if (rest.empty()) return nullptr;
    const auto place = child_at(const_cast<Node&>(node), rest.front());
    const bool is_known = place != node.children_.end() && (*place)->edge_.front() == rest.front();
    return is_known ? place->get() : nullptr;
  }
  // The first node with a value at `node` or below it.
  [[nodiscard]] static const Node* first_value(const Node& node) {
    const Node* now = &node;
    while (!now->value && !now->children_.empty()) now = now->children_.front().get();
    return now->value ? now : nullptr;
  }

  // Puts a node between `child` and its parent, after the first `common` tokens of the edge.
  static void split(std::unique_ptr<Node>& child, std::size_t common) {
    const auto middle = child->edge_.begin() + static_cast<std::ptrdiff_t>(common);
    auto added = std::make_unique<Node>();
    added->edge_.assign(child->edge_.begin(), middle);
    added->children_.reserve(1);
    added->parent_ = child->parent_;
    added->depth_ = child->parent_->depth_ + common;
    child->edge_.erase(child->edge_.begin(), middle);
    child->parent_ = added.get();
    added->children_.push_back(std::exchange(child, nullptr));
    child = std::move(added);
  }
  // The only child of `node` takes its place; without memory for the longer edge both stay.
  void merge(Node& node) noexcept {
    Children& siblings = node.parent_->children_;
    const auto place =
        std::ranges::find_if(siblings, [&](const auto& sibling) { return sibling.get() == &node; });
    KVPOLICY_TRY {
      std::vector<Token> edge = node.edge_;
      edge.insert(edge.end(), node.children_.front()->edge_.begin(), node.children_.front()->edge_.end());
      std::unique_ptr<Node> child = std::move(node.children_.front());
      child->edge_ = std::move(edge);
      child->parent_ = node.parent_;
      *place = std::move(child);
    }
    KVPOLICY_CATCH_ALL {}
  }

  std::unique_ptr<Node> root_;
};

}  // namespace kvpolicy::detail
