// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/tokenizer.hpp>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/added_tokens.hpp>
#include <reference_model/tokenizer/byte_alphabet.hpp>
#include <reference_model/tokenizer/byte_pair_encoding.hpp>
#include <reference_model/tokenizer/normalizer.hpp>
#include <reference_model/tokenizer/pre_tokenizer.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::size_t longest_token = 4096;
constexpr std::array<std::string_view, 5> well_known_ends = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>",
                                                             "<|end_of_text|>", "<|endoftext|>"};

class BytePairModel final : public TokenModel {
 public:
  explicit BytePairModel(const TokenizerParts& parts)
      : pre_tokenizer_{parts.pre_tokenizer, parts.origin}, encoding_{parts} {}

  void encode(std::string_view text, bool at_start, std::vector<int>& tokens) const override {
    BytePairEncoding::Scratch scratch;
    pre_tokenizer_.split(text, at_start,
                         [&](std::string_view piece) { encoding_.encode(piece, scratch, tokens); });
  }

 private:
  PreTokenizer pre_tokenizer_;
  BytePairEncoding encoding_;
};

class ByteModel final : public TokenModel {
 public:
  void encode(std::string_view text, bool, std::vector<int>& tokens) const override {
    for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  }
  [[nodiscard]] bool reads_utf8() const override { return false; }
};

/// The bytes that a token stands for. `first`: at the beginning of a text.
std::string decoded(const std::string& token, const DecoderParts& rules, bool first) {
  if (rules.byte_level) return ByteAlphabet::get().bytes_of(token).value_or(token);
  if (rules.byte_fallback && token.size() == 6 && token.starts_with("<0x")) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      if (token == spelled_byte(static_cast<unsigned char>(byte))) return {static_cast<char>(byte)};
    }
  }
  if (rules.replaced.empty()) return token;
  return with_replaced(token, rules.replaced,
                       first && rules.first_token_drops_replaced ? "" : rules.replacement);
}

/// The parts, if all tokens that they name exist.
TokenizerParts checked(TokenizerParts parts) {
  const std::size_t count = parts.tokens.size();
  require<FormatError>(count > 0, parts.origin, ": has no tokens");
  require<FormatError>(count < max_vocabulary, parts.origin, ": has ", count, " tokens, must be less than ",
                       max_vocabulary);
  for (std::size_t id = 0; id < count; ++id) {
    const std::string& token = parts.tokens[id];
    require<FormatError>(!token.empty() && token.size() <= longest_token, parts.origin, ": token ", id,
                         " has ", token.size(), " bytes, must have 1 to ", longest_token);
    require<FormatError>(valid_utf8(token) == token, parts.origin, ": token ", id, " is not UTF-8");
  }
  const auto require_token = [&](int id, std::string_view what) {
    require<FormatError>(id >= 0 && static_cast<std::size_t>(id) < count, parts.origin, ": ", what,
                         " is token ", id, ", but there are ", count);
  };
  for (const AddedToken& added : parts.added) require_token(added.id, "an added token");
  for (const int id : parts.prefix) require_token(id, "what begins a text");
  for (const int id : parts.suffix) require_token(id, "what follows a text");
  for (const int id : parts.ends) require_token(id, "an end of text");
  if (parts.bos) require_token(*parts.bos, "bos");
  if (parts.unknown) require_token(*parts.unknown, "the unknown token");
  return parts;
}

}  // namespace

