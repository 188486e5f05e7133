// SPDX-License-Identifier: Apache-2.0
//
// Bounds of logits by upper halves: the CPU engine's beside ScalarEngine's, and both above the logits of the whole keys
// in double.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/engine.hpp>
#include <kvpolicy/storage/encode_rows.hpp>

#include "cache/read_oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

// Small row tiles, which cut units.
struct SmallTiles : cpu::DefaultTuning {
  static constexpr std::size_t stream_quantized_rows = 13;
  static constexpr std::size_t stream_queries = 3;
};
// Two workers, which take tasks in turn.
struct TwoWorkers {
  [[nodiscard]] static std::size_t threads() { return 2; }
  void operator()(std::size_t count, const auto& loop) const {
    for (std::size_t i = count; i-- > 0;) loop(i);
  }
};

// The keys of one head: whatever rows there are, written to pages in halves.
struct Keys {
  std::vector<std::vector<std::byte>> pages;
  std::vector<const std::byte*> table;
  Segment rows;

  Keys(test::Random& random, const RowFormat& format, std::size_t first, std::size_t count,
       std::size_t head_dim, bool adversarial) {
    constexpr std::size_t page_rows = 64;
    const PageLayout layout{format, head_dim, page_rows};
    const std::size_t unit = format.granularity == Granularity::per_channel ? format.group : 1;
    const detail::RowEncoder encoder{format, Encoding::float32, head_dim, page_rows};
    const std::size_t total = (first + count + page_rows - 1) / page_rows * page_rows;
    for (std::size_t at = 0; at < total; at += unit) {
      if (at % page_rows == 0) pages.emplace_back(layout.page_bytes);
      for (std::size_t i = 0; i < unit; ++i) {
        for (std::size_t c = 0; c < head_dim; ++c) {
          float number = (c % 7 == 3 ? 9.0F : 1.0F) * test::normal(random) + (c % 5 == 0 ? 20.0F : 0.0F);
          // Codes of which every lower half is 0 or 15, so that whole keys lie as far from upper ones as they can.
          if (adversarial)
            number = (test::below(random, 2) == 0 ? 15.0F : 0.0F) +
                     16.0F * static_cast<float>(test::below(random, 16));
          encoder.row(i)[c] = adversarial && (at + i) % 8 < 2 ? ((at + i) % 8 == 0 ? 0.0F : 255.0F) : number;
        }
      }
      encoder.write_unit(pages.back().data(), at % page_rows);
    }
    for (const auto& page : pages) table.push_back(page.data());
    rows.keys = {.format = format, .pages = table.data(), .page_rows = page_rows, .first_row = first};
    rows.values = rows.keys;
    rows.rows = count;
  }
};

struct Case {
  RowFormat format;
  std::size_t head_dim;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::size_t head_dim : std::initializer_list<std::size_t>{8, 40, 128, 576}) {
    for (const std::size_t group : std::initializer_list<std::size_t>{16, 32, 64}) {
      all.push_back({{Encoding::uint4x2, Granularity::per_channel, group}, head_dim});
    }
    all.push_back({{Encoding::uint4x2, Granularity::per_channel, 32, true}, head_dim});
    all.push_back({{Encoding::uint4x2, Granularity::per_token, head_dim}, head_dim});
    all.push_back({{Encoding::uint4x2, Granularity::per_token, 8}, head_dim});
    all.push_back({{Encoding::uint4x2, Granularity::per_token, head_dim, true}, head_dim});
  }
  return all;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

template <class Engine>
std::vector<UnitBound> bounds(Engine& engine, LayerBounds work, std::size_t queries) {
  std::vector<UnitBound> units(queries * units_of(work.heads[0]), UnitBound{7, 7, 7, 7});
  const std::span<UnitBound> all{units};
  work.units = {&all, 1};
  engine.bound(work);
  return units;
}

void check_close(const std::vector<UnitBound>& a, const std::vector<UnitBound>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double size = 1.0 + std::abs(static_cast<double>(a[i].highest));
    CHECK(std::abs(static_cast<double>(a[i].highest - b[i].highest)) <
          1e-4 * size + static_cast<double>(a[i].slack));
    CHECK(static_cast<double>(a[i].width) == doctest::Approx(static_cast<double>(b[i].width)).epsilon(1e-4));
    CHECK(static_cast<double>(a[i].slack) == doctest::Approx(static_cast<double>(b[i].slack)).epsilon(1e-4));
    const double mass_a = std::log(static_cast<double>(a[i].mass)) + static_cast<double>(a[i].highest);
    const double mass_b = std::log(static_cast<double>(b[i].mass)) + static_cast<double>(b[i].highest);
    CHECK(std::abs(mass_a - mass_b) < 1e-4 * size + static_cast<double>(a[i].slack));
  }
}

}  // namespace

