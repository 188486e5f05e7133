// SPDX-License-Identifier: Apache-2.0
//
// Writes GGUF files, right ones and wrong ones, byte by byte from the format's description.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvpolicy::reference {

template <class Number>
std::string number_bytes(Number value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}
inline std::string text_bytes(std::string_view text) {
  return number_bytes<std::uint64_t>(text.size()).append(text);
}

/// A metadata entry; `type` is the format's number of the value's type.
inline std::string entry_bytes(std::string_view key, std::uint32_t type, std::string_view value) {
  return text_bytes(key).append(number_bytes(type)).append(value);
}
inline std::string uint_entry(std::string_view key, std::uint32_t value) {
  return entry_bytes(key, 4, number_bytes(value));
}
inline std::string float_entry(std::string_view key, float value) {
  return entry_bytes(key, 6, number_bytes(value));
}
inline std::string text_entry(std::string_view key, std::string_view value) {
  return entry_bytes(key, 8, text_bytes(value));
}
/// An array's value: the type and the count of its elements, then these.
inline std::string array_bytes(std::uint32_t type, std::uint64_t count, std::string_view elements) {
  return number_bytes(type).append(number_bytes(count)).append(elements);
}

struct GgufBytes {
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> sizes;  // the shortest stride first, as in files
    std::uint32_t type = 0;
    std::uint64_t offset = 0;
  };

  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::optional<std::uint64_t> tensor_count, key_count;  // lies
  std::vector<std::string> entries;
  std::vector<Tensor> tensors;
  std::size_t alignment = 32;
  std::size_t data_bytes = 0;

  [[nodiscard]] std::string text() const {
    std::string file = magic + number_bytes(version);
    file += number_bytes(tensor_count.value_or(tensors.size()));
    file += number_bytes(key_count.value_or(entries.size()));
    for (const std::string& entry : entries) file += entry;
    for (const Tensor& tensor : tensors) {
      file += text_bytes(tensor.name);
      file += number_bytes(static_cast<std::uint32_t>(tensor.sizes.size()));
      for (const std::uint64_t size : tensor.sizes) file += number_bytes(size);
      file += number_bytes(tensor.type) + number_bytes(tensor.offset);
    }
    file.resize((file.size() + alignment - 1) / alignment * alignment, '\0');
    file.append(data_bytes, '\x3c');  // small floats of any type
    return file;
  }
};

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span{text.data(), text.size()});
}

}  // namespace kvpolicy::reference
