// SPDX-License-Identifier: Apache-2.0
//
// The texts of the goldens.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/io/text_file.hpp>

#include "support/source_dir.hpp"

inline const std::string goldens = kvpolicy::testing::source_dir() + "/tests/tokenizer/goldens/";

/// The file has each byte as one character, because some texts are not UTF-8.
inline std::vector<std::string> golden_texts() {
  std::vector<std::string> texts;
  for (const auto& item : nlohmann::json::parse(kvpolicy::io::read_text_file(goldens + "texts.json"))) {
    std::string text;
    const auto spelled = item.get<std::string>();
    for (std::size_t i = 0; i < spelled.size(); ++i) {
      const auto byte = static_cast<unsigned char>(spelled[i]);
      if (byte < 0x80) {
        text.push_back(spelled[i]);
      } else {
        text.push_back(
            static_cast<char>((byte & 3U) << 6U | (static_cast<unsigned char>(spelled[++i]) & 0x3FU)));
      }
    }
    texts.push_back(text);
  }
  return texts;
}
