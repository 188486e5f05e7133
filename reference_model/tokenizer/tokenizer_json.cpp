// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/tokenizer_json.hpp>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/byte_pair_encoding.hpp>
#include <reference_model/tokenizer/json_section.hpp>
#include <reference_model/tokenizer/pre_tokenizer.hpp>

namespace kvpolicy::reference {
namespace {

using io::Json;

/// A pattern: {"String": text} or {"Regex": expression}.
std::pair<std::string, bool> read_pattern(Section section) {
  const bool is_regex = section.find("Regex") != nullptr;
  std::string pattern = section.text(is_regex ? "Regex" : "String");
  require<FormatError>(!pattern.empty(), section.where(), ": the pattern is empty");
  section.refuse_others();
  return {std::move(pattern), is_regex};
}

// ---- normalizer ------------------------------------------------------------------------------
void read_normalizer(Section section, std::vector<NormalizerStep>& steps) {
  using Kind = NormalizerStep::Kind;
  const std::string& type = section.text("type");
  NormalizerStep step;
  if (type == "Sequence") {
    for (const Section& inner : section.sections("normalizers")) read_normalizer(inner, steps);
  } else if (type == "Prepend") {
    step.kind = Kind::prepend;
    step.content = section.text("prepend");
    steps.push_back(step);
  } else if (type == "Replace") {
    step.kind = Kind::replace;
    std::tie(step.pattern, step.is_regex) = read_pattern(section.section("pattern"));
    step.content = section.text("content");
    steps.push_back(step);
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    step.kind = type == "NFC"    ? Kind::nfc
                : type == "NFD"  ? Kind::nfd
                : type == "NFKC" ? Kind::nfkc
                                 : Kind::nfkd;
    steps.push_back(step);
  } else {
    section.refuse_type(type, "Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD");
  }
  section.refuse_others();
}

// ---- pre_tokenizer ---------------------------------------------------------------------------
SplitBehaviour behaviour_of(const Section& section, const std::string& name) {
  if (name == "Removed") return SplitBehaviour::removed;
  if (name == "Isolated") return SplitBehaviour::isolated;
  if (name == "MergedWithPrevious") return SplitBehaviour::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehaviour::merged_with_next;
  if (name == "Contiguous") return SplitBehaviour::contiguous;
  fail<FormatError>(section.where(), ", behavior: is ", io::in_quotes(name),
                    ", must be Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

/// Metaspace, in its spelling of today (prepend_scheme) and that of before (add_prefix_space).
PrependSpace read_prepend_scheme(Section& section) {
  const bool before = section.flag_or("add_prefix_space", true);
  if (section.find("prepend_scheme") == nullptr) {
    return before ? PrependSpace::always : PrependSpace::never;
  }
  const std::string& scheme = section.text("prepend_scheme");
  if (scheme == "always") return PrependSpace::always;
  if (scheme == "first") return PrependSpace::first;
  require<FormatError>(scheme == "never", section.where(), ", prepend_scheme: is ", io::in_quotes(scheme),
                       ", must be always, first or never");
  return PrependSpace::never;
}

void require_space_mark(Section& section) {
  const std::string& mark = section.text("replacement");
  require<FormatError>(mark == space_mark, section.where(), ", replacement: is ", io::in_quotes(mark),
                       ", must be U+2581");
  section.find("str_rep");
}

void read_pre_tokenizer(Section section, PreTokenizerParts& parts) {
  const std::string& type = section.text("type");
  require<FormatError>(!parts.byte_level, section.where(), ": ", io::in_quotes(type),
                       " follows ByteLevel, which must be the last");
  const auto require_first = [&](std::string_view what) {
    require<FormatError>(parts.splits.empty() && parts.prepend == PrependSpace::never && !parts.metaspace,
                         section.where(), ": ", what, " must be the first pre-tokenizer");
  };
  if (type == "Sequence") {
    for (const Section& inner : section.sections("pretokenizers")) read_pre_tokenizer(inner, parts);
  } else if (type == "ByteLevel") {
    if (section.flag_or("add_prefix_space", true)) {
      require_first("ByteLevel with add_prefix_space");
      parts.prepend = PrependSpace::always;
    }
    if (section.flag_or("use_regex", true)) parts.splits.push_back({std::string{gpt2_pattern}});
    section.flag_or("trim_offsets", true);  // is about positions in the text, not about tokens
    parts.byte_level = true;
  } else if (type == "Digits") {
    const bool individual = section.flag_or("individual_digits", false);
    parts.splits.push_back(
        {"\\p{N}", true, individual ? SplitBehaviour::isolated : SplitBehaviour::contiguous});
  } else if (type == "Split") {
    SplitStep step;
    std::tie(step.pattern, step.is_regex) = read_pattern(section.section("pattern"));
    step.behaviour = behaviour_of(section, section.text("behavior"));
    step.invert = section.flag_or("invert", false);
    parts.splits.push_back(std::move(step));
  } else if (type == "Metaspace") {
    require_first("Metaspace");
    require_space_mark(section);
    parts.metaspace = true;
    parts.prepend = read_prepend_scheme(section);
    if (section.flag_or("split", true)) {
      parts.splits.push_back({std::string{space_mark}, false, SplitBehaviour::merged_with_next});
    }
  } else {
    section.refuse_type(type, "Sequence, ByteLevel, Digits, Split, Metaspace");
  }
  section.refuse_others();
}

// ---- post_processor --------------------------------------------------------------------------
/// The special tokens around one text.
void read_template(Section& section, TokenizerParts& parts) {
  section.find("pair");
  Section known = section.section("special_tokens");
  bool text_seen = false;
  for (Section& item : section.sections("single")) {
    if (item.find("Sequence") != nullptr) {
      require<FormatError>(!text_seen, item.where(), ": the text is there twice");
      text_seen = true;
      continue;
    }
    Section token = item.section("SpecialToken");
    Section meant = known.section(token.text("id").c_str());
    const Json& ids = meant.at("ids");
    require<FormatError>(ids.is_array(), meant.where("ids"), ": must be an array, is ", io::shown(ids));
    for (const Json& id : ids) {
      (text_seen ? parts.suffix : parts.prefix)
          .push_back(static_cast<int>(io::JsonObject::as_count(id, meant.where("ids"), max_vocabulary)));
    }
  }
  require<FormatError>(text_seen, section.where(), ", single: holds no Sequence for the text");
}

void read_post_processor(Section section, TokenizerParts& parts) {
  const std::string& type = section.text("type");
  if (type == "Sequence") {
    for (const Section& inner : section.sections("processors")) read_post_processor(inner, parts);
  } else if (type == "TemplateProcessing") {
    require<FormatError>(parts.prefix.empty() && parts.suffix.empty(), section.where(),
                         ": there are two templates");
    read_template(section, parts);
  } else if (type == "ByteLevel") {
    for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) section.find(key);
  } else {
    section.refuse_type(type, "Sequence, TemplateProcessing, ByteLevel");
  }
  section.refuse_others();
}

// ---- decoder ---------------------------------------------------------------------------------
void read_decoder(Section section, DecoderParts& parts, bool& fused) {
  const std::string& type = section.text("type");
  if (type == "Sequence") {
    for (const Section& inner : section.sections("decoders")) read_decoder(inner, parts, fused);
  } else if (type == "ByteLevel") {
    for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) section.find(key);
    parts.byte_level = true;
  } else if (type == "Replace") {
    const auto [pattern, is_regex] = read_pattern(section.section("pattern"));
    require<FormatError>(!is_regex && parts.replaced.empty() && !fused, section.where(),
                         ": only one replaced String, before Fuse, is implemented");
    parts.replaced = pattern;
    parts.replacement = section.text("content");
  } else if (type == "ByteFallback") {
    parts.byte_fallback = true;
  } else if (type == "Fuse") {
    fused = true;
  } else if (type == "Strip") {
    require<FormatError>(fused && section.text("content") == " " && section.count("stop") == 0,
                         section.where(), ": only spaces at the beginning, after Fuse, can be stripped");
    parts.strip_spaces = section.count("start");
  } else if (type == "Metaspace") {
    require_space_mark(section);
    parts.replaced = space_mark;
    parts.replacement = " ";
    parts.first_token_drops_replaced = read_prepend_scheme(section) != PrependSpace::never;
    section.find("split");
  } else {
    section.refuse_type(type, "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace");
  }
  section.refuse_others();
}

// ---- model and added tokens ------------------------------------------------------------------
/// Gives each number to one spelling. There can be no more numbers than `most`, how many spellings
/// the file has: a small file with a large number must not take the memory of a large one.
class Numbering {
 public:
  explicit Numbering(std::size_t most) : spellings_(most) {}

