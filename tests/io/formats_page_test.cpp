// SPDX-License-Identifier: Apache-2.0
//
// docs/formats.md shows a file of each format. Each must be readable, and what the page says about
// defaults and keys must be true.
#include <fstream>
#include <iterator>
#include <string>
#include <type_traits>

#include <doctest/doctest.h>

#include <kvpolicy/io/cost_table_json.hpp>
#include <kvpolicy/io/damage_json.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>

#include "support/source_dir.hpp"

namespace {

using namespace kvpolicy;

std::string page() {
  std::ifstream file{testing::source_dir() + "/docs/formats.md"};
  return {std::istreambuf_iterator<char>{file}, {}};
}

// The JSON block after the comment `<!-- file: NAME -->`.
std::string shown(const std::string& name) {
  const std::string text = page();
  const std::string mark = "<!-- file: " + name + " -->\n```json\n";
  const std::size_t begin = text.find(mark);
  REQUIRE_MESSAGE(begin != std::string::npos, "docs/formats.md shows no " << name);
  const std::size_t first = begin + mark.size();
  return text.substr(first, text.find("```", first) - first);
}

TEST_CASE("docs/formats.md: every file on the page is read") {
  CHECK(io::parse_duo_config(shown("duo config")) == std::pair<std::size_t, std::size_t>{128, 256});

  const HeadScores scores = io::parse_head_scores(shown("head scores"));
  CHECK(scores.layers() == 2);
  CHECK(scores.heads() == 2);
  CHECK(scores(0, 0) == doctest::Approx(0.29));

  const auto plan = io::parse_plan(shown("plan"));
  CHECK(plan.shape() == ModelShape{2, 4, 2, 64});
  CHECK(plan.has<FullCache<DenseStorage<float>>>(0, 0));
  CHECK(plan.has<SinkRecentCache<DenseStorage<float>>>(0, 1));
  CHECK(plan.has<HeadBudgetCache<PerTokenStorage<float>>>(1, 0));
  CHECK(plan.has<ChunkRetrievalCache<DenseStorage<float>, MinMaxKey>>(1, 1));

  const auto damage = io::parse_damage<float>(shown("damage"));
  CHECK(damage.context == 2048);
  CHECK(damage.choices.size() == 2);
  CHECK(damage.choices[1].damage(0, 0) == 0.7);

  const auto costs = io::parse_costs<float>(shown("costs"));
  CHECK(costs.table.head_dim() == 128);
  CHECK(costs.table.curves()[0].measured.size() == 2);
}

TEST_CASE("docs/formats.md: the limits are those of the code") {
  const std::string text = page();
  const auto says = [&](const std::string& line) {
    CHECK_MESSAGE(text.find(line) != std::string::npos, "docs/formats.md does not say: " << line);
  };
  static_assert(io::largest_text_file == std::size_t{64} << 20);
  says("| a file, or standard input where a tool reads a text from it | 64 MiB |");
  static_assert(io::JsonLimits{}.most_values == 4'194'304);
  says("| values and keys of a JSON file, all together | 4,194,304 |");
  static_assert(io::JsonLimits{}.deepest == 16);
  says("| depth of arrays and objects | 16 |");
}

// Writes each setting with all of its keys: the page must name every key and its default.
TEST_CASE("docs/formats.md: the tables of keys are complete, and the defaults are those of the code") {
  const std::string text = page();
  const auto says = [&](const std::string& words) {
    CHECK_MESSAGE(text.find(words) != std::string::npos, "docs/formats.md does not say: " << words);
  };
  const auto check = [&]<class P>(std::type_identity<P>) {
    const io::Json setting = io::parse_json(io::write_setting(HeadSettings<float>::of<P>()), "setting");
    const auto check_keys = [&](const io::Json& object) {
      for (const auto& [key, value] : object.items()) {
        if (key == "policy" || key == "scorer" || key == "summary" || key == "type") {
          says(key == "type" ? "`" + value.template get<std::string>() + "`"
                             : value.template get<std::string>());
        } else if (value.is_string()) {
          says("`" + key + "` \"" + value.template get<std::string>() + "\"");
        } else if (!value.is_object()) {
          says("`" + key + "` " + value.dump());
        }
      }
    };
    check_keys(setting);
    if (setting.contains("storage")) check_keys(setting["storage"]);
  };
  check(std::type_identity<FullCache<DenseStorage<float>>>{});
  check(std::type_identity<QuantizedResidualCache<float>>{});
  check(std::type_identity<QuantizedResidualCache<float, Granularity::per_channel>>{});
  check(std::type_identity<SinkRecentCache<DenseStorage<float>>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, TovaScorer>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, H2oScorer>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, KeyNormScorer>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, KeyDiffScorer>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, KvZipScorer>>{});
  check(std::type_identity<HeadBudgetCache<DenseStorage<float>, ExpectedAttentionScorer>>{});
  check(std::type_identity<ChunkRetrievalCache<DenseStorage<float>>>{});
  check(std::type_identity<ChunkRetrievalCache<DenseStorage<float>, MinMaxKey>>{});
  std::string members = "{";
  io::JsonFieldWriter writer{members, "dense"};
  RotaryConfig{}.fields(writer);
  const io::Json rotary = io::parse_json(members + "}", "rotary");
  CHECK(rotary.size() == 6);
  for (const auto& [key, value] : rotary.items()) says("`" + key + "`");
  for (const char* words :
       {"`compress_from` 0", "`after_first_compress` false", "`adaptive_in_layer` false", "`safeguard` 0.2",
        "`adaptive_in_model` false", "`weigh_values` false", "`value_norm` \"value_l2\" or \"output_l1\"",
        "`unweighed_share` 0", "`prior_share` 0", "`votes` \"mean\" or \"largest\""})
    says(words);
}

}  // namespace
