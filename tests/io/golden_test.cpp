// SPDX-License-Identifier: Apache-2.0
//
// Computes published results from published patterns and scores, for every head of every golden file.
#include <cmath>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>

#include "shared_data.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream{text};
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

io::Json golden(const char* name) {
  const auto path = shared_data() / "golden" / name;
  return io::parse_json(io::read_text_file(path), path.string());
}

}  // namespace

TEST_CASE("DuoAttention patterns: threshold and every head as published") {
  if (!has_shared_data()) return;
  const io::Json goldens = golden("duo_binarized.json");
  CHECK(goldens.size() == 12);
  for (const auto& item : goldens.items()) {
    CAPTURE(item.key());
    const auto parts = split(item.key(), '|');
    const double sparsity = std::stod(parts.at(1));
    const io::DuoPattern pattern = io::load_duo_pattern(shared_data() / "duo_patterns" / parts.at(0));
    CHECK(pattern.sinks == 128);
    CHECK(pattern.recent == 256);
    CHECK(gate_threshold(pattern.gates, sparsity) == item.value()["threshold"].get<double>());
    const HeadKinds kinds = head_kinds(pattern.gates, sparsity, GateCut::threshold);
    CHECK(kinds.values().size() == item.value()["heads"].get<std::size_t>());
    std::size_t kept = 0;
    for (std::size_t layer = 0; layer < kinds.layers(); ++layer) {
      std::string row;
      for (const HeadKind kind : kinds.layer(layer)) {
        row += kind == HeadKind::retrieval ? '1' : '0';
        kept += kind == HeadKind::retrieval;
      }
      CHECK(row == item.value()["rows"][layer].get<std::string>());
    }
    CHECK(kept == item.value()["full_heads"].get<std::size_t>());

    // The default rule keeps the number that it states. If it keeps fewer heads than the threshold,
    // they are among those that the threshold keeps.
    const HeadKinds exact = head_kinds(pattern.gates, sparsity);
    std::size_t count = 0;
    for (std::size_t i = 0; i < exact.values().size(); ++i) {
      if (exact.values()[i] != HeadKind::retrieval) continue;
      ++count;
      if (count <= kept) CHECK(kinds.values()[i] == HeadKind::retrieval);
    }
    CHECK(count == retrieval_head_count(exact.values().size(), sparsity));
  }
}

TEST_CASE("ties in published gates: the upper layers get their proportional number of heads") {
  if (!has_shared_data()) return;
  const io::DuoPattern pattern =
      io::load_duo_pattern(shared_data() / "duo_patterns" / "Mistral-7B-Instruct-v0.2");
  const HeadGates& gates = pattern.gates;
  for (const double sparsity : {0.75, 0.9}) {
    CAPTURE(sparsity);
    // Only heads of the 110 gates of 1 (and above) are taken.
    const Highest found = highest_gates(gates, sparsity);
    CHECK(found.tied == 110);
    CHECK(found.tied_in == (sparsity == 0.75 ? 64 : 26));
    const HeadKinds kinds = head_kinds(gates, sparsity);
    double tied = 0, kept = 0;  // of the upper half
    for (std::size_t i = gates.values().size() / 2; i < gates.values().size(); ++i) {
      tied += gates.values()[i] >= 1.0;
      kept += kinds.values()[i] == HeadKind::retrieval;
    }
    CHECK(std::abs(kept - tied * static_cast<double>(found.tied_in) / 110) <= 1.0);
    CHECK(kept > (sparsity == 0.75 ? 30 : 12));
  }
}

TEST_CASE("HeadKV scores: budgets as published") {
  if (!has_shared_data()) return;
  const io::Json goldens = golden("headkv_budgets.json");
  CHECK(goldens.size() == 80);
  std::size_t whole = 0;
  for (const auto& item : goldens.items()) {
    CAPTURE(item.key());
    const auto parts = split(item.key(), '|');
    static std::string loaded;
    static HeadScores scores;
    if (loaded != parts.at(0)) {
      loaded = parts.at(0);
      scores = io::load_head_scores(shared_data() / "headkv_scores" / (loaded + ".json"));
    }
    const HeadKvBudgetConfig config{.capacity = static_cast<std::size_t>(std::stoul(parts.at(1))),
                                    .observation_window = 8,
                                    .beta = std::stod(parts.at(2))};
    const HeadBudgets budgets = published_headkv_budgets(scores, config);
    REQUIRE(budgets.layers() == 32);
    REQUIRE(budgets.heads() == 32);
    std::size_t sum = 0;
    for (const std::size_t budget : budgets.values()) sum += budget;
    CHECK(sum == item.value()["sum"].get<std::size_t>());
    CHECK(std::ranges::min(budgets.values()) == item.value()["min"].get<std::size_t>());
    CHECK(std::ranges::max(budgets.values()) == item.value()["max"].get<std::size_t>());
    if (item.value()["rows"].is_null()) continue;
    ++whole;
    for (std::size_t layer = 0; layer < 32; ++layer) {
      for (std::size_t head = 0; head < 32; ++head) {
        CHECK(budgets(layer, head) == item.value()["rows"][layer][head].get<std::size_t>());
      }
    }
    // The plan's budgets for the model's 8 KV heads sum exactly.
    const HeadBudgets plan = headkv_budgets(scores, 8, config);
    std::size_t plan_sum = 0;
    for (const std::size_t budget : plan.values()) plan_sum += budget;
    CHECK(plan_sum == (config.capacity - 8) * 32 * 8);
  }
  CHECK(whole == 6);
}
