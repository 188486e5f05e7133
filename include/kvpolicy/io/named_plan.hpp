// SPDX-License-Identifier: Apache-2.0
//
// Makes a plan from a short name and the shape of a model, for engines that take the plan from their command
// line or their configuration:
//
//     full                 every row, exact
//     int4                 every row in so many bits, the first 4 and the latest 128 exact; int4:64 for 64; also 2, 3,
//                          5, 6 and 8 bits
//     k8v4                 the same with keys of 8 bits and values of 4 (io/low_bits.hpp)
//     hf4, hf2             groups of 64 in a row, the latest 128 exact (transformers' QuantizedCache)
//     fp8, mxfp4, nvfp4    every row in such numbers, for engines whose rows are in them; fp8:scale=0.5
//     sink_recent:16,128   the first 16 rows and the latest 128
//     duo@PATH:0.5         half of the heads stream, by the gates of a DuoAttention pattern (io/duo_pattern.hpp)
//     duo+int4@PATH:0.5    the same; the heads that keep every row keep it as int4 does
//     PATH.json            a plan file (io/plan_json.hpp)
//
// What is quantised takes more settings, after the numbers, as in int4:64,hadamard=both:
//
//     hadamard=none|keys|values|both   rows that are rotated before they are quantised
//     normal=none|keys|values|both     codes that stand for Lloyd-Max numbers (core/codebook.hpp)
//     keys=channel|token               which numbers of the keys share a scale
//     key_group=64                     of how many rows, per channel; divides the rows of a page (CacheOptions)
//     group=64                         of how many channels of a row
//     scale=1                          of a head, where rows are in fp8 or nvfp4
//     residual=128, sinks=4            latest and first rows that stay exact (sinks: int4 and so on by themselves)
//
// A name means here what it means to the tools' `--plan`, which has more names.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/low_bits.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/io/plan_name.hpp>

namespace kvpolicy::io {

namespace detail {

template <Element E>
[[nodiscard]] HeadPlan<E> duo_by_name(PlanName& own, std::string_view called, const ModelShape& shape) {
  own.place({"sparsity"});
  require(!own.source.empty(), called, ": needs the folder of a DuoAttention pattern, as in duo@FOLDER:0.5");
  const double sparsity = own.number("sparsity", 0.5);
  HeadSettings<E> retrieval = typename FullCache<DenseStorage<E>>::Config{};
  if (!own.storage.empty()) retrieval = text_format(own, own.storage, shape).template head<E>();
  own.refuse_others();
  const DuoPattern pattern = load_duo_pattern(own.source);
  return duo_plan<E>(shape, pattern.gates,
                     {.sparsity = sparsity, .sinks = pattern.sinks, .recent = pattern.recent}, retrieval);
}

template <Element E>
[[nodiscard]] HeadPlan<E> sink_recent_by_name(PlanName& own, const ModelShape& shape) {
  own.place({"sinks", "recent"});
  const std::size_t sinks = own.count("sinks", 16);
  const std::size_t recent = own.count("recent", 128);
  return HeadPlan<E>{shape,
                     typename SinkRecentCache<DenseStorage<E>>::Config{.sinks = sinks, .recent = recent}};
}

}  // namespace detail

/// Makes the plan that `name` names, for a model of the given shape.
/// @throws ConfigError for a name that is not known, a setting that does not work, or a file for another
/// shape; FormatError for a file that cannot be read.
template <Element E = float>
[[nodiscard]] HeadPlan<E> named_plan(std::string_view name, const ModelShape& shape) {
  shape.validate();
  if (name.ends_with(".json")) {
    HeadPlan<E> plan = load_plan<E>(std::string{name});
    require(plan.shape() == shape, name, ": is a plan for ", write_shape(plan.shape()), "; the model has ",
            write_shape(shape));
    return plan;
  }
  const std::string called = message("plan ", in_quotes(name));
  PlanName own{name, called};
  if (own.name == "duo") return detail::duo_by_name<E>(own, called, shape);
  const auto made = [&](HeadPlan<E> plan) {
    own.refuse_others();
    return plan;
  };
  if (own.storage.empty() && own.source.empty()) {
    if (own.name == "full") {
      own.place({});
      return made(HeadPlan<E>{shape});
    }
    if (is_precision_name(own.name)) {
      own.place({"residual"});
      return made(low_bit_plan<E>(own, own.name, shape));
    }
    if (own.name == "sink_recent") return made(detail::sink_recent_by_name<E>(own, shape));
  }
  fail<ConfigError>(
      called,
      ": is not known; known are full, int4 (also 8, 6, 5, 3, 2), k8v4, hf4, hf2, fp8, mxfp4, nvfp4, "
      "sink_recent:16,128, duo@FOLDER:0.5, duo+int4@FOLDER:0.5 and a plan file whose name ends in "
      ".json");
}

}  // namespace kvpolicy::io
