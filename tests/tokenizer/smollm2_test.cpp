// SPDX-License-Identifier: Apache-2.0
//
// SmolLM2's own tokenizer, where ./scripts/fetch-model smollm2 has brought it: the tokens of the
// golden texts by PyPI `tokenizers`, as one checksum.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <reference_model/tokenizer/chat_template.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/unicode.hpp>

#include "golden_texts.hpp"
#include "support/source_dir.hpp"

namespace {

using namespace kvpolicy::reference;

const std::string folder = kvpolicy::testing::source_dir() + "/models/smollm2";
const bool skipped = !have_icu() || !std::filesystem::exists(folder + "/tokenizer.json");

/// FNV-1a over the numbers, four bytes each, with -1 after each text.
class Checksum {
 public:
  void add(int number) {
    for (int shift = 0; shift < 32; shift += 8) {
      sum_ = (sum_ ^ (static_cast<std::uint32_t>(number) >> shift & 0xFFU)) * 0x100000001B3U;
    }
  }
  [[nodiscard]] std::uint64_t value() const { return sum_; }

 private:
  std::uint64_t sum_ = 0xCBF29CE484222325U;
};

TEST_CASE("SmolLM2 finds the tokens of PyPI tokenizers" * doctest::skip(skipped)) {
  const auto tokenizer = Tokenizer::load(folder);
  CHECK(tokenizer.vocabulary() == 49'152);
  CHECK_NOTHROW(tokenizer.require_fits(49'152));
  Checksum checksum;
  std::size_t count = 0;
  for (const std::string& text : golden_texts()) {
    const std::vector<int> tokens = tokenizer.encode(text);
    for (const int token : tokens) checksum.add(token);
    checksum.add(-1);
    count += tokens.size();
  }
  CHECK(count == 6872);
  CHECK(checksum.value() == 0xa3ad56284b16ad63U);
}

TEST_CASE("a question to SmolLM2" * doctest::skip(skipped)) {
  const auto tokenizer = Tokenizer::load(folder);
  const ChatTemplate chat{tokenizer};
  const std::vector<ChatMessage> messages{{"user", "What is the capital of France?"}};
  const std::vector<int> tokens = chat.encode(messages);
  const std::vector<int> expected{1,    9690, 198,   2683, 359,  253,  5356, 5646,  11173, 3365,
                                  3511, 308,  34519, 28,   7018, 411,  407,  19712, 8182,  2,
                                  198,  1,    4093,  198,  1780, 314,  260,  3575,  282,   4649,
                                  47,   2,    198,   1,    520,  9531, 198};
  CHECK(tokens == expected);
  CHECK(tokenizer.is_end(tokenizer.find("<|im_end|>").value()));
}

}  // namespace
