// SPDX-License-Identifier: Apache-2.0
#include "key_format.hpp"

#include <cctype>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace kvpolicy::tools {

std::vector<std::string> draw_names(Random& random, std::size_t count) {
  constexpr std::string_view consonants = "bdfghjklmnprstvz";
  constexpr std::string_view vowels = "aeiou";
  std::set<std::string> names;
  while (names.size() < count) {
    std::string name;
    for (int syllable = 0; syllable < 3; ++syllable) {
      name += consonants[random.below(consonants.size())];
      name += vowels[random.below(vowels.size())];
    }
    name.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(name.front())));
    names.insert(std::move(name));
  }
  std::vector<std::string> shuffled{names.begin(), names.end()};
  random.shuffle(shuffled);
  return shuffled;
}

std::string draw_key(Random& random) { return fmt::format("{:05}", random.below(100000)); }

std::string key_fact(std::string_view name, std::string_view key) {
  return fmt::format("The key of {} is {}. ", name, key);
}
std::string key_older(std::string_view elder, std::string_view younger) {
  return fmt::format("{} is older than {}. ", elder, younger);
}
std::string ask_key(std::string_view name) { return fmt::format("\nWhat is the key of {}? ", name); }
std::string ask_key_of_older(std::string_view first, std::string_view second) {
  return fmt::format("\nWhat is the key of the older of {} and {}? ", first, second);
}
std::string key_answer(std::string_view name, std::string_view key) {
  return fmt::format("The key of {} is {}.", name, key);
}

bool is_sentence_start(std::string_view text, std::size_t at) {
  constexpr std::string_view ends = ".:;?!";
  return at >= 2 && text[at - 1] == ' ' && ends.find(text[at - 2]) != std::string_view::npos;
}

}  // namespace kvpolicy::tools
