// SPDX-License-Identifier: Apache-2.0
//
// Compares each small kernel of the model on a GPU with plain loops in double.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/kernels/embed.cuh>
#include <reference_model/cuda/kernels/int8.cuh>
#include <reference_model/cuda/kernels/likeliest.cuh>
#include <reference_model/cuda/kernels/norm.cuh>
#include <reference_model/cuda/kernels/random.cuh>
#include <reference_model/cuda/kernels/rotate.cuh>
#include <reference_model/cuda/kernels/swiglu.cuh>
#include <reference_model/cuda/tabulate.hpp>

#include "model_cuda/device_numbers.hpp"

namespace kvpolicy::reference::kernels_test {
namespace {

namespace kernels = gpu::llama;

double number(bfloat16 x) { return static_cast<double>(static_cast<float>(x)); }

TEST_CASE("tokens become their rows of the embedding, and the position advances") {
  constexpr int vocabulary = 11;
  for (const int hidden : {1, 35, 256, 300}) {
    for (const int rows : {1, 3, 130}) {
      CAPTURE(hidden);
      CAPTURE(rows);
      const auto width = static_cast<std::size_t>(hidden);
      const auto table = random_bfloat16(vocabulary * width, 7);
      std::vector<int> tokens(static_cast<std::size_t>(rows));
      for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int>(i * 7 % vocabulary);
      tokens.back() = rows > 1 ? kernels::no_token : vocabulary - 1;
      const DeviceNumbers<bfloat16> embedding{table};
      const DeviceNumbers<int> given{tokens};
      const DeviceNumbers<int> position{std::vector{40}};
      const DeviceNumbers<float> residual{tokens.size() * width};
      gpu::launch(gpu::Kernel{kernels::embed_kernel<>, "embed", kernels::embed_threads}, {.x = rows}, nullptr,
                  kernels::EmbedParams{.tokens = given.data(),
                                       .embedding = embedding.as<std::uint16_t>(),
                                       .residual = residual.data(),
                                       .position = position.data(),
                                       .rows = rows,
                                       .vocabulary = vocabulary,
                                       .hidden = hidden});
      CHECK(position.get()[0] == 40 + rows);
      const auto out = residual.get();
      bool same = true;
      for (std::size_t row = 0; row < tokens.size(); ++row) {
        const auto token = static_cast<std::size_t>(tokens[row] < 0 ? 0 : tokens[row]);
        for (std::size_t i = 0; i < width; ++i) {
          same = same && out[row * width + i] == static_cast<float>(table[token * width + i]);
        }
      }
      CHECK(same);
    }
  }
}

TEST_CASE("angles follow the position on the device, also far into a text") {
  constexpr std::size_t rows = 5;
  for (const std::size_t pairs : {1, 32, 40, 128, 150}) {
    for (const int first : {0, 3, 4'000'000}) {
      CAPTURE(pairs);
      CAPTURE(first);
      std::vector<float> frequencies(pairs);
      for (std::size_t i = 0; i < pairs; ++i) {
        frequencies[i] = std::pow(500000.0F, -static_cast<float>(i) / static_cast<float>(pairs));
      }
      const DeviceNumbers<float> given{frequencies};
      const DeviceNumbers<int> position{std::vector{first}};
      const std::vector<int> distances{0, 1, 2, 1, 7};  // as in a token tree
      const DeviceNumbers<int> offsets{distances};
      const DeviceNumbers<float> cosines{rows * pairs};
      const DeviceNumbers<float> sines{rows * pairs};
      gpu::launch(gpu::Kernel{kernels::angles_kernel<>, "angles", kernels::angles_threads}, {.x = rows},
                  nullptr,
                  kernels::AnglesParams{.position = position.data(),
                                        .offsets = offsets.data(),
                                        .inverse_frequencies = given.data(),
                                        .cosines = cosines.data(),
                                        .sines = sines.data(),
                                        .pairs = static_cast<int>(pairs)});
      double error = 0;
      for (std::size_t i = 0; i < rows * pairs; ++i) {
        const double angle =
            static_cast<double>(first + distances[i / pairs]) * static_cast<double>(frequencies[i % pairs]);
        error = std::fmax(error, std::fabs(std::cos(angle) - static_cast<double>(cosines.get()[i])));
        error = std::fmax(error, std::fabs(std::sin(angle) - static_cast<double>(sines.get()[i])));
      }
      CHECK(error <= 1e-6);
    }
  }
}

TEST_CASE("norm gives rows unit mean square") {
  for (const std::size_t width : {1, 28, 35, 192, 511, 512, 513, 4099}) {
    CAPTURE(width);
    constexpr std::size_t rows = 3;
    auto x = random_floats(rows * width, 3, 4.0F);
    std::fill_n(x.begin(), width, 0.0F);  // a row of zeros stays zero
    const auto weight = random_floats(width, 4);
    const DeviceNumbers<float> in{x};
    const DeviceNumbers<float> scale{weight};
    const DeviceNumbers<bfloat16> out{rows * width};
    constexpr float eps = 1e-3F;
    gpu::launch(
        gpu::Kernel{kernels::norm_kernel<>, "norm", kernels::norm_threads, kernels::norm_shared_bytes()},
        {.x = rows}, nullptr,
        kernels::NormParams{.x = in.data(),
                            .weight = scale.data(),
                            .out = out.as<std::uint16_t>(),
                            .width = static_cast<int>(width),
                            .eps = eps});
    const auto got = out.get();
    bool close = true;
    for (std::size_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (std::size_t i = 0; i < width; ++i) {
        squares += std::pow(static_cast<double>(x[row * width + i]), 2);
      }
      const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(eps));
      for (std::size_t i = 0; i < width; ++i) {
        const double y = static_cast<double>(x[row * width + i]) * factor * static_cast<double>(weight[i]);
        close = close && std::fabs(number(got[row * width + i]) - y) <= rounding(y);
      }
    }
    CHECK(close);
  }
}

TEST_CASE("the first heads of a row are rotated, the others stay") {
  for (const std::size_t pairs : {4, 32, 40, 128}) {
    for (const std::size_t heads : {2, 9}) {
      CAPTURE(pairs);
      CAPTURE(heads);
      constexpr std::size_t rows = 3;
      const std::size_t width = (heads + 2) * 2 * pairs;
      const auto x = random_bfloat16(rows * width, 5);
      const auto angles = random_floats(rows * pairs, 6);
      std::vector<float> cosine;
      std::vector<float> sine;
      for (const float angle : angles) {
        cosine.push_back(std::cos(angle));
        sine.push_back(std::sin(angle));
      }
      const DeviceNumbers<bfloat16> in{x};
      const DeviceNumbers<float> cosines{cosine};
      const DeviceNumbers<float> sines{sine};
      gpu::launch(gpu::Kernel{kernels::rotate_kernel<>, "rotate", kernels::rotate_threads}, {.x = rows},
                  nullptr,
                  kernels::RotateParams{.rows = in.as<std::uint16_t>(),
                                        .cosines = cosines.data(),
                                        .sines = sines.data(),
                                        .row_width = static_cast<int>(width),
                                        .heads = static_cast<int>(heads),
                                        .pairs = static_cast<int>(pairs)});
      const auto got = in.get();
      bool close = true;
      for (std::size_t i = 0; i < rows * width; ++i) {
        const std::size_t row = i / width;
        const std::size_t head = i % width / (2 * pairs);
        const std::size_t channel = i % (2 * pairs);
        if (head >= heads) {
          close = close && got[i] == x[i];
          continue;
        }
        const auto c = static_cast<double>(cosine[row * pairs + channel % pairs]);
        const auto s = static_cast<double>(sine[row * pairs + channel % pairs]);
        const double y = channel < pairs ? number(x[i]) * c - number(x[i + pairs]) * s
                                         : number(x[i]) * c + number(x[i - pairs]) * s;
        close = close && std::fabs(number(got[i]) - y) <= rounding(y);
      }
      CHECK(close);
    }
  }
}

TEST_CASE("swiglu of gates large and small") {
  for (const std::size_t width : {2, 56, 512, 2046, 2048, 2050, 4098}) {
    CAPTURE(width);
    constexpr std::size_t rows = 2;
    auto x = random_bfloat16(rows * 2 * width, 8, 10.0F);
    x[0] = bfloat16{-200.0F};  // e^200 overflows a float
    x[1] = bfloat16{200.0F};
    const DeviceNumbers<bfloat16> in{x};
    const DeviceNumbers<bfloat16> out{rows * width};
    const auto words = static_cast<int>(width / 2);
    gpu::launch(
        gpu::Kernel{kernels::swiglu_kernel<>, "swiglu", kernels::swiglu_threads},
        {.x = rows, .y = (words + kernels::swiglu_words_of_block - 1) / kernels::swiglu_words_of_block},
        nullptr,
        kernels::SwigluParams{
            .gate_up = in.as<std::uint32_t>(), .out = out.as<std::uint32_t>(), .words = words});
    const auto got = out.get();
    bool close = true;
    for (std::size_t i = 0; i < rows * width; ++i) {
      const std::size_t at = i / width * 2 * width + i % width;
      const double gate = number(x[at]);
      const double y = gate / (1 + std::exp(-gate)) * number(x[at + width]);
      close = close && std::fabs(number(got[i]) - y) <= rounding(y);
    }
    CHECK(close);
  }
}

struct Choice {
  int token;
  std::vector<int> chosen;
  int choices;
};
Choice choose(const std::vector<float>& logits, int before = 0, std::size_t capacity = 4) {
  const DeviceNumbers<float> in{logits};
  const DeviceNumbers<int> token{std::vector{99}};
  const DeviceNumbers<int> chosen{std::vector<int>(capacity, 77)};
  const DeviceNumbers<int> choices{std::vector{before}};
  gpu::launch(gpu::Kernel{kernels::likeliest_kernel<>, "likeliest", kernels::likeliest_threads,
                          kernels::likeliest_shared_bytes()},
              {}, nullptr,
              kernels::LikeliestParams{.logits = in.data(),
                                       .vocabulary = static_cast<int>(logits.size()),
                                       .choices = {.token = token.data(),
                                                   .chosen = chosen.data(),
                                                   .count = choices.data(),
                                                   .capacity = static_cast<int>(capacity)}});
  return {token.get()[0], chosen.get(), choices.get()[0]};
}

TEST_CASE("the likeliest token at any index; ties go to the lower one") {
  for (const std::size_t vocabulary : {1, 2, 64, 1023, 1024, 1025, 5000}) {
    CAPTURE(vocabulary);
    for (const std::size_t at : {std::size_t{0}, vocabulary / 2, vocabulary - 1}) {
      auto logits = random_floats(vocabulary, 9);
      logits[at] = 3.0F;
      CHECK(choose(logits).token == static_cast<int>(at));
      logits[vocabulary - 1] = 3.0F;
      CHECK(choose(logits).token == static_cast<int>(at));
    }
    CHECK(choose(std::vector<float>(vocabulary, -5.0F)).token == 0);
  }
}

TEST_CASE("choices are recorded while there is room, and counted beyond it") {
  const std::vector<float> logits{0.0F, 1.0F, -1.0F};
  CHECK(choose(logits, 0).chosen == std::vector<int>{1, 77, 77, 77});
  CHECK(choose(logits, 3).chosen == std::vector<int>{77, 77, 77, 1});
  CHECK(choose(logits, 4).chosen == std::vector<int>{77, 77, 77, 77});
  CHECK(choose(logits, 4).choices == 5);
}

TEST_CASE("logits with NaN have no likeliest token") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity}) {
    for (const std::size_t at : {0, 40, 1999}) {
      auto logits = random_floats(2000, 10);
      logits[at] = bad;
      CHECK(choose(logits).token == kernels::no_token);
    }
  }
  CHECK(choose(std::vector<float>(50, -infinity)).token == kernels::no_token);
  std::vector<float> banned(50, -infinity);
  banned[7] = -std::numeric_limits<float>::max();
  CHECK(choose(banned).token == 7);
}

