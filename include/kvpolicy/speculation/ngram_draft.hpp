// SPDX-License-Identifier: Apache-2.0
//
// Guesses that what followed the text's latest words when they stood there before follows them
// again. Needs no model and next to no time; good where a text repeats itself or its prompt:
// summaries, code, answers with quotations.
//
// Method: prompt lookup decoding (Saxena, https://github.com/apoorvumang/prompt-lookup-decoding);
// LLMA, arXiv:2304.04487. Two deviations: the latest occurrence counts, not the first, and a
// continuation that reaches the end of the text goes on with what it guessed itself, so that a
// repetition is carried on for as many tokens as are asked for.
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

/// How much of the end of a text is looked up in it.
struct NgramDraftConfig {
  std::size_t max_ngram = 4;  ///< Tokens of the text's end that are looked up first; at most 64.
  std::size_t min_ngram = 2;  ///< The fewest that are looked up where more are not found; at least 1.

  /// @throws ConfigError
  void validate() const {
    require(min_ngram >= 1 && min_ngram <= max_ngram && max_ngram <= 64,
            "NgramDraftConfig: min_ngram is ", min_ngram,
            " and max_ngram ", max_ngram,
            ", must be 1 <= min_ngram <= max_ngram <= 64");
  }
};

/// Where the n-grams of a text were last. Tokens are added and taken back at its end, each in time
/// that does not grow with the text. Memory: 12 to 24 bytes for a token and each n.
class NgramIndex {
 public:
  /// @throws ConfigError
  explicit NgramIndex(const NgramDraftConfig& config = {}) {
    config.validate();
    for (std::size_t n = config.min_ngram; n <= config.max_ngram; ++n) lengths_.push_back({n, {}, {}});
  }

  /// The text that is indexed.
  [[nodiscard]] std::span<const int> text() const { return text_; }

  /// Makes `text` the text: takes back what differs, adds what is new. What stays is compared once.
  /// @throws CapacityError for a text of 2^31 tokens or more; std::bad_alloc; unchanged then
  void update(std::span<const int> text) {
    reserve(text.size());
    const std::size_t same = common_prefix(text);
    while (text_.size() > same) pop();
    for (const int token : text.subspan(same)) push(token);
  }

  /// Where the latest tokens stood before: the place behind the latest earlier occurrence of the
  /// longest n-gram that ends the text and has one.
  [[nodiscard]] std::optional<std::size_t> continuation() const {
    if (text_.empty()) return std::nullopt;
    for (auto length = lengths_.rbegin(); length != lengths_.rend(); ++length) {
      const Place earlier = length->earlier.back();
      if (earlier != nowhere) return std::size_t{earlier} + 1;
    }
    return std::nullopt;
  }

 private:
  using Place = std::uint32_t;  // of an n-gram's last token
  static constexpr Place nowhere = static_cast<Place>(-1);

  // All n-grams of one length. `latest` is a hash table with linear probing that holds no keys: an
  // entry is a place, and the text says what stands there. Entries go in the reverse order in which
  // they came, so one that goes leaves no gap that a search for another would have to pass.
  struct Length {
    std::size_t n;
    std::vector<Place> latest;   // a power of two of entries, at least twice the tokens
    std::vector<Place> earlier;  // for each place, the one before it of the same n-gram
  };

  // So that adding tokens cannot fail any more.
  void reserve(std::size_t tokens) {
    require<CapacityError>(tokens < std::size_t{1} << 31, "NgramIndex: a text of ", tokens,
                           " tokens, must have less than 2^31");
    const bool larger = tokens > capacity_;
    const std::size_t capacity =
        larger ? std::bit_ceil(std::max<std::size_t>(tokens, 256)) : capacity_;
    std::vector<std::vector<Place>> tables(larger ? lengths_.size() : 0);
    for (auto& table : tables) table.resize(2 * capacity, nowhere);
    // Also where the tables are large enough: a copy's vectors have no room to spare.
    for (Length& length : lengths_) length.earlier.reserve(capacity);
    text_.reserve(capacity);
    if (!larger) return;
    capacity_ = capacity;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      lengths_[i].latest = std::move(tables[i]);
      lengths_[i].earlier.clear();
      for (std::size_t place = 0; place < text_.size(); ++place) add(lengths_[i], place);
    }
  }

  // Block by block, because the comparison of a block is one call of memcmp.
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
    const std::size_t place = text_.size() - 1;
    for (Length& length : lengths_) {
      if (place + 1 >= length.n) length.latest[slot_of(length, place)] = length.earlier[place];
      length.earlier.pop_back();
    }
    text_.pop_back();
  }

  void add(Length& length, std::size_t place) noexcept {
    if (place + 1 < length.n) {  // the text is shorter than that
      length.earlier.push_back(nowhere);
      return;
    }
    Place& latest = length.latest[slot_of(length, place)];
    length.earlier.push_back(latest);
    latest = static_cast<Place>(place);
  }

  // The entry of the n-gram that ends at `place`, or the empty one where it belongs.
  [[nodiscard]] std::size_t slot_of(const Length& length, std::size_t place) const noexcept {
    const int* const end = text_.data() + place + 1;
    std::uint64_t hash = 0;
    for (const int* token = end - length.n; token != end; ++token) {
      hash = (hash ^ static_cast<std::uint32_t>(*token)) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 32;
    }
    const std::size_t mask = length.latest.size() - 1;
    std::size_t slot = static_cast<std::size_t>(hash) & mask;
    for (;; slot = (slot + 1) & mask) {
      const Place other = length.latest[slot];
      if (other == nowhere) return slot;
      const int* const other_end = text_.data() + other + 1;
      if (std::equal(end - length.n, end, other_end - length.n)) return slot;
    }
  }

  std::vector<int> text_;
  std::vector<Length> lengths_;  // ascending n
  std::size_t capacity_ = 0;     // tokens that fit the tables
};

/// A Draft: what followed the latest tokens where they stood before.
/// Copies are independent; not synchronised.
class NgramDraft {
 public:
  /// @throws ConfigError
  explicit NgramDraft(const NgramDraftConfig& config = {}) : index_{config} {}

  /// Serves any vocabulary: it repeats what it has seen.
  [[nodiscard]] static std::size_t vocabulary() { return 0; }

  /// A chain of `max_guesses` guesses, each of them certain; none where the text's end is new.
  /// @throws as NgramIndex::update; it goes on with the next call
  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions&, Random&,
               Guesses& guesses) {
    guesses.clear();
    if (max_guesses == 0) return;
    index_.update(text);
    const std::optional<std::size_t> from = index_.continuation();
    if (!from) return;
    guesses.reserve(max_guesses);
    for (std::size_t i = 0; i < max_guesses; ++i) {
      const std::size_t place = *from + i;
      const int token = place < text.size() ? text[place] : guesses[place - text.size()].token;
      guesses.push_back({token, Distribution::certain(token), i == 0 ? TokenTree::text : i - 1, 0});
    }
  }

 private:
  NgramIndex index_;
};
static_assert(Draft<NgramDraft>);

}  // namespace kvpolicy
