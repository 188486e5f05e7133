// SPDX-License-Identifier: Apache-2.0
//
// The best shapes of trees of draft tokens: the static trees of Sequoia, found by dynamic
// programming from how often a node's first, second, ... child is the accepted one. Decoders that
// verify a tree in one pass measure these frequencies (speculation/acceptance_vector.hpp).
//
// Method: Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
// arXiv:2402.12374. It assumes that the acceptance of a child depends only on its number among its
// siblings. Its trees count the text's last token as their root and ours do not, so n nodes here
// are n + 1 nodes there; the root's 1 is the token that every verification yields in any case.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace kvpolicy {

/// Limits on the depth and the width of a tree.
struct TreeLimits {
  std::size_t levels = TokenTree::max_nodes;    ///< Most nodes on one path: passes of the draft.
  std::size_t branches = TokenTree::max_nodes;  ///< Most children of one node.
};

namespace detail {

/// Checks a vector of acceptances.
/// @throws ConfigError unless every entry is a probability and their sum is at most 1, because a
/// node has at most one accepted child
inline void check_acceptance(std::span<const double> acceptance) {
  double sum = 0.0;
  for (std::size_t child = 0; child < acceptance.size(); ++child) {
    const double share = acceptance[child];
    // Written so that NaN fails.
    require(share >= 0.0 && share <= 1.0, "acceptance: that of child ", child, " is ", share,
            ", must be 0 to 1");
    sum += share;
  }
  require(sum <= 1.0 + 1e-6, "acceptance: the children's sum to ", sum,
          ", must be at most 1, for one of them at most is accepted");
}

}  // namespace detail

/// How many nodes of `tree` are accepted on average. `acceptance[k]` is how often the k-th child is
/// the accepted one, given that its parent was accepted. Children are tried in the order of their
/// numbers; children beyond `acceptance` are never accepted.
/// @throws ConfigError unless the acceptances are probabilities that sum to at most 1
[[nodiscard]] inline double expected_accepted(const TokenTree& tree, std::span<const double> acceptance) {
  detail::check_acceptance(acceptance);
  std::vector<double> reached(tree.size());            // how often the node is accepted
  std::vector<std::size_t> children(tree.size() + 1);  // children so far; the last entry is the text
  double sum = 0.0;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const std::size_t parent = tree.parent(node);
    const bool top = parent == TokenTree::text;
    const std::size_t child = children[top ? tree.size() : parent]++;
    const double share = child < acceptance.size() ? acceptance[child] : 0.0;
    reached[node] = (top ? 1.0 : reached[parent]) * share;
    sum += reached[node];
  }
  return sum;
}

/// How many tokens one verification of `tree` yields on average: the accepted nodes, and the token
/// that the target adds after them.
/// @throws ConfigError unless the acceptances are probabilities that sum to at most 1
[[nodiscard]] inline double expected_tokens(const TokenTree& tree, std::span<const double> acceptance) {
  return 1.0 + expected_accepted(tree, acceptance);
}

/// How many levels `tree` has. The draft needs one pass for each level.
[[nodiscard]] inline std::size_t levels_of(const TokenTree& tree) {
  std::size_t levels = 0;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    levels = std::max(levels, tree.depth(node) + 1);
  }
  return levels;
}

/// A tree of `count` independent chains of `length` tokens, level by level.
/// @throws ConfigError for more than TokenTree::max_nodes nodes
[[nodiscard]] inline TokenTree independent_sequences(std::size_t count, std::size_t length) {
  require(count == 0 || length <= TokenTree::max_nodes / count, "independent_sequences: ", count, " of ",
          length, " tokens are too many, a tree has at most ", TokenTree::max_nodes, " nodes");
  TokenTree tree;
  for (std::size_t node = 0; node < count * length; ++node) {
    tree.add(node < count ? TokenTree::text : node - count);
  }
  return tree;
}

/// A chain of `length` tokens.
/// @throws ConfigError for more than TokenTree::max_nodes nodes
[[nodiscard]] inline TokenTree chain(std::size_t length) { return independent_sequences(1, length); }

/// `tree` with one more token before it as node 0, so that node i becomes node i + 1. That token is the
/// text's latest, if its row is not cached yet and the pass over the draft tokens reads it first.
/// @throws ConfigError if `tree` has TokenTree::max_nodes already
[[nodiscard]] inline TokenTree after_one_token(const TokenTree& tree) {
  TokenTree result;
  result.add(TokenTree::text);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    result.add(tree.parent(node) == TokenTree::text ? 0 : tree.parent(node) + 1);
  }
  return result;
}

