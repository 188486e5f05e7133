// SPDX-License-Identifier: Apache-2.0
#include "words.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::tools {
namespace {

// clang-format off
// Each string holds its words with a space between them.
constexpr std::string_view thing_looks =
    "amber ancient bitter blue brass bright broken calm clever cold copper crooked dusty early "
    "empty faded famous gentle golden green hidden hollow humble icy iron ivory jolly lonely loud "
    "marble narrow noble orange painted patient plain purple quiet rapid rusty scarlet silent "
    "silver sleepy tiny velvet wooden yellow";
constexpr std::string_view thing_nouns =
    "anchor basket bell bicycle bottle bridge candle carpet castle clock compass curtain dragon "
    "drum engine falcon feather fiddle garden hammer harbour helmet island jacket kettle ladder "
    "lantern locket meadow mirror needle orchard parrot pencil piano pillow quarry ribbon rocket "
    "saddle statue teapot temple tower umbrella violin wagon window";

constexpr WordKind kinds_of_words[]{
    {"fish",
     "trout salmon herring cod tuna carp pike haddock sardine halibut mackerel perch"},
    {"bird",
     "sparrow robin eagle owl pigeon parrot falcon swallow raven penguin pelican finch"},
    {"fruit",
     "apple banana pear plum cherry mango peach grape lemon apricot papaya melon"},
    {"vegetable",
     "carrot cabbage spinach potato onion broccoli lettuce turnip celery radish cauliflower leek"},
    {"tool",
     "hammer screwdriver wrench chisel saw drill pliers spanner shovel rake axe crowbar"},
    {"tree",
     "oak birch maple willow pine cedar beech spruce fir elm poplar sycamore"},
    {"colour",
     "red blue green yellow purple pink brown grey turquoise crimson magenta beige"},
    {"metal",
     "iron copper tin zinc aluminium nickel silver titanium platinum cobalt tungsten chromium"},
    {"musical instrument",
     "violin piano flute trumpet guitar clarinet cello harp trombone oboe banjo tuba"},
    {"insect",
     "ant bee wasp beetle moth butterfly mosquito cricket grasshopper termite ladybird dragonfly"},
    {"garment",
     "shirt jacket coat skirt sweater scarf blouse glove sock dress cardigan waistcoat"},
    {"vehicle",
     "car bus truck tram bicycle motorcycle van lorry taxi ambulance tractor scooter"},
};

constexpr WordPair capital_pairs[]{
    {"Afghanistan", "Kabul"}, {"Algeria", "Algiers"}, {"Argentina", "Buenos Aires"},
    {"Australia", "Canberra"}, {"Austria", "Vienna"}, {"Bangladesh", "Dhaka"},
    {"Belgium", "Brussels"}, {"Bulgaria", "Sofia"}, {"Canada", "Ottawa"}, {"Chile", "Santiago"},
    {"China", "Beijing"}, {"Colombia", "Bogota"}, {"Croatia", "Zagreb"}, {"Cuba", "Havana"},
    {"Denmark", "Copenhagen"}, {"Ecuador", "Quito"}, {"Egypt", "Cairo"},
    {"Ethiopia", "Addis Ababa"}, {"Finland", "Helsinki"}, {"France", "Paris"},
    {"Germany", "Berlin"}, {"Ghana", "Accra"}, {"Greece", "Athens"}, {"Hungary", "Budapest"},
    {"Iceland", "Reykjavik"}, {"India", "New Delhi"}, {"Indonesia", "Jakarta"}, {"Iran", "Tehran"},
    {"Iraq", "Baghdad"}, {"Ireland", "Dublin"}, {"Italy", "Rome"}, {"Jamaica", "Kingston"},
    {"Japan", "Tokyo"}, {"Jordan", "Amman"}, {"Kenya", "Nairobi"}, {"Lebanon", "Beirut"},
    {"Libya", "Tripoli"}, {"Malaysia", "Kuala Lumpur"}, {"Mongolia", "Ulaanbaatar"},
    {"Morocco", "Rabat"}, {"Nepal", "Kathmandu"}, {"New Zealand", "Wellington"},
    {"Nigeria", "Abuja"}, {"Norway", "Oslo"}, {"Pakistan", "Islamabad"}, {"Peru", "Lima"},
    {"Poland", "Warsaw"}, {"Portugal", "Lisbon"}, {"Romania", "Bucharest"}, {"Russia", "Moscow"},
    {"Serbia", "Belgrade"}, {"South Korea", "Seoul"}, {"Spain", "Madrid"}, {"Sweden", "Stockholm"},
    {"Syria", "Damascus"}, {"Thailand", "Bangkok"}, {"Turkey", "Ankara"}, {"Ukraine", "Kyiv"},
    {"Venezuela", "Caracas"}, {"Vietnam", "Hanoi"}};

constexpr WordPair opposite_pairs[]{
    {"hot", "cold"}, {"big", "small"}, {"fast", "slow"}, {"happy", "sad"}, {"young", "old"},
    {"rich", "poor"}, {"hard", "soft"}, {"light", "dark"}, {"full", "empty"}, {"high", "low"},
    {"open", "closed"}, {"wet", "dry"}, {"strong", "weak"}, {"early", "late"}, {"wide", "narrow"},
    {"clean", "dirty"}, {"loud", "quiet"}, {"sweet", "sour"}, {"thick", "thin"}, {"true", "false"},
    {"good", "bad"}, {"long", "short"}, {"near", "far"}, {"heavy", "lightweight"},
    {"first", "last"}, {"rough", "smooth"}, {"sharp", "blunt"}, {"deep", "shallow"},
    {"brave", "cowardly"}, {"cheap", "expensive"}, {"polite", "rude"}, {"safe", "dangerous"},
    {"simple", "complicated"}, {"right", "wrong"}, {"alive", "dead"}, {"awake", "asleep"},
    {"ancient", "modern"}, {"generous", "selfish"}, {"guilty", "innocent"}, {"major", "minor"},
    {"odd", "even"}, {"private", "public"}, {"temporary", "permanent"}, {"tight", "loose"},
    {"vertical", "horizontal"}, {"maximum", "minimum"}, {"male", "female"}, {"inside", "outside"}};
// clang-format on

}  // namespace

