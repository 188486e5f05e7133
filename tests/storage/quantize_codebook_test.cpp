// SPDX-License-Identifier: Apache-2.0
//
// Rows whose codes stand for other numbers than equal steps. The test reads scales and codes from the bytes of a page
// by itself, as docs/formats.md describes them, and asks of each code whether another would have been nearer.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

// ---- the formats, written down once more

double e4m3(unsigned code) {
  const double size = (code >> 3 & 15U) == 0
                          ? std::ldexp(code & 7U, -9)
                          : std::ldexp(8 + (code & 7U), static_cast<int>(code >> 3 & 15U) - 10);
  return (code & 128U) != 0 ? -size : size;
}

std::vector<double> numbers_of(Codebook codebook, std::size_t bits) {
  std::vector<double> upper;
  if (codebook == Codebook::fp8) {
    for (unsigned code = 0; code < 256; ++code) upper.push_back((code & 127U) == 127U ? 1e300 : e4m3(code));
    return upper;
  }
  if (codebook != Codebook::normal) return {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6};
  if (bits == 2) upper = {38, 127};
  if (bits == 3) upper = {14, 45, 79, 127};
  if (bits == 4) upper = {6, 18, 31, 44, 58, 75, 96, 127};
  std::vector<double> all;
  for (auto level = upper.rbegin(); level != upper.rend(); ++level) all.push_back(-*level);
  all.insert(all.end(), upper.begin(), upper.end());
  return all;
}

std::size_t group_of(Codebook codebook, std::size_t head_dim, std::size_t group) {
  return codebook == Codebook::mxfp4   ? 32
         : codebook == Codebook::nvfp4 ? 16
         : codebook == Codebook::fp8   ? head_dim
                                       : group;
}
std::size_t bytes_of_scale(Codebook codebook) {
  return codebook == Codebook::normal ? 2 : codebook == Codebook::fp8 ? 0 : 1;
}

struct Rows {
  RowFormat format;
  std::size_t head_dim;
  std::size_t count;
  std::vector<float> given;
  PlaneStore store;

  Rows(const RowFormat& row_format, std::size_t channels, std::size_t rows, test::Random& random,
       float size = 1.0F)
      : format{row_format},
        head_dim{channels},
        count{rows},
        given(rows * channels),
        store{row_format, {channels, 16}} {
    for (float& number : given) number = size * test::normal(random);
  }
  void append() {
    store.append(
        {.base = reinterpret_cast<const std::byte*>(given.data()), .row_stride = head_dim * sizeof(float)},
        count);
  }
  [[nodiscard]] std::size_t bits() const { return bits_of(format.encoding); }

  // The bytes of a row's codes, of its scales, and what they stand for.
  [[nodiscard]] unsigned code(std::size_t row, std::size_t channel) const {
    const auto place = store.plane(0).address_of(row);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(place.page) + place.row * head_dim * bits() / 8;
    const auto part = [&](const std::uint8_t* packed, std::size_t width) {
      const std::size_t bytes = head_dim * width / 8;
      return unsigned{packed[channel % bytes]} >> (channel / bytes * width) & ((1U << width) - 1U);
    };
    if (bits() != 3) return part(codes, bits());
    return part(codes, 2) << 1 | part(codes + head_dim / 4, 1);
  }
  [[nodiscard]] double scale(std::size_t row, std::size_t channel) const {
    const std::size_t bytes = bytes_of_scale(format.codebook);
    if (bytes == 0) return format.scale;
    const auto place = store.plane(0).address_of(row);
    const std::size_t groups = head_dim / group_of(format.codebook, head_dim, format.group);
    const std::size_t at =
        16 * head_dim * bits() / 8 + (place.row * groups + channel * groups / head_dim) * bytes;
    if (format.codebook == Codebook::normal) {
      float16 stored;
      std::memcpy(&stored, place.page + at, 2);
      return static_cast<float>(stored);
    }
    const auto stored = static_cast<unsigned>(place.page[at]);
    return format.codebook == Codebook::mxfp4 ? std::ldexp(1.0, static_cast<int>(stored) - 127)
                                              : e4m3(stored) * format.scale;
  }
};

RowFormat format_of(Codebook codebook, std::size_t bits, std::size_t head_dim, std::size_t group,
                    float scale = 1.0F) {
  return {code_encoding(bits),
          Granularity::per_token,
          group_of(codebook, head_dim, group),
          false,
          codebook,
          has_head_scale(codebook) ? scale : 1.0F};
}