TEST_CASE("8-bit codes have an error of at most half a step; padded rows are zeros") {
  for (const std::size_t width : {4, 16, 1020, 1024, 1040}) {
    CAPTURE(width);
    constexpr std::size_t rows = 3;
    constexpr std::size_t padded = 5;
    auto x = random_bfloat16(rows * width, 11, 30.0F);
    std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(width), width, bfloat16{});
    const DeviceNumbers<bfloat16> in{x};
    const DeviceNumbers<std::int8_t> codes{padded * width};
    const DeviceNumbers<float> scales{padded};
    gpu::launch(gpu::Kernel{kernels::quantize_rows_kernel<>, "quantize", kernels::quantize_rows_threads,
                            kernels::quantize_rows_shared_bytes()},
                {.x = padded}, nullptr,
                kernels::QuantizeRowsParams{.x = in.as<std::uint16_t>(),
                                            .codes = codes.as<std::uint32_t>(),
                                            .scales = scales.data(),
                                            .rows = rows,
                                            .width = static_cast<int>(width)});
    const auto code = codes.get();
    const auto scale = scales.get();
    bool close = true;
    for (std::size_t i = 0; i < padded * width; ++i) {
      const auto step = static_cast<double>(scale[i / width]);
      const double y = i < x.size() ? number(x[i]) : 0;
      close = close && code[i] >= -127 && std::fabs(code[i] * step - y) <= 0.5001 * step;
    }
    CHECK(close);
    CHECK(scale[1] == 0.0F);
    CHECK(scale[4] == 0.0F);
  }
}