struct Tokenizer::State {
  State(TokenizerParts parts, std::unique_ptr<const TokenModel> with_model)
      : rules{parts.decoder},
        normalizer{parts.normalizer, parts.origin},
        origin{parts.origin},
        prefix{std::move(parts.prefix)},
        suffix{std::move(parts.suffix)},
        bos{parts.bos},
        ends{std::move(parts.ends)},
        chat_template{std::move(parts.chat_template)},
        named_tokens{std::move(parts.named_tokens)},
        named_beside{parts.named_beside} {
    // A base model's files name the end of a text only; a chat ends with the end of a turn.
    for (const AddedToken& added : parts.added) {
      const std::string& spelling = parts.tokens[static_cast<std::size_t>(added.id)];
      if (added.special &&
          std::find(well_known_ends.begin(), well_known_ends.end(), spelling) != well_known_ends.end()) {
        ends.push_back(added.id);
      }
    }
    model = with_model ? std::move(with_model) : std::make_unique<BytePairModel>(parts);
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    spelled = std::move(parts.tokens);
    special.resize(spelled.size());
    for (std::size_t id = 0; id < spelled.size(); ++id) {
      bytes.push_back(decoded(spelled[id], rules, false));
      const bool is_new = ids.try_emplace(spelled[id], static_cast<int>(id)).second;
      require<FormatError>(is_new, origin, ": tokens ", ids.at(spelled[id]), " and ", id, " are both ",
                           io::in_quotes(spelled[id]));
    }
    if (parts.unknown && !rules.unknown_text.empty()) {
      bytes[static_cast<std::size_t>(*parts.unknown)] = rules.unknown_text;
    }
    for (const AddedToken& token : parts.added) {
      const auto id = static_cast<std::size_t>(token.id);
      special[id] = special[id] || token.special;
      if (token.normalized) {
        const std::string changed = normalizer.apply(spelled[id]);
        if (!changed.empty()) found_later.add(token, changed);
      } else {
        found_first.add(token, spelled[id]);
      }
    }
  }

  bool is_padding(int token) const {
    return token >= 0 && static_cast<std::size_t>(token) >= spelled.size() &&
           static_cast<std::size_t>(token) < spelled.size() + most_padding;
  }
  std::size_t require_known(int token) const {
    require<ShapeError>(token >= 0 && static_cast<std::size_t>(token) < spelled.size(), origin, ": token ",
                        token, " is not in the vocabulary of ", spelled.size());
    return static_cast<std::size_t>(token);
  }

  DecoderParts rules;
  Normalizer normalizer;
  std::string origin;
  std::vector<int> prefix;
  std::vector<int> suffix;
  std::optional<int> bos;
  std::vector<int> ends;
  std::string chat_template;
  std::map<std::string, std::string> named_tokens;
  std::size_t named_beside;
  std::unique_ptr<const TokenModel> model;
  std::vector<std::string> spelled;
  std::vector<std::string> bytes;  // what each token decodes to, but for the first of a text
  std::vector<bool> special;
  std::unordered_map<std::string_view, int> ids;  // into `spelled`
  AddedTokens found_first;                        // in the text as it is given
  AddedTokens found_later;                        // in the normalised text between those
};

Tokenizer::Tokenizer(TokenizerParts parts) : Tokenizer{std::move(parts), nullptr} {}
Tokenizer::Tokenizer(TokenizerParts parts, std::unique_ptr<const TokenModel> model)
    : state_{std::make_shared<const State>(checked(std::move(parts)), std::move(model))} {}

Tokenizer Tokenizer::bytes() {
  TokenizerParts parts;
  parts.origin = "the tokenizer of bytes";
  for (unsigned byte = 0; byte < 256; ++byte) {
    parts.tokens.emplace_back(ByteAlphabet::get().spelled(static_cast<unsigned char>(byte)));
  }
  parts.decoder.byte_level = true;
  return {std::move(parts), std::make_unique<ByteModel>()};
}

namespace {

// Ascending, and apart from each other: a conversation has as many as it has messages.
std::vector<ByteRange> merged(std::span<const ByteRange> ranges) {
  std::vector<ByteRange> sorted{ranges.begin(), ranges.end()};
  std::ranges::sort(sorted, {}, &ByteRange::begin);
  std::vector<ByteRange> apart;
  for (const ByteRange& range : sorted) {
    if (apart.empty() || range.begin > apart.back().end) {
      apart.push_back(range);
    } else {
      apart.back().end = std::max(apart.back().end, range.end);
    }
  }
  return apart;
}

}  // namespace