/// The best trees of every size up to `max_nodes`, in one table that `best_tree` and
/// `best_tree_for` read.
///
/// Let best(n, 0) be how many of n descendants of an accepted node are accepted on average, in the
/// best arrangement. s of them belong to the node's first child: the child itself, which is accepted
/// with probability acceptance[0], and s - 1 descendants. The later children share the other n - s:
///
///     best(n, child) = max over s of  acceptance[child] (1 + best(s - 1, 0))
///                                     + best(n - s, child + 1)
///
/// If levels are limited, best(s - 1, 0) is taken with one level less.
/// Work: branches x max_nodes^2, times levels if they are limited.
class TreeTable {
 public:
  enum class Levels { free, counted };

  /// With `Levels::free`, limits.levels is ignored and one table serves any number of levels.
  /// @throws ConfigError as `expected_accepted`; for an empty `acceptance`, limits of 0, or a
  /// `max_nodes` of 0 or above TokenTree::max_nodes
  TreeTable(std::span<const double> acceptance, std::size_t max_nodes, TreeLimits limits, Levels kind)
      : max_nodes_{max_nodes}, kind_{kind} {
    detail::check_acceptance(acceptance);
    require(max_nodes >= 1 && max_nodes <= TokenTree::max_nodes, "TreeTable: a tree of ", max_nodes,
            " nodes, must have 1 to ", TokenTree::max_nodes);
    require(!acceptance.empty(), "TreeTable: there is no acceptance, needs that of 1 child or more");
    require(limits.levels >= 1 && limits.branches >= 1, "TreeTable: limits of ", limits.levels,
            " levels and ", limits.branches, " branches, must be 1 or more");
    branches_ = std::min({limits.branches, acceptance.size(), max_nodes});
    add_table(acceptance);
    if (kind_ == Levels::free) return;
    while (levels() < std::min(limits.levels, max_nodes)) {
      add_table(acceptance);
      // If one more level improves nothing, further levels do not either.
      if (accepted_[levels() - 1] == accepted_[levels() - 2]) break;
    }
  }

  /// Most nodes of a tree.
  [[nodiscard]] std::size_t max_nodes() const { return max_nodes_; }
  /// The number of levels after which no tree improves, or the limit; 1 if levels are free.
  [[nodiscard]] std::size_t levels() const { return accepted_.size(); }

  /// How many nodes of the best tree of `nodes` nodes with at most `levels` levels are accepted;
  /// minus infinity if the limits do not allow so many nodes. `nodes` is at most max_nodes(),
  /// `levels` is 1 to levels().
  [[nodiscard]] double accepted(std::size_t nodes, std::size_t levels) const {
    KVPOLICY_ASSERT(nodes <= max_nodes_ && levels >= 1 && levels <= this->levels());
    return accepted_[levels - 1][nodes];
  }

  /// The tree of which `accepted` tells the mean, level by level, with siblings in the order in which they
  /// are tried.
  /// @throws ConfigError if the limits do not allow `nodes` nodes
  [[nodiscard]] TokenTree tree(std::size_t nodes, std::size_t levels) const {
    require(accepted(nodes, levels) >= 0.0, "best_tree: ", nodes, " nodes, where ", levels,
            " levels of at most ", branches_, " branches have room for fewer");
    struct Parent {
      std::size_t node;   // or the text
      std::size_t below;  // number of its descendants
    };
    TokenTree tree;
    std::vector<Parent> parents{{TokenTree::text, nodes}};
    for (std::size_t table = levels - 1; !parents.empty();
         table -= kind_ == Levels::counted && table > 0 ? 1 : 0) {
      std::vector<Parent> children;
      for (const Parent& parent : parents) {
        std::size_t left = parent.below;
        for (std::size_t child = 0; left > 0; ++child) {
          const std::size_t taken = taken_[table][child * (max_nodes_ + 1) + left];
          children.push_back({tree.add(parent.node), taken - 1});
          left -= taken;
        }
      }
      parents = std::move(children);
    }
    return tree;
  }