TEST_CASE("no whole key's logit is above its unit's bound, whatever the engine") {
  test::Random random{11};
  ScalarEngine scalar;
  cpu::Engine<cpu::SerialFor> engine;
  cpu::Engine<TwoWorkers, SmallTiles> other;
  for (const auto& [format, head_dim] : cases()) {
    for (const std::size_t count : std::initializer_list<std::size_t>{1, 8, 65, 135}) {
      if (head_dim == 576 && count != 65) continue;
      for (const bool adversarial : {false, true}) {
        const std::size_t align = format.granularity == Granularity::per_channel ? 3 : 5;
        const Keys keys{random, format, test::below(random, 2) * align, count, head_dim, adversarial};
        Segment upper = keys.rows;
        upper.keys = upper.keys.upper_half();
        upper.values = upper.keys;
        const std::span<const Segment> head{&upper, 1};
        std::vector<std::vector<double>> whole;
        for (std::size_t i = 0; i < count; ++i) whole.push_back(test::decoded(keys.rows.keys, i, head_dim));
        constexpr std::size_t tokens = 2;
        constexpr std::size_t group = 3;
        test::Tensor<float> q{tokens, group, head_dim};
        q.randomize(random, 0.5F);
        // The sign of a query that meets the worst case: lower halves all at one end.
        if (adversarial) q.fill([&](auto...) { return test::below(random, 4) == 0 ? -0.3F : 0.3F; });
        for (const Certainty certainty : {Certainty::sure, Certainty::four_sigma, Certainty::none}) {
          LayerBounds work{.queries = ConstTensor{std::as_const(q).view()},
                           .heads = {&head, 1},
                           .scale = 0.25F,
                           .softcap = count == 65 ? 30.0F : 0.0F,
                           .certainty = certainty};
          const auto slow = bounds(scalar, work, tokens * group);
          const auto fast = bounds(engine, work, tokens * group);
          check_close(slow, fast);
          check_close(slow, bounds(other, work, tokens * group));
          const std::size_t units = units_of(head);
          for (std::size_t m = 0; m < tokens * group; ++m) {
            const std::vector<double> query = q.row_of_doubles(m / group, m % group);
            for (std::size_t u = 0; u < units; ++u) {
              double mass_low = 0;
              double mass = 0;
              const UnitBound& own = fast[m * units + u];
              const UnitBound& own_slow = slow[m * units + u];
              for (std::size_t i = u * bounded_unit; i < std::min(count, (u + 1) * bounded_unit); ++i) {
                double logit = 0.25 * dot(query, whole[i]);
                if (work.softcap > 0) logit = 30.0 * std::tanh(logit / 30.0);
                if (certainty == Certainty::sure) {
                  CHECK(logit <= static_cast<double>(own.highest));
                  CHECK(logit <= static_cast<double>(own_slow.highest));
                }
                mass += std::exp(logit - static_cast<double>(own.highest));
                mass_low +=
                    std::exp(logit + 2 * static_cast<double>(own.width) - static_cast<double>(own.highest));
              }
              if (certainty != Certainty::sure) continue;
              CHECK(mass <= static_cast<double>(own.mass) * (1 + 1e-5));
              CHECK(mass_low >= static_cast<double>(own.mass) * (1 - 1e-3));  // no wider than it says
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a query that is not finite makes its bounds unknown, and those of no other") {
  test::Random random{3};
  const Keys keys{random, {Encoding::uint4x2, Granularity::per_channel, 32}, 0, 100, 64, false};
  Segment upper = keys.rows;
  upper.keys = upper.keys.upper_half();
  upper.values = upper.keys;
  const std::span<const Segment> head{&upper, 1};
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3e38F}) {
    test::Tensor<float> q{1, 2, 64};
    q.randomize(random);
    q.at(0, 1, 17) = bad;
    const LayerBounds work{
        .queries = ConstTensor{std::as_const(q).view()}, .heads = {&head, 1}, .scale = 1.0F};
    ScalarEngine scalar;
    cpu::Engine<cpu::SerialFor> engine;
    const std::size_t units = units_of(head);
    for (const auto& found : {bounds(scalar, work, 2), bounds(engine, work, 2)}) {
      for (std::size_t u = 0; u < units; ++u) {
        CHECK(is_finite(found[u].highest));
        CHECK_FALSE(is_finite(found[units + u].highest));
        CHECK_FALSE(is_finite(found[units + u].mass));
      }
    }
  }
}
