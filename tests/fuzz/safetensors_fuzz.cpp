// SPDX-License-Identifier: Apache-2.0
//
// Reads any bytes as a safetensors file: the result is a FormatError, or a header whose tensors can all be
// read without an access out of bounds and written to an equal file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/safetensors.hpp>

using namespace kvpolicy;
using namespace kvpolicy::reference;

namespace {

void expect(bool ok) {
  if (!ok) std::abort();
}

void read_all(const SafetensorsHeader& header, std::span<const std::byte> file) {
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, entry] : header.tensors) {
    const auto bytes = file.subspan(static_cast<std::size_t>(header.data_begin + entry.begin),
                                    static_cast<std::size_t>(entry.end - entry.begin));
    expect(entry.elements() * bytes_of(entry.type) == bytes.size());
    if (entry.type == TensorType::f32 || entry.type == TensorType::f16 || entry.type == TensorType::bf16) {
      expect(to_floats(entry.type, bytes).size() == entry.elements());
    }
    tensors.push_back({name, entry.type, entry.shape, bytes});
  }
  const std::vector<std::byte> again = serialize_safetensors(tensors, header.metadata);
  const SafetensorsHeader second = parse_safetensors(again, "written");
  expect(second.metadata == header.metadata && second.tensors.size() == header.tensors.size());
  for (const auto& [name, entry] : header.tensors) {
    expect(second.tensors.at(name).shape == entry.shape);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  try {
    read_all(parse_safetensors(file, "fuzzed"), file);
  } catch (const FormatError& error) {
    // Errors must be short, however long the refused text is.
    expect(std::string_view{error.what()}.size() < 4000);
  }
  return 0;
}
