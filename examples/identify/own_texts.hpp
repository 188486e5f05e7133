// SPDX-License-Identifier: Apache-2.0
//
// Texts of a user's own that heads are identified on, as token ids: for models with a tokenizer of
// their own, where the texts that we draw, which are bytes, mean nothing. Whoever has the tokenizer
// writes a file in JSON; ids and positions are numbers from 0, `end` is the first behind a range.
//
//     {"format": "kvpolicy labelled texts", "version": 1,
//      "texts": [{"tokens": [5, 9, 2, 7, 9, 2], "labelled": [[3, 6]],
//                 "passkeys": [{"hidden": [1, 3], "answer": [4, 6]}]}]}
//
//     {"format": "kvpolicy needle samples", "version": 1,
//      "samples": [{"prompt": [5, 9, 2, 7], "answer": [9, 2], "needle": [1, 2]}]}
//
// `labelled`: ranges [first, end] that count in a loss, in order, apart from each other; never the
// first token alone, for nothing foretells it. `passkeys` may be left out where nobody looks for
// them; both ranges of one are of one length, the answer behind. `needle`: [first, count], where in
// the prompt the right answer stands. A key that is unknown is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/identify/headkv_scores.hpp>
#include <reference_model/identify/labelled_text.hpp>

namespace kvpolicy::tools {

/// Most bytes of such a file, which are about fifty million tokens.
inline constexpr std::uintmax_t largest_own_texts = std::uintmax_t{256} << 20;

struct LabelledTexts {
  std::vector<reference::LabelledText> texts;  ///< at least one, each of which passes its check()
  std::string digest;  ///< of the file, 16 hexadecimal digits: tells it from another of its name
};

struct NeedleSamples {
  std::vector<reference::NeedleSample> samples;  ///< at least one, each of which passes its check()
  std::string digest;                            ///< as there
};

/// `origin`, a path most often, begins every error.
/// @throws FormatError that says where and what is wrong: not JSON, another format, no texts, ids
/// that a model of `vocabulary` does not have, ranges outside the text or out of order, keys that
/// are missing or unknown
[[nodiscard]] LabelledTexts parse_labelled_texts(std::string_view text, std::string_view origin,
                                                 std::size_t vocabulary);

/// @throws FormatError as there
[[nodiscard]] NeedleSamples parse_needle_samples(std::string_view text, std::string_view origin,
                                                 std::size_t vocabulary);

/// Of a file. @throws FormatError as io::read_text_file and the parsers
[[nodiscard]] LabelledTexts load_labelled_texts(const std::string& path, std::size_t vocabulary);
[[nodiscard]] NeedleSamples load_needle_samples(const std::string& path, std::size_t vocabulary);

/// @throws FormatError, naming the first, if a text of the file `origin` has no passkeys.
void require_passkeys(const LabelledTexts& own, std::string_view origin);

}  // namespace kvpolicy::tools
