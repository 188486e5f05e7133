// SPDX-License-Identifier: Apache-2.0
//
// Compares what visualize says of reads with a bound with numbers counted by hand, on recordings made by hand.
#include <visualize/bound_summary.hpp>

#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = HeadPlan<bfloat16>;

const ModelShape shape{2, 4, 2, 64};

HeadSettings<bfloat16> in_halves() { return LowBitFormat::of_bounded(shape).head<bfloat16>(); }

HeadStep head(std::size_t kept, std::size_t read, float bound, float measured) {
  HeadStep made;
  made.kept = {{0, kept}};
  made.read = {{0, read}};
  made.unread = UnreadShare{bound, measured};
  return made;
}

Step step(std::vector<HeadStep> heads, StepKind kind = StepKind::generate) {
  Step made;
  made.kind = kind;
  made.heads = std::move(heads);
  return made;
}

bool is_near(double value, double expected) { return std::abs(value - expected) <= 1e-6; }

}  // namespace

TEST_CASE("the largest and the median share, and the rows read by layer, of heads with keys in halves") {
  Recording recording{.heads = Plan{shape, in_halves()}};
  recording.heads.set(1, 1,
                      FullCache<DenseStorage<bfloat16>>::Config{});  // reads all, so that it leaves nothing
  recording.steps.push_back(
      {.kind = StepKind::prompt, .heads = std::vector<HeadStep>(4)});  // without a bound
  recording.steps.push_back(step({head(100, 20, 0.04F, 0.01F), head(100, 40, 0.02F, 0.0F),
                                  head(100, 90, 0.05F, 0.003F), head(100, 100, 0.0F, 0.0F)}));
  const auto odd = summarize_bound(recording);
  REQUIRE(odd);
  CHECK(odd->reads == 3);
  CHECK(is_near(odd->bound.largest, 0.05));
  CHECK(is_near(odd->bound.median, 0.04));
  CHECK(is_near(odd->measured.largest, 0.01));
  CHECK(is_near(odd->measured.median, 0.003));
  CHECK(is_near(odd->rows_read, 0.5));
  REQUIRE(odd->rows_read_by_layer.size() == 2);
  CHECK(is_near(odd->rows_read_by_layer[0], 0.3));
  CHECK(is_near(odd->rows_read_by_layer[1], 0.9));

  recording.steps.push_back(step({head(200, 20, 0.01F, 0.0F), head(200, 200, 0.0F, 0.0F),
                                  head(200, 110, 0.03F, 0.02F), head(200, 200, 0.0F, 0.0F)}));
  const auto even = summarize_bound(recording);
  REQUIRE(even);
  CHECK(even->reads == 6);
  CHECK(is_near(even->bound.median, 0.025));  // of 0, 0.01, 0.02, 0.03, 0.04, 0.05
  CHECK(is_near(even->measured.median, 0.0015));
  CHECK(is_near(even->measured.largest, 0.02));
  CHECK(is_near(even->rows_read_by_layer[0], 280.0 / 600));  // a longer text counts for more
  CHECK(is_near(even->rows_read_by_layer[1], 200.0 / 300));
  const std::string text = shown(*even);
  CAPTURE(text);
  CHECK(text.find("at most 5.0 % of a query's attention by the bound (median 2.5 %)") != std::string::npos);
  CHECK(text.find("2.0 % as measured") != std::string::npos);
  CHECK(text.find("  0 to 1     47   67\n") != std::string::npos);
}

TEST_CASE("a layer without keys in halves has no share, and a recording without a bound no summary") {
  Recording recording{.heads = Plan{shape, in_halves()}};
  CHECK(!summarize_bound(recording));
  recording.steps.push_back(step(std::vector<HeadStep>(4)));
  CHECK(!summarize_bound(recording));
  for (const std::size_t h : {0U, 1U})
    recording.heads.set(0, h, SinkRecentCache<DenseStorage<bfloat16>>::Config{});
  recording.steps.push_back(
      step({head(9, 9, 0, 0), head(9, 9, 0, 0), head(8, 2, 0.1F, 0), head(8, 4, 0.3F, 0)}));
  const auto summary = summarize_bound(recording);
  REQUIRE(summary);
  CHECK(summary->reads == 2);
  CHECK(summary->rows_read_by_layer[0] < 0);
  CHECK(is_near(summary->rows_read_by_layer[1], 0.375));
  CHECK(is_near(summary->bound.median, 0.2));
  CHECK(shown(*summary).find("  0 to 1      -   38\n") != std::string::npos);
}