TEST_CASE("sums of codes are multiplied by both scales, for every output") {
  for (const std::size_t width : {1, 1023, 1024, 1025}) {
    for (const bool biased : {false, true}) {
      CAPTURE(width);
      CAPTURE(biased);
      constexpr std::size_t rows = 2;
      std::vector<int> sums(rows * width);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<int>(i * 7919 % 20001) - 10000;
      const auto row_scale = random_floats(rows, 12);
      const auto column_scale = random_floats(width, 13);
      const auto bias = random_floats(width, 14);
      const DeviceNumbers<int> in{sums};
      const DeviceNumbers<float> by_row{row_scale};
      const DeviceNumbers<float> by_column{column_scale};
      const DeviceNumbers<float> more{bias};
      const DeviceNumbers<float> added{std::vector<float>(rows * width, 5.0F)};
      const DeviceNumbers<float> floats{rows * width};
      const DeviceNumbers<bfloat16> out{rows * width};
      const kernels::DequantizeParams params{.sums = in.data(),
                                             .row_scales = by_row.data(),
                                             .column_scales = by_column.data(),
                                             .bias = biased ? more.data() : nullptr,
                                             .width = static_cast<int>(width)};
      const auto run = [&](kernels::DequantizeParams p) {
        gpu::launch(gpu::Kernel{kernels::dequantize_kernel<>, "dequantize", kernels::dequantize_threads},
                    {.x = rows, .y = static_cast<int>(width - 1) / kernels::dequantize_columns_of_block + 1},
                    nullptr, p);
      };
      auto p = params;
      p.added = added.data();
      run(p);
      p = params;
      p.floats = floats.data();
      run(p);
      p = params;
      p.out = out.as<std::uint16_t>();
      run(p);
      bool close = true;
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const double y = sums[i] * static_cast<double>(row_scale[i / width]) *
                             static_cast<double>(column_scale[i % width]) +
                         (biased ? static_cast<double>(bias[i % width]) : 0.0);
        const double tight = 1e-6 * std::fabs(y) + 1e-2;  // for numbers up to 40000
        close = close && std::fabs(static_cast<double>(floats.get()[i]) - y) <= tight;
        close = close && std::fabs(static_cast<double>(added.get()[i]) - y - 5) <= tight;
        close = close && std::fabs(number(out.get()[i]) - y) <= rounding(y) + tight;
        if (i > 40 && i + 40 < sums.size()) i += 13;
      }
      CHECK(close);
    }
  }
}

