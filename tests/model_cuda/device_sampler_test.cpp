// SPDX-License-Identifier: Apache-2.0
//
// Tokens that are drawn on a device, against a plain loop in double with random numbers of its own.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/cuda/device_sampler.hpp>
#include <reference_model/cuda/device_sort.hpp>

#include "model_cuda/device_numbers.hpp"

namespace kvpolicy::reference {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// splitmix64, as a generator.
struct Splitmix {
  std::uint64_t state;
  double next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return std::ldexp(static_cast<double>((z ^ z >> 31) >> 11), -53);
  }
};

struct Wanted {
  int token;
  bool is_close;  // rounding may choose a neighbour
};
Wanted draw(const std::vector<float>& logits, const SamplerConfig& config, double uniform) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](int token) { return static_cast<double>(logits[static_cast<std::size_t>(token)]); };
  std::ranges::stable_sort(order, [&](int a, int b) { return logit(a) > logit(b); });
  if (config.top_k > 0) order.resize(std::min(config.top_k, order.size()));
  std::vector<double> up_to;
  double total = 0;
  for (const int token : order) {
    total += std::exp((logit(token) - logit(order[0])) / static_cast<double>(config.temperature));
    up_to.push_back(total);
  }
  bool is_close = false;
  const auto first = [&](double least, bool equal) {
    std::size_t at = 0;
    while (at + 1 < up_to.size() && !(equal ? up_to[at] >= least : up_to[at] > least)) ++at;
    for (const double sum : up_to) is_close = is_close || std::abs(sum - least) < 1e-5 * total;
    return at;
  };
  double kept = total;
  if (config.top_p < 1.0F) {
    const std::size_t last = first(static_cast<double>(config.top_p) * total, true);
    kept = up_to[last];
    up_to.resize(last + 1);
  }
  return {order[first(uniform * kept, false)], is_close};
}

// The next `count` tokens that the sampler draws.
std::vector<int> choose(DeviceSampler& sampler, const std::vector<float>& logits, int count = 1) {
  const DeviceNumbers<float> in{logits};
  const DeviceNumbers<int> token{std::vector{99}};
  const DeviceNumbers<int> chosen{std::vector<int>(static_cast<std::size_t>(count), 77)};
  const DeviceNumbers<int> made{std::vector{0}};
  for (int i = 0; i < count; ++i) {
    sampler.choose(in.data(), {token.data(), chosen.data(), made.data(), count}, nullptr);
  }
  std::vector<int> tokens = chosen.get();
  CHECK(made.get()[0] == count);
  CHECK(token.get()[0] == tokens.back());
  return tokens;
}

TEST_CASE("drawn tokens: every size, temperature, top-k and top-p") {
  int close = 0;
  int all = 0;
  unsigned seed = 0;
  for (const std::size_t vocabulary : {1, 2, 31, 1023, 1024, 1025, 2500}) {
    for (const SamplerConfig& settings :
         std::vector<SamplerConfig>{{.temperature = 1.0F},
                                    {.temperature = 0.1F},
                                    {.temperature = 20.0F},
                                    {.temperature = 1.0F, .top_k = 1},
                                    {.temperature = 2.0F, .top_k = 1024},
                                    {.temperature = 1.0F, .top_p = 0.9F},
                                    {.temperature = 4.0F, .top_p = 0.3F},
                                    {.temperature = 1.0F, .top_p = 1e-6F},
                                    {.temperature = 3.0F, .top_k = 40, .top_p = 0.7F}}) {
      CAPTURE(vocabulary);
      CAPTURE(settings.temperature);
      CAPTURE(settings.top_k);
      CAPTURE(settings.top_p);
      SamplerConfig config = settings;
      config.seed = ++seed;
      const std::vector<float> logits = random_floats(vocabulary, seed, 6.0F);
      DeviceSampler sampler{config, vocabulary};
      Splitmix random{config.seed};
      for (const int token : choose(sampler, logits, 3)) {
        const Wanted wanted = draw(logits, config, random.next());
        ++all;
        if (wanted.is_close) {
          ++close;
        } else {
          CHECK(token == wanted.token);
        }
      }
    }
  }
  CHECK(close * 3 < all);  // so most are compared
}

