// SPDX-License-Identifier: Apache-2.0
//
// A cache of tokens instead of rows, for tests of speculative decoding without attention. It handles
// tentative rows and trees like KvCache and checks its caller: whatever a decoder or a draft must not
// do throws BrokenRule.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace test {

/// Not an error of the library, so that none of its handlers catches it as one.
struct BrokenRule : std::logic_error {
  using std::logic_error::logic_error;
};

inline void rule(bool kept, const char* what) {
  if (!kept) throw BrokenRule(what);
}

struct TableCacheOptions {
  std::size_t max_rollback = 16;
  std::size_t max_tokens = 0;  ///< 0: any number
};

/// Not synchronised.
class TableCache {
 public:
  explicit TableCache(TableCacheOptions options = {}) : options_{options} {}
  TableCache(TableCache&&) = default;
  TableCache& operator=(TableCache&&) = default;

  [[nodiscard]] TableCache fork() const { return TableCache{*this}; }
  [[nodiscard]] const TableCacheOptions& options() const { return options_; }
  /// Counts like KvCache: the rows of a call that failed half-way are not in all layers.
  [[nodiscard]] std::size_t tokens() const { return torn_at_.value_or(rows_.size()); }
  [[nodiscard]] std::size_t commit_point() const { return committed_; }

  /// Allocates nothing, like KvCache's, because it is called during exception handling.
  void truncate(std::size_t tokens) {
    kvpolicy::require<kvpolicy::RollbackError>(tokens >= committed_ && tokens <= this->tokens(),
                                               "TableCache: cannot go back to ", tokens, " from ",
                                               this->tokens(), ", committed ", committed_);
    rule(tree_.empty() || tokens <= root(), "truncate into a tree, expected accept");
    tree_ = {};
    rows_.resize(tokens);
    torn_at_.reset();
    undo_choices(tokens);
  }

  void accept(std::span<const std::size_t> path) {
    rule(!torn_at_, "accept after a call that failed, expected truncate first");
    kvpolicy::require<kvpolicy::RollbackError>(!tree_.empty(), "TableCache: no tree to accept");
    kvpolicy::require<kvpolicy::ShapeError>(kvpolicy::is_path(tree_, path), "TableCache: not a path");
    const std::size_t text = root();
    // A selection stays if the query that made it is part of the text now.
    std::size_t unmoved = 0;
    while (unmoved < path.size() && path[unmoved] == unmoved) ++unmoved;
    for (std::size_t i = 0; i < path.size(); ++i) rows_[text + i] = rows_[text + path[i]];
    rows_.resize(text + path.size());
    tree_ = {};
    undo_choices(text + unmoved);
  }

  // ---- for the model

  /// Appends the rows of a call, as step, attention and bookkeeping of KvCache would.
  void append(std::span<const int> tokens, const kvpolicy::AttendOptions& options) {
    rule(!torn_at_, "a call after one that failed half-way, expected truncate first");
    rule(!tokens.empty(), "a call without tokens");
    const bool partial = options.read == kvpolicy::Read::selected;
    rule(partial || partial_rows() == 0,
         "a read of all rows sees rows that a selected read wrote, expected them rewritten");
    kvpolicy::require<kvpolicy::CapacityError>(
        options_.max_tokens == 0 || rows_.size() + tokens.size() <= options_.max_tokens,
        "TableCache: ", tokens.size(), " more tokens after ", rows_.size(),
        " exceed max_tokens = ", options_.max_tokens);
    if (options.tree != nullptr) {
      const kvpolicy::TokenTree& tree = *options.tree;
      kvpolicy::require<kvpolicy::ShapeError>(
          tree.size() == tree_.size() + tokens.size() && tree.first(tree_.size()) == tree_,
          "TableCache: another tree than the one that waits");
      kvpolicy::require<kvpolicy::CapacityError>(tree.size() <= options_.max_rollback,
                                                 "TableCache: a tree of ", tree.size(),
                                                 " nodes, max_rollback is ", options_.max_rollback);
      const std::size_t first = tree.size() - tokens.size();
      rule(!options.refresh_selection ||
               (options.selection_query && is_on_all_paths(tree, first + *options.selection_query)),
           "a query that is not on all paths of a tree is to choose");
    } else {
      kvpolicy::require<kvpolicy::RollbackError>(tree_.empty(), "TableCache: a tree waits");
    }
    // Allocations come first, so that a call that fails changes nothing.
    rows_.reserve(rows_.size() + tokens.size());
    choices_.reserve(choices_.size() + 1);
    tree_ = options.tree == nullptr ? kvpolicy::TokenTree{} : kvpolicy::TokenTree{*options.tree};
    for (const int token : tokens) rows_.push_back({token, partial});
    if (rows_.size() > options_.max_rollback + committed_) {
      committed_ = rows_.size() - options_.max_rollback;
    }
    rule(rows_.size() == partial_rows() || committed_ <= rows_.size() - partial_rows(),
         "rows that a selected read wrote are committed");
    choose(tokens.size(), options);
  }
  /// Makes the call that brought the latest `tokens` rows fail half-way through the layers.
  void tear(std::size_t tokens) { torn_at_ = rows_.size() - tokens; }

  /// The tokens of row `row` and of the row before it on its path; `none` if there is none before.
  [[nodiscard]] std::pair<int, int> latest_two(std::size_t row, int none) const {
    const std::size_t text = root();
    if (row < text) return {row == 0 ? none : rows_[row - 1].token, rows_[row].token};
    const std::size_t parent = tree_.parent(row - text);
    const std::size_t before = parent == kvpolicy::TokenTree::text ? text - 1 : text + parent;
    const bool first = parent == kvpolicy::TokenTree::text && text == 0;
    return {first ? none : rows_[before].token, rows_[row].token};
  }

  // ---- for tests

  [[nodiscard]] std::vector<int> text() const {
    std::vector<int> tokens;
    for (const Row& row : rows_) tokens.push_back(row.token);
    return tokens;
  }
  [[nodiscard]] std::size_t partial_rows() const {
    std::size_t count = 0;
    while (count < rows_.size() && rows_[rows_.size() - 1 - count].partial) ++count;
    return count;
  }
  /// The length of the text up to the query that made the latest selection; 0 if there is none.
  [[nodiscard]] std::size_t chosen_at() const { return choices_.empty() ? 0 : choices_.back(); }
  [[nodiscard]] bool has_tree() const { return !tree_.empty(); }

 private:
  struct Row {
    int token;
    bool partial;  // written by a selected read
  };

  TableCache(const TableCache&) = default;

  [[nodiscard]] std::size_t root() const { return rows_.size() - tree_.size(); }

  void choose(std::size_t tokens, const kvpolicy::AttendOptions& options) {
    const bool selected = options.read == kvpolicy::Read::selected;
    if (!options.refresh_selection && !(selected && choices_.empty())) return;
    const std::size_t query = options.selection_query.value_or(tokens - 1);
    rule(query < tokens, "selection_query is not one of the call's tokens");
    choices_.push_back(rows_.size() - tokens + query + 1);
  }
  void undo_choices(std::size_t tokens) {
    while (!choices_.empty() && choices_.back() > tokens) choices_.pop_back();
  }

  TableCacheOptions options_;
  std::vector<Row> rows_;
  std::size_t committed_ = 0;
  kvpolicy::TokenTree tree_;
  std::optional<std::size_t> torn_at_;
  std::vector<std::size_t> choices_;
};

}  // namespace test
