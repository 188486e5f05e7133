// SPDX-License-Identifier: Apache-2.0
//
// The alphabet of byte-level tokenizers: each byte as one printable character, as GPT-2 defined it.
// Bytes that are printable in Latin-1 stand for themselves; the others, in their order, are U+0100
// and the characters after it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <reference_model/utf8.hpp>

namespace kvpolicy::reference {

class ByteAlphabet {
 public:
  [[nodiscard]] static const ByteAlphabet& get() {
    static const ByteAlphabet alphabet;
    return alphabet;
  }

  [[nodiscard]] std::string_view spelled(unsigned char byte) const noexcept { return spellings_[byte]; }

  void append_spelled(std::string_view bytes, std::string& out) const {
    for (const char byte : bytes) out.append(spelled(static_cast<unsigned char>(byte)));
  }

  /// The bytes that `text` spells; nothing if it has a character that stands for no byte.
  [[nodiscard]] std::optional<std::string> bytes_of(std::string_view text) const {
    std::string bytes;
    while (!text.empty()) {
      const std::size_t length = first_character(text).bytes;
      const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
      const std::size_t code = length == 1   ? byte(0)
                               : length == 2 ? (byte(0) & 0x1FU) << 6U | (byte(1) & 0x3FU)
                                             : bytes_.size();
      if (code >= bytes_.size() || bytes_[code] < 0) return {};
      bytes.push_back(static_cast<char>(bytes_[code]));
      text.remove_prefix(length);
    }
    return bytes;
  }

 private:
  ByteAlphabet() {
    bytes_.fill(-1);
    std::size_t next = 256;
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      const std::size_t code = printable ? byte : next++;
      bytes_[code] = static_cast<int>(byte);
      if (code < 0x80) {
        spellings_[byte].push_back(static_cast<char>(code));
      } else {
        spellings_[byte].push_back(static_cast<char>(0xC0U | code >> 6U));
        spellings_[byte].push_back(static_cast<char>(0x80U | (code & 0x3FU)));
      }
    }
  }

  std::array<std::string, 256> spellings_;
  std::array<int, 256 + 68> bytes_{};  // by code; 68 bytes are not printable
};

}  // namespace kvpolicy::reference
