// SPDX-License-Identifier: Apache-2.0
//
// Reads any bytes as a tokenizer.json: they are refused in a short sentence,
// or the tokenizer turns any text into tokens of its vocabulary and any of its tokens into UTF-8.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/tokenizer_json.hpp>
#include <reference_model/utf8.hpp>

using namespace kvpolicy;
using namespace kvpolicy::reference;

namespace {

void expect(bool ok) {
  if (!ok) std::abort();
}
void expect_short(const Error& error) { expect(std::string_view{error.what()}.size() < 4000); }

void use(const Tokenizer& tokenizer, std::string_view text) {
  const std::vector<int> tokens = tokenizer.encode(text);
  for (const int token : tokens) expect(!tokenizer.token_text(token).empty());
  const std::string decoded = tokenizer.decode(tokens, {.skip_special = false});
  expect(valid_utf8(decoded) == decoded);
  TextStream stream{tokenizer, {.skip_special = false}};
  std::string streamed;
  for (const int token : tokens) {
    const std::string part = stream.next(token);
    expect(valid_utf8(part) == part);
    streamed += part;
  }
  expect(streamed + stream.finish() == decoded);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes{reinterpret_cast<const char*>(data), size};
  try {
    const Tokenizer tokenizer{parse_tokenizer_json(bytes, "fuzzed")};
    use(tokenizer, "ab abab<end> \xE2\x96\x81\xFF 12\n");
    use(tokenizer, bytes.substr(0, 100));
  } catch (const FormatError& error) {
    expect_short(error);
  } catch (const ConfigError& error) {  // a pattern that takes too long, or a build without ICU
    expect_short(error);
  }
  return 0;
}