TEST_CASE("random weights have the requested spread, and no two layers are equal") {
  constexpr std::size_t count = 5003;
  const auto draw = [&](std::uint64_t seed) {
    const DeviceNumbers<bfloat16> out{count};
    tabulate(out.as<std::uint16_t>(), count, kernels::RandomNumbers{seed, 0.5F}, nullptr);
    return out.get();
  };
  const auto one = draw(1);
  double mean = 0;
  double squares = 0;
  for (const bfloat16 x : one) {
    CHECK(std::fabs(number(x)) <= 0.5);
    mean += number(x) / count;
    squares += number(x) * number(x) / count;
  }
  CHECK(std::fabs(mean) <= 0.02);
  CHECK(std::fabs(squares - 0.25 / 3) <= 0.005);
  CHECK(one == draw(1));
  CHECK(one != draw(2));

  const DeviceNumbers<std::int8_t> codes{count};
  tabulate(codes.data(), count, kernels::RandomCodes{3}, nullptr);
  const auto got = codes.get();
  const std::set<int> met(got.begin(), got.end());
  CHECK(met.size() == 255);
  CHECK(*met.begin() == -127);
}

TEST_CASE("numbers that are NaN are counted, and nothing else is") {
  auto numbers = random_bfloat16(3001, 5);
  numbers[3] = bfloat16{std::numeric_limits<float>::infinity()};
  const auto count = [&] {
    const DeviceNumbers<bfloat16> in{numbers};
    return count_of(in.as<std::uint16_t>(), numbers.size(), kernels::IsNan{}, nullptr);
  };
  CHECK(count() == 0);
  numbers[0] = bfloat16{std::nanf("")};
  numbers[3000] = bfloat16{-std::nanf("")};
  CHECK(count() == 2);
}

}  // namespace
}  // namespace kvpolicy::reference::kernels_test