std::vector<std::string_view> words_in(std::string_view list) {
  std::vector<std::string_view> words;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(' '), list.size());
    words.push_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return words;
}

std::vector<std::string> draw_things(Random& random, std::size_t count) {
  const std::vector<std::string_view> looks = words_in(thing_looks);
  const std::vector<std::string_view> nouns = words_in(thing_nouns);
  std::vector<std::size_t> numbers(looks.size() * nouns.size());
  require(count <= numbers.size(), "a task has ", count, " different things, at most ", numbers.size(),
          " have names");
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  random.shuffle(numbers);
  std::vector<std::string> things;
  for (std::size_t i = 0; i < count; ++i) {
    std::string thing{looks[numbers[i] / nouns.size()]};
    thing.append(" ").append(nouns[numbers[i] % nouns.size()]);
    things.push_back(std::move(thing));
  }
  return things;
}

std::string draw_digits(Random& random, std::size_t digits) {
  std::string number;
  while (number.size() < digits) {
    number += static_cast<char>(number.empty() ? '1' + random.below(9) : '0' + random.below(10));
  }
  return number;
}

std::string draw_uuid(Random& random) {
  std::string uuid = "xxxxxxxx-xxxx-4xxx-vxxx-xxxxxxxxxxxx";
  for (char& digit : uuid) {
    if (digit == 'x') digit = "0123456789abcdef"[random.below(16)];
    if (digit == 'v') digit = "89ab"[random.below(4)];
  }
  return uuid;
}

std::string draw_letters(Random& random, std::size_t letters, char first) {
  std::string word;
  while (word.size() < letters) word += static_cast<char>(first + static_cast<char>(random.below(26)));
  return word;
}

std::span<const WordKind> word_kinds() { return kinds_of_words; }
std::span<const WordPair> capitals() { return capital_pairs; }
std::span<const WordPair> opposites() { return opposite_pairs; }

}  // namespace kvpolicy::tools
