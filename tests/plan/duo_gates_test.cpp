// SPDX-License-Identifier: Apache-2.0
//
// Thresholds and kept heads must equal what numpy.quantile and a comparison give for the same gates.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/duo_gates.hpp>

using namespace kvpolicy;

namespace {

const HeadGates gates{3, 4, {0.3, -0.02, 1.0, 0.7, 0.7, 0.7, 1.1, 0.1, 0.05, 0.9, 0.25, 0.0}};
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

std::string text_of(const HeadKinds& kinds) {
  std::string text;
  for (std::size_t layer = 0; layer < kinds.layers(); ++layer) {
    for (const HeadKind kind : kinds.layer(layer)) text += kind == HeadKind::retrieval ? '1' : '0';
    text += ' ';
  }
  return text;
}

}  // namespace

TEST_CASE("threshold is numpy's linear quantile of the clipped gates") {
  struct Case {
    double sparsity, threshold;
    const char* kept;
  };
  const Case cases[]{{0.1, 0.0050000000000000044, "1011 1111 1110 "},
                     {0.25, 0.08750000000000001, "1011 1111 0110 "},
                     {1.0 / 3.0, 0.19999999999999998, "1011 1110 0110 "},
                     {0.5, 0.5, "0011 1110 0100 "},
                     {0.7, 0.7, "0011 1110 0100 "},
                     {0.9, 0.99, "0010 0010 0000 "},
                     {0.999, 1.0, "0010 0010 0000 "}};
  for (const Case& c : cases) {
    CAPTURE(c.sparsity);
    CHECK(gate_threshold(gates, c.sparsity) == doctest::Approx(c.threshold).epsilon(1e-15));
    CHECK(text_of(head_kinds(gates, c.sparsity, GateCut::threshold)) == c.kept);
  }
}

TEST_CASE("a sparsity at or beyond 0 or 1 keeps all heads or none") {
  for (const GateCut rule : {GateCut::exact_count, GateCut::threshold}) {
    for (const double sparsity : {0.0, -0.5, -std::numeric_limits<double>::infinity()}) {
      CHECK(text_of(head_kinds(gates, sparsity, rule)) == "1111 1111 1111 ");
    }
    for (const double sparsity : {1.0, 1.5, std::numeric_limits<double>::infinity()}) {
      CHECK(text_of(head_kinds(gates, sparsity, rule)) == "0000 0000 0000 ");
    }
  }
}

TEST_CASE("exact count: of a tie at the cut, the kept heads are spread evenly") {
  // The gates 1.0 and 1.1 tie after clipping, as do the three gates 0.7.
  CHECK(text_of(head_kinds(gates, 1.0 - 1.0 / 12)) == "0010 0000 0000 ");
  CHECK(text_of(head_kinds(gates, 1.0 - 2.0 / 12)) == "0010 0010 0000 ");
  CHECK(text_of(head_kinds(gates, 1.0 - 4.0 / 12)) == "0010 1010 0100 ");  // the middle one
  CHECK(text_of(head_kinds(gates, 1.0 - 5.0 / 12)) == "0011 0110 0100 ");  // the outer two
  CHECK(text_of(head_kinds(gates, 0.5)) == "0011 1110 0100 ");
  const HeadGates equal{4, 2, 0.5};
  CHECK(text_of(head_kinds(equal, 7.0 / 8)) == "00 01 00 00 ");
  CHECK(text_of(head_kinds(equal, 5.0 / 8)) == "01 01 00 10 ");
  CHECK(text_of(head_kinds(equal, 0.5)) == "10 10 10 10 ");
}

TEST_CASE("the number of gates that tie at the cut") {
  const auto tie = [](double sparsity) {
    const Highest found = highest_gates(gates, sparsity);
    return std::pair{found.tied, found.tied_in};
  };
  using Tie = std::pair<std::size_t, std::size_t>;
  CHECK(tie(1.0 - 1.0 / 12) == Tie{2, 1});
  CHECK(tie(1.0 - 2.0 / 12) == Tie{0, 0});  // both are kept
  CHECK(tie(1.0 - 5.0 / 12) == Tie{3, 2});
  CHECK(tie(0.5) == Tie{0, 0});
  CHECK(tie(0.0) == Tie{0, 0});
  CHECK(tie(1.0) == Tie{0, 0});
}

