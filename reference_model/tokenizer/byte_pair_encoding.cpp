// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/byte_pair_encoding.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::uint32_t nobody = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t longest_scored = 256;
// Words come back, long pieces do not; and memory must not grow with the text.
constexpr std::size_t longest_known_piece = 64;
constexpr std::size_t most_known_pieces = 1 << 15;

}  // namespace

std::pair<std::string, std::string> split_merge(std::string_view text, std::size_t index,
                                                std::string_view origin) {
  const std::size_t space = text.find(' ');
  require<FormatError>(space != text.npos && text.find(' ', space + 1) == text.npos, origin, ": merge ",
                       index, " is ", io::in_quotes(text), ", must be two tokens with a space between them");
  return {std::string{text.substr(0, space)}, std::string{text.substr(space + 1)}};
}

std::string spelled_byte(unsigned char byte) {
  constexpr std::string_view digits = "0123456789ABCDEF";
  return {'<', '0', 'x', digits[byte >> 4U], digits[byte & 15U], '>'};
}

BytePairEncoding::BytePairEncoding(const TokenizerParts& parts)
    : unknown_{parts.unknown}, fuse_unknown_{parts.fuse_unknown}, ignore_merges_{parts.ignore_merges} {
  std::vector<bool> outside(parts.tokens.size());
  for (const AddedToken& added : parts.added) {
    if (added.outside_model) outside[static_cast<std::size_t>(added.id)] = true;
  }
  tokens_.reserve(parts.tokens.size());
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    if (!outside[id]) tokens_.emplace(parts.tokens[id], static_cast<int>(id));
  }
  if (parts.byte_fallback) {
    for (int byte = 0; byte < 256; ++byte) {
      bytes_.push_back(find(spelled_byte(static_cast<unsigned char>(byte))).value_or(-1));
    }
  }
  if (parts.scores.empty()) {
    read_merges(parts);
  } else {
    read_scores(parts);
  }
}

void BytePairEncoding::read_merges(const TokenizerParts& parts) {
  merges_.reserve(parts.merges.size());
  std::uint32_t rank = 0;
  for (const auto& halves : parts.merges) {
    const std::string& left = halves.first;
    const std::string& right = halves.second;
    const auto token_of = [&](const std::string& spelling) {
      const std::optional<int> token = find(spelling);
      require<FormatError>(token.has_value(), parts.origin, ": merge ", rank, " is of ", io::in_quotes(left),
                           " and ", io::in_quotes(right), ", but ", io::in_quotes(spelling),
                           " is no token of the vocabulary");
      return *token;
    };
    require<FormatError>(!left.empty() && !right.empty(), parts.origin, ": merge ", rank,
                         " has an empty half");
    const std::uint64_t pair = pair_of(token_of(left), token_of(right));
    std::string joint = left;
    joint.append(right);
    const bool is_new = merges_.try_emplace(pair, Merge{rank, token_of(joint)}).second;
    require<FormatError>(is_new, parts.origin, ": merge ", rank, " of ", io::in_quotes(left), " and ",
                         io::in_quotes(right), " is given twice");
    ++rank;
  }
}

void BytePairEncoding::read_scores(const TokenizerParts& parts) {
  require<FormatError>(parts.scores.size() == parts.tokens.size(), parts.origin, ": has ",
                       parts.scores.size(), " scores for ", parts.tokens.size(), " tokens");
  std::vector<std::size_t> order(parts.tokens.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (const std::size_t id : order) {
    require<FormatError>(std::isfinite(parts.scores[id]), parts.origin, ": the score of token ", id,
                         " is not a finite number");
  }
  // A byte's spelling is not what text merges into.
  for (const int byte : bytes_) {
    if (byte >= 0) tokens_.erase(parts.tokens[static_cast<std::size_t>(byte)]);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return parts.scores[a] > parts.scores[b]; });
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    // Equal scores are equally urgent.
    if (i > 0 && parts.scores[order[i]] != parts.scores[order[i - 1]]) ++rank;
    const std::string_view spelling = parts.tokens[order[i]];
    const auto joint = tokens_.find(spelling);
    if (joint == tokens_.end()) continue;
    // Every cut of a token in two is tried.
    require<FormatError>(spelling.size() <= longest_scored, parts.origin, ": token ", joint->second, " has ",
                         spelling.size(), " bytes, must have at most ", longest_scored,
                         " in a vocabulary with scores");
    for (std::size_t cut = 1; cut < spelling.size(); ++cut) {
      const std::optional<int> left = find(spelling.substr(0, cut));
      const std::optional<int> right = left ? find(spelling.substr(cut)) : std::nullopt;
      if (right) merges_.try_emplace(pair_of(*left, *right), Merge{rank, joint->second});
    }
  }
}

