// SPDX-License-Identifier: Apache-2.0
#include "own_texts.hpp"

#include <algorithm>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/io/text_file.hpp>

#include <fmt/format.h>

namespace kvpolicy::tools {
namespace {

constexpr std::string_view labelled_format = "kvpolicy labelled texts";
constexpr std::string_view needle_format = "kvpolicy needle samples";
constexpr std::size_t own_version = 1;

/// A file of tokens has far more numbers than any other JSON file; few of them are written in less
/// than 4 bytes.
constexpr io::JsonLimits own_limits{.most_values = largest_own_texts / 4};

/// FNV-1a. It detects accidental differences between files, not intended ones.
std::string digest_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return fmt::format("{:016x}", hash);
}

const io::Json& array_of(io::JsonObject& object, const char* key, const char* what) {
  const io::Json& found = object.at(key);
  require<FormatError>(found.is_array() && !found.empty(), object.where(key),
                       ": must be an array of at least one ", what, ", is ", io::shown(found));
  return found;
}

std::vector<int> ids_of(io::JsonObject& object, const char* key, std::size_t vocabulary) {
  const io::Json& ids = array_of(object, key, "token");
  constexpr auto most_int = static_cast<std::uint64_t>(std::numeric_limits<int>::max());
  const std::uint64_t end = std::min<std::uint64_t>(vocabulary, most_int);
  std::vector<int> tokens;
  tokens.reserve(ids.size());
  for (const io::Json& id : ids) {
    // The message is only built for the rare id that is wrong.
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= end) {
      throw FormatError(message(object.where(key), '[', tokens.size(), "]: is ", io::shown(id),
                                ", must be a token of the model, 0 to ", vocabulary - 1));
    }
    tokens.push_back(static_cast<int>(id.get<std::uint64_t>()));
  }
  return tokens;
}

struct Range {
  std::size_t first = 0;
  std::size_t end = 0;
};

/// Reads two whole numbers; the caller knows what they mean.
Range pair_of(const io::Json& json, const std::string& where, const char* names) {
  require<FormatError>(json.is_array() && json.size() == 2, where, ": must be ", names, ", is ",
                       io::shown(json));
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  return {io::JsonObject::as_count(json[0], where + "[0]", any),
          io::JsonObject::as_count(json[1], where + "[1]", any)};
}

Range range_of(const io::Json& json, const std::string& where, std::size_t tokens) {
  const Range range = pair_of(json, where, "[first, end]");
  require<FormatError>(range.first < range.end && range.end <= tokens, where, ": is [", range.first, ", ",
                       range.end,
                       "], must be [first, end] with first below end and end at "
                       "most ",
                       tokens, ", the number of tokens");
  return range;
}

std::vector<std::size_t> labels_of(io::JsonObject& object, std::size_t tokens) {
  std::vector<std::size_t> labels;
  std::size_t number = 0;
  for (const io::Json& json : array_of(object, "labelled", "range")) {
    const std::string where = message(object.where("labelled"), '[', number++, ']');
    const Range range = range_of(json, where, tokens);
    require<FormatError>(labels.empty() || labels.back() < range.first, where, ": begins at ", range.first,
                         ", the range before it ends at ", labels.empty() ? 0 : labels.back() + 1,
                         ": ranges must be in order and apart");
    for (std::size_t label = range.first; label < range.end; ++label) labels.push_back(label);
  }
  require<FormatError>(labels.back() > 0, object.where("labelled"),
                       ": is the first token alone, "
                       "which nothing foretells: label others");
  return labels;
}

std::vector<reference::Passkey> passkeys_of(io::JsonObject& object, std::size_t tokens) {
  std::vector<reference::Passkey> keys;
  const io::Json* found = object.find("passkeys");
  if (found == nullptr) return keys;
  const std::string list = object.where("passkeys");
  require<FormatError>(found->is_array(), list, ": must be an array of passkeys, is ", io::shown(*found));
  for (const io::Json& json : *found) {
    io::JsonObject key{json, message(list, '[', keys.size(), ']')};
    const Range hidden = range_of(key.at("hidden"), key.where("hidden"), tokens);
    const Range answer = range_of(key.at("answer"), key.where("answer"), tokens);
    key.refuse_others();
    const std::size_t size = hidden.end - hidden.first;
    require<FormatError>(answer.end - answer.first == size, key.where(), ": ", size,
                         " tokens are hidden and ", answer.end - answer.first, " answer, must be as many");
    require<FormatError>(hidden.end <= answer.first, key.where(), ": is hidden up to ", hidden.end,
                         " and answered from ", answer.first, " on, must be answered after it");
    keys.push_back({.hidden = hidden.first, .answer = answer.first, .tokens = size});
  }
  return keys;
}

}  // namespace

LabelledTexts parse_labelled_texts(std::string_view text, std::string_view origin, std::size_t vocabulary) {
  const io::Json json = io::parse_json(text, origin, own_limits);
  io::JsonObject file{json, std::string{origin}};
  io::require_format(file, labelled_format, own_version);
  LabelledTexts own{.texts = {}, .digest = digest_of(text)};
  for (const io::Json& entry : array_of(file, "texts", "text")) {
    io::JsonObject object{entry, message(origin, ", texts[", own.texts.size(), ']')};
    reference::LabelledText one;
    one.tokens = ids_of(object, "tokens", vocabulary);
    one.labels = labels_of(object, one.tokens.size());
    one.passkeys = passkeys_of(object, one.tokens.size());
    object.refuse_others();
    own.texts.push_back(std::move(one));
  }
  file.refuse_others();
  return own;
}

NeedleSamples parse_needle_samples(std::string_view text, std::string_view origin, std::size_t vocabulary) {
  const io::Json json = io::parse_json(text, origin, own_limits);
  io::JsonObject file{json, std::string{origin}};
  io::require_format(file, needle_format, own_version);
  NeedleSamples own{.samples = {}, .digest = digest_of(text)};
  for (const io::Json& entry : array_of(file, "samples", "sample")) {
    io::JsonObject object{entry, message(origin, ", samples[", own.samples.size(), ']')};
    reference::NeedleSample one;
    one.prompt = ids_of(object, "prompt", vocabulary);
    one.answer = ids_of(object, "answer", vocabulary);
    const std::string where = object.where("needle");
    const auto [first, count] = pair_of(object.at("needle"), where, "[first, count]");
    const std::size_t tokens = one.prompt.size();
    require<FormatError>(count > 0 && count <= tokens && first <= tokens - count, where, ": is [", first,
                         ", ", count,
                         "], must be [first, count] of at least one token of "
                         "the prompt, which has ",
                         tokens);
    one.needle = first;
    one.needle_tokens = count;
    object.refuse_others();
    own.samples.push_back(std::move(one));
  }
  file.refuse_others();
  return own;
}

LabelledTexts load_labelled_texts(const std::string& path, std::size_t vocabulary) {
  return parse_labelled_texts(io::read_text_file(path, largest_own_texts), path, vocabulary);
}

NeedleSamples load_needle_samples(const std::string& path, std::size_t vocabulary) {
  return parse_needle_samples(io::read_text_file(path, largest_own_texts), path, vocabulary);
}

void require_passkeys(const LabelledTexts& own, std::string_view origin) {
  const auto without = std::ranges::find_if(
      own.texts, [](const reference::LabelledText& text) { return text.passkeys.empty(); });
  require<FormatError>(without == own.texts.end(), origin, ", texts[", without - own.texts.begin(),
                       "]: has no passkeys, which --profile passkey "
                       "looks for: give their ranges, or use --profile outside");
}

}  // namespace kvpolicy::tools