 private:
  void add_table(std::span<const double> acceptance) {
    constexpr double impossible = -std::numeric_limits<double>::infinity();
    const std::size_t sizes = max_nodes_ + 1;
    // [child, nodes]; after the last child no node is possible.
    std::vector<double> best((branches_ + 1) * sizes, impossible);
    for (std::size_t child = 0; child <= branches_; ++child) best[child * sizes] = 0.0;
    std::vector<std::uint16_t> taken(branches_ * sizes);
    // best(n, 0) of a child's descendants; after the last level no node is possible either.
    const double* below = &best[branches_ * sizes];
    if (kind_ == Levels::free) below = best.data();
    if (!accepted_.empty()) below = accepted_.back().data();
    for (std::size_t nodes = 1; nodes <= max_nodes_; ++nodes) {
      for (std::size_t child = 0; child < branches_; ++child) {
        const double* const others = &best[(child + 1) * sizes];
        double highest = impossible;
        std::size_t first = 0;
        // Of equal values the smaller first child is kept, because a wider tree has fewer levels.
        for (std::size_t s = 1; s <= nodes; ++s) {
          const double value = acceptance[child] * (1.0 + below[s - 1]) + others[nodes - s];
          if (value > highest) {
            highest = value;
            first = s;
          }
        }
        best[child * sizes + nodes] = highest;
        taken[child * sizes + nodes] = static_cast<std::uint16_t>(first);
      }
    }
    best.resize(sizes);
    taken_.push_back(std::move(taken));
    accepted_.push_back(std::move(best));
  }

  std::size_t max_nodes_;
  Levels kind_;
  std::size_t branches_ = 0;                       // most children of a node
  std::vector<std::vector<double>> accepted_;      // [levels - 1][nodes]: best(nodes, 0)
  std::vector<std::vector<std::uint16_t>> taken_;  // [levels - 1][child, nodes]: s
};

/// The tree of `nodes` nodes with the most accepted nodes on average, level by level: a parent comes before
/// its children, and siblings are in the order in which they are tried. Of equally good trees it is the
/// wider one. Work: branches x nodes^2, times levels if `limits.levels` has an effect.
/// @throws ConfigError as `expected_accepted`; for an empty `acceptance`, limits of 0, and `nodes`
/// that is 0, above TokenTree::max_nodes or more than the limits allow
[[nodiscard]] inline TokenTree best_tree(std::span<const double> acceptance, std::size_t nodes,
                                         TreeLimits limits = {}) {
  const TreeTable free{acceptance, nodes, limits, TreeTable::Levels::free};
  TokenTree tree = free.tree(nodes, 1);
  if (levels_of(tree) <= limits.levels) return tree;
  const TreeTable counted{acceptance, nodes, limits, TreeTable::Levels::counted};
  return counted.tree(nodes, counted.levels());
}

/// A tree, and what a round with it yields and costs.
struct TreeChoice {
  TokenTree tree;        ///< Empty if plain decoding is fastest.
  double tokens = 1.0;   ///< Average number of tokens that a round yields.
  double seconds = 0.0;  ///< Cost of a round, in the caller's unit.
};

/// The tree with the most tokens per second, of all sizes up to `max_nodes` and all numbers of
/// levels. `seconds(nodes, levels)` is the cost of a round that drafts `levels` levels one after
/// another and verifies `nodes` nodes in one pass; (0, 0) is a step of plain decoding. More levels
/// must not cost less. Of equally good trees it is the smaller one. Work: levels x branches x
/// max_nodes^2.
/// @throws ConfigError as `best_tree`; if a cost is not positive and finite
template <class Seconds>
  requires std::is_invocable_r_v<double, Seconds&, std::size_t, std::size_t>
[[nodiscard]] TreeChoice best_tree_for(std::span<const double> acceptance, std::size_t max_nodes,
                                       Seconds&& seconds, TreeLimits limits = {}) {
  const auto cost = [&](std::size_t nodes, std::size_t levels) {
    const double value = seconds(nodes, levels);
    require(value > 0.0 && std::isfinite(value), "best_tree_for: ", nodes, " nodes on ", levels,
            " levels cost ", value, ", must be positive and finite");
    return value;
  };
  const TreeTable table{acceptance, max_nodes, limits, TreeTable::Levels::counted};
  TreeChoice choice{{}, 1.0, cost(0, 0)};
  std::size_t best_nodes = 0;
  std::size_t best_levels = 0;
  for (std::size_t nodes = 1; nodes <= max_nodes; ++nodes) {
    for (std::size_t levels = 1; levels <= std::min(nodes, table.levels()); ++levels) {
      const double tokens = 1.0 + table.accepted(nodes, levels);
      if (!(tokens >= 1.0)) continue;  // the limits do not allow so many
      const double value = cost(nodes, levels);
      if (tokens / value <= choice.tokens / choice.seconds) continue;
      choice.tokens = tokens;
      choice.seconds = value;
      best_nodes = nodes;
      best_levels = levels;
    }
  }
  if (best_nodes > 0) choice.tree = table.tree(best_nodes, best_levels);
  return choice;
}

}  // namespace kvpolicy
