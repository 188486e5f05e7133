// SPDX-License-Identifier: Apache-2.0
//
// Reads any bytes as a GGUF file: the result is a FormatError, or a header whose tensors do not
// overlap and can all be decoded without an access out of bounds.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gguf.hpp>

using namespace kvpolicy;
using namespace kvpolicy::reference;

namespace {

void expect(bool ok) {
  if (!ok) std::abort();
}

void read_all(const GgufHeader& header, std::span<const std::byte> file) {
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : header.tensors) {
    std::size_t elements = 1;
    for (const std::size_t size : tensor.shape) elements *= size;
    expect(elements % tensor.columns() == 0);
    expect(elements / tensor.columns() * tensor.row_bytes() == tensor.bytes);
    expect(tensor.begin <= file.size() && tensor.bytes <= file.size() - tensor.begin);
    std::vector<float> values(elements);
    decode_gguf(tensor.type, file.subspan(static_cast<std::size_t>(tensor.begin), tensor.bytes), values);
    bytes += tensor.bytes;
  }
  expect(bytes <= file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  try {
    read_all(parse_gguf(file, "fuzzed"), file);
  } catch (const FormatError& error) {
    // Errors must be short, however long the refused text is.
    expect(std::string_view{error.what()}.size() < 4000);
  }
  return 0;
}
