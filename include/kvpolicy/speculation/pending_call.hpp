// SPDX-License-Identifier: Apache-2.0
//
// The call with which a model verifies draft tokens. It contains the tokens of the text that the model's
// cache has not read, usually one, and then the draft tokens, as a chain or as a tree.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/language_model.hpp>

namespace kvpolicy {

/// Owns the tokens and the tree that the call points to, so it must outlive the call. Paths are indices of
/// its draft tokens, so those must not change in the meantime.
class PendingCall {
 public:
  PendingCall() = default;
  /// `unread` are the unread tokens of the text, at least one.
  PendingCall(std::span<const int> unread, std::span<const DraftToken> guesses)
      : unread_{unread.size()}, tokens_{unread.begin(), unread.end()}, is_tree_{!is_chain(guesses)} {
    KVPOLICY_ASSERT(unread_ > 0);
    tokens_.reserve(unread_ + guesses.size());
    for (const DraftToken& guess : guesses) tokens_.push_back(guess.token);
    if (!is_tree_) return;
    for (std::size_t i = 0; i < unread_; ++i) tree_.add(i == 0 ? TokenTree::text : i - 1);
    for (const DraftToken& guess : guesses) {
      tree_.add(guess.parent == TokenTree::text ? unread_ - 1 : unread_ + guess.parent);
    }
  }

  [[nodiscard]] std::size_t tokens() const { return tokens_.size(); }

  /// If the options ask for a refresh, ChunkRetrieval heads select by the text's last token, which stays
  /// whether or not the draft tokens are accepted.
  [[nodiscard]] ModelCall call(AttendOptions attend) const {
    attend.selection_query = unread_ - 1;
    attend.tree = is_tree_ ? &tree_ : nullptr;
    return {tokens_, LogitsOf::all, attend};
  }

  /// The logits after the text's last token and after each draft token.
  /// @throws ShapeError if the number of logits is not that of all the call's tokens
  [[nodiscard]] std::span<const float> last_rows(std::span<const float> logits,
                                                 std::size_t vocabulary) const {
    detail::check_logits(logits, tokens_.size(), vocabulary);
    return logits.subspan(vocabulary * (unread_ - 1));
  }

  /// Keeps the call's rows of the unread text and of the draft tokens on `path`, and drops the rows of the
  /// other draft tokens. `seen` is the number of tokens in the cache before the call.
  template <TentativeCache Cache>
  void keep(Cache& cache, std::size_t seen, std::span<const std::size_t> path) const {
    if (!is_tree_) return cache.truncate(seen + unread_ + path.size());
    std::vector<std::size_t> nodes;
    nodes.reserve(unread_ + path.size());
    for (std::size_t i = 0; i < unread_; ++i) nodes.push_back(i);
    for (const std::size_t guess : path) nodes.push_back(unread_ + guess);
    cache.accept(nodes);
  }

 private:
  std::size_t unread_ = 0;
  std::vector<int> tokens_;
  bool is_tree_ = false;
  TokenTree tree_;
};

}  // namespace kvpolicy