std::vector<int> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const State& state = *state_;
  std::string repaired;
  if (state.model->reads_utf8()) {
    repaired = valid_utf8(text);
    require<ShapeError>(options.literal.empty() || repaired == text,
                        "a text with literal ranges is not UTF-8");
    text = repaired;
  }
  bool special_in_literal = false;
  for (const ByteRange range : options.literal) {
    require<ShapeError>(range.begin <= range.end && range.end <= text.size(), "a literal range of bytes ",
                        range.begin, " to ", range.end, " of a text of ", text.size());
    const std::string_view part = text.substr(range.begin, range.end - range.begin);
    special_in_literal = special_in_literal || state.found_first.special_in(part) ||
                         state.found_later.special_in(state.normalizer.apply(part));
  }
  const std::vector<ByteRange> literal = merged(options.literal);
  const auto special_counts = [&](std::size_t begin) {
    if (!options.parse_special) return false;
    const auto after = std::ranges::upper_bound(literal, begin, {}, &ByteRange::begin);
    return after == literal.begin() || begin >= std::prev(after)->end;
  };
  // Normalised text has lost its positions: there, special tokens count unless a literal range
  // holds one.
  const bool special_counts_later = options.parse_special && !special_in_literal;

  std::vector<int> tokens;
  if (options.add_special) tokens = state.prefix;
  for (const TextPart& part : state.found_first.split(text, special_counts)) {
    if (part.token) {
      tokens.push_back(*part.token);
      continue;
    }
    const std::string changed = state.normalizer.apply(part.text);
    bool at_start = part.text.data() == text.data();
    for (const TextPart& inner :
         state.found_later.split(changed, [&](std::size_t) { return special_counts_later; })) {
      if (inner.token) {
        tokens.push_back(*inner.token);
      } else {
        state.model->encode(inner.text, at_start, tokens);
      }
      at_start = false;
    }
  }
  if (options.add_special) tokens.insert(tokens.end(), state.suffix.begin(), state.suffix.end());
  return tokens;
}

std::string Tokenizer::decode(std::span<const int> tokens, const DecodeOptions& options) const {
  TextStream stream{*this, options};
  std::string text;
  for (const int token : tokens) text += stream.next(token);
  return text += stream.finish();
}

std::size_t Tokenizer::vocabulary() const noexcept { return state_->spelled.size(); }
const std::string& Tokenizer::token_text(int token) const {
  return state_->spelled[state_->require_known(token)];
}
std::optional<int> Tokenizer::find(std::string_view token_text) const {
  const auto found = state_->ids.find(token_text);
  return found == state_->ids.end() ? std::nullopt : std::optional{found->second};
}
bool Tokenizer::is_special(int token) const { return state_->special[state_->require_known(token)]; }
std::optional<int> Tokenizer::bos() const noexcept { return state_->bos; }
std::span<const int> Tokenizer::ends() const noexcept { return state_->ends; }
bool Tokenizer::is_end(int token) const noexcept {
  return std::binary_search(state_->ends.begin(), state_->ends.end(), token);
}
const std::string& Tokenizer::chat_template() const noexcept { return state_->chat_template; }
const std::map<std::string, std::string>& Tokenizer::named_tokens() const noexcept {
  return state_->named_tokens;
}

void Tokenizer::require_fits(std::size_t model_vocabulary) const {
  const std::size_t count = vocabulary() - state_->named_beside;
  require<FormatError>(count <= model_vocabulary, state_->origin, ": has ", count,
                       " tokens, but the model's embedding has only ", model_vocabulary, " rows");
  require<FormatError>(model_vocabulary - count <= most_padding, state_->origin, ": has only ", count,
                       " tokens for a model of ", model_vocabulary, "; it may be another model's tokenizer");
}

TextStream::TextStream(Tokenizer tokenizer, const DecodeOptions& options)
    : tokenizer_{std::move(tokenizer)},
      options_{options},
      spaces_to_strip_{tokenizer_.state_->rules.strip_spaces} {}

std::string TextStream::next(int token) {
  const Tokenizer::State& state = *tokenizer_.state_;
  if (state.is_padding(token)) return {};
  const std::size_t id = state.require_known(token);
  if (options_.skip_special && state.special[id]) return {};
  if (first_ && state.rules.first_token_drops_replaced) {
    pending_ += decoded(state.spelled[id], state.rules, true);
  } else {
    pending_ += state.bytes[id];
  }
  first_ = false;
  if (state.rules.strip_replaced_only && !pending_.empty() &&
      !state.spelled[id].starts_with(state.rules.replaced)) {
    spaces_to_strip_ = 0;
  }
  while (spaces_to_strip_ > 0 && !pending_.empty()) {
    if (pending_.front() != ' ') {
      spaces_to_strip_ = 0;
      break;
    }
    pending_.erase(0, 1);
    --spaces_to_strip_;
  }
  std::string text;
  const std::size_t truncated = append_valid_utf8(pending_, text, true);
  pending_.erase(0, pending_.size() - truncated);
  return text;
}

std::string TextStream::finish() {
  std::string text = valid_utf8(pending_);
  *this = TextStream{tokenizer_, options_};
  return text;
}

}  // namespace kvpolicy::reference