TEST_CASE("any tie: each run of layers gets its proportional number of heads to within one") {
  std::mt19937 random{11};
  for (int round = 0; round < 200; ++round) {
    HeadGates drawn{1 + random() % 40, 1 + random() % 9};
    for (double& gate : drawn.values()) gate = static_cast<double>(random() % 4) / 3.0;
    const double sparsity = static_cast<double>(random() % 1001) / 1000.0;
    const HeadKinds kinds = head_kinds(drawn, sparsity);
    // The heads with each gate and those that are kept, by layer.
    for (const double gate : {0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0}) {
      std::vector<double> there(drawn.layers()), in(drawn.layers());
      double all = 0, all_in = 0;
      for (std::size_t layer = 0; layer < drawn.layers(); ++layer) {
        for (std::size_t head = 0; head < drawn.heads(); ++head) {
          if (drawn(layer, head) != gate) continue;
          there[layer] += 1, all += 1;
          if (kinds(layer, head) == HeadKind::retrieval) in[layer] += 1, all_in += 1;
        }
      }
      for (std::size_t first = 0; first < drawn.layers(); ++first) {
        double tied = 0, kept = 0;
        for (std::size_t last = first; last < drawn.layers(); ++last) {
          tied += there[last], kept += in[last];
          if (all > 0) REQUIRE(std::abs(kept - tied * all_in / all) <= 1.0 + 1e-9);
        }
      }
    }
    const Highest found = highest_gates(drawn, sparsity);
    CHECK(found.indices.size() == retrieval_head_count(drawn.values().size(), sparsity));
    CHECK(std::ranges::is_sorted(found.indices));
  }
}

TEST_CASE("the count of retrieval heads is rounded, halves to even") {
  CHECK(retrieval_head_count(5, 0.5) == 2);  // 2.5
  CHECK(retrieval_head_count(7, 0.5) == 4);  // 3.5
  CHECK(retrieval_head_count(1, 0.5) == 0);  // 0.5
  CHECK(retrieval_head_count(3, 0.5) == 2);  // 1.5
  CHECK(retrieval_head_count(256, 0.5) == 128);
  CHECK(retrieval_head_count(10, 0.73) == 3);  // 2.7
  CHECK(retrieval_head_count(10, 0.77) == 2);  // 2.3
  CHECK(retrieval_head_count(0, 0.5) == 0);
}

TEST_CASE("the exact count never depends on how many gates are equal") {
  for (const std::size_t heads : {1U, 2U, 3U, 7U, 8U, 31U}) {
    const HeadGates equal{2, heads, 0.5};
    for (int tenths = 0; tenths <= 10; ++tenths) {
      const HeadKinds kinds = head_kinds(equal, tenths / 10.0);
      std::size_t kept = 0;
      for (const HeadKind kind : kinds.values()) kept += kind == HeadKind::retrieval;
      CHECK(kept == retrieval_head_count(2 * heads, tenths / 10.0));
    }
  }
}

TEST_CASE("what is not a number is refused by name") {
  CHECK_THROWS_WITH_AS((void)head_kinds(gates, not_a_number), doctest::Contains("sparsity is NaN"),
                       ConfigError);
  CHECK_THROWS_AS((void)head_kinds(gates, not_a_number, GateCut::threshold), ConfigError);
  CHECK_THROWS_AS((void)gate_threshold(gates, not_a_number), ConfigError);
  HeadGates broken = gates;
  broken(1, 2) = not_a_number;
  CHECK_THROWS_WITH_AS((void)head_kinds(broken, 0.5), doctest::Contains("layer 1, head 2 is nan"),
                       ConfigError);
  broken(1, 2) = std::numeric_limits<double>::infinity();
  CHECK_THROWS_AS((void)gate_threshold(broken, 0.5), ConfigError);
  CHECK_THROWS_AS((void)head_kinds(HeadGates{}, 0.5), ConfigError);
}

TEST_CASE("a head table has one value for each head") {
  CHECK_THROWS_AS((HeadGates{2, 3, std::vector<double>(5)}), ShapeError);
  const HeadGates table{2, 3, {1, 2, 3, 4, 5, 6}};
  CHECK(table(1, 0) == 4);
  CHECK(table.layer(1)[2] == 6);
  CHECK(table.values().size() == 6);
}
