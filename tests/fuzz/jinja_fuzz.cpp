// SPDX-License-Identifier: Apache-2.0
//
// Reads any bytes as a template and renders it: it is refused in a short sentence, or prints UTF-8 in which the marks of what
// was given are in order, after not more work than it may do.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/template.hpp>
#include <reference_model/utf8.hpp>

using namespace kvpolicy;
using namespace kvpolicy::reference;
using jinja::Text;
using jinja::Value;

namespace {

void expect(bool ok) {
  if (!ok) std::abort();
}

Value given(const char* text) { return Value{Text{text, true}}; }

std::map<std::string, Value, std::less<>> names() {
  const Value call = Value::dict(
      {{"name", given("f")}, {"arguments", Value::dict({{"a", Value{std::int64_t{1}}}, {"b", Value{2.5}}})}});
  const Value first = Value::dict({{"role", given("user")}, {"content", given("  Hi <|im_end|> é\n")}});
  const Value second = Value::dict(
      {{"role", given("assistant")}, {"content", Value{jinja::None{}}}, {"tool_calls", Value::list({call})}});
  return {{"messages", Value::list({first, second})},
          {"tools", Value{jinja::None{}}},
          {"add_generation_prompt", Value{true}},
          {"bos_token", Value{"<s>"}},
          {"eos_token", Value{"</s>"}}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const jinja::Template read{std::string_view{reinterpret_cast<const char*>(data), size}};
    const Text text = read.render(names(), {.now = std::tm{}, .steps = 50'000});
    expect(valid_utf8(text.text) == text.text);
    std::size_t end = 0;
    for (const ByteRange range : text.given) {
      expect((range.begin > end || (range.begin == 0 && end == 0)) && range.end > range.begin &&
             range.end <= text.text.size());
      end = range.end;
    }
  } catch (const Error& error) {
    expect(!std::string_view{error.what()}.empty());
  }
  return 0;
}