void BytePairEncoding::encode(std::string_view piece, Scratch& scratch, std::vector<int>& tokens) const {
  if (piece.empty()) return;
  if (ignore_merges_) {
    if (const std::optional<int> whole = find(piece)) {
      tokens.push_back(*whole);
      return;
    }
  }
  if (piece.size() > longest_known_piece) {
    begin_symbols(piece, scratch);
    merge(scratch, tokens);
    return;
  }
  const auto [known, is_new] = scratch.known.try_emplace(std::string{piece});
  if (is_new) {
    begin_symbols(piece, scratch);
    merge(scratch, known->second);
  }
  tokens.insert(tokens.end(), known->second.begin(), known->second.end());
  if (scratch.known.size() > most_known_pieces) scratch.known.clear();
}

void BytePairEncoding::begin_symbols(std::string_view piece, Scratch& scratch) const {
  scratch.symbols.clear();
  const auto add = [&](int token) {
    const auto at = static_cast<std::uint32_t>(scratch.symbols.size());
    scratch.symbols.push_back({token, at == 0 ? nobody : at - 1, at + 1});
  };
  bool after_unknown = false;
  while (!piece.empty()) {
    const std::string_view character = piece.substr(0, first_character(piece).bytes);
    piece.remove_prefix(character.size());
    bool unknown_here = false;
    if (const std::optional<int> token = find(character)) {
      add(*token);
    } else if (!bytes_.empty() && std::all_of(character.begin(), character.end(), [&](char byte) {
                 return bytes_[static_cast<unsigned char>(byte)] >= 0;
               })) {
      for (const char byte : character) add(bytes_[static_cast<unsigned char>(byte)]);
    } else if (unknown_) {
      unknown_here = true;
      if (!fuse_unknown_ || !after_unknown) add(*unknown_);
    }
    after_unknown = unknown_here;
  }
  if (!scratch.symbols.empty()) scratch.symbols.back().next = nobody;
}

void BytePairEncoding::add_candidate(Scratch& scratch, std::uint32_t left) const {
  if (left == nobody || scratch.symbols[left].next == nobody) return;
  const auto& symbol = scratch.symbols[left];
  const auto found = merges_.find(pair_of(symbol.token, scratch.symbols[symbol.next].token));
  if (found == merges_.end()) return;
  scratch.heap.push_back({found->second.rank, left, found->second.token});
  std::push_heap(scratch.heap.begin(), scratch.heap.end());
}

void BytePairEncoding::merge(Scratch& scratch, std::vector<int>& tokens) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  for (std::uint32_t i = 0; i < symbols.size(); ++i) add_candidate(scratch, i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const auto [rank, left, token] = heap.back();
    heap.pop_back();
    // The pair may have lost a half to another pair since it was found.
    if (symbols[left].token < 0 || symbols[left].next == nobody) continue;
    const std::uint32_t right = symbols[left].next;
    const auto still = merges_.find(pair_of(symbols[left].token, symbols[right].token));
    if (still == merges_.end() || still->second.token != token) continue;
    symbols[left].token = token;
    symbols[left].next = symbols[right].next;
    symbols[right].token = -1;
    if (symbols[right].next != nobody) symbols[symbols[right].next].previous = left;
    add_candidate(scratch, symbols[left].previous);
    add_candidate(scratch, left);
  }
  for (std::uint32_t i = symbols.empty() ? nobody : 0; i != nobody; i = symbols[i].next) {
    tokens.push_back(symbols[i].token);
  }
}

}  // namespace kvpolicy::reference
