// SPDX-License-Identifier: Apache-2.0
//
// A user's own texts that heads are identified on, as token ids. They are for models with a
// tokenizer, to which the texts that the tools draw, which are bytes, mean nothing. The user writes
// a JSON file with the tokenizer. Ids and positions are numbers from 0; `end` is one past the last
// position.
//
//     {"format": "kvpolicy labelled texts", "version": 1,
//      "texts": [{"tokens": [5, 9, 2, 7, 9, 2], "labelled": [[3, 6]],
//                 "passkeys": [{"hidden": [1, 3], "answer": [4, 6]}]}]}
//
//     {"format": "kvpolicy needle samples", "version": 1,
//      "samples": [{"prompt": [5, 9, 2, 7], "answer": [9, 2], "needle": [1, 2]}]}
//
// `labelled`: ranges [first, end] that count in a loss, ascending and disjoint, and never the first
// token, because no logits precede it. `passkeys` may be omitted where no method needs them; the
// two ranges of one have the same length, and the answer comes after the hidden range. `needle`:
// [first, count], the position in the prompt where the right answer stands. An unknown key is an
// error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/identify/headkv_scores.hpp>
#include <reference_model/identify/labelled_text.hpp>

namespace kvpolicy::tools {

/// The largest accepted file, which holds about fifty million tokens.
inline constexpr std::uintmax_t largest_own_texts = std::uintmax_t{256} << 20;

struct LabelledTexts {
  std::vector<reference::LabelledText> texts;  ///< at least one, each of which passes its check()
  std::string digest;  ///< 16 hexadecimal digits that identify the content of the file
};

struct NeedleSamples {
  std::vector<reference::NeedleSample> samples;  ///< at least one, each of which passes its check()
  std::string digest;                            ///< the same for its file
};

/// `origin`, usually a path, begins every error message.
/// @throws FormatError that says where and what is wrong: not JSON, another format, no texts, ids
/// outside a `vocabulary`, ranges outside the text or out of order, missing or unknown keys
[[nodiscard]] LabelledTexts parse_labelled_texts(std::string_view text, std::string_view origin,
                                                 std::size_t vocabulary);

/// @throws FormatError as parse_labelled_texts
[[nodiscard]] NeedleSamples parse_needle_samples(std::string_view text, std::string_view origin,
                                                 std::size_t vocabulary);

/// Loads a file. @throws FormatError as io::read_text_file and the parsers
[[nodiscard]] LabelledTexts load_labelled_texts(const std::string& path, std::size_t vocabulary);
[[nodiscard]] NeedleSamples load_needle_samples(const std::string& path, std::size_t vocabulary);

/// @throws FormatError naming the first text of the file `origin` that has no passkeys
void require_passkeys(const LabelledTexts& own, std::string_view origin);

}  // namespace kvpolicy::tools