TEST_CASE("drawn tokens: ties go to the lower ones, banned tokens are never drawn") {
  DeviceSampler two{{.temperature = 1.0F, .top_k = 2, .seed = 5}, 2000};
  const std::vector<int> tied = choose(two, std::vector<float>(2000, 1.5F), 12);
  CHECK(std::ranges::count(tied, 0) + std::ranges::count(tied, 1) == 12);
  CHECK(std::ranges::count(tied, 0) > 0);
  CHECK(std::ranges::count(tied, 1) > 0);

  std::vector<float> banned(1500, -infinity);
  banned[3] = -std::numeric_limits<float>::max();
  banned[1400] = -std::numeric_limits<float>::max();
  DeviceSampler any{{.temperature = 1.0F, .seed = 6}, 1500};
  for (const int token : choose(any, banned, 8)) CHECK((token == 3 || token == 1400));
}

TEST_CASE("drawn tokens: at a temperature next to 0 the likeliest") {
  for (const float temperature : {1e-40F, std::numeric_limits<float>::denorm_min(), 1e-30F}) {
    std::vector<float> logits = random_floats(600, 12);
    logits[417] = 7.0F;
    logits[3] = -infinity;
    DeviceSampler sampler{{.temperature = temperature, .top_p = 0.9F}, logits.size()};
    CHECK(choose(sampler, logits, 2) == std::vector<int>{417, 417});
  }
}

TEST_CASE("drawn tokens: logits that say nothing are reported") {
  for (const float bad : {std::nanf(""), -std::nanf(""), infinity}) {
    std::vector<float> logits = random_floats(1100, 4);
    logits[1050] = bad;
    DeviceSampler sampler{{.temperature = 1.0F}, logits.size()};
    CHECK(choose(sampler, logits) == std::vector<int>{gpu::llama::no_token});
  }
  DeviceSampler sampler{{.temperature = 1.0F}, 70};
  CHECK(choose(sampler, std::vector<float>(70, -infinity)) == std::vector<int>{gpu::llama::no_token});
}

TEST_CASE("samplers that cannot be are refused") {
  CHECK_THROWS_AS((DeviceSampler{{.temperature = 0.0F}, 10}), ConfigError);
  CHECK_THROWS_AS((DeviceSampler{{.temperature = -1.0F}, 10}), ConfigError);
  CHECK_THROWS_AS((DeviceSampler{{.temperature = 1.0F, .top_p = 0.0F}, 10}), ConfigError);
  CHECK_THROWS_AS((DeviceSampler{{.temperature = 1.0F}, 0}), ShapeError);
  CHECK_THROWS_AS((DeviceSampler{{.temperature = 1.0F}, std::size_t{1} << 31}), ShapeError);
}

TEST_CASE("the device's sort: largest first, equal ones in their order, NaN at the end of its sign") {
  std::vector<float> keys = random_floats(3000, 8);
  for (std::size_t i = 0; i < keys.size(); i += 3) keys[i] = static_cast<float>(i % 5) - 2.0F;  // ties
  keys[100] = -0.0F;
  keys[101] = 0.0F;
  keys[7] = std::nanf("");
  keys[2000] = -std::nanf("");
  keys[5] = infinity;
  keys[6] = -infinity;
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  const DeviceNumbers<float> in{keys}, sorted{keys.size()};
  const DeviceNumbers<int> values{order}, sorted_values{keys.size()};
  const int count = static_cast<int>(keys.size());
  const DeviceNumbers<char> scratch{sort_bytes(count)};
  sort_pairs(scratch.data(), sort_bytes(count), in.data(), sorted.data(), values.data(), sorted_values.data(),
             count, nullptr);

  const auto place = [&](int i) {  // NaN outside of everything
    const float key = keys[static_cast<std::size_t>(i)];
    const double number = static_cast<double>(key);
    return std::isnan(key)   ? std::copysign(std::numeric_limits<double>::max(), number)
           : std::isinf(key) ? std::copysign(1e300, number)
                             : number;
  };
  std::ranges::stable_sort(order, [&](int a, int b) { return place(a) > place(b); });
  CHECK(sorted_values.get() == order);
  const std::vector<float> numbers = sorted.get();
  CHECK(std::isnan(numbers.front()));
  CHECK(numbers[1] == infinity);
  CHECK(std::isnan(numbers.back()));
}

}  // namespace
}  // namespace kvpolicy::reference
