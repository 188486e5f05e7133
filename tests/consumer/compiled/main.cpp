// SPDX-License-Identifier: Apache-2.0
//
// A program that uses the installed library without a Highway header and without compiler flags.
#include <array>
#include <cstdio>

#include <kvpolicy/compiled/engine.hpp>

int main() {
  std::array<float, 64> row;
  row.fill(2.0F);
  const kvpolicy::Plane rows{.base = reinterpret_cast<const std::byte*>(row.data()),
                             .row_stride = sizeof row};
  int wrong = 0;
  for (const std::string_view name : kvpolicy::compiled::instruction_sets()) {
    kvpolicy::compiled::Engine engine{kvpolicy::cpu::SerialFor{}, name};
    float score = 0.0F;
    engine.score(rows, row, {&score, 1});
    std::printf("%s: %g\n", name.data(), static_cast<double>(score));
    if (score != 256.0F) ++wrong;
  }
  return wrong;
}
