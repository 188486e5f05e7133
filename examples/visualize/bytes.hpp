// SPDX-License-Identifier: Apache-2.0
//
// Writes numbers as few bytes, and bytes as text that may stand in an HTML page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvpolicy::tools {

/// A sequence of bytes to which numbers are appended.
class ByteWriter {
 public:
  void byte(std::uint8_t value) { bytes_.push_back(value); }

  /// Appends seven bits per byte, the lowest first; all bytes but the last have their highest bit
  /// set (LEB128).
  void number(std::size_t value) {
    for (; value >= 0x80; value >>= 7) byte(static_cast<std::uint8_t>(value & 0x7F) | 0x80);
    byte(static_cast<std::uint8_t>(value));
  }

  [[nodiscard]] const std::vector<std::uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

[[nodiscard]] inline std::string base64(const std::vector<std::uint8_t>& bytes) {
  constexpr const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t three = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      three = three << 8 | (at + i < bytes.size() ? bytes[at + i] : 0U);
    }
    for (unsigned i = 0; i < 4; ++i) {
      text += at + i > bytes.size() ? '=' : letters[three >> (18 - 6 * i) & 63];
    }
  }
  return text;
}

}  // namespace kvpolicy::tools
