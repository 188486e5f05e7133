// SPDX-License-Identifier: Apache-2.0
#include "texts.hpp"

#include <algorithm>
#include <filesystem>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "files.hpp"
#include "key_format.hpp"

namespace kvpolicy::tools {

std::string text_named(std::string_view name) {
  if (name == "kjv") {
    return io::read_text_file(repository_path("reference_model/weights/heldout_kjv.txt"));
  }
  require(std::ranges::find(text_names, name) != text_names.end(), "there is no text '", name,
          "'; there are kjv, novels, lexicon, manual and code");
  std::string path = "texts/";
  path.append(name).append(".txt");
  path = repository_path(path);
  require<FormatError>(std::filesystem::exists(path), path,
                       ": there is no such file; ./scripts/fetch-texts makes it");
  return io::read_text_file(path);
}

std::string part_of(std::string text, Split split) {
  if (split == Split::whole) return text;
  std::size_t end = text.size() * 3 / 10;
  while (end < text.size() && !is_unit_start(text, end)) ++end;
  if (split == Split::test) return text.substr(end);
  text.resize(end);
  return text;
}

bool is_unit_start(std::string_view text, std::size_t at) {
  return (at >= 1 && text[at - 1] == '\n') || is_sentence_start(text, at);
}

}  // namespace kvpolicy::tools