  void add(const std::string& spelling, std::size_t id, const Section& section) {
    require<FormatError>(id < spellings_.size(), section.where(), ": ", io::in_quotes(spelling), " is token ",
                         id, ", but the file has only ", spellings_.size(), " tokens");
    const std::string& other = spellings_[id];
    require<FormatError>(other.empty() || other == spelling, section.where(), ": ", io::in_quotes(other),
                         " and ", io::in_quotes(spelling), " are both token ", id);
    spellings_[id] = spelling;
    used_ = std::max(used_, id + 1);
  }
  [[nodiscard]] bool has(std::size_t id) const { return id < spellings_.size() && !spellings_[id].empty(); }
  /// @throws FormatError for a number without a spelling, below the highest
  [[nodiscard]] std::vector<std::string> take(std::string_view origin) {
    spellings_.resize(used_);
    const auto hole = std::find(spellings_.begin(), spellings_.end(), std::string{});
    require<FormatError>(hole == spellings_.end(), origin, ": no token has the number ",
                         hole - spellings_.begin(), ", but there is one with ", used_ - 1);
    return std::move(spellings_);
  }

 private:
  std::vector<std::string> spellings_;
  std::size_t used_ = 0;  // the highest number that is given, and one
};

std::size_t size_of(const Json* value) { return value == nullptr ? 0 : value->size(); }

std::pair<std::string, std::string> read_merge(const Json& merge, const Section& section, std::size_t index) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  require<FormatError>(merge.is_string(), section.where("merges"), ": merge ", index,
                       " must be two texts or one, is ", io::shown(merge));
  return split_merge(merge.get_ref<const std::string&>(), index, section.where("merges"));
}

void read_model(Section section, TokenizerParts& parts, Numbering& numbering) {
  const std::string type = section.find("type") == nullptr ? "BPE" : section.text("type");
  if (type != "BPE")
    section.refuse_type(type, "BPE (for Unigram, give the folder's tokenizer.model instead)");
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* value = section.find(key);
    const bool unset = value == nullptr || *value == Json("") || (value->is_number() && *value == Json(0));
    require<FormatError>(unset, section.where(key), ": is not implemented, must be null");
  }
  parts.fuse_unknown = section.flag_or("fuse_unk", false);
  parts.byte_fallback = section.flag_or("byte_fallback", false);
  parts.ignore_merges = section.flag_or("ignore_merges", false);
  const Json& vocabulary = section.at("vocab");
  require<FormatError>(vocabulary.is_object(), section.where("vocab"), ": must be an object, is ",
                       io::shown(vocabulary));
  for (const auto& item : vocabulary.items()) {
    const std::size_t id = io::JsonObject::as_count(item.value(), section.where("vocab"), max_vocabulary);
    require<FormatError>(!item.key().empty(), section.where("vocab"), ": token ", id, " is empty");
    numbering.add(item.key(), id, section);
  }
  const Json& merges = section.at("merges");
  require<FormatError>(merges.is_array(), section.where("merges"), ": must be an array, is ",
                       io::shown(merges));
  parts.merges.reserve(merges.size());
  for (const Json& merge : merges) parts.merges.push_back(read_merge(merge, section, parts.merges.size()));
  if (section.find("unk_token") != nullptr) {
    const auto unknown = vocabulary.find(section.text("unk_token"));
    require<FormatError>(unknown != vocabulary.end(), section.where("unk_token"), ": ",
                         io::in_quotes(section.text("unk_token")), " is no token of the vocabulary");
    parts.unknown = unknown->get<int>();
  }
  section.refuse_others();
}

