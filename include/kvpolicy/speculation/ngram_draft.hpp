// SPDX-License-Identifier: Apache-2.0
//
// Proposes the tokens that followed the previous occurrence of the latest tokens in the text. It needs no
// model and almost no time. It is good if a text repeats itself or its prompt: summaries, code, answers
// with quotations.
//
// Method: prompt lookup decoding (Saxena, https://github.com/apoorvumang/prompt-lookup-decoding); LLMA,
// arXiv:2304.04487. Two differences: the latest occurrence counts, not the first; and if the copied tokens
// reach the end of the text, copying continues with the draft tokens themselves, so a repetition continues
// for as many tokens as requested.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/draft.hpp>

namespace kvpolicy {

/// Settings of an NgramDraft: how many of the latest tokens are looked up in the text.
struct NgramDraftConfig {
  std::size_t max_ngram = 4;  ///< Longest run of latest tokens that is looked up; at most 64.
  std::size_t min_ngram = 2;  ///< Shortest run, if longer ones are not found; at least 1.

  /// @throws ConfigError
  void validate() const {
    require(min_ngram >= 1 && min_ngram <= max_ngram && max_ngram <= 64, "NgramDraftConfig: min_ngram is ",
            min_ngram, " and max_ngram ", max_ngram, ", must be 1 <= min_ngram <= max_ngram <= 64");
  }
};

/// An index of the latest occurrence of each n-gram of a text. Tokens are added and removed at the
/// end of the text, each in constant time. Memory: 12 to 24 bytes for each token and each n.
class NgramIndex {
 public:
  /// @throws ConfigError
  explicit NgramIndex(const NgramDraftConfig& config = {}) {
    config.validate();
    for (std::size_t n = config.min_ngram; n <= config.max_ngram; ++n) lengths_.push_back({n, {}, {}});
  }

  /// The text that is indexed.
  [[nodiscard]] std::span<const int> text() const { return text_; }

  /// Replaces the text by `text`: removes the tokens from the first difference on and adds the new
  /// ones.
  /// @throws CapacityError for a text of 2^31 tokens or more; std::bad_alloc; the index is then
  /// unchanged
  void update(std::span<const int> text) {
    reserve(text.size());
    const std::size_t same = common_prefix(text);
    while (text_.size() > same) pop();
    for (const int token : text.subspan(same)) push(token);
  }

  /// Index of the token after the latest earlier occurrence of the text's last n tokens, for the
  /// largest n that has an earlier occurrence.
  [[nodiscard]] std::optional<std::size_t> continuation() const {
    if (text_.empty()) return std::nullopt;
    for (auto length = lengths_.rbegin(); length != lengths_.rend(); ++length) {
      const TokenIndex earlier = length->earlier.back();
      if (earlier != nowhere) return std::size_t{earlier} + 1;
    }
    return std::nullopt;
  }

 private:
  using TokenIndex = std::uint32_t;  // index in the text of an n-gram's last token
  static constexpr TokenIndex nowhere = static_cast<TokenIndex>(-1);

  // All n-grams of one length. `latest` is a hash table with linear probing that stores no keys: an entry
  // is an index into the text, where its key is. Entries are removed in the reverse order of their
  // insertion, so a removal leaves no gap in the probe sequence of another entry.
  struct Length {
    std::size_t n;
    std::vector<TokenIndex> latest;   // a power of two of entries, at least twice the tokens
    std::vector<TokenIndex> earlier;  // for each index, the previous occurrence of the same n-gram
  };

  // Allocates memory first, so that adding tokens cannot fail.
  void reserve(std::size_t tokens) {
    require<CapacityError>(tokens < std::size_t{1} << 31, "NgramIndex: a text of ", tokens,
                           " tokens, must have less than 2^31");
    const bool larger = tokens > capacity_;
    const std::size_t capacity = larger ? std::bit_ceil(std::max<std::size_t>(tokens, 256)) : capacity_;
    std::vector<std::vector<TokenIndex>> tables(larger ? lengths_.size() : 0);
    for (auto& table : tables) table.resize(2 * capacity, nowhere);
    // Needed even if the tables are large enough, because a copy's vectors have no spare capacity.
    for (Length& length : lengths_) length.earlier.reserve(capacity);
    text_.reserve(capacity);
    if (!larger) return;
    capacity_ = capacity;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      lengths_[i].latest = std::move(tables[i]);
      lengths_[i].earlier.clear();
      for (std::size_t index = 0; index < text_.size(); ++index) add(lengths_[i], index);
    }
  }

