// SPDX-License-Identifier: Apache-2.0
//
// The random tests of what kernels bound, on the emulation, as often as one likes: ./scripts/long-runs.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "cuda/support/bound_trial.hpp"
#include "long/record.hpp"

namespace {

test::Record* record = nullptr;  // doctest's cases take no arguments

}  // namespace

TEST_CASE("random bounds of units on a device, against what their rows weigh in double") {
  record->run(record->part("device_bounds"), test::check_random_device_bounds);
}

int main(int argc, char** argv) {
  std::size_t bounds = 10'000'000;
  std::uint64_t seed = 1;
  std::string json;
  CLI::App app{
      "Random bounds of units of rows in halves, made by the kernel on an emulation of a device and compared "
      "with what the rows weigh in double. One thread."};
  app.add_option("--device-bounds", bounds, "how many rows to bound, each time that a query's are")
      ->capture_default_str();
  app.add_option("--seed", seed, "of the first set; the next has the next one")->capture_default_str();
  app.add_option("--json", json, "writes there what was done, also on the way");
  CLI11_PARSE(app, argc, argv);
  test::Record own{"cuda, emulated", seed, json, {{"device_bounds", "--device-bounds", bounds}}};
  record = &own;
  return test::run_cases(own, " --batches 0 --prefix-operations 0 --bounds 0");
}
