// SPDX-License-Identifier: Apache-2.0
//
// What a tokenizer is made of, whatever file it came from: tokenizer.json (tokenizer_json.hpp) and
// the metadata of a GGUF file (gguf_parts.hpp) are both read into these structs, and `Tokenizer` is
// built from them. The words are those of Hugging Face's `tokenizers`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvpolicy::reference {

/// Every vocabulary has fewer tokens than this, so a token's number fits an int.
inline constexpr std::size_t max_vocabulary = std::size_t{1} << 24;

/// One change of the text before anything else happens to it.
struct NormalizerStep {
  enum class Kind : std::uint8_t { prepend, replace, nfc, nfd, nfkc, nfkd };
  Kind kind = Kind::nfc;
  std::string pattern{};  ///< What `replace` replaces.
  bool is_regex = false;  ///< Whether `pattern` is a regular expression.
  std::string content{};  ///< The new text of `prepend` and `replace`.
};

/// What happens to the matches of a pattern at which text is split.
enum class SplitBehaviour : std::uint8_t {
  removed,
  isolated,
  merged_with_previous,
  merged_with_next,
  contiguous  ///< Neighbouring matches are one piece.
};

struct SplitStep {
  std::string pattern{};
  bool is_regex = true;
  SplitBehaviour behaviour = SplitBehaviour::isolated;
  bool invert = false;  ///< Text between matches is treated as a match, and matches as text.
};

/// When a space is put in front of a text that does not begin with one.
enum class PrependSpace : std::uint8_t {
  never,
  first,  ///< Only at the beginning of the whole text, not after a special token.
  always
};

/// How text is cut into the pieces inside which tokens are merged.
struct PreTokenizerParts {
  PrependSpace prepend = PrependSpace::never;
  bool metaspace = false;         ///< Spaces become U+2581 before the splits.
  std::vector<SplitStep> splits;  ///< Each cuts the pieces of the one before.
  bool byte_level = false;        ///< Last, each byte of a piece becomes one printable character.
};

/// How tokens become text again.
struct DecoderParts {
  bool byte_level = false;     ///< Characters stand for bytes, as in `PreTokenizerParts`.
  bool byte_fallback = false;  ///< A token "<0xE2>" is this byte.
  std::string replaced{};      ///< This text inside tokens becomes `replacement`; empty for none.
  std::string replacement{};
  std::size_t strip_spaces = 0;             ///< At most so many spaces are removed at the beginning.
  bool strip_replaced_only = false;         ///< Strips only spaces that `replaced` spelled.
  bool first_token_drops_replaced = false;  ///< In the first token, `replaced` becomes nothing.
  std::string unknown_text{};               ///< What the unknown token decodes to; empty for its spelling.
};

/// A token that is found in the text before it is cut into pieces.
struct AddedToken {
  int id = 0;
  bool special = false;        ///< Control, not text: an end of turn, for example.
  bool single_word = false;    ///< Only where no letter or digit touches it.
  bool lstrip = false;         ///< White space in front of it belongs to it.
  bool rstrip = false;         ///< White space after it belongs to it.
  bool normalized = false;     ///< It is looked for in the normalised text.
  bool outside_model = false;  ///< Merges never make it; it is only found in the text.
};

struct TokenizerParts {
  std::string origin;               ///< The file, for error messages.
  std::vector<std::string> tokens;  ///< Spelled as in the file; the index is the token's number.
  /// How many of the last ones only files beside the tokenizer's own name. A model may be without rows for them.
  std::size_t named_beside = 0;

  /// Pairs of tokens that become one, the most urgent first. Without them, `scores` decides.
  std::vector<std::pair<std::string, std::string>> merges;
  /// SentencePiece's BPE: two neighbours become one if their joint spelling is a token, the one
  /// with the highest score first. Empty, or one for each token.
  std::vector<float> scores;
  bool ignore_merges = false;  ///< A piece that is a token is that token, whatever the merges say.
  std::optional<int> unknown;  ///< Stands for a character that is no token; without it, such are dropped.
  bool fuse_unknown = false;   ///< Unknown neighbours are one token.
  bool byte_fallback = false;  ///< A character that is no token becomes its bytes, "<0xE2>".

  std::vector<NormalizerStep> normalizer;
  PreTokenizerParts pre_tokenizer;
  DecoderParts decoder;
  std::vector<AddedToken> added;

  std::vector<int> prefix;    ///< What `add_special` puts in front of a text, usually the bos token.
  std::vector<int> suffix;    ///< What it puts after it.
  std::optional<int> bos;     ///< Begins a text.
  std::vector<int> ends;      ///< Tokens that end a text or a turn.
  std::string chat_template;  ///< As in tokenizer_config.json; empty if there is none.
  /// What chat templates call special tokens: "bos_token" and the like, with their spellings.
  std::map<std::string, std::string> named_tokens;
};

}  // namespace kvpolicy::reference
