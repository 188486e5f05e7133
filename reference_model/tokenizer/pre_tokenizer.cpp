// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/pre_tokenizer.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>

#include <reference_model/tokenizer/byte_alphabet.hpp>

namespace kvpolicy::reference {
namespace {

struct Found {
  TextRange range;
  bool is_match;
};

/// Appends the pieces that `found`, one piece cut at its matches, is by this behaviour.
void append_pieces(const std::vector<Found>& found, SplitBehaviour behaviour,
                   std::vector<TextRange>& pieces) {
  const std::size_t first = pieces.size();
  bool match_before = false;
  const auto grows = [&](bool is_match) {
    return pieces.size() > first &&
           (behaviour == SplitBehaviour::contiguous ? is_match == match_before : is_match && !match_before);
  };
  switch (behaviour) {
    case SplitBehaviour::removed:
    case SplitBehaviour::isolated:
      for (const auto& [range, is_match] : found) {
        if (!is_match || behaviour == SplitBehaviour::isolated) pieces.push_back(range);
      }
      break;
    case SplitBehaviour::contiguous:
    case SplitBehaviour::merged_with_previous:
      for (const auto& [range, is_match] : found) {
        if (grows(is_match)) {
          pieces.back().end = range.end;
        } else {
          pieces.push_back(range);
        }
        match_before = is_match;
      }
      break;
    case SplitBehaviour::merged_with_next:
      for (std::size_t i = found.size(); i-- > 0;) {
        const auto& [range, is_match] = found[i];
        if (grows(is_match)) {
          pieces.back().begin = range.begin;
        } else {
          pieces.push_back(range);
        }
        match_before = is_match;
      }
      std::reverse(pieces.begin() + static_cast<std::ptrdiff_t>(first), pieces.end());
      break;
  }
}

}  // namespace

std::string with_replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = from.empty() ? text.npos : text.find(from, at);
    out.append(text.substr(at, found - at));
    if (found == text.npos) break;
    out.append(to);
    at = found + from.size();
  }
  return out;
}

PreTokenizer::PreTokenizer(const PreTokenizerParts& parts, std::string_view origin)
    : prepend_{parts.prepend}, metaspace_{parts.metaspace}, byte_level_{parts.byte_level} {
  for (const SplitStep& step : parts.splits) {
    steps_.push_back({Pattern{step.pattern, origin, !step.is_regex}, step.behaviour, step.invert});
  }
}

std::string PreTokenizer::with_spaces(std::string_view text, bool at_start) const {
  std::string out = metaspace_ ? with_replaced(text, " ", space_mark) : std::string{text};
  const std::string_view space = metaspace_ ? space_mark : " ";
  const bool wanted = prepend_ == PrependSpace::always || (prepend_ == PrependSpace::first && at_start);
  if (wanted && !out.empty() && !out.starts_with(space)) out.insert(0, space);
  return out;
}

std::vector<TextRange> PreTokenizer::ranges(std::u16string_view text) const {
  std::vector<TextRange> pieces;
  if (!text.empty()) pieces.push_back({0, text.size()});
  std::vector<Found> found;
  for (const Step& step : steps_) {
    std::vector<TextRange> next;
    step.pattern.split(
        text, pieces,
        [&](TextRange range, bool is_match) { found.push_back({range, is_match != step.invert}); },
        [&] {
          append_pieces(found, step.behaviour, next);
          found.clear();
        });
    pieces = std::move(next);
  }
  return pieces;
}

void PreTokenizer::spell(std::string_view text, std::string& piece) const {
  if (byte_level_) {
    ByteAlphabet::get().append_spelled(text, piece);
  } else {
    piece.append(text);
  }
}

}  // namespace kvpolicy::reference