template <class Check>
void for_each_format(Check check) {
  for (const Codebook codebook : {Codebook::normal, Codebook::fp8, Codebook::mxfp4, Codebook::nvfp4}) {
    for (const std::size_t bits : {2U, 3U, 4U, 8U}) {
      if (!fits_codebook(codebook, bits)) continue;
      for (const std::size_t head_dim : {8U, 32U, 64U, 96U, 128U}) {
        for (const std::size_t group : {std::size_t{8}, std::size_t{head_dim}}) {
          const std::size_t own = group_of(codebook, head_dim, group);
          if (head_dim % own != 0 || (codebook != Codebook::normal && group != head_dim)) continue;
          for (const float scale : {1.0F, 0.375F}) {
            if (scale != 1.0F && !has_head_scale(codebook)) continue;
            CAPTURE(std::string{name_of(codebook)});
            CAPTURE(bits);
            CAPTURE(head_dim);
            CAPTURE(own);
            check(format_of(codebook, bits, head_dim, own, scale), head_dim);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "codebooks: each code stands for the nearest number of its group, and a page is as long as its format "
    "says") {
  test::Random random{7};
  for_each_format([&](const RowFormat& format, std::size_t head_dim) {
    for (const float size : {1e-6F, 0.02F, 1.0F, 300.0F}) {
      Rows rows{format, head_dim, 37, random, size};
      rows.given[3] = 0.0F;
      rows.append();
      const std::size_t groups = head_dim / format.group;
      CHECK(rows.store.bytes() ==
            3 * 16 * (head_dim * rows.bits() / 8 + groups * bytes_of_scale(format.codebook)));
      const std::vector<double> numbers = numbers_of(format.codebook, rows.bits());
      std::vector<float> loaded(head_dim);
      bool nearest = true;
      bool as_read = true;
      for (std::size_t row = 0; row < rows.count; ++row) {
        load_row(rows.store.plane(0), row, loaded);
        for (std::size_t channel = 0; channel < head_dim; ++channel) {
          const double scale = rows.scale(row, channel);
          const double value = rows.given[row * head_dim + channel];
          const double stored = numbers[rows.code(row, channel)] * scale;
          as_read = as_read && std::abs(loaded[channel] - stored) <= 1e-6 * std::abs(stored);
          double least = 1e300;
          for (const double number : numbers) least = std::min(least, std::abs(number * scale - value));
          // Two may be equally near but for rounding.
          nearest = nearest && std::abs(stored - value) <= least + 1e-5 * (std::abs(value) + scale);
        }
      }
      CHECK(nearest);
      CHECK(as_read);
    }
  });
}

TEST_CASE("codebooks: normal numbers lose what Max's tables say, and no scale would do better by far") {
  test::Random random{11};
  const std::vector<double> errors{0.1175, 0.03454, 0.009497};
  for (std::size_t bits = 2; bits <= 4; ++bits) {
    const double error = errors[bits - 2];
    Rows rows{format_of(Codebook::normal, bits, 128, 128), 128, 400, random};
    rows.append();
    double lost = 0.0;
    double best = 0.0;
    std::vector<float> loaded(128);
    const std::vector<double> numbers = numbers_of(Codebook::normal, bits);
    for (std::size_t row = 0; row < rows.count; ++row) {
      load_row(rows.store.plane(0), row, loaded);
      double own = 0.0;
      for (std::size_t c = 0; c < 128; ++c) own += std::pow(loaded[c] - rows.given[row * 128 + c], 2);
      lost += own;
      double least = own;
      for (double factor = 0.8; factor < 1.25; factor += 0.01) {
        double other = 0.0;
        for (std::size_t c = 0; c < 128; ++c) {
          double nearest = 1e300;
          for (const double number : numbers) {
            nearest =
                std::min(nearest, std::abs(number * factor * rows.scale(row, c) - rows.given[row * 128 + c]));
          }
          other += nearest * nearest;
        }
        least = std::min(least, other);
      }
      best += least;
    }
    CAPTURE(bits);
    CHECK(lost / (400 * 128) < 1.03 * error);
    CHECK(lost < 1.02 * best);
  }
}

TEST_CASE("codebooks: groups of zeros are zeros, and the largest numbers stay finite") {
  for_each_format([&](const RowFormat& format, std::size_t head_dim) {
    test::Random random{3};
    Rows rows{format, head_dim, 20, random, 0.0F};
    std::fill(rows.given.begin() + static_cast<std::ptrdiff_t>(head_dim), rows.given.end(),
              largest_quantizable);
    for (std::size_t i = 2 * head_dim; i < rows.given.size(); i += 3) rows.given[i] = -0.0F;
    rows.append();
    std::vector<float> loaded(head_dim);
    load_row(rows.store.plane(0), 0, loaded);
    CHECK(std::ranges::count(loaded, 0.0F) == static_cast<std::ptrdiff_t>(head_dim));
    for (std::size_t row = 1; row < 20; ++row) {
      load_row(rows.store.plane(0), row, loaded);
      for (const float number : loaded) CHECK(std::abs(number) <= largest_quantizable);
    }
  });
}

TEST_CASE("codebooks: numbers that an engine has in the format stay what they are") {
  test::Random random{5};
  // MXFP4 and fp8 of any codes; NVFP4 where a block has its largest number.
  for (const Codebook codebook : {Codebook::fp8, Codebook::mxfp4, Codebook::nvfp4}) {
    const std::size_t bits = codebook == Codebook::fp8 ? 8 : 4;
    Rows rows{format_of(codebook, bits, 64, 0, 0.25F), 64, 50, random};
    const std::vector<double> numbers = numbers_of(codebook, bits);
    for (std::size_t i = 0; i < rows.given.size(); ++i) {
      std::size_t code = test::below(random, numbers.size());
      if (codebook == Codebook::fp8 && code % 128 == 127) code -= 1;
      if (codebook == Codebook::nvfp4 && i % 16 == 0) code = 7;
      const std::size_t block = i / (codebook == Codebook::nvfp4 ? 16 : 32);
      const double scale = codebook == Codebook::fp8 ? 0.25
                           : codebook == Codebook::mxfp4
                               ? std::ldexp(1.0, static_cast<int>(block % 9) - 6)
                               : 0.25 * e4m3(20 + static_cast<unsigned>(block % 30));
      rows.given[i] = static_cast<float>(numbers[code] * scale);
    }
    rows.append();
    std::vector<float> loaded(64);
    bool same = true;
    for (std::size_t row = 0; row < rows.count; ++row) {
      load_row(rows.store.plane(0), row, loaded);
      for (std::size_t c = 0; c < 64; ++c) same = same && loaded[c] == rows.given[row * 64 + c];
    }
    CAPTURE(std::string{name_of(codebook)});
    CHECK(same);
  }
}

TEST_CASE("codebooks: settings that do not fit are refused") {
  using Storage = ResidualStorage<float>;
  using ByChannel = ResidualStorage<float, Granularity::per_channel>;
  const StorageContext context{64, 64};
  const auto message_of = [&](const ResidualConfig& config) {
    return test::thrown<ConfigError>([&] { Storage::validate(config, context); });
  };
  CHECK(message_of({.bits = 5, .value_codebook = Codebook::normal}) ==
        "ResidualStorage: value_codebook 'normal' has 2, 3 or 4 bits, not 5");
  CHECK(message_of({.bits = 4, .key_codebook = Codebook::fp8}) ==
        "ResidualStorage: key_codebook 'fp8' has 8 bits, not 4");
  CHECK(message_of({.bits = 8, .value_codebook = Codebook::nvfp4}) ==
        "ResidualStorage: value_codebook 'nvfp4' has 4 bits, not 8");
  CHECK(
      message_of({.bits = 4, .key_group = 16, .key_codebook = Codebook::mxfp4}) ==
      "ResidualStorage: key_codebook 'mxfp4' shares a scale among 32 channels, so key_group must be that or "
      "0, not 16");
  CHECK(message_of({.bits = 4, .value_scale = 2.0}) ==
        "ResidualStorage: value_scale is 2, must be 1: 'even' codes have no scale of the head; 'fp8' and "
        "'nvfp4' have");
  for (const double scale : {0.0, -1.0, std::nan(""), 1e30}) {
    CHECK(message_of({.bits = 8, .key_codebook = Codebook::fp8, .key_scale = scale})
              .ends_with("must be from 2^-60 to 2^60"));
  }
  CHECK(message_of({.bits = 8, .halves = true, .key_codebook = Codebook::fp8}) ==
        "ResidualStorage: key_codebook 'fp8' cannot be stored in halves");
  CHECK(message_of({.bits = 4, .key_codebook = Codebook::normal, .value_codebook = Codebook::mxfp4}).empty());
  const ByChannel::Config by_channel = ResidualConfig{.bits = 2, .key_codebook = Codebook::normal};
  CHECK(test::thrown<ConfigError>([&] { ByChannel::validate(by_channel, context); }) ==
        "ResidualStorage: key_codebook is 'normal', must be 'even' where keys share scales along the text "
        "(per channel)");
  // A block that does not divide the channels.
  CHECK(test::thrown<ConfigError>([&] {
          Storage::validate(ResidualConfig{.bits = 4, .value_codebook = Codebook::mxfp4}, {80, 64});
        }) == "ResidualStorage: value_group is 32, must divide head_dim = 80");
}
