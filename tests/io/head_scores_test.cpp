// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/head_scores.hpp>

#include "says.hpp"
#include "shared_data.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

std::string refusal(std::string_view text) {
  try {
    (void)io::parse_head_scores(text, "scores.json");
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the shipped sample is read: a head's score is the mean of its list") {
  const HeadScores scores = io::load_head_scores(sample_data() / "head_scores.json");
  CHECK(scores.layers() == 4);
  CHECK(scores.heads() == 8);
  const HeadBudgets budgets = headkv_budgets(scores, 4, {.capacity = 64, .observation_window = 8});
  std::size_t sum = 0;
  for (const std::size_t budget : budgets.values()) sum += budget;
  CHECK(sum == 56 * 16);
  CHECK(io::parse_head_scores(R"({"0-0": [0.25, 0.5, 0]})")(0, 0) == 0.25);
}

TEST_CASE("the key decides which head a score belongs to, in any order") {
  const HeadScores scores =
      io::parse_head_scores(R"({"1-1": [4], "0-0": [1], "1-0": [2, 4], "0-1": [1, 3]})");
  CHECK(scores == HeadScores{2, 2, {1, 2, 3, 4}});
  // As text, keys with two digits sort before those with one.
  std::string text = "{";
  for (int head = 11; head >= 0; --head) {
    text += message('"', "0-", head, "\": [", head, ']', head > 0 ? "," : "}");
  }
  for (std::size_t head = 0; head < 12; ++head) {
    CHECK(io::parse_head_scores(text)(0, head) == static_cast<double>(head));
  }
}

TEST_CASE("what is no score file is refused with its key") {
  CHECK(refusal("") == Says{"scores.json: is empty"});
  CHECK(refusal("{}") == Says{"must be an object"});
  CHECK(refusal("[1]") == Says{"must be an object"});
  CHECK(refusal(R"({"0-0": []})") == Says{"key '0-0': must be a list of at least one score"});
  CHECK(refusal(R"({"0-0": 1})") == Says{"key '0-0': must be a list"});
  CHECK(refusal(R"({"0-0": [1, "2"]})") == Says{"one is the string '2'"});
  CHECK(refusal(R"({"0-0": [1, null]})") == Says{"one is null"});
  CHECK(refusal(R"({"0-0": [1], "0-0": [2]})") == Says{"line 1, column 19: the key '0-0' is given twice"});
  CHECK(refusal(R"({"0-0": [1], "0-2": [2]})") ==
        Says{"has 2 heads, but the largest numbers mean 1 layers x 3 heads"});
  CHECK(refusal("{\"0-0\": [1],\n \"0-1\": [NaN]}") == Says{"line 2, column 1"});
  CHECK(refusal(R"({"0-0": [1e999]})") == Says{"number overflow"});
  CHECK(refusal(R"({"0-0": [1e308, 1e308]})") == Says{"more than a double holds"});
  for (const char* key : {"", "-", "0", "0-", "-0", "00-0", "0-01", "0-0-0", "a-0", "0-+1", " 0-0",
                          "0-1048576", "99999999999999999999-0"}) {
    CAPTURE(key);
    CHECK(refusal(message("{\"", key, "\": [1]}")) == Says{"must name a head as layer-head"});
  }
  CHECK(refusal("{\"0-0\": [1]") == Says{"line 1, column"});
  CHECK(refusal("{\"0-0\": [1]} x") != "");
}

TEST_CASE("deep nesting is refused before it can exhaust the stack") {
  const std::size_t deep = 5'000'000;
  CHECK(refusal("{\"0-0\":" + std::string(deep, '[') + std::string(deep, ']') + "}") ==
        Says{"nested deeper than 16"});
  std::string objects;
  for (std::size_t i = 0; i < 200'000; ++i) objects += "{\"a\":";
  CHECK(refusal(objects) == Says{"nested deeper than 16"});
  CHECK(refusal(std::string(deep, '[')) == Says{"nested deeper than 16"});
}

TEST_CASE("scores are the same after they are written and read, on one line as published") {
  const TemporaryFolder folder;
  const HeadScores scores{2, 3, {0.1, 1.0 / 3.0, 5e-324, 1e300, 0.0, -0.25}};
  io::save_head_scores(folder.path() / "scores.json", scores);
  const std::string text = io::read_text_file(folder.path() / "scores.json");
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  CHECK(io::parse_head_scores(text) == scores);
  HeadScores broken = scores;
  broken(1, 1) = std::numeric_limits<double>::infinity();
  CHECK_THROWS_AS((void)io::format_head_scores(broken), ConfigError);
  CHECK_THROWS_WITH_AS((void)io::load_head_scores(folder.path() / "none.json"),
                       doctest::Contains("there is no such file"), FormatError);
  CHECK_THROWS_AS(io::save_head_scores(folder.path() / "no" / "such" / "folder.json", scores), StorageError);
}

TEST_CASE("samples are read one by one and written unchanged") {
  const std::string text = R"({"0-0": [0.5, 0.25, 1e-7], "0-1": [0], "1-0": [1, 2], "1-1": [3]})";
  const io::HeadSamples samples = io::parse_head_samples(text);
  CHECK(samples(0, 0) == std::vector<double>{0.5, 0.25, 1e-7});
  CHECK(samples(0, 1) == std::vector<double>{0.0});
  CHECK(samples(1, 0) == std::vector<double>{1.0, 2.0});
  CHECK(io::format_head_samples(samples) ==
        "{\"0-0\": [0.5, 0.25, 1e-07], \"0-1\": [0.0], \"1-0\": [1.0, 2.0], \"1-1\": [3.0]}\n");
  io::HeadSamples drawn{3, 5};
  std::mt19937_64 random{2};
  for (auto& list : drawn.values()) {
    for (std::size_t i = 0; i <= random() % 4; ++i) {
      list.push_back(static_cast<double>(random() >> 11) * 0x1p-53);
    }
  }
  CHECK(io::parse_head_samples(io::format_head_samples(drawn)) == drawn);  // to the last bit
  drawn(2, 4)[0] = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_WITH_AS((void)io::format_head_samples(drawn), doctest::Contains("layer 2, head 4 is nan"),
                       ConfigError);
  drawn(0, 1).clear();
  CHECK_THROWS_WITH_AS((void)io::format_head_samples(drawn),
                       doctest::Contains("layer 0, head 1 has no samples"), ConfigError);
}
