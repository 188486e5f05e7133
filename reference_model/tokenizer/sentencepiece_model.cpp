// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/sentencepiece_model.hpp>

#include <kvpolicy/core/error.hpp>

#ifdef KVPOLICY_WITH_SENTENCEPIECE
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <sentencepiece_processor.h>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/pre_tokenizer.hpp>

namespace kvpolicy::reference {
namespace {

using sentencepiece::SentencePieceProcessor;

class SentencePieceModel final : public TokenModel {
 public:
  explicit SentencePieceModel(std::unique_ptr<const SentencePieceProcessor> processor)
      : processor_{std::move(processor)} {}

  void encode(std::string_view text, bool, std::vector<int>& tokens) const override {
    std::vector<int> ids;
    const auto status = processor_->Encode({text.data(), text.size()}, &ids);
    require(status.ok(), "SentencePiece cannot encode this text: ", status.ToString());
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }

 private:
  std::unique_ptr<const SentencePieceProcessor> processor_;
};

/// How the model spells a text once it has normalised it.
std::string spelled(const SentencePieceProcessor& processor, std::string_view text) {
  std::vector<std::string> pieces;
  std::string joint;
  if (processor.Encode({text.data(), text.size()}, &pieces).ok()) {
    for (const std::string& piece : pieces) joint += piece;
  }
  return joint;
}

}  // namespace

bool have_sentencepiece() noexcept { return true; }

std::pair<TokenizerParts, std::unique_ptr<const TokenModel>> read_sentencepiece(
    const std::filesystem::path& path) {
  const std::string origin = path.string();
  auto processor = std::make_unique<SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(io::read_text_file(path));
  require<FormatError>(status.ok(), origin,
                       ": is no SentencePiece model: ", io::shortened(status.ToString(), 200));
  TokenizerParts parts;
  parts.origin = origin;
  for (int id = 0; id < processor->GetPieceSize(); ++id) {
    parts.tokens.push_back(processor->IdToPiece(id));
    if (processor->IsControl(id)) parts.added.push_back({.id = id, .special = true});
  }
  if (processor->unk_id() >= 0) parts.unknown = processor->unk_id();
  if (processor->bos_id() >= 0) {
    parts.bos = processor->bos_id();
    parts.prefix.push_back(processor->bos_id());
  }
  if (processor->eos_id() >= 0) parts.ends.push_back(processor->eos_id());

  parts.decoder.byte_fallback = true;
  parts.decoder.replaced = space_mark;
  parts.decoder.replacement = " ";
  parts.decoder.strip_replaced_only = true;
  parts.decoder.unknown_text = " \xE2\x81\x87 ";
  // The library has no question for these two settings, but it shows what they do to a text.
  const bool removes_spaces =
      spelled(*processor, "a  b").find("\xE2\x96\x81\xE2\x96\x81") == std::string::npos;
  if (removes_spaces) {
    parts.decoder.strip_spaces = std::numeric_limits<std::size_t>::max();
  } else if (spelled(*processor, "a").starts_with(space_mark)) {
    parts.decoder.strip_spaces = 1;
  }
  return {std::move(parts), std::make_unique<SentencePieceModel>(std::move(processor))};
}

}  // namespace kvpolicy::reference
#else
namespace kvpolicy::reference {

bool have_sentencepiece() noexcept { return false; }

std::pair<TokenizerParts, std::unique_ptr<const TokenModel>> read_sentencepiece(
    const std::filesystem::path& path) {
  fail<ConfigError>(path.string(),
                    ": needs SentencePiece, and this program was built without it; install "
                    "libsentencepiece-dev (Debian, Ubuntu) and build again, or put the model's "
                    "tokenizer.json here");
}

}  // namespace kvpolicy::reference
#endif
