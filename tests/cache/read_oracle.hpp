// SPDX-License-Identifier: Apache-2.0
//
// What a bounded read left out, in double: rows are decoded from the bytes of their pages as docs/formats.md describes
// them, with no code of the library's, and an engine in between notes which rows were attended to.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>

namespace test {

/// A half's bits as a number.
inline double half_number(const std::byte* at) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, 2);
  const int exponent = bits >> 10 & 31;
  const double fraction = (exponent == 0 ? 0 : 1024) + (bits & 1023);
  // A power of two by its bits: ldexp was half the time of the tests that decode rows.
  const double unit =
      std::bit_cast<double>(static_cast<std::uint64_t>(1023 - 25 + std::max(exponent, 1)) << 52);
  const double magnitude = fraction * unit;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// Each part of the row, of the largest power of two that divides it, by the orthonormal Hadamard matrix,
/// H_2n = [H_n H_n; H_n -H_n].
inline void turn(std::vector<double>& row) {
  std::size_t block = 1;
  for (; row.size() % (2 * block) == 0; block *= 2) {
    for (std::size_t first = 0; first < row.size(); first += 2 * block) {
      for (std::size_t i = first; i < first + block; ++i) {
        const double sum = row[i] + row[i + block];
        row[i + block] = row[i] - row[i + block];
        row[i] = sum;
      }
    }
  }
  for (double& number : row) number /= std::sqrt(static_cast<double>(block));
}

/// Row `row` of a plane of float, bfloat16 or codes in halves.
inline std::vector<double> decoded(const kvpolicy::Plane& plane, std::size_t row, std::size_t channels) {
  using kvpolicy::Encoding;
  const std::size_t at = plane.first_row + row;
  std::vector<double> numbers(channels);
  const std::size_t wide = plane.format.encoding == Encoding::float32 ? 4 : 2;
  if (plane.format.encoding == Encoding::float32 || plane.format.encoding == Encoding::bfloat16) {
    const std::byte* from = plane.pages == nullptr
                                ? plane.base + at * plane.row_stride
                                : plane.pages[at / plane.page_rows] + at % plane.page_rows * wide * channels;
    for (std::size_t c = 0; c < channels; ++c) {
      std::uint32_t bits = 0;
      std::memcpy(reinterpret_cast<std::byte*>(&bits) + (4 - wide), from + c * wide, wide);
      numbers[c] = std::bit_cast<float>(bits);
    }
    return numbers;
  }
  const std::byte* page = plane.pages[at / plane.page_rows];
  const std::size_t index = at % plane.page_rows;
  const std::size_t codes = plane.page_rows * channels / 2;
  const bool by_channel = plane.format.granularity == kvpolicy::Granularity::per_channel;
  const std::size_t group = plane.format.group;
  const std::size_t params =
      by_channel ? plane.page_rows / group * channels : plane.page_rows * (channels / group);
  const std::byte* lower = page + codes + 2 * params * 2;
  const std::byte* scales = lower + codes;
  const std::byte* zeros = scales + params * 2;
  for (std::size_t c = 0; c < channels; ++c) {
    const std::size_t byte = index * channels / 2 + c % (channels / 2);
    const unsigned shift = c < channels / 2 ? 0 : 4;
    const unsigned code = (static_cast<unsigned>(page[byte]) >> shift & 15U) << 4 |
                          (static_cast<unsigned>(lower[byte]) >> shift & 15U);
    const std::size_t param =
        by_channel ? index / group * channels + c : index * (channels / group) + c / group;
    numbers[c] = half_number(scales + 2 * param) * code + half_number(zeros + 2 * param);
  }
  if (plane.format.hadamard) turn(numbers);
  return numbers;
}

/// A row of a head, in double.
struct DecodedRow {
  std::int64_t position = 0;
  std::int64_t window = kvpolicy::unlimited_window;
  std::vector<double> key, value;
};

/// A row of a head as a query sees it.
struct SeenRow {
  std::int64_t position = 0;
  double logit = 0;
  double size = 0;  // of the products that the logit is the sum of
  std::span<const double> value;
};

/// An engine that notes the positions of the rows that it attends to, for each KV head.
template <class Engine>
class NotingEngine {
 public:
  NotingEngine() = default;
  void attend(const kvpolicy::LayerAttention& work) {
    noted.resize(work.heads.size());
    shown.assign(work.heads.size(), {});
    for (std::size_t h = 0; h < work.heads.size(); ++h) {
      for (const kvpolicy::Segment& rows : work.heads[h]) {
        shown[h].push_back(rows);
        rows.for_each_run([&](const kvpolicy::RowRun& run) {
          for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
            repeated = !noted[h].insert(rows.position_of(i)).second || repeated;
          }
        });
      }
    }
    ++calls;
    engine_.attend(work);
  }
  void observe(const kvpolicy::LayerObservation& work) { engine_.observe(work); }
  void score(const kvpolicy::Plane& rows, std::span<const float> query, std::span<float> out) {
    engine_.score(rows, query, out);
  }
  void bound(const kvpolicy::LayerBounds& work)
    requires kvpolicy::BoundingEngine<Engine>
  {
    engine_.bound(work);
  }
  void forget() {
    noted.clear();
    repeated = false;
    calls = 0;
  }

  std::vector<std::set<std::int64_t>> noted;
  std::vector<std::vector<kvpolicy::Segment>> shown;  // of the latest call
  bool repeated = false;                              // a row was attended to twice
  int calls = 0;

 private:
  Engine engine_;
};

}  // namespace test