void read_added_token(Section section, TokenizerParts& parts, Numbering& numbering) {
  AddedToken token;
  const std::size_t id = section.count("id", max_vocabulary);
  const std::string& content = section.text("content");
  require<FormatError>(!content.empty(), section.where(), ": added token ", id, " is empty");
  token.id = static_cast<int>(id);
  token.outside_model = !numbering.has(id);
  token.special = section.flag_or("special", false);
  token.single_word = section.flag_or("single_word", false);
  token.lstrip = section.flag_or("lstrip", false);
  token.rstrip = section.flag_or("rstrip", false);
  token.normalized = section.flag_or("normalized", !token.special);
  section.refuse_others();
  numbering.add(content, id, section);
  parts.added.push_back(token);
}

}  // namespace

TokenizerParts parse_tokenizer_json(std::string_view text, std::string_view origin) {
  const Json json = io::parse_json(text, origin);
  TokenizerParts parts;
  parts.origin = origin;
  Section root{json, std::string{origin}};
  root.find("version");
  for (const char* key : {"truncation", "padding"}) {
    require<FormatError>(root.find(key) == nullptr, root.where(key), ": is not implemented, must be null");
  }
  Section model = root.section("model");
  Numbering numbering{size_of(model.find("vocab")) + size_of(root.find("added_tokens"))};
  read_model(std::move(model), parts, numbering);
  if (root.find("added_tokens") != nullptr) {
    for (const Section& token : root.sections("added_tokens")) read_added_token(token, parts, numbering);
  }
  parts.tokens = numbering.take(origin);
  if (root.find("normalizer") != nullptr) read_normalizer(root.section("normalizer"), parts.normalizer);
  if (root.find("pre_tokenizer") != nullptr) {
    read_pre_tokenizer(root.section("pre_tokenizer"), parts.pre_tokenizer);
  }
  if (root.find("post_processor") != nullptr) read_post_processor(root.section("post_processor"), parts);
  bool fused = false;
  read_decoder(root.section("decoder"), parts.decoder, fused);
  root.refuse_others();
  return parts;
}

}  // namespace kvpolicy::reference
