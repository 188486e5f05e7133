// SPDX-License-Identifier: Apache-2.0
//
// Reads gates from any bytes: they are refused, or they make plans, and reading them back after writing gives
// the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <kvpolicy/io/duo_pattern.hpp>

namespace {

// Errors must be short, however long the refused text is.
void expect_short(const kvpolicy::FormatError& error) {
  if (std::string_view{error.what()}.size() > 4000) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpolicy;
  const std::string_view text{reinterpret_cast<const char*>(data), size};
  try {
    const HeadGates gates = io::parse_duo_gates(text);
    for (const GateCut rule : {GateCut::exact_count, GateCut::threshold}) {
      for (const double sparsity : {0.0, 0.25, 0.5, 1.0}) {
        const HeadKinds kinds = head_kinds(gates, sparsity, rule);
        if (sparsity == 0.0 && kinds.values().front() != HeadKind::retrieval) std::abort();
      }
    }
    if (io::parse_duo_gates(io::format_duo_gates(gates)) != gates) std::abort();
  } catch (const FormatError& error) {
    expect_short(error);
  }
  try {
    (void)io::parse_duo_config(text);
  } catch (const FormatError& error) {
    expect_short(error);
  }
  return 0;
}
