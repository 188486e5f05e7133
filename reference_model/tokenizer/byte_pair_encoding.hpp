// SPDX-License-Identifier: Apache-2.0
//
// Byte-pair encoding: a piece of text begins as its characters, and neighbours that are a known
// pair become one token, the most urgent pair first and the leftmost of equals, until no pair is
// left.
//
// Method: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units",
// arXiv:1508.07909, with the pairs in a heap, so that a piece of n characters takes n log n steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

class BytePairEncoding {
 public:
  /// @throws FormatError for a merge whose halves or result are no tokens, an empty or doubled
  /// spelling, a doubled merge, or scores that are not finite or not one for each token
  explicit BytePairEncoding(const TokenizerParts& parts);

  /// Memory for one `encode` after another. Each thread needs its own.
  class Scratch {
    friend class BytePairEncoding;
    struct Symbol {
      int token;  // -1 once it is part of the symbol before it
      std::uint32_t previous;
      std::uint32_t next;
    };
    struct Candidate {
      std::uint32_t rank;
      std::uint32_t left;  // the position of the pair's left half
      int token;
      // std::push_heap keeps the greatest first.
      friend bool operator<(const Candidate& a, const Candidate& b) noexcept {
        return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
      }
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    std::unordered_map<std::string, std::vector<int>> known;  // pieces that were met already
  };

  /// Appends the tokens of one piece, which must be UTF-8.
  void encode(std::string_view piece, Scratch& scratch, std::vector<int>& tokens) const;

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept {
      return std::hash<std::string_view>{}(text);
    }
  };
  struct Merge {
    std::uint32_t rank;
    int token;
  };
  struct PairHash {
    std::size_t operator()(std::uint64_t pair) const noexcept {
      return static_cast<std::size_t>((pair ^ pair >> 29U) * 0x9E3779B97F4A7C15ULL >> 7U);
    }
  };

  [[nodiscard]] static std::uint64_t pair_of(int left, int right) noexcept {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U |
           static_cast<std::uint32_t>(right);
  }
  [[nodiscard]] std::optional<int> find(std::string_view spelling) const {
    const auto found = tokens_.find(spelling);
    return found == tokens_.end() ? std::nullopt : std::optional{found->second};
  }
  void read_merges(const TokenizerParts& parts);
  void read_scores(const TokenizerParts& parts);
  void merge(Scratch& scratch, std::vector<int>& tokens) const;
  void begin_symbols(std::string_view piece, Scratch& scratch) const;
  void add_candidate(Scratch& scratch, std::uint32_t left) const;

  std::unordered_map<std::string, int, TextHash, std::equal_to<>> tokens_;
  std::unordered_map<std::uint64_t, Merge, PairHash> merges_;
  std::vector<int> bytes_;  // the tokens "<0x00>" to "<0xFF>", -1 where there is none; empty without fallback
  std::optional<int> unknown_;
  bool fuse_unknown_;
  bool ignore_merges_;
};

/// A merge as files have it, "left right". @throws FormatError, naming `origin`, unless it is two
/// tokens
[[nodiscard]] std::pair<std::string, std::string> split_merge(std::string_view text, std::size_t index,
                                                              std::string_view origin);

/// The spelling of a byte in vocabularies with byte fallback: "<0xE2>".
[[nodiscard]] std::string spelled_byte(unsigned char byte);

}  // namespace kvpolicy::reference