  // Compares in pieces, because the comparison of a piece is one call of memcmp.
  [[nodiscard]] std::size_t common_prefix(std::span<const int> text) const {
    constexpr std::size_t block = 1024;
    const std::size_t most = std::min(text.size(), text_.size());
    std::size_t same = 0;
    while (same + block <= most && std::equal(&text[same], &text[same] + block, &text_[same])) {
      same += block;
    }
    while (same < most && text[same] == text_[same]) ++same;
    return same;
  }

  void push(int token) noexcept {
    text_.push_back(token);
    for (Length& length : lengths_) add(length, text_.size() - 1);
  }

  void pop() noexcept {
    const std::size_t index = text_.size() - 1;
    for (Length& length : lengths_) {
      if (index + 1 >= length.n) length.latest[slot_of(length, index)] = length.earlier[index];
      length.earlier.pop_back();
    }
    text_.pop_back();
  }

  void add(Length& length, std::size_t index) noexcept {
    if (index + 1 < length.n) {  // the text is shorter than n
      length.earlier.push_back(nowhere);
      return;
    }
    TokenIndex& latest = length.latest[slot_of(length, index)];
    length.earlier.push_back(latest);
    latest = static_cast<TokenIndex>(index);
  }

  // Finds the slot of the n-gram that ends at `index`, or the empty slot where it belongs.
  [[nodiscard]] std::size_t slot_of(const Length& length, std::size_t index) const noexcept {
    const int* const end = text_.data() + index + 1;
    std::uint64_t hash = 0;
    for (const int* token = end - length.n; token != end; ++token) {
      hash = (hash ^ static_cast<std::uint32_t>(*token)) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 32;
    }
    const std::size_t mask = length.latest.size() - 1;
    std::size_t slot = static_cast<std::size_t>(hash) & mask;
    for (;; slot = (slot + 1) & mask) {
      const TokenIndex other = length.latest[slot];
      if (other == nowhere) return slot;
      const int* const other_end = text_.data() + other + 1;
      if (std::equal(end - length.n, end, other_end - length.n)) return slot;
    }
  }

  std::vector<int> text_;
  std::vector<Length> lengths_;  // ascending n
  std::size_t capacity_ = 0;     // tokens for which the tables have room
};

/// A Draft that copies the tokens after the previous occurrence of the latest tokens.
/// Copies are independent. Not synchronised.
class NgramDraft {
 public:
  /// @throws ConfigError
  explicit NgramDraft(const NgramDraftConfig& config = {}) : index_{config} {}

  /// 0, because it serves any vocabulary: it only repeats tokens of the text.
  [[nodiscard]] static std::size_t vocabulary() { return 0; }

  /// Makes a chain of `max_guesses` draft tokens, each with probability 1, or none if the latest tokens did
  /// not occur before.
  /// @throws as NgramIndex::update; the next call is not affected
  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions&, Random&,
               DraftTokens& guesses) {
    guesses.clear();
    if (max_guesses == 0) return;
    index_.update(text);
    const std::optional<std::size_t> from = index_.continuation();
    if (!from) return;
    guesses.reserve(max_guesses);
    for (std::size_t i = 0; i < max_guesses; ++i) {
      const std::size_t index = *from + i;
      const int token = index < text.size() ? text[index] : guesses[index - text.size()].token;
      guesses.push_back({token, Distribution::certain(token), i == 0 ? TokenTree::text : i - 1, 0});
    }
  }

 private:
  NgramIndex index_;
};
static_assert(Draft<NgramDraft>);

}  // namespace kvpolicy
