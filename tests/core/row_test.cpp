// SPDX-License-Identifier: Apache-2.0
//
// A quantised row as float: each channel by the definition, from its own code and its own grid.
#include <kvpolicy/core/row.hpp>

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include "support/tensors.hpp"

namespace kvpolicy {
namespace {

// Pages of random codes and random grids, laid out as PageLayout says.
struct Pages {
  RowFormat format;
  std::size_t head_dim;
  std::size_t page_rows = 64;
  std::size_t count = 2;
  PageLayout layout{format, head_dim, page_rows};
  std::vector<std::vector<float16>> memory;  // aligned for the grids
  std::vector<const std::byte*> table;

  Pages(RowFormat of, std::size_t dim, test::Random& random) : format{of}, head_dim{dim} {
    for (std::size_t page = 0; page < count; ++page) {
      memory.emplace_back(layout.page_bytes / sizeof(float16));
      auto* bytes = reinterpret_cast<unsigned char*>(memory.back().data());
      for (std::size_t i = 0; i < layout.scales_offset; ++i) {
        bytes[i] = static_cast<unsigned char>(test::below(random, 256));
      }
      for (std::size_t i = layout.scales_offset / sizeof(float16); i < memory.back().size(); ++i) {
        memory.back()[i] = float16{test::normal(random)};
      }
      table.push_back(reinterpret_cast<const std::byte*>(bytes));
    }
  }

  // Scale and zero have the same index in two tables, one entry for each group of the row or of rows.
  [[nodiscard]] float number(std::size_t row, std::size_t channel) const {
    const std::byte* page = table[row / page_rows];
    const std::size_t in_page = row % page_rows;
    const std::size_t grid = format.granularity == Granularity::per_token
                                 ? in_page * (head_dim / format.group) + channel / format.group
                                 : in_page / format.group * head_dim + channel;
    const auto* scales = reinterpret_cast<const float16*>(page + layout.scales_offset);
    const auto* zeros = reinterpret_cast<const float16*>(page + layout.zeros_offset);
    const std::byte* codes = page + in_page * layout.row_bytes;
    const unsigned code = load_code(format.encoding, codes, codes + layout.lower_offset, channel, head_dim);
    // The product of a scale of 11 bits and a code of 8 bits is exact, so the sum is rounded once,
    // fused or not.
    return static_cast<float>(scales[grid]) * static_cast<float>(code) + static_cast<float>(zeros[grid]);
  }
};

TEST_CASE("a quantised row is each channel's code on its grid") {
  test::Random random{11};
  for (const Encoding encoding : {Encoding::uint8, Encoding::uint6, Encoding::uint5, Encoding::uint4,
                                  Encoding::uint3, Encoding::uint2, Encoding::uint4x2}) {
    for (const Granularity granularity : {Granularity::per_token, Granularity::per_channel}) {
      for (const std::size_t head_dim : {64U, 80U, 128U}) {
        for (const std::size_t group : {std::size_t{16}, head_dim}) {
          if (granularity == Granularity::per_channel && group != 16) continue;
          const Pages pages{{encoding, granularity, group}, head_dim, random};
          for (const std::size_t first : {0U, 3U, 63U}) {
            const Plane plane{.format = pages.format,
                              .pages = pages.table.data(),
                              .page_rows = pages.page_rows,
                              .first_row = first};
            std::size_t wrong = 0;
            for (std::size_t row = 0; row + first < pages.count * pages.page_rows; ++row) {
              std::vector<float> out(head_dim, -1.0F);
              load_row(plane, row, out);
              for (std::size_t channel = 0; channel < head_dim; ++channel) {
                wrong += out[channel] == pages.number(first + row, channel) ? 0 : 1;
              }
            }
            CHECK(wrong == 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvpolicy
